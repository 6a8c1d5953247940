"""ms-swift's loss of a name and its functions of sharded logits, values and gradients, against
float64."""

import functools
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from pages import marked_block
from ranks import on_ranks
from trainer_problem import (
    DTYPES,
    WEIGHTS,
    B,
    K,
    S,
    V,
    close,
    close_grads,
    cut,
    data,
    dtype_name,
    truth,
)

from tp_headloss import CrossEntropy, HeadLoss, ZLoss
from tp_headloss.integrations import ms_swift


def labelled():
    """Labels [B, S], already shifted, with two that are ignored."""
    _, labels = data()
    labels[0, 2] = labels[1, 5] = -100
    return labels


def scored(group, device, dtype):
    logits, labels = data(dtype)[0], labelled().to(device)
    x = cut(logits, group).detach().to(device).requires_grad_()
    before = x.detach().clone()
    given = {"tp_group": group, "vocab_size": V}
    function = ms_swift.compute_logps_and_entropy_from_logits
    log_prob, entropy = function(x, labels, True, 3, **given)
    alone, nothing = function(x, labels, **given)
    assert torch.equal(alone, log_prob) and nothing is None and torch.equal(x, before)
    first, second = WEIGHTS.to(device)
    (first * log_prob + second * entropy).sum().backward()
    return log_prob.detach(), entropy.detach(), x.grad


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("ranks", [1, 2])
def test_log_probs_and_entropies(ranks, dtype):
    results = on_ranks(ranks, scored, dtype)
    labels, (logits, _) = labelled(), data(dtype)
    log_prob, entropy, _, leaf = truth(logits, labels)
    valid = labels != -100
    log_prob, entropy = (torch.where(valid, x, 0.0) for x in (log_prob, entropy))
    (WEIGHTS[0] * log_prob + WEIGHTS[1] * entropy).sum().backward()
    for found_log_prob, found_entropy, _ in results:
        close(found_log_prob, log_prob)
        close(found_entropy, entropy, atol=1e-5)
    close_grads([grad for _, _, grad in results], leaf.grad, dtype)


def teacher_of(top_k):
    """Whole logits of a teacher, or K of them, of which one token has none."""
    logits = data()[0].flip(0, 1)
    if not top_k:
        return {"full_logits": logits, "topk_logprobs": None, "topk_indices": None}
    values, ids = logits[..., :V].topk(K)
    values[1, 1] = -torch.inf
    return {"full_logits": None, "topk_logprobs": values, "topk_indices": ids}


def distilled(group, device, dtype, beta, top_k, labels_of_teacher=True):
    labels, parts = labelled().to(device), teacher_of(top_k)
    if not top_k:
        parts["full_logits"] = cut(parts["full_logits"], group)
    parts = {name: x if x is None else x.detach().to(device) for name, x in parts.items()}
    teacher = SimpleNamespace(**parts, labels=labels if labels_of_teacher else None)
    x = cut(data(dtype)[0], group).detach().to(device).requires_grad_()
    total, count = ms_swift.gkd_loss(
        x, teacher, labels, beta, 1.5, chunk_size=2, tp_group=group, vocab_size=V
    )
    (2 * total).backward()
    return total.detach(), count, x.grad


def divergence(student, teacher, beta):
    """Per token, of logits in float64 over the last dimension."""
    s, t = student.log_softmax(-1), teacher.log_softmax(-1)
    if beta in (0, 1):
        p, q = (t, s) if beta == 0 else (s, t)
        return (p.exp() * (p - q)).sum(-1)
    mixture = (beta * t.exp() + (1 - beta) * s.exp()).log()
    of_teacher, of_student = ((x.exp() * (x - mixture)).sum(-1) for x in (t, s))
    return beta * of_teacher + (1 - beta) * of_student


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("top_k", [False, True], ids=["whole", "top_k"])
@pytest.mark.parametrize("beta", [0, 0.3, 1.0])
@pytest.mark.parametrize("ranks", [1, 2])
def test_divergences_from_a_teacher(ranks, beta, top_k, dtype):
    results = on_ranks(ranks, distilled, dtype, beta, top_k, beta != 0)
    leaf, parts = data(dtype)[0].double().requires_grad_(), teacher_of(top_k)
    counts = labelled() != -100
    if top_k:
        counts[1, 1] = False
        student = leaf.gather(-1, parts["topk_indices"])
        teacher = parts["topk_logprobs"].double()
    else:
        student, teacher = leaf[..., :V], parts["full_logits"].double()[..., :V]
    expected = divergence(student[counts] / 1.5, teacher[counts] / 1.5, beta).sum()
    (2 * expected).backward()
    for total, count, _ in results:
        close(total, expected, rtol=1e-5)
        assert int(count) == int(counts.sum())
    close_grads([grad for _, _, grad in results], leaf.grad, dtype)


def likeliest(group, device, dtype):
    x = cut(data(dtype)[0], group).detach().to(device)
    return ms_swift.vocab_parallel_topk(x, K, tp_group=group, vocab_size=V)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("ranks", [1, 2])
def test_largest_logits(ranks, dtype):
    logits = data(dtype)[0][..., :V]
    order = logits.sort(dim=-1, descending=True, stable=True)
    for values, ids in on_ranks(ranks, likeliest, dtype):
        assert values.dtype == dtype and torch.equal(ids.cpu(), order.indices[..., :K])
        close(values, order.values[..., :K].double())


def test_a_group_must_be_said():
    """ms-swift's own functions look it up; without it the logits of a rank would pass for all."""
    logits, labels = data()
    teacher = SimpleNamespace(**teacher_of(False), labels=None)
    for function, given in (
        (ms_swift.compute_logps_and_entropy_from_logits, (logits, labels)),
        (ms_swift.vocab_parallel_topk, (logits, 2)),
        (ms_swift.gkd_loss, (logits, teacher, labels, 0, 1.0)),
    ):
        with pytest.raises(TypeError, match="tp_group"):
            function(*given)


def test_teachers_that_are_refused():
    logits, labels = data()[0], labelled()
    nothing = SimpleNamespace(full_logits=None, topk_logprobs=None, topk_indices=None, labels=None)
    with pytest.raises(ValueError, match="or topk_logprobs and topk_indices, got neither"):
        ms_swift.gkd_loss(logits, nothing, labels, 0, 1.0, tp_group=None)
    other = SimpleNamespace(**teacher_of(False), labels=labels.flip(1))
    with pytest.raises(ValueError, match="at the student's positions, got others"):
        ms_swift.gkd_loss(logits, other, labels, 0, 1.0, tp_group=None)


def trainer(sequence_parallel_size=1):
    return SimpleNamespace(template=SimpleNamespace(sequence_parallel_size=sequence_parallel_size))


def not_shifted():
    """Labels [B, S] of a prompt, an answer and padding."""
    labels = data()[1]
    labels[:, :2] = labels[1, 5] = -100
    return labels


@pytest.mark.parametrize("count", [None, torch.tensor(17)], ids=["own", "global"])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_loss_of_a_name(scaled, count):
    logits, labels = data()[0][..., :V], not_shifted()
    x, leaf = logits.clone().requires_grad_(), logits.double().requires_grad_()
    # as ms-swift's trainer makes them before it calls a loss
    scale = torch.linspace(0.5, 2, B * S).view(B, S).roll(-1, -1).view(-1) if scaled else None
    loss = ms_swift.LogitsLoss(None, trainer())
    given = {"num_items_in_batch": count, "loss_scale": scale, "trainer": None}
    found = loss(SimpleNamespace(logits=x), labels, **given)
    found.backward()
    per_token = F.cross_entropy(leaf.flatten(0, 1), labels.roll(-1, -1).view(-1), reduction="none")
    per_token = per_token if scale is None else per_token * scale
    expected = per_token.sum() / ((labels[:, 1:] != -100).sum() if count is None else count)
    expected.backward()
    close(found.detach(), expected)
    close(x.grad, leaf.grad, 1e-5)


def test_a_loss_of_a_name_may_be_any_head_loss():
    logits, labels = data()[0][..., :V], not_shifted()
    head_loss = HeadLoss([CrossEntropy(), ZLoss(0.01)])
    loss_map = {"z_loss": functools.partial(ms_swift.LogitsLoss, head_loss=head_loss)}
    found = loss_map["z_loss"](None, trainer())(SimpleNamespace(logits=logits), labels)
    plain = ms_swift.LogitsLoss(None, trainer())(SimpleNamespace(logits=logits), labels)
    lse = logits.double().logsumexp(-1)[:, :-1]
    close(found - plain, 0.01 * lse[labels[:, 1:] != -100].square().mean(), 1e-4)


def test_losses_of_a_name_that_are_refused():
    with pytest.raises(ValueError, match="sequence_parallel_size 1, got 2"):
        ms_swift.LogitsLoss(None, trainer(2))
    with pytest.raises(ValueError, match="got a HeadLoss with reduction='none'"):
        ms_swift.LogitsLoss(None, trainer(), HeadLoss(reduction="none"))
    for other, divisor in (
        (
            HeadLoss(CrossEntropy(class_weight=torch.ones(V))),
            r"terms \['cross_entropy'\] divide by",
        ),
        (HeadLoss(reduction="seq-mean-token-mean"), "reduction='seq-mean-token-mean' divides by"),
    ):
        with pytest.raises(ValueError, match=f"counts tokens, and {divisor}"):
            ms_swift.LogitsLoss(None, trainer(), other)


def modules():
    """Modules of ms-swift and Megatron by name, with what the guide's files import."""
    names = ("loss", "megatron", "megatron.trainers")
    found = {name: ModuleType(name) for name in ("swift", *(f"swift.{name}" for name in names))}
    found |= {name: ModuleType(name) for name in ("megatron", "megatron.core")}
    trainers = found["swift.megatron.trainers"]
    for name in ("gkd_trainer", "grpo_trainer", "vocab_parallel_utils"):
        setattr(trainers, name, SimpleNamespace())
    found["swift.loss"].loss_map = {}
    group = SimpleNamespace(get_tensor_model_parallel_group=lambda: None)  # one rank
    found["megatron.core"].parallel_state = group
    return found


def test_the_files_of_the_guide(monkeypatch):
    found = modules()
    for name, module in found.items():
        monkeypatch.setitem(sys.modules, name, module)
    exec(compile(marked_block("host", "ms_swift-loss"), "docs", "exec"), {})
    loss = found["swift.loss"].loss_map["z_loss"](None, trainer())
    logits, labels = data()
    assert loss(SimpleNamespace(logits=logits), not_shifted()).isfinite()
    exec(compile(marked_block("host", "ms_swift-megatron"), "docs", "exec"), {})
    trainers = found["swift.megatron.trainers"]
    expected = logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    for module in (trainers.grpo_trainer, trainers.vocab_parallel_utils):
        close(module.compute_logps_and_entropy_from_logits(logits, labels)[0], expected.double())
    teacher = SimpleNamespace(**teacher_of(False), labels=labels)
    total, count = trainers.gkd_trainer.gkd_loss(logits, teacher, labels, 0.5, 1.0)
    assert total > 0 and count == B * S
