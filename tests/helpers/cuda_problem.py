"""Sizes, one step's results, and the capture of a step, which the tests on GPUs share."""

import torch

from tp_headloss import Options, vocab_statistics

V, N = 32000, 512


def results(logits, labels, shard, transport):
    x = logits.clone().requires_grad_()
    stats = vocab_statistics(
        x, labels, shard=shard, want=("entropy", "argmax"), options=Options(transport=transport)
    )
    (stats.log_prob.sum() + stats.entropy.sum()).backward()
    return stats.lse, stats.log_prob, stats.entropy, stats.argmax, x.grad


def captured(step):
    """Run a step, which must not wait for the host, and capture it -> its CUDA graph and the
    tensors that it fills."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for mode in ("default", "default", "default", "error"):
            torch.cuda.set_sync_debug_mode(mode)
            try:
                step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog looks at events meanwhile
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outputs = step()
    return graph, outputs


def replays(graph, outputs, step):
    """Replay the graph -> copies of its outputs, and whether they have the bits of an eager
    step."""
    graph.replay()
    replayed = [x.clone() for x in outputs]
    return replayed, all(torch.equal(a, b) for a, b in zip(replayed, step(), strict=True))
