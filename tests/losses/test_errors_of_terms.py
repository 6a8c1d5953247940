"""Errors that come from a term's function name the term, and what its inputs may be."""

import math
import re
import sys

import pytest
import torch

import tp_headloss as hl

B, S, K, V = 2, 3, 4, 16
IDS = torch.arange(K).expand(B, S, K)


def call(function, inputs=None, **given):
    term = hl.Term("mine", function, inputs=tuple(inputs or {}), **given)
    return hl.HeadLoss(term)(
        torch.randn(B, S, V, requires_grad=True), torch.zeros(B, S).long(), inputs=inputs
    )


def test_a_value_of_statistics_is_no_metric_reads_no_inputs_and_is_wrapped():
    entropy = hl.StatisticValue("entropy")
    with pytest.raises(TypeError, match=r"write Metric\(lambda stats: {'entropy': stats.entropy}"):
        hl.Metric(entropy)
    with pytest.raises(TypeError, match=r"'a': a StatisticValue reads no inputs, got .*'margin'"):
        hl.Term("a", entropy, inputs=("teacher", "margin"))
    with pytest.raises(TypeError, match=r"wrap it, Term\('entropy', StatisticValue\(statistic="):
        hl.HeadLoss([entropy])
    with pytest.raises(TypeError, match="got StatisticValue: write 'entropy'"):
        hl.HeadLoss(metrics=[entropy])


@pytest.mark.parametrize(
    "added",
    [
        lambda a, b: 0.5 * a,
        lambda a, b: a * 0.5,
        lambda a, b: a / 2,
        lambda a, b: a + b,
        lambda a, b: a - b,
        lambda a, b: 1 - a,
        lambda a, b: -a,
        lambda a, b: sum([a, b]),
    ],
)
def test_terms_are_a_list_and_have_their_weights_themselves(added):
    with pytest.raises(TypeError, match=r"HeadLoss\(\[CrossEntropy\(0\.5\), ZLoss\(1e-4\)\]\)"):
        added(hl.CrossEntropy(), hl.ZLoss(1e-4))


@pytest.mark.parametrize(
    "made, write",
    [
        (lambda: hl.HeadLoss([(0.5, hl.CrossEntropy())]), "a term has its weight itself"),
        (lambda: hl.HeadLoss([hl.AcceptanceRate()]), "a metric is one of metrics= of HeadLoss"),
        (lambda: hl.HeadLoss(metrics=[hl.ZLoss(1e-4)]), "a term stands in the list of a HeadLoss"),
    ],
)
def test_parts_in_the_wrong_place_are_told_theirs(made, write):
    with pytest.raises(TypeError, match=write):
        made()


def test_weights_in_the_place_of_a_terms_own_are_told_theirs():
    class_weight = (
        r"weight must have shape \[\], got \[7\]: one per class is CrossEntropy\(class_weight"
    )
    for term in (hl.CrossEntropy, hl.ZLoss):
        with pytest.raises(ValueError, match=class_weight):
            term(weight=torch.rand(7))
    assert hl.CrossEntropy(weight=torch.rand(())).weight.shape == ()


def test_a_head_loss_in_the_place_of_a_trainers_function_says_what_to_write():
    logits, labels = torch.zeros(2, 3, 7), torch.zeros(2, 3).long()
    with pytest.raises(TypeError, match=r"compute_loss_func, fuse_head\(model, HeadLoss\(\.\.\)\)"):
        hl.HeadLoss()(logits, labels, num_items_in_batch=6)


def test_a_token_weight_wants_its_statistic_by_itself():
    weighed = hl.Term("a", lambda stats: -stats.log_prob, token_weight=hl.StatisticValue("entropy"))
    assert hl.HeadLoss(weighed).want == ("entropy",)


WRONG = {
    "bool": lambda stats: stats.log_prob > -1,
    "int64": lambda stats: (stats.log_prob > -1).long(),
}


@pytest.mark.parametrize("dtype", WRONG)
def test_a_term_returns_floating_point(dtype):
    words = f"term 'mine' must return a loss per token, floating point, got torch.{dtype}"
    with pytest.raises(TypeError, match=words):
        call(WRONG[dtype])
    # a metric may count
    head = hl.HeadLoss(metrics=hl.Metric(lambda stats: {"sure": WRONG[dtype](stats)}))
    assert float(head(torch.zeros(1, 2), torch.tensor([0])).metrics["sure"]) == 1


def fail(kind):
    def function(stats):
        raise kind("no luck")

    return function


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes")
@pytest.mark.parametrize("kind", [RuntimeError, ValueError, TypeError, KeyError, AttributeError])
def test_an_error_of_a_function_has_a_note_that_names_its_term(kind):
    with pytest.raises(kind, match="no luck") as caught:
        call(fail(kind))
    assert caught.value.__notes__ == [f"in term 'mine', whose statistics are [{B}, {S}]"]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes")
def test_a_value_per_token_beside_values_of_ids_says_how_it_broadcasts():
    def function(stats, ids, w):
        return (stats.log_probs_at * w).sum(-1)

    given = {"ids": IDS, "w": torch.tensor(2.0)}
    with pytest.raises(RuntimeError) as caught:
        call(function, given, want=("log_probs_at",))
    (note,) = caught.value.__notes__
    assert "term 'mine'" in note and f"'w' [{B}, {S}]" in note
    assert f"log_probs_at are [{B}, {S}, {K}], to which x[..., None]" in note


@pytest.mark.parametrize("shape", [(K,), (1, K), (1, 1, K), (B, 1, K)])
def test_values_of_ids_are_of_each_token(shape):
    def function(stats, ids, w):
        return (stats.log_probs_at * w).sum(-1)

    given = {"ids": IDS, "w": torch.ones(shape)}
    words = rf"input 'w' must be .*\[{B}, {S}, {K}\], one for .* pass its .expand\({B}, {S}, {K}\)"
    with pytest.raises(ValueError, match=words):
        call(function, given, want=("log_probs_at",))
    call(function, given | {"w": given["w"].expand(B, S, K)}, want=("log_probs_at",))


def test_ids_that_nothing_wants_log_probs_of_say_what_to_want():
    with pytest.raises(ValueError, match=r"'ids' \[.., K\] is for .* want=\('log_probs_at',\)"):
        call(lambda stats, ids: stats.lse, {"ids": IDS})


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_trained_weight_has_no_gradient_where_an_ignored_value_is_infinite(reduction):
    logits = torch.randn(3, V, requires_grad=True)
    labels = torch.tensor([1, -100, 2])
    weight = torch.ones(3, requires_grad=True)
    head = hl.HeadLoss(hl.Term("inverse", lambda stats: 1 / stats.lse), reduction=reduction)
    head(logits, labels, token_weight=weight).loss.sum().backward()
    assert weight.grad.isfinite().all() and weight.grad[1] == 0
    assert logits.grad[[0, 2]].isfinite().all() and weight.grad[0] != 0


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes")
def test_a_tokenwise_function_that_reads_all_tokens_says_how_many_it_was_called_with():
    n, of_all = 512, torch.rand(512)
    hidden, weight = torch.randn(n, 8, requires_grad=True), torch.randn(64, 8, requires_grad=True)
    functions = {
        RuntimeError: lambda stats: stats.lse * of_all,  # torch's own error
        ValueError: lambda stats: of_all + 0 * stats.lse.sum(),
    }
    for kind, function in functions.items():
        head = hl.HeadLoss(hl.Term("mine", function, tokenwise=True))
        head(hidden @ weight.t(), torch.zeros(n).long())  # right with all of them
        linear = hl.Linear("one_sweep", budget=140 * 64 * 4)
        with pytest.raises(kind) as caught:
            head.linear(hidden, weight, torch.zeros(n).long(), linear=linear)
        note = caught.value.__notes__[-1]
        assert note.startswith("one sweep calls a tokenwise function with some of the tokens")
        assert "here 128 of 512: name whatever it reads of each token in inputs=(..)" in note
        assert "term 'mine'" in "".join([str(caught.value), *caught.value.__notes__])


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes")
def test_a_tokenwise_function_that_reads_other_shapes_says_how_its_tokens_come():
    mask = torch.ones(B, S)
    head = hl.HeadLoss(hl.Term("mine", lambda stats: stats.lse * mask, tokenwise=True))
    hidden, weight = torch.randn(B, S, 8, requires_grad=True), torch.randn(V, 8)
    with pytest.raises(RuntimeError) as caught:
        head.linear(hidden, weight, torch.zeros(B, S).long())
    of_term, of_sweep = caught.value.__notes__
    assert of_term == f"in term 'mine', whose statistics are [{B * S}]"
    assert f"tokens in one dimension, here [{B * S}] of [{B}, {S}]: name whatever" in of_sweep


@pytest.mark.parametrize("promise", ["tokenwise", "pointwise"])
@pytest.mark.parametrize("name", ["sequences", "sets"])
def test_a_term_of_what_all_tokens_have_together_is_not_tokenwise(name, promise):
    def function(stats, **inputs):
        return stats.lse

    words = f"'mine' takes '{name}', .* so it is not {promise}: leave out {promise}=True"
    with pytest.raises(ValueError, match=words):
        hl.Term("mine", function, inputs=(name,), **{promise: True})
    hl.Term("mine", function, inputs=(name,))
    hl.Term("mine", function, inputs=("teacher",), **{promise: True})


def test_a_token_weight_takes_the_inputs_of_its_term():
    def weighted(stats, a):
        return stats.lse * a

    words = r"the token_weight of term 'mine': function must take \(stats, a\), got \(stats\)"
    with pytest.raises(TypeError, match=words):
        hl.Term("mine", weighted, inputs=("a",), token_weight=lambda stats: stats.lse)
    hl.Term("mine", weighted, inputs=("a",), token_weight=lambda stats, a: a)
    hl.Term("mine", weighted, inputs=("a",), token_weight=hl.StatisticValue("lse"))


@pytest.mark.parametrize(
    "shape, words",
    [
        ((S,), r"got \[3\]: a value per position is \[1, S\], pass its \[None\]"),
        ((B,), r"got \[2\]: a value per row is \[B, 1\]$"),
        ((S + 1,), r"got \[4\]: a value per row is \[B, 1\]$"),
    ],
)
def test_fewer_values_than_tokens_are_told_their_shape(shape, words):
    with pytest.raises(ValueError, match=words):
        call(lambda stats, w: stats.lse * w, {"w": torch.ones(shape)})
    call(lambda stats, w: stats.lse * w, {"w": torch.ones(S)[None]})


LENGTHS = torch.tensor([2, 4])
PER_SEQUENCE = torch.tensor([1.0, 5.0])
PACKED = {
    "[T], [B, 1]": ((6,), PER_SEQUENCE[:, None]),
    "[T], [1, B]": ((6,), PER_SEQUENCE[None]),
    "[T], [B]": ((6,), PER_SEQUENCE),
    "[1, T], [B, 1]": ((1, 6), PER_SEQUENCE[:, None]),
    "[1, T], [1, B]": ((1, 6), PER_SEQUENCE[None]),
    "[1, T], [B]": ((1, 6), PER_SEQUENCE),
    "[T], [B, S]": ((6,), torch.arange(6.0).view(2, 3)),
    "[1, T], [T, 1]": ((1, 6), torch.arange(6.0)[:, None]),
    "[B, S], [T]": ((2, 3), torch.arange(6.0)),
    "[B, S], [1, T]": ((2, 3), torch.arange(6.0)[None]),
}


@pytest.mark.parametrize("case", PACKED)
def test_values_of_packed_sequences_are_told_what_is_taken(case):
    """What the error says to pass gives each token its sequence's value, or its own."""
    shape, values = PACKED[case]
    head = hl.HeadLoss(hl.Term("mine", lambda stats, w: w, inputs=("w",)), reduction="none")
    x, labels = torch.zeros(*shape, 4), torch.zeros(shape).long()
    with pytest.raises(ValueError, match="must broadcast to the tokens") as caught:
        head(x, labels, inputs={"w": values})
    advice = re.search(r"[Pp]ass its (\S+|\.reshape\(.*\))$", str(caught.value))[1]
    passed = eval(f"values{advice}", {"values": values, "lengths": LENGTHS})
    wanted = values.flatten()
    if values.numel() == len(LENGTHS):
        wanted = wanted.repeat_interleave(LENGTHS)
    assert torch.equal(head(x, labels, inputs={"w": passed}).loss.flatten(), wanted)


def test_values_that_are_neither_per_token_nor_per_sequence_are_not_told_so():
    head = hl.HeadLoss(hl.Term("mine", lambda stats, w: w, inputs=("w",)))
    with pytest.raises(ValueError, match=r"got \[4\]: a value for all tokens is \[\]$"):
        head(torch.zeros(6, 4), torch.zeros(6).long(), inputs={"w": torch.ones(4)})
    with pytest.raises(ValueError, match=r"got \[1\]: a value for all tokens is \[\]$"):
        head(torch.zeros(4), torch.tensor(0), inputs={"w": torch.ones(1)})


@pytest.mark.parametrize("name", ["logits", "probs", "input_ids"])
def test_a_name_that_no_statistic_has_is_told_those_there_are(name):
    words = f"no '{name}': these have .lse, .log_prob, .* others by want=.*register_statistic"
    with pytest.raises(AttributeError, match=words):
        call(lambda stats: getattr(stats, name))


def test_a_name_in_want_that_is_like_no_other_may_be_registered():
    words = r"got \['p4'\]: a statistic of your own is known after register_statistic\(..\)"
    with pytest.raises(ValueError, match=words):
        hl.Term("mine", lambda stats: stats.p4, want=("p4",))
    with pytest.raises(ValueError, match=words):
        hl.vocab_statistics(torch.zeros(1, 4), want=("p4",))
    with pytest.raises(ValueError, match=r"got \['entrpy'\]: did you mean 'entropy'\?$"):
        hl.Term("mine", lambda stats: stats.p4, want=("entrpy",))


def test_a_teacher_whose_statistics_nothing_wants_says_what_to_want():
    given = {"teacher": hl.Teacher(torch.zeros(B, S, V))}
    with pytest.raises(ValueError, match=r"\[\] in want: write want=\('forward_kl',\), of"):
        call(lambda stats, teacher: stats.lse, given)


def test_a_schedule_by_assignment_says_how_a_weight_follows_one():
    head = hl.HeadLoss([hl.CrossEntropy(), hl.ZLoss(1e-3)])
    with pytest.raises(AttributeError, match=r"got a new 'weight': .*tensor.* weight.fill_\(0.0\)"):
        head.terms[1].weight = 0.0
    assert head.terms[1].weight == 1e-3


@pytest.mark.parametrize("made", [lambda weight: hl.Term("a", len, weight), hl.ZLoss])
def test_a_function_in_the_place_of_a_weight_says_how_a_weight_follows_a_schedule(made):
    words = r"got function: for a schedule pass a tensor, weight = torch.tensor\(0.1\), .*fill_"
    with pytest.raises(TypeError, match=words):
        made(lambda step: 0.1)


def test_a_number_in_the_place_of_an_input_is_written_as_a_tensor():
    def scaled(stats, g):
        return g * stats.lse

    with pytest.raises(TypeError, match=r"got float: write torch.tensor\(0.3\)$"):
        call(scaled, {"g": 0.3})
    with pytest.raises(TypeError, match=r"got float$"):
        call(scaled, {"g": float("inf")})
    assert call(scaled, {"g": torch.tensor(0.3)}).loss.isfinite()


def test_the_number_of_an_input_may_be_on_the_cpu(device):
    head = hl.HeadLoss(hl.Term("mine", lambda stats, g: g * stats.lse, inputs=("g",)))
    logits, labels = torch.zeros(B, S, V, device=device), torch.zeros(B, S, device=device).long()
    found = head(logits, labels, inputs={"g": torch.tensor(0.3)}).loss
    assert found.item() == pytest.approx(0.3 * math.log(V))


ELSEWHERE = " must be on cpu like the statistics, got meta"


def test_a_result_on_another_device_is_named():
    def elsewhere(stats):
        return torch.zeros(B, S, device="meta")

    with pytest.raises(ValueError, match="term 'mine'" + ELSEWHERE):
        call(elsewhere)
    with pytest.raises(ValueError, match="token_weight of term 'mine'" + ELSEWHERE):
        call(lambda stats: stats.lse, token_weight=elsewhere)
    metric = hl.Metric(lambda stats: {"own": elsewhere(stats)})
    with pytest.raises(ValueError, match="metric 'own'" + ELSEWHERE):
        hl.HeadLoss(metrics=metric)(torch.zeros(B, S, V), torch.zeros(B, S).long())


INPUTS = {
    "tail_log_mass": "'teacher': TopKTeacher(ids, log_probs)",
    "topk_forward_kl": "'teacher': TopKTeacher(ids, log_probs)",
    "forward_kl": "'teacher': Teacher(..)",
    "set_entropy": "'sets': IdSets(ids)",
    "log_probs_at": "'ids': a tensor of ids [.., K]",
}


@pytest.mark.parametrize("name", INPUTS)
def test_the_input_of_a_statistic_is_named_by_its_own_record(name):
    words = re.escape(f"write inputs={{{INPUTS[name]}}}") + "$"
    with pytest.raises(ValueError, match=words):
        call(lambda stats: getattr(stats, name), want=(name,))


def test_all_inputs_that_are_missing_are_written():
    words = "write inputs={'teacher': TopKTeacher(ids, log_probs), 'ids': a tensor of ids [.., K]}"
    with pytest.raises(ValueError, match=re.escape(words)):
        call(lambda stats: stats.lse, want=("tail_log_mass", "log_probs_at"))
    with pytest.raises(ValueError, match=r"write inputs={'sequences': Sequences\.from_mask"):
        hl.HeadLoss(hl.Term("mine", lambda stats, sequences: stats.lse, inputs=("sequences",)))(
            torch.zeros(B, S, V), torch.zeros(B, S).long(), inputs={}
        )


def test_the_wrong_kind_of_teacher_says_which_one_to_pass():
    whole = hl.Teacher(torch.zeros(B, S, V))
    few = hl.TopKTeacher(IDS, torch.zeros(B, S, K) - 2)
    x = torch.zeros(B, S, V)
    with pytest.raises(ValueError, match=r"; pass TopKTeacher\(ids, log_probs\)$"):
        hl.vocab_statistics(x, want=("tail_log_mass",), teacher=whole)
    with pytest.raises(ValueError, match=r"; pass Teacher\(..\)$"):
        hl.vocab_statistics(x, want=("jsd",), teacher=few)
    with pytest.raises(ValueError, match="a call has one teacher, so make a call for each"):
        hl.vocab_statistics(x, want=("jsd", "tail_log_mass"), teacher=few)
    with pytest.raises(
        ValueError, match=r"got none: teacher=TopKTeacher\(ids, log_probs\), of a HeadLoss"
    ):
        hl.vocab_statistics(x, want=("tail_log_mass",))
    with pytest.raises(
        ValueError,
        match=r"got none: teacher=Teacher\(..\), of a HeadLoss inputs=\{'teacher': Teacher",
    ):
        hl.vocab_statistics(x, want=("jsd",))
