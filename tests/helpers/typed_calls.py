"""What a type checker knows of calls of the package; scripts/test.sh has mypy read it, and nothing
runs it."""

import torch
from typing_extensions import assert_type

import tp_headloss as hl


def calls(x: torch.Tensor, labels: torch.Tensor, head: hl.VocabParallelHead) -> None:
    out = hl.HeadLoss([hl.Term("own", lambda stats: -stats.log_prob)])(x, labels)
    assert_type(out, hl.HeadLossOutput)
    assert_type(out.loss, torch.Tensor)
    assert_type(0.5 * out + out / 2 - out**2, torch.Tensor)
    assert_type(out + out, torch.Tensor)
    assert_type(out < 1, torch.Tensor)
    hl.HeadLoss()(x, labels, lables=labels)  # type: ignore[call-arg]  # an error, as it should be
    assert_type(hl.CausalLMLoss()(x, labels).count, torch.Tensor)
    assert_type(hl.HeadLoss().linear(x, head.weight, labels), hl.HeadLossOutput)
    assert_type(head(x, labels), hl.HeadLossOutput)
    assert_type(head(x), torch.Tensor)
    embedding = hl.VocabParallelEmbedding(4, head.shard)
    assert_type(embedding(labels), torch.Tensor)
    embedding(idx=labels)  # type: ignore[call-arg]
    assert_type(hl.vocab_statistics(x, labels), hl.VocabStatistics)
    assert_type(hl.topk_log_probs(x, 4), hl.TopK)
    assert_type(hl.sample(x, seed=0, positions=labels), hl.Sample)
    assert_type(hl.mean_metrics(out), dict[str, torch.Tensor])
    # synonyms that are taken
    hl.HeadLoss(reduction="token-mean")
    hl.KLToReference(0.1, "low_var_kl")
    hl.PolicyGradient("gpg")
    hl.Distillation(1.0, "tv")
    hl.LKLoss(form="nla")
