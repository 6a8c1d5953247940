"""`Options(check=True)` looks at what terms return: NaN, and values that depend on other tokens."""

import pytest
import torch

import tp_headloss as hl

B, S, H, V = 4, 6, 8, 32
CHECK = hl.Options(check=True)


def problem():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(B, S, H, generator=generator).requires_grad_()
    weight = torch.randn(V, H, generator=generator)
    labels = torch.randint(0, V, (B, S), generator=generator)
    labels[0, :2] = -100
    return hidden, weight, labels


def call(term, inputs=None, is_linear=False, **arguments):
    hidden, weight, labels = problem()
    head = hl.HeadLoss(term, options=CHECK)
    if is_linear:
        return head.linear(hidden, weight, labels, inputs=inputs, **arguments)
    return head(hidden @ weight.t(), labels, inputs=inputs, **arguments)


NOT_TOKENWISE = {
    "divided by a row's tokens": lambda stats: -stats.log_prob / stats.valid.sum(-1, keepdim=True),
    "divided by all tokens": lambda stats: -stats.log_prob / stats.valid.sum(),
    "a running sum": lambda stats: -stats.log_prob.cumsum(-1),
    "another one each time": lambda stats: -stats.log_prob * torch.rand(()),
}


@pytest.mark.parametrize("is_linear", [True, False])
@pytest.mark.parametrize("promise", ["tokenwise", "pointwise"])
@pytest.mark.parametrize("name", NOT_TOKENWISE)
def test_a_term_that_depends_on_other_tokens_is_named(name, promise, is_linear):
    function = NOT_TOKENWISE[name]
    words = r"term 'mine' has other values for .*\[\d+\] tokens.* than for \[.*\]: not tokenwise"
    with pytest.raises(ValueError, match=words):
        call(hl.Term("mine", function, **{promise: True}), is_linear=is_linear)
    call(hl.Term("mine", function), is_linear=is_linear)


def test_a_term_of_the_tokens_in_one_dimension_is_named_with_their_number():
    def function(stats):
        return -stats.log_prob / stats.valid.sum(-1, keepdim=True)

    words = rf"has other values for \[{B * S}\] tokens than for \[{B}, {S}\]: not tokenwise"
    with pytest.raises(ValueError, match=words):
        call(hl.Term("mine", function, tokenwise=True))


OF_PLACES = {
    "its place": lambda stats: stats.lse * torch.arange(len(stats.lse)),
    "a running sum": lambda stats: stats.lse.cumsum(0),
    "the first token": lambda stats: stats.lse - stats.lse[0],
    "the last token": lambda stats: stats.lse - stats.lse[-1],
    "the token before": lambda stats: stats.lse - stats.lse.roll(1),
    "a variable of all tokens": lambda stats: stats.lse * torch.ones(B * S),
}


@pytest.mark.parametrize("name", OF_PLACES)
def test_a_term_that_looks_at_a_tokens_place_in_one_dimension_is_named(name):
    hidden, weight, labels = problem()
    head = hl.HeadLoss(hl.Term("mine", OF_PLACES[name], tokenwise=True), options=CHECK)
    words = (
        rf"for the last \[{B * S // 2}\] tokens in reverse order than for \[{B * S}\].*tokenwise"
    )
    with pytest.raises(ValueError, match=words):
        head((hidden @ weight.t()).flatten(0, 1), labels.flatten())


def test_a_token_weight_that_depends_on_other_tokens_is_named():
    def share(stats):
        return stats.lse / stats.lse.sum()

    term = hl.Term("mine", lambda stats: stats.lse, token_weight=share, tokenwise=True)
    with pytest.raises(ValueError, match="the token_weight of term 'mine' has other values"):
        call(term)


MISFITS = {
    "an error": lambda stats: stats.lse * torch.ones(B, S),
    "another shape": lambda stats: stats.lse.reshape(-1, S),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_term_that_some_tokens_do_not_fit_is_named(name):
    words = rf"term 'mine' is not tokenwise, got .* for \[{B * S}\] tokens than for \[{B}, {S}\]"
    with pytest.raises(ValueError, match=words):
        call(hl.Term("mine", MISFITS[name], tokenwise=True))
    call(hl.Term("mine", MISFITS[name]))


def ratio(stats, old, ids, teacher):
    at = stats.log_probs_at.sum(-1) * (ids >= 0).sum(-1)
    return (stats.log_prob - old).exp() + at + stats.forward_kl * teacher.temperature


@pytest.mark.parametrize("is_linear", [True, False])
def test_tokenwise_terms_of_all_kinds_of_inputs_pass(is_linear):
    hidden, weight, _ = problem()
    inputs = {
        "old": torch.rand(B, S),
        "ids": torch.arange(3).expand(B, S, 3),
        "teacher": hl.Teacher((hidden @ weight.t()).detach() / 2, temperature=torch.rand(B, S) + 1),
    }
    want = "log_probs_at", "forward_kl"
    term = hl.Term("mine", ratio, inputs=tuple(inputs), want=want, tokenwise=True)
    assert call(term, inputs, is_linear).loss.isfinite()
    focal = hl.Term("focal", lambda s: -((1 - s.log_prob.exp()) ** 2) * s.log_prob, pointwise=True)
    assert call(focal, is_linear=is_linear).loss.isfinite()


def test_values_that_are_large_or_not_finite_compare_by_their_size():
    big = hl.Term("mine", lambda stats: 1e6 * stats.lse.exp(), tokenwise=True)
    assert call(big).loss.isfinite()
    infinite = hl.Term("mine", lambda stats: stats.lse * torch.inf, tokenwise=True)
    assert call(infinite).loss.isinf()


@pytest.mark.parametrize("is_linear", [True, False])
@pytest.mark.parametrize("tokenwise", [True, False])
def test_a_term_that_is_nan_is_named_with_its_first_token(tokenwise, is_linear):
    root = hl.Term("root", lambda stats: (stats.log_prob + 1).sqrt(), tokenwise=tokenwise)
    log_prob = call(hl.CrossEntropy()).stats.log_prob.flatten()
    wrong = (log_prob < -1).nonzero().flatten().tolist()
    words = rf"term 'root' is NaN at token {wrong[0]} \(flat index\); {len(wrong)} such tokens: its"
    with pytest.raises(ValueError, match=words):
        call(root, is_linear=is_linear)
    # tokens that do not count are none of these
    known = torch.where(log_prob < -1, 0.0, 1.0).view(B, S)
    assert call(root, is_linear=is_linear, token_weight=known).loss.isfinite()


def test_a_token_of_weight_0_within_a_sequence_may_be_nan():
    hidden, weight, labels = problem()
    logits, mask = hidden @ weight.t(), labels != -100
    root = hl.Term("root", lambda stats: (stats.log_prob + 1).sqrt())
    head = hl.HeadLoss(root, reduction="seq-mean-token-mean", options=CHECK)
    inputs = {"sequences": hl.Sequences.from_mask(mask)}
    known = hl.vocab_statistics(logits, labels).log_prob >= -1
    loss = head(logits, labels, inputs=inputs, token_weight=known.float()).loss
    assert loss.isfinite()
    with pytest.raises(ValueError, match="term 'root' is NaN"):
        head(logits, labels, inputs=inputs)


@pytest.mark.parametrize("is_linear", [True, False])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e39])
def test_a_weight_that_a_schedule_made_no_number_is_named(value, is_linear):
    weight = torch.tensor(0.5, dtype=torch.float64)
    head = hl.HeadLoss([hl.CrossEntropy(), hl.ZLoss(weight)], options=CHECK)
    hidden, matrix, labels = problem()
    logits = (hidden @ matrix.t()).detach().requires_grad_()

    def call_once():
        return head.linear(hidden, matrix, labels) if is_linear else head(logits, labels)

    assert call_once().loss.isfinite()  # calls of this kind are known from now on
    weight.fill_(value)
    with pytest.raises(ValueError, match="the weight of term 'z_loss' must be finite in fp32, got"):
        call_once()
