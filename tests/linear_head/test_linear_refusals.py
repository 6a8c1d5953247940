"""Refusals of a linear head, and what their messages say."""

import itertools

import pytest
import torch
from linear_problem import H, N, V, a_teacher, small_blocks, tensors
from ranks import on_ranks
from torch.testing import assert_close

import tp_headloss as hl
from tp_headloss.linear_head.request import LinearRequest
from tp_headloss.statistics import FULL_TEACHER


def test_one_sweep_refuses_what_it_cannot_do():
    hidden, weight, _, labels, weights = tensors()
    hidden.requires_grad_()
    one_sweep = hl.Linear(mode="one_sweep")
    for head, kwargs, words in (
        (hl.HeadLoss(reduction="none"), {}, "loss per token"),
        (hl.HeadLoss([hl.Term("own", lambda s: s.lse)]), {}, "declared tokenwise"),
        (
            hl.HeadLoss([hl.CrossEntropy(class_weight=torch.ones(V)), hl.ZLoss(0.1)]),
            {},
            "denominators of their own",
        ),
        (hl.HeadLoss(), {"token_weight": weights.clone().requires_grad_()}, "require a gradient"),
        (
            hl.HeadLoss(),
            {"hidden": hidden.half(), "weight": weight.half()},
            "float16 gradients underflow",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            head.linear(
                **{"hidden": hidden, "weight": weight, "labels": labels, "linear": one_sweep}
                | kwargs
            )
    pointwise = hl.HeadLoss([hl.Term("own", lambda s: s.lse, pointwise=True)])
    pointwise.linear(hidden, weight, labels, linear=one_sweep)  # which promises it, too
    out = hl.HeadLoss().linear(hidden, weight, labels, linear=one_sweep)
    with pytest.raises(RuntimeError, match="mode='recompute'"):
        (out.loss + out.stats.log_prob.sum()).backward()
    with torch.no_grad():
        assert not hl.HeadLoss().linear(hidden, weight, labels, linear=one_sweep).loss.requires_grad


BAD = {  # others are in tests/helpers/odd_inputs.py
    "gather them first": lambda h, w, y: hl.Linear(
        max_valid_tokens=3, hidden_grad="reduce_scatter"
    ),
    "got none": lambda h, w, y: hl.linear_vocab_statistics(
        h, w, linear=hl.Linear(max_valid_tokens=3)
    ),
    "copy the teacher": lambda h, w, y: hl.linear_vocab_statistics(
        h,
        w,
        y,
        teacher=a_teacher("logits", "cpu"),
        want=FULL_TEACHER,
        linear=hl.Linear(max_valid_tokens=3),
    ),
    r"weight must have shape \[width, 24\] to fit hidden states, got \[200, 5\]": lambda h, w, y: (
        hl.linear_vocab_statistics(h, w[:, :5], y)
    ),
    "bias must have shape": lambda h, w, y: hl.linear_vocab_statistics(h, w, y, bias=w[:5, 0]),
    "upstream is of": lambda h, w, y: hl.linear_vocab_statistics(
        h, w, y, linear=hl.Linear(upstream=1.0)
    ),
    r"H\], got \[\d+\]: unsqueeze": lambda h, w, y: hl.linear_vocab_statistics(
        h[0], w, y[0], linear=hl.Linear(hidden_grad="reduce_scatter")
    ),
}


@pytest.mark.parametrize("words", BAD)
def test_bad_arguments_are_named(words):
    hidden, weight, _, labels, _ = tensors()
    with pytest.raises(ValueError, match=words):
        BAD[words](hidden, weight, labels)


def test_shapes_are_checked_before_tokens_are_dropped():
    hidden, weight, _, labels, weights = tensors()
    few, rows = hl.Linear(max_valid_tokens=30), hidden.view(4, 11, H)
    turned = hl.Transform(temperature=weights.view(11, 4))
    for call in (
        lambda: hl.HeadLoss().linear(hidden, weight, labels[:5], linear=few),
        lambda: hl.HeadLoss().linear(rows, weight, labels.view(11, 4), linear=few),
        lambda: hl.linear_vocab_statistics(hidden[:5], weight, labels, linear=few),
        lambda: hl.linear_vocab_statistics(
            rows, weight, labels.view(4, 11), transform=turned, linear=few
        ),
    ):
        with pytest.raises(ValueError, match="must have shape"):
            call()
    labels[30] = V
    for linear in (few, hl.Linear(max_valid_tokens=1)):
        with pytest.raises(ValueError, match="label of token 30"):
            hl.linear_vocab_statistics(
                hidden, weight, labels, linear=linear, options=hl.Options(check=True)
            )
    valid = int((labels != -100).sum())
    with pytest.raises(ValueError, match=f"at least the number of valid tokens, {valid}, got 30"):
        hl.HeadLoss(options=hl.Options(check=True)).linear(
            hidden, weight, labels.clamp(max=V - 1), linear=few
        )


def test_check_numbers_the_tokens_of_the_call_though_ignored_ones_are_dropped():
    hidden, weight, _, labels, _ = tensors()
    labels[:7] = -100
    few, ids = hl.Linear(max_valid_tokens=len(labels)), labels.clamp(min=0)[:, None].repeat(1, 2)
    ids[20, 1] = V
    checked = hl.Options(check=True)
    for name, inputs in (
        ("log_probs_at", {"ids": ids}),
        ("set_log_prob", {"sets": hl.IdSets(ids)}),
    ):
        term = hl.Term("own", lambda stats: stats.lse, want=(name,))
        with pytest.raises(ValueError, match="of token 20 "):
            hl.HeadLoss([term], options=checked).linear(
                hidden, weight, labels, inputs=inputs, linear=few
            )
        with pytest.raises(ValueError, match="of token 20 "):
            hl.linear_vocab_statistics(
                hidden, weight, labels, want=(name,), linear=few, options=checked, **inputs
            )


def test_one_sweep_knows_what_it_cannot_differentiate(caplog, monkeypatch):
    hidden, weight, _, labels, _ = tensors()
    scale = torch.tensor(2.0, requires_grad=True)
    own = hl.HeadLoss([hl.Term("own", lambda stats: -scale * stats.log_prob, tokenwise=True)])
    with pytest.raises(
        ValueError, match="'one_sweep' is not possible: a tokenwise term depends on something else"
    ):
        own.linear(hidden.requires_grad_(), weight, labels, linear=hl.Linear("one_sweep"))
    known = hl.HeadLoss().linear(hidden, weight, labels)
    plain = torch.autograd.grad(known.loss, hidden)[0]
    own.terms = own.terms  # nothing is known of them
    monkeypatch.setattr("tp_headloss.linear_head.request._logged_modes", set())
    with caplog.at_level("INFO", "tp_headloss"):
        for _ in range(2):
            d_scale, found = torch.autograd.grad(
                own.linear(hidden, weight, labels).loss, [scale, hidden]
            )
            assert_close(d_scale, known.loss.detach())
            assert_close(found, 2 * plain)
    why = "linear head: no one sweep, because a tokenwise term depends on something else that requires a gradient"
    assert caplog.messages == [why, "linear head: recompute"]
    constant = hl.HeadLoss(
        [hl.Term("constant", lambda stats: stats.log_prob.detach(), tokenwise=True)]
    )
    loss = constant.linear(hidden, weight, labels).loss
    assert not torch.autograd.grad(loss, hidden)[0].any()


@pytest.mark.parametrize("token", range(0, N, 8))
@pytest.mark.parametrize("valid", [None, N])
def test_one_sweep_looks_at_every_block_for_something_else_that_is_trained(token, valid):
    """A term reaches its parameter only in the block of one token, which a Python branch takes."""
    hidden, weight, _, labels, _ = tensors()
    labels = torch.where(labels == V - 1, 0, labels)
    labels[token] = V - 1
    scale = torch.nn.Parameter(torch.tensor(2.0))
    calls = []

    def function(stats):
        calls.append(stats.labels.numel())
        hard = stats.labels == V - 1
        return (
            -torch.where(hard, scale, 1.0) * stats.log_prob if bool(hard.any()) else -stats.log_prob
        )

    own = hl.HeadLoss([hl.Term("own", function, tokenwise=True)])

    def run(mode, **options):
        linear = hl.Linear(mode, budget=16 * 256 * 4, max_valid_tokens=valid, **options)
        return own.linear(hidden.requires_grad_(), weight, labels, linear=linear)

    with small_blocks():
        want = torch.autograd.grad(run("recompute").loss, (scale, hidden))
        assert want[0] != 0
        calls.clear()
        with pytest.raises(
            ValueError, match="'one_sweep' is not possible: a tokenwise term depends on something"
        ):
            run("one_sweep")
        place = token if valid is None else int((labels[:token] != -100).sum())
        # it raises in the token's block
        assert len(calls) == place // calls[0] + 1 and calls[0] < N
        own.terms = own.terms  # nothing is known of them
        for _ in range(2):
            assert_close(torch.autograd.grad(run("auto").loss, (scale, hidden)), want)


def test_a_main_grad_that_has_a_part_of_the_gradient_is_named():
    hidden, weight, _, labels, _ = tensors()
    labels[:] = torch.arange(N)
    scale = torch.nn.Parameter(torch.tensor(2.0))
    weight.requires_grad_().main_grad = torch.zeros(weight.shape)

    def function(stats):
        return -stats.log_prob * (scale if bool((stats.labels >= 40).any()) else 1.0)

    linear = hl.Linear("one_sweep", budget=16 * 256 * 4, main_grad=True, upstream=1.0)
    own = hl.HeadLoss([hl.Term("own", function, tokenwise=True)])
    with small_blocks():
        with pytest.raises(
            ValueError, match="main_grad has the gradients of the first blocks by now"
        ):
            own.linear(hidden, weight, labels, linear=linear)
        weight.main_grad.zero_()
        with pytest.raises(ValueError, match="'one_sweep' is not possible: a tokenwise term"):
            own.linear(hidden, weight, labels, linear=linear)
    assert not weight.main_grad.any()  # the second call begins nothing


def test_a_call_after_an_equal_one_is_not_checked_again_but_by_what_may_differ(monkeypatch, device):
    """Results and gradients are those of the first call; other operands, heads and missing memory
    are noticed."""
    hidden, weight = torch.randn(6, 8, device=device), torch.randn(12, 8, device=device)
    labels, shard, modes = (
        torch.arange(6, device=device),
        hl.VocabShard(0, 12, 12),
        ("recompute", "one_sweep", "auto"),
    )
    known = hl.HeadLoss(metrics="entropy")

    def run(linear, given=shard, x=hidden, y=labels, head=known):
        x, w = x.clone().requires_grad_(), weight.clone().requires_grad_()
        w.main_grad = torch.zeros(w.shape, device=device)
        out = head.linear(x, w, y, shard=given, linear=linear)
        out.loss.backward()
        return (
            out.loss.detach(),
            out.metrics["entropy"],
            x.grad,
            w.main_grad if linear.main_grad else w.grad,
        )

    options = [
        hl.Linear(mode, main_grad=main_grad) for mode in modes for main_grad in (False, True)
    ]
    first = [run(linear, given) for linear in options for given in (shard, None)]
    others = [run(linear, x=hidden * 2, y=labels.flip(0)) for linear in options]
    with monkeypatch.context() as patch:
        patch.setattr(LinearRequest, "checked", None)
        again = [run(linear, given) for linear in options for given in (shard, None)]
        assert all(torch.equal(a, b) for x, y in zip(first, again) for a, b in zip(x, y))
    for linear, found in zip(options, others):
        expected = run(linear, x=hidden * 2, y=labels.flip(0), head=hl.HeadLoss(metrics="entropy"))
        assert all(torch.equal(a, b) for a, b in zip(expected, found))
    with pytest.raises(ValueError, match=r"main_grad=True needs weight.main_grad"):
        known.linear(
            hidden, weight.clone().requires_grad_(), labels, shard=shard, linear=options[1]
        )
    with pytest.raises(TypeError, match="must have one dtype"):
        known.linear(hidden, weight.half(), labels, shard=shard, linear=options[0])
    with torch.autocast(device if isinstance(device, str) else device.type, dtype=torch.bfloat16):
        half = known.linear(hidden, weight, labels, shard=shard, linear=options[0]).loss
    assert not torch.equal(
        half, known.linear(hidden, weight, labels, shard=shard, linear=options[0]).loss
    )


GIVEN = {  # what of a call may differ from that of the one before
    "denominator": (None, 9.0, torch.tensor(9.0), torch.tensor(9.0, requires_grad=True)),
    "advantages": (torch.arange(6.0), torch.arange(6.0).requires_grad_()),
    "token_weight": (None, torch.arange(6.0)),
    "grad": (True, False),
}


@pytest.mark.parametrize("way", ["logits", "auto", "one_sweep", "recompute"])
def test_a_call_is_that_of_a_fresh_head_whatever_was_called_before(way):
    torch.manual_seed(0)
    hidden, weight, labels = torch.randn(6, 8), torch.randn(12, 8), torch.arange(6)

    def fresh():
        return hl.HeadLoss(
            [hl.CrossEntropy(class_weight=torch.arange(1.0, 13.0)), hl.PolicyGradient("reinforce")]
        )

    def run(head, denominator, advantages, token_weight, grad):
        x, given = (
            hidden.clone().requires_grad_(),
            {"denominator": denominator, "token_weight": token_weight},
        )
        call, operands = head, (x @ weight.T, labels)
        if way != "logits":
            call, operands, given["linear"] = head.linear, (x, weight, labels), hl.Linear(way)
        try:
            with torch.set_grad_enabled(grad):
                loss = call(*operands, **given, inputs={"advantages": advantages}).loss
        except ValueError as error:
            return str(error)
        return [loss.tolist(), torch.autograd.grad(loss, x)[0].tolist() if grad else None]

    for states in itertools.product(*GIVEN.values()):
        for place, (before, now) in enumerate(zip(states, GIVEN.values())):
            for other in now:
                head, later = fresh(), (*states[:place], other, *states[place + 1 :])
                run(head, *states)
                if other is not before:
                    assert run(head, *later) == run(fresh(), *later), (states, later)


def scattered_whole(group, device):
    """Hidden states of all tokens, where each rank has its part of them."""
    shard = hl.VocabShard.from_group(group, V)
    hidden, weight = torch.zeros(4, 6, H), torch.zeros(shard.width, H)
    linear, labels = hl.Linear(hidden_grad="reduce_scatter"), torch.zeros(4, 6).long()
    said = []
    for call in (hl.HeadLoss().linear, hl.linear_vocab_statistics):
        try:
            call(hidden, weight, labels, shard=shard, linear=linear)
        except ValueError as error:
            said.append(str(error))
    return said


def test_whole_hidden_states_for_a_reduce_scatter_are_said_to_be_gathered():
    for said in on_ranks(2, scattered_whole):
        assert len(said) == 2 and said[0] == said[1]
        assert said[0] == (
            "labels must have shape [8, 6] to fit hidden states, which hidden_grad='reduce_scatter' "
            "gathers from 2 ranks (whole ones need 'all_reduce'), got [4, 6]"
        )


def part_of_hidden_states(group, device):
    """The error of a rank's part of the tokens' hidden states beside all labels."""
    shard = hl.VocabShard.from_group(group, V)
    hidden, weight = torch.zeros(2, 6, H), torch.zeros(shard.width, H)
    with pytest.raises(ValueError) as found:
        hl.HeadLoss().linear(hidden, weight, torch.zeros(4, 6).long(), shard=shard)
    return str(found.value)


def test_all_labels_beside_a_part_of_the_hidden_states_name_the_option():
    for said in on_ranks(2, part_of_hidden_states):
        assert said.startswith("labels must have shape [2, 6] to fit hidden states, got [4, 6]: of")
        assert said.endswith("Keep it, and pass linear=Linear(hidden_grad='reduce_scatter')")


def without_a_gradient(group, device):
    """Whether statistics require one: of arguments that do not, with and without torch.no_grad."""
    shard = hl.VocabShard.from_group(group, V)
    sizes = (4, H), (shard.width, H)
    arguments = [torch.zeros(size, device=device) for size in sizes]
    arguments.append(torch.zeros(4, dtype=torch.long, device=device))
    found = []
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            stats = hl.linear_vocab_statistics(*arguments, shard=shard)
        found.append(stats.log_prob.requires_grad)
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_under_no_grad_statistics_of_frozen_hidden_states_have_no_graph(world_size):
    assert on_ranks(world_size, without_a_gradient) == [[world_size > 1, False]] * world_size
