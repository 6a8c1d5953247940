"""What a type checker knows of calls of the package; scripts/test.sh has mypy read it, and nothing runs it."""

import torch
from typing_extensions import assert_type

from tp_headloss import (
    CausalLMLoss,
    HeadLoss,
    HeadLossOutput,
    Sample,
    Term,
    TopK,
    VocabParallelHead,
    VocabStatistics,
    mean_metrics,
    sample,
    topk_log_probs,
    vocab_statistics,
)


def calls(x: torch.Tensor, labels: torch.Tensor, head: VocabParallelHead) -> None:
    out = HeadLoss([Term("own", lambda stats: -stats.log_prob)])(x, labels)
    assert_type(out, HeadLossOutput)
    assert_type(out.loss, torch.Tensor)
    assert_type(CausalLMLoss()(x, labels).count, torch.Tensor)
    assert_type(HeadLoss().linear(x, head.weight, labels), HeadLossOutput)
    assert_type(head(x, labels), HeadLossOutput)
    assert_type(head(x), torch.Tensor)
    assert_type(vocab_statistics(x, labels), VocabStatistics)
    assert_type(topk_log_probs(x, 4), TopK)
    assert_type(sample(x, seed=0, positions=labels), Sample)
    assert_type(mean_metrics(out), dict[str, torch.Tensor])
