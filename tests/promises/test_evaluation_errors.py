"""What somebody who scores a model writes first, and what the error says to write."""

import math
import re
from types import SimpleNamespace

import pytest
import torch

from tp_headloss import (
    BitsPerByte,
    CrossEntropy,
    HeadLoss,
    Metric,
    SamplingRule,
    Teacher,
    Term,
    TopKAccuracy,
    Transform,
    kept_ids,
    linear_vocab_statistics,
    log_probs,
    topk_log_probs,
    vocab_statistics,
)

V, H = 11, 4
LOGITS, LABELS = torch.randn(2, 5, V), torch.zeros(2, 5, dtype=torch.int64)
HIDDEN, WEIGHT = torch.randn(2, 5, H), torch.randn(V, H)
OUTPUT = SimpleNamespace(logits=LOGITS, hidden_states=(HIDDEN,))
LAST = ": pass its .hidden_states[-1], of a call with output_hidden_states=True"
TRANSPOSED = ": transposed? Pass its .t(), or pass hidden states [.., 11]"
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
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
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
