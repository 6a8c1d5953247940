"""What somebody who scores a model writes first, and what the error says to write."""

import math
import re
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from tp_headloss import (
    BitsPerByte,
    CausalLMLoss,
    CrossEntropy,
    HeadLoss,
    Metric,
    SamplingRule,
    Sequences,
    Teacher,
    Term,
    TopKAccuracy,
    Transform,
    combine_metrics,
    kept_ids,
    linear_vocab_statistics,
    log_probs,
    mean_metrics,
    sample,
    topk_log_probs,
    vocab_statistics,
)

V, H = 11, 4
LOGITS, LABELS = torch.randn(2, 5, V), torch.zeros(2, 5, dtype=torch.int64)
HIDDEN, WEIGHT = torch.randn(2, 5, H), torch.randn(V, H)
OUTPUT = SimpleNamespace(logits=LOGITS, hidden_states=(HIDDEN,))
LAST = ": pass its .hidden_states[-1], of a call with output_hidden_states=True"
TRANSPOSED = ": transposed? Pass its .t(), or pass hidden states [.., 11]"
OF_FUSED_HEAD = (
    "got NoneType: a model with a fused head makes logits in eval() under torch.no_grad()"
)
OUT = HeadLoss(metrics="accuracy")(LOGITS, LABELS)
POSITIONS = torch.arange(10).view(2, 5)
OF_LABELS = "a number for each label, in its shape, such as table[labels.clamp(min=0)]"


def with_bytes(value):
    return lambda: HeadLoss(metrics=BitsPerByte())(LOGITS, LABELS, inputs={"num_bytes": value})


# a call -> words of its error
MESSAGES = {
    "a transposed weight": (
        lambda: linear_vocab_statistics(HIDDEN, WEIGHT.t(), LABELS),
        TRANSPOSED,
    ),
    "a transposed weight of a loss": (
        lambda: HeadLoss().linear(HIDDEN, WEIGHT.t(), LABELS),
        TRANSPOSED,
    ),
    "a transposed weight of likeliest ids": (
        lambda: topk_log_probs(HIDDEN, 2, weight=WEIGHT.t()),
        TRANSPOSED,
    ),
    "a transposed weight of kept ids": (
        lambda: kept_ids(HIDDEN, SamplingRule(top_k=2), weight=WEIGHT.t()),
        TRANSPOSED,
    ),
    "a weight of another model": (
        lambda: linear_vocab_statistics(HIDDEN, torch.randn(V, 7), LABELS),
        "got [11, 7]: or pass hidden states [.., 7]",
    ),
    "a bias with a column": (
        lambda: linear_vocab_statistics(HIDDEN, WEIGHT, LABELS, bias=torch.zeros(V, 1)),
        "got [11, 1]: pass its .reshape(11)",
    ),
    "a bias with a row": (
        lambda: linear_vocab_statistics(HIDDEN, WEIGHT, LABELS, bias=torch.zeros(1, V)),
        "got [1, 11]: pass its .reshape(11)",
    ),
    "a bias of a transform with a column": (
        lambda: Transform(bias=torch.zeros(V, 1)),
        "got [11, 1]: pass its .reshape(11)",
    ),
    "class weights with a column": (
        lambda: CrossEntropy(class_weight=torch.ones(V, 1)),
        "got [11, 1]: pass its .reshape(11)",
    ),
    "labels in the place of a weight": (
        lambda: linear_vocab_statistics(HIDDEN, LABELS),
        "got torch.int64: are these labels? The weight [width, H] comes before them",
    ),
    "a method of the class": (
        lambda: HeadLoss.linear(HIDDEN, WEIGHT, LABELS),
        "got hidden, weight: write HeadLoss(..).linear(hidden, weight, labels)",
    ),
    "forward of the class": (
        lambda: HeadLoss.forward(LOGITS, LABELS),
        "got logits: write HeadLoss(..)(logits, labels)",
    ),
    "a model's output as logits": (lambda: log_probs(OUTPUT, LABELS), ": pass its .logits"),
    "a model's output as logits of a loss": (
        lambda: HeadLoss()(OUTPUT, LABELS),
        ": pass its .logits",
    ),
    "a model's output as logits of likeliest ids": (
        lambda: topk_log_probs(OUTPUT, 2),
        ": pass its .logits",
    ),
    "a model's output as hidden states": (
        lambda: linear_vocab_statistics(OUTPUT, WEIGHT, LABELS),
        LAST,
    ),
    "a model's output as hidden states of a loss": (
        lambda: HeadLoss().linear(OUTPUT, WEIGHT, LABELS),
        LAST,
    ),
    "a model's output as hidden states of likeliest ids": (
        lambda: topk_log_probs(OUTPUT, 2, weight=WEIGHT),
        LAST,
    ),
    "the output of a model without a head": (
        lambda: linear_vocab_statistics(SimpleNamespace(last_hidden_state=HIDDEN), WEIGHT, LABELS),
        ": pass its .last_hidden_state",
    ),
    "log-probs of labels as a teacher": (
        lambda: Teacher(log_probs(LOGITS, LABELS)),
        "got LogProbs: its .log_prob is one number per token, not one per id of the vocabulary",
    ),
    "one number of bytes": (with_bytes(100), f"got int: {OF_LABELS}"),
    "a list of bytes": (with_bytes([1, 2]), f"got list: {OF_LABELS}"),
    "a tensor of one number of bytes": (with_bytes(torch.tensor(100)), f"got []: {OF_LABELS}"),
    "a table of bytes": (with_bytes(torch.ones(V)), f"got [11]: {OF_LABELS}"),
    "a transposed weight, whose rows are not known": (
        lambda: HeadLoss().linear(HIDDEN, WEIGHT.t(), LABELS),
        "weight must have shape [width, 4] to fit hidden states, got [4, 11]",
    ),
    "no logits": (lambda: log_probs(None, LABELS), OF_FUSED_HEAD),
    "no logits of a loss": (lambda: HeadLoss()(None, LABELS), OF_FUSED_HEAD),
    "no logits of unshifted labels": (lambda: CausalLMLoss()(None, LABELS), OF_FUSED_HEAD),
    "no logits of samples": (
        lambda: sample(None, seed=0, positions=POSITIONS),
        OF_FUSED_HEAD,
    ),
    "no labels": (lambda: Sequences.from_mask(None), "mask must be a tensor, got NoneType$"),
    "a bias by id": (
        lambda: Transform(bias={5: 1.0}),
        "got dict: write a tensor [width] of them, one number for each id",
    ),
    "class weights by id": (
        lambda: CrossEntropy(class_weight={5: 2.0}),
        "got dict: write a tensor [V] of them, one number for each id",
    ),
    "a list as bias": (
        lambda: Transform(bias=[1.0, 2.0]),
        "got list: write a tensor [width] of them, one number for each id",
    ),
    "a temperature as bias": (lambda: Transform(0.7), "a temperature is temperature="),
    "a number as transform": (
        lambda: log_probs(LOGITS, LABELS, transform=0.7),
        "transform must be a Transform, got float: write Transform(temperature=0.7)",
    ),
    "a whole number as transform": (
        lambda: HeadLoss()(LOGITS, LABELS, transform=2),
        "got int: write Transform(temperature=2)",
    ),
    "a k as rule": (
        lambda: kept_ids(LOGITS, 50),
        "rule must be a SamplingRule, got int: write SamplingRule(top_k=50)",
    ),
    "a share as rule": (
        lambda: sample(LOGITS, 0.9, seed=0, positions=POSITIONS),
        "got float: write SamplingRule(top_p=0.9), or min_p=0.9",
    ),
    "several samples": (
        lambda: sample(LOGITS, seed=0, positions=POSITIONS, num_samples=4),
        "'num_samples': write logits[None].expand(num_samples, *logits.shape), with positions of",
    ),
    "a generator of samples": (
        lambda: sample(LOGITS, generator=torch.Generator(), positions=POSITIONS),
        "'generator': write seed=, an int, and positions=",
    ),
    "a metric as a term": (
        lambda: HeadLoss("perplexity"),
        "terms must be Terms, got 'perplexity': a metric, write HeadLoss(metrics='perplexity')",
    ),
    "a metric that is made as a term": (
        lambda: HeadLoss([CrossEntropy(), "top5_accuracy"]),
        "'top5_accuracy': a metric, write HeadLoss(metrics=TopKAccuracy(5))",
    ),
    "a host's name of a metric as a term": (
        lambda: HeadLoss("ppl"),
        "'ppl': as a metric (metrics=..) write \"perplexity\"",
    ),
    "a loss by name": (lambda: HeadLoss("nll"), "got 'nll': write CrossEntropy()"),
    "a divergence by name": (lambda: HeadLoss("kl_div"), ': write Distillation(1.0, "forward_kl")'),
    "metrics of a generator": (
        lambda: HeadLoss(metrics=(TopKAccuracy(k) for k in (1, 5))),
        "metrics must be names or Metrics, got <genexpr>: pass list(..) of it",
    ),
    "metrics of a dict": (
        lambda: HeadLoss(metrics={"a": "accuracy"}.values()),
        "got dict_values: pass list(..) of it",
    ),
    "outputs of a generator": (
        lambda: mean_metrics(out for out in [OUT]),
        "each `HeadLossOutput`, got generator: pass list(..) of it",
    ),
    "sums of a generator": (
        lambda: combine_metrics(out.metrics for out in [OUT]),
        "must be a tuple or list, got generator: pass list(..) of it",
    ),
    "outputs as sums": (
        lambda: combine_metrics([OUT]),
        "must be a dict, got HeadLossOutput: pass its .metrics",
    ),
    "statistics of a generator": (
        lambda: Metric(lambda stats: {"rank": stats.rank}, want=(x for x in ["rank"])),
        "want must be a tuple of names, got generator: pass list(..) of it",
    ),
    "a generator where no list is taken": (
        lambda: Transform(temperature=(x for x in [0.7])),
        "got generator$",
    ),
    "sums as outputs": (
        lambda: mean_metrics([OUT.metrics]),
        "got [MetricSums], sums by name: mean_metrics takes the outputs themselves",
    ),
    "sums of one output": (
        lambda: mean_metrics(HeadLoss()(LOGITS, LABELS).metrics),
        "got MetricSums, sums by name: mean_metrics takes the outputs themselves",
    ),
    "accuracy of another k": (lambda: HeadLoss(metrics="accuracy@7"), ": write TopKAccuracy(7)"),
    "top ten": (lambda: HeadLoss(metrics="Top10_accuracy"), ": write TopKAccuracy(10)"),
    "top one": (lambda: HeadLoss(metrics="acc@1"), ': write "accuracy"'),
    "likeliest ids in want": (
        lambda: vocab_statistics(LOGITS, LABELS, want=("top5",)),
        "got ['top5']: write topk_log_probs(logits, k=..)",
    ),
    "want's spelling": (
        lambda: vocab_statistics(LOGITS, LABELS, want=("ranks",)),
        "got ['ranks']: did you mean 'rank'?; ('lse'",
    ),
    "a term as a function": (
        lambda: Term("mine", CrossEntropy()),
        "function must be a function, got Term",
    ),
    "a term as a metric": (lambda: HeadLoss(metrics=CrossEntropy()), "Metrics, got Term"),
    "a number of several tensors": (
        lambda: float(log_probs(LOGITS, LABELS)),
        "LogProbs are several tensors",
    ),
    "more entries than ids": (
        lambda: HeadLoss(metrics=TopKAccuracy(V + 1))(LOGITS, LABELS),
        "k of TopKAccuracy must be at most 11, the size of the vocabulary, got 12",
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_says_what_to_write(name):
    call, words = MESSAGES[name]
    pattern = re.escape(words.removesuffix("$")) + "$" * words.endswith("$")
    with pytest.raises((TypeError, ValueError), match=pattern):
        call()


def test_what_is_advised_is_right():
    """What the errors above say to write has the same statistics."""
    given = log_probs(HIDDEN @ WEIGHT.t(), LABELS).log_prob
    stats = linear_vocab_statistics(OUTPUT.hidden_states[-1], WEIGHT.t().t(), LABELS)
    torch.testing.assert_close(stats.log_prob, given)
    bias = torch.randn(V, 1)
    stats = linear_vocab_statistics(HIDDEN, WEIGHT, LABELS, bias=bias.reshape(V))
    whole = HIDDEN @ WEIGHT.t() + bias[:, 0]
    torch.testing.assert_close(stats.log_prob, log_probs(whole, LABELS).log_prob)
    all_ids = HeadLoss(metrics=TopKAccuracy(V))(LOGITS, LABELS).means()
    assert all_ids[f"top{V}_accuracy"] == 1
    mask = torch.arange(5).expand(2, 5) % 2
    labels = LABELS.masked_fill(mask == 0, -100)
    scored = log_probs(LOGITS, labels)
    torch.testing.assert_close(
        scored.log_prob.sum(), (mask * log_probs(LOGITS, LABELS).log_prob).sum()
    )
    inverse = Metric(lambda read: {"mrr": 1 / read.rank}, want=("rank",))
    ranks = 1 + (LOGITS[..., :1] < LOGITS).sum(-1)[mask > 0]
    found = HeadLoss(metrics=inverse)(LOGITS, labels).means()["mrr"]
    torch.testing.assert_close(found, (1 / ranks.double()).mean(), rtol=1e-6, atol=0)


def test_what_is_advised_for_samples_is_right():
    """Several samples of one token are independent, and one is what a call alone draws."""
    positions = torch.arange(4 * 10).view(4, 2, 5)
    several = sample(LOGITS[None].expand(4, *LOGITS.shape), seed=3, positions=positions)
    assert several.ids.shape == (4, 2, 5)
    alone = sample(LOGITS, seed=3, positions=positions[2])
    assert torch.equal(several.ids[2], alone.ids)
    assert not torch.equal(several.ids[0], several.ids[1])


def test_bytes_are_moved_as_their_labels_are():
    """By `CausalLMLoss` itself, and by hand where labels are moved by hand."""
    labels, table = torch.randint(V, (2, 5)), torch.randint(1, 9, (V,))
    head = HeadLoss(metrics=BitsPerByte())
    num_bytes = table[labels]
    ours = CausalLMLoss(head)(LOGITS, labels, inputs={"num_bytes": num_bytes}).means()
    moved = F.pad(labels[:, 1:], (0, 1), value=-100)
    by_hand = {"num_bytes": F.pad(num_bytes[:, 1:], (0, 1))}
    theirs = head(LOGITS, moved, inputs=by_hand).means()
    assert torch.equal(ours["bits_per_byte"], theirs["bits_per_byte"])


def test_a_broken_row_is_wrong_for_every_metric_as_the_pages_say():
    logits = torch.randn(4, V)
    logits[0, 3], logits[1, 3], logits[2] = math.nan, math.inf, -math.inf
    top = topk_log_probs(logits, 3)
    assert top.lse.isfinite().tolist() == [False] * 3 + [True]
    assert top.log_probs[:3].isnan().all() and (top.ids >= 0).all()
    for label in range(V):
        labels = torch.full((4,), label)
        stats = vocab_statistics(logits, labels, want=("rank", "argmax"))
        assert stats.rank[:3].isnan().all() and (stats.argmax[:3] == -1).all()
        greedy = (top.ids[:, 0] == labels) & top.lse.isfinite()
        assert torch.equal(stats.rank == 1, greedy) and torch.equal(stats.correct, greedy)
        out = HeadLoss(metrics=TopKAccuracy(3))(logits[:3], labels[:3])
        assert out.metrics["top3_accuracy"] == 0


def test_what_nobody_wants_is_none():
    stats = vocab_statistics(LOGITS, LABELS)
    assert (
        stats.rank is None and stats.entropy is None and vocab_statistics(LOGITS).log_prob is None
    )
    for function in (vocab_statistics, linear_vocab_statistics):
        assert "None" in function.__doc__.partition("\nReturns:\n")[2].partition("\n\n")[0]
