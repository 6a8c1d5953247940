"""`mean_metrics`: sums become means, extrema stay, over micro-batches and over ranks with other tokens."""

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks

from tp_headloss import CrossEntropy, Entropy, HeadLoss, Metric, Sequences, VocabShard, mean_metrics, vocab_statistics

V, PARTS = 11, 4
HEAD = HeadLoss(
    [CrossEntropy(), Entropy(0.1)],
    metrics=("entropy", "accuracy", Metric(lambda stats: {f"{kind}_lse": stats.lse for kind in ("max", "min")})),
)


def batches():
    """Micro-batches of different numbers of valid tokens; the last has none."""
    generator = torch.Generator().manual_seed(0)
    x, labels = torch.randn(PARTS, 6, V, generator=generator), torch.randint(V, (PARTS, 6), generator=generator)
    labels[1, 2:] = labels[3] = -100
    return x, labels


def means_of_rank(group, device):
    x, labels = (part.to(device) for part in batches())
    world, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    outputs = [HEAD(x[i], labels[i], denominator=7) for i in range(rank, PARTS, world)]
    return mean_metrics(outputs, group)


@pytest.mark.parametrize("world_size", [1, 2])
def test_means_are_those_of_all_valid_tokens_together(world_size):
    x, labels = batches()
    valid = labels != -100
    stats = vocab_statistics(x.double(), labels, want=("entropy", "argmax"))
    wanted = {
        "loss/cross_entropy": -stats.log_prob[valid].mean(),
        "loss/entropy": -stats.entropy[valid].mean(),
        "entropy": stats.entropy[valid].mean(),
        "accuracy": stats.correct[valid].double().mean(),
        "max_lse": stats.lse[valid].max(),
        "min_lse": stats.lse[valid].min(),
    }
    for found in on_ranks(world_size, means_of_rank):
        assert list(found) == list(wanted)
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-6, msg=name)


def test_with_sequences_metrics_are_means_over_tokens_and_terms_over_sequences():
    x, labels = batches()
    sequences = Sequences.from_mask(labels != -100)
    head = HeadLoss(metrics=("log_prob",), reduction="seq-mean-token-sum")
    out = head(x, labels, inputs={"sequences": sequences})
    found, log_prob = mean_metrics(out), out.stats.log_prob
    assert found["num_tokens"] == (labels != -100).sum()
    torch.testing.assert_close(found["log_prob"].float(), log_prob.sum() / found["num_tokens"].float())
    torch.testing.assert_close(found["loss/cross_entropy"].float(), out.loss)


def test_what_is_no_output_and_what_has_no_tokens():
    x, labels = batches()
    out = HEAD(x[3], labels[3])
    found = mean_metrics(out)
    assert found["accuracy"].isnan() and found["max_lse"] == -torch.inf
    with pytest.raises(TypeError, match="a HeadLossOutput or a list of them, got dict"):
        mean_metrics(out.metrics)
    with pytest.raises(TypeError, match=r"got \['dict'\]"):
        mean_metrics([out.metrics])
    with pytest.raises(ValueError, match="at least one"):
        mean_metrics([])
    with pytest.raises(
        ValueError, match=r"the same terms and metrics in the same order, got \[\['loss/cross_entropy',"
    ):
        mean_metrics([out, HeadLoss()(x[0], labels[0])])


def refused_group(group, device):
    shard = VocabShard.from_group(group, V)
    x, labels = (part.to(device) for part in batches())
    out = HEAD(x[..., shard.start : shard.stop], labels, shard=shard)
    try:
        mean_metrics(out, group)
    except ValueError as error:
        return str(error)


def test_the_group_of_the_vocabulary_is_refused():
    for message in on_ranks(2, refused_group):
        assert "got the group of a VocabShard" in message
