"""Sizes and one step's results that the tests on GPUs share."""

from tp_headloss import Options, vocab_statistics

V, N = 32000, 512


def results(logits, labels, shard, transport):
    x = logits.clone().requires_grad_()
    stats = vocab_statistics(x, labels, shard=shard, want=("entropy", "argmax"), options=Options(transport=transport))
    (stats.log_prob.sum() + stats.entropy.sum()).backward()
    return stats.lse, stats.log_prob, stats.entropy, stats.argmax, x.grad
