"""Terms and metrics: what they may be, what is refused, inputs per sequence, pickling."""

import functools
import pickle
import sys
import warnings

import pytest
import torch
from loss_problem import V, rows

import tp_headloss as hl
from tp_headloss.engine.reductions import StatisticValue


def test_a_head_loss_prints_what_it_computes():
    head = hl.HeadLoss(
        [hl.CrossEntropy(), hl.ZLoss(1e-4)],
        metrics=("accuracy", hl.PolicyMetrics()),
        reduction="sum",
    )
    assert repr(head) == (
        "HeadLoss(terms=[cross_entropy, 0.0001 * z_loss], metrics=[accuracy, policy_metrics], "
        "reduction='sum')"
    )
    other = repr(
        hl.HeadLoss([hl.ZLoss(torch.tensor(1.0))], ignore_index=0, options=hl.Options(check=True))
    )
    assert (
        "tensor * z_loss" in other
        and "ignore_index=0, options=Options(" in other
        and "check=True" in other
    )


def test_head_loss_refuses_what_it_cannot_mean():
    x, labels, class_weight, _ = rows()
    smoothed = hl.CrossEntropy(class_weight=class_weight, label_smoothing=0.1)
    short = hl.CrossEntropy(class_weight=torch.ones(3), label_smoothing=0.1)
    free, kept = (lambda stats: stats.total), (lambda stats: {"kept": stats.mass})
    for build, words in (  # others are in tests/helpers/odd_inputs.py
        (lambda: hl.HeadLoss([smoothed, hl.Term("wants", len, want=("total",))]), "only one term"),
        (lambda: hl.HeadLoss([smoothed, hl.Term("free", free)]), "only one term"),
        (
            lambda: hl.HeadLoss([smoothed, hl.Term("free", StatisticValue("total"))]),
            "only one term",
        ),
        (
            lambda: hl.HeadLoss([smoothed], metrics=hl.Metric(len, want=("total",))),
            "only one term and no metric",
        ),
        (lambda: hl.HeadLoss([smoothed], metrics=hl.Metric(kept)), "only one term and no metric"),
        (
            lambda: hl.Term("mine", len, class_weight=class_weight),
            r"weighs the statistic 'total', .* want=\(\)",
        ),
        (
            lambda: hl.HeadLoss([hl.Term("hits", lambda stats: stats.correct.float())])(x, labels),
            "correct",
        ),
        (lambda: hl.HeadLoss([short])(x, labels), "class_weight"),
    ):
        with pytest.raises(ValueError, match=words):
            build()


def own_ratio(stats, old_log_prob):
    return (stats.log_prob - old_log_prob).exp()


# terms and metrics besides a policy gradient over sets, whose "old_log_prob" is over sets, too ->
# the input
MIXED = {
    "metrics": ((), hl.PolicyMetrics(), "old"),
    "metrics of the generator": ((), hl.GeneratorMetrics(), "old"),
    "a KL's weight": ((hl.KLToReference(0.1, importance_weight="old"),), (), "old"),
    "a term of one's own": ((hl.Term("own", own_ratio, inputs=("old_log_prob",)),), (), "old"),
    "a reference": (
        (hl.KLToReference(0.1),),
        hl.PolicyMetrics(reference=True, over="sets"),
        "reference",
    ),
}


@pytest.mark.parametrize("name", MIXED)
def test_recorded_log_probs_are_over_the_same_ids_for_all_that_read_them(name):
    terms, metrics, recorded = MIXED[name]
    with pytest.raises(
        ValueError, match=f"'{recorded}_log_prob' needs the same over=.* got .*'sets': '"
    ):
        hl.HeadLoss([hl.PolicyGradient(over="sets"), *terms], metrics=metrics)


def test_inputs_that_only_one_of_them_reads_may_be_over_other_ids():
    hl.HeadLoss([hl.PolicyGradient("reinforce", over="sets")], metrics=hl.PolicyMetrics())
    hl.HeadLoss(
        [hl.PolicyGradient(over="sets"), hl.KLToReference(0.1)],
        metrics=hl.PolicyMetrics(over="sets"),
    )


SHAPES = {
    "a mean": lambda s: -s.log_prob.mean(),
    "a row too many": lambda s: s.lse.expand(2, *s.lse.shape),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_term_that_is_not_per_token_is_refused(name, options, device):
    x, labels, *_ = (t.to(device) for t in rows())
    term = hl.Term("mine", SHAPES[name], tokenwise=True)
    words = r"term 'mine' must return a value per token"
    for reduction in ("mean", "sum", "none"):
        with pytest.raises(ValueError, match=words):
            hl.HeadLoss([term], reduction=reduction, options=options)(x, labels)
    with pytest.raises(ValueError, match=words):
        hidden, weight = (
            torch.randn(*labels.shape, 4, device=device),
            torch.randn(V, 4, device=device),
        )
        weight.requires_grad_()
        hl.HeadLoss([term], options=options).linear(
            hidden, weight, labels, linear=hl.Linear("one_sweep")
        )
    with pytest.raises(TypeError, match="got float"):
        hl.HeadLoss([hl.Term("mine", lambda s: 1.0)], options=options)(x, labels)
    with pytest.raises(ValueError, match="metric 'mine' must return a value per token"):
        hl.HeadLoss(metrics=[hl.Metric(lambda s: {"mine": s.lse.sum()})], options=options)(
            x, labels
        )
    with pytest.raises(ValueError, match="token_weight of term 'mine'"):
        weighted = hl.Term("mine", lambda s: s.lse, token_weight=lambda s: s.lse.sum())
        hl.HeadLoss([weighted], options=options)(x, labels)


def test_a_statistic_that_nobody_wants_is_named_where_a_term_uses_it():
    x, labels, *_ = rows()
    with pytest.raises(
        ValueError, match=r"term 'mine' uses the statistics \['entropy'\].* want=\('entropy',\)"
    ):
        hl.HeadLoss([hl.Term("mine", lambda s: -s.log_prob - 0.1 * s.entropy)])(x, labels)
    with pytest.raises(
        ValueError, match=r"a metric uses the statistics \['entropy'\].* want=\('entropy',\)"
    ):
        hl.HeadLoss(metrics=hl.Metric(lambda s: {"entropy": s.entropy}))(x, labels)


def test_a_statistic_that_nobody_wants_is_named_where_it_is_compared_with_a_number():
    """`None == 1` is False, and no error of Python's."""
    x, labels, *_ = rows()
    with pytest.raises(ValueError, match=r"a metric uses the statistics \['rank'\]"):
        hl.HeadLoss(metrics=hl.Metric(lambda s: {"greedy": s.rank == 1}))(x, labels)
    with pytest.raises(ValueError, match=r"term 'mine' uses the statistics \['rank'\]"):
        hl.HeadLoss([hl.Term("mine", lambda s: s.rank == 1)])(x, labels)


def read_elsewhere(stats):
    return stats.entropy


UNWANTED = {  # functions that read "total_variation" or "entropy" in another function
    "a loss": hl.losses.acceptance_rate,
    "a call of a loss": lambda stats: 1 - hl.losses.acceptance_rate(stats),
    "a function, for arithmetic": lambda stats: 1 - read_elsewhere(stats),
    "a function, which is returned": lambda stats: read_elsewhere(stats),
    "a partial": functools.partial(hl.losses.lk_lambda, eta=1.0),
}


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("name", UNWANTED)
def test_a_statistic_that_nobody_wants_is_named_where_another_function_reads_it(name, compile):
    x, labels, *_ = rows()
    function = UNWANTED[name]
    words = r"uses the statistics \[.*('entropy'|'total_variation')\].* give it want=\("
    term = hl.HeadLoss(hl.Term("mine", function), compile=compile)
    with pytest.raises(ValueError, match="term 'mine' " + words):
        term(x, labels)
    metric = hl.HeadLoss(metrics=hl.Metric(lambda s: {"mine": function(s)}), compile=compile)
    with pytest.raises(ValueError, match="a metric " + words):
        metric(x, labels)


def test_a_weight_without_a_number_is_named():
    x, labels, *_ = rows()
    with torch.device("meta"):
        of_meta = hl.HeadLoss([hl.CrossEntropy(), hl.ZLoss(torch.tensor(0.1))])
    with pytest.raises(ValueError, match=r"weight of term 'z_loss' must have a number, got a meta"):
        of_meta(x, labels)
    with torch.inference_mode():
        weight = torch.tensor(0.3)
    head_loss = hl.HeadLoss(hl.Term("mine", lambda s: -s.log_prob, weight=weight))
    with pytest.raises(
        ValueError, match=r"weight of term 'mine' must be .* got tensors of torch\.inf"
    ):
        head_loss(x.detach().requires_grad_(), labels)


def test_a_functions_own_error_stays_its_own():
    x, labels, *_ = rows()

    def wrong(stats):
        raise TypeError(f"not {hl.losses.entropy_bonus}")  # whose name it does not call

    with pytest.raises(TypeError, match=r"^not <function"):
        hl.HeadLoss(hl.Term("wrong", wrong))(x, labels)


IN_PLACE = {
    "a metric": {"metrics": hl.Metric(lambda s: {"p": s.log_prob.exp_()})},
    "term 'own'": {"terms": hl.Term("own", lambda s: s.log_prob.neg_(), tokenwise=True)},
    "term 'read'": {
        "terms": hl.Term(
            "read",
            lambda s, advantages: advantages.sub_(1) * s.lse,
            inputs=("advantages",),
            tokenwise=True,
        )
    },
}


@pytest.mark.parametrize("mode", ["logits", "one_sweep", "recompute"])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("who", IN_PLACE)
def test_a_function_that_changes_what_others_read_is_an_error_that_names_it(
    who, grad, mode, device
):
    hidden, weight = (
        torch.randn(6, 8, device=device).requires_grad_(grad),
        torch.randn(V, 8, device=device),
    )
    labels, head, given = torch.arange(6, device=device), hl.HeadLoss(**IN_PLACE[who]), {}
    if head.input_names:
        given["inputs"] = {"advantages": torch.ones(6, device=device)}
    with pytest.raises(
        RuntimeError, match=f"must not change them in place .* got a change by {who}"
    ):
        if mode == "logits":
            head(hidden @ weight.T, labels, **given)
        else:
            head.linear(hidden, weight, labels, linear=hl.Linear(mode), **given)


def test_check_finds_what_is_written_without_a_word(device):
    """As by a collective, tensors do not count what is written through `.data`."""
    doubled = hl.Metric(lambda s: {"p": s.log_prob.data.mul_(2)})
    x, labels = torch.randn(6, V, device=device), torch.arange(6, device=device)
    head = hl.HeadLoss(metrics=doubled, options=hl.Options(check=True))
    with pytest.raises(RuntimeError, match=r"must not change them in place .*dist\.all_reduce"):
        head(x, labels)
    labels[2] = -100
    own = torch.ones(6, device=device).index_fill(0, labels.new_tensor(2), torch.nan)
    term = hl.Term("own", lambda s, own: own * s.lse, inputs=("own",))
    # NaN is equal to itself
    out = hl.HeadLoss(term, options=hl.Options(check=True))(x, labels, inputs={"own": own})
    assert out.loss.isfinite()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes")
def test_mistakes_with_statistics_are_answered(device):
    x, labels = torch.randn(3, V, device=device), torch.tensor([-100, 1, 2], device=device)

    def sets_a_field(stats):
        stats.log_prob = stats.log_prob * 2

    with pytest.raises(AttributeError) as found:
        hl.HeadLoss(hl.Term("a", sets_a_field))(x, labels)
    assert "statistics are read only" in found.value.__notes__[0]
    table = torch.rand(V // 2)  # on a GPU such an index ends the process
    with pytest.raises(IndexError) as found:
        hl.HeadLoss(hl.Term("a", lambda s: -table[s.labels] * s.log_prob))(x.cpu(), labels.cpu())
    assert "stats.labels.clamp(min=0)" in found.value.__notes__[0]
    with pytest.raises(IndexError) as found:
        hl.HeadLoss(hl.Term("a", lambda s: s.log_prob[9]))(x.cpu(), labels.cpu())
    assert len(found.value.__notes__) == 1


def test_an_input_per_sequence_is_spread_and_an_ambiguous_one_refused(device):
    """[B] beside labels [B, S] would align with S."""
    x, labels = torch.randn(4, 4, V, device=device), torch.randint(0, V, (4, 4), device=device)
    advantages, head = (
        torch.tensor([1.0, -2.0, 3.0, 0.5], device=device),
        hl.HeadLoss([hl.PolicyGradient("reinforce")]),
    )
    with pytest.raises(
        ValueError, match=r"input 'advantages' .* got \[4\]: a value per row is \[B, 1\]"
    ):
        head(x, labels, inputs={"advantages": advantages})
    expected = head(x, labels, inputs={"advantages": advantages[:, None]}).loss
    sequences = hl.Sequences.from_mask(labels >= 0)
    spread = head(x, labels, inputs={"advantages": advantages, "sequences": sequences})
    assert torch.equal(spread.loss, expected)
    packed = hl.Sequences.from_cu_seqlens(
        torch.arange(0, 17, 4, device=device), labels.flatten() >= 0
    )
    flat = head(
        x.flatten(0, 1), labels.flatten(), inputs={"advantages": advantages, "sequences": packed}
    )
    torch.testing.assert_close(flat.loss, expected)


EVERY_TERM = {
    "smoothing": hl.CrossEntropy(label_smoothing=0.1), "classes": hl.CrossEntropy(class_weight=torch.rand(V)),
    "both": hl.CrossEntropy(label_smoothing=0.1, class_weight=torch.rand(V)),
    "z": hl.ZLoss(0.1), "entropy": hl.Entropy(0.1),
    "distillation": hl.Distillation(1.0, "cross_entropy", temperature_squared=True),
    "top-K": hl.TopKDistillation(1.0, "jsd", support="vocabulary"), "clip": hl.PolicyGradient("clip", clip=(0.1, 0.3)),
    "positive": hl.PolicyGradient("positive-nll"), "kl": hl.KLToReference(0.1, "k1", importance_weight="old"),
}  # fmt: skip


@pytest.mark.parametrize("name", EVERY_TERM)
def test_terms_and_heads_are_pickled_and_compute_the_same(name):
    head = hl.HeadLoss(
        [EVERY_TERM[name]],
        metrics=("accuracy", hl.PolicyMetrics(), hl.GeneratorMetrics()),
        options=hl.Options(check=True),
    )
    again = pickle.loads(pickle.dumps(head))
    x, labels, *_ = rows()
    shape, generator = labels.shape, torch.Generator().manual_seed(0)
    inputs = {key: torch.randn(shape, generator=generator) for key in
              ("advantages", "old_log_prob", "generator_log_prob", "reference_log_prob", "rewards")}  # fmt: skip
    inputs |= {key: -values.abs() for key, values in inputs.items() if key.endswith("log_prob")}
    inputs["teacher"] = hl.Teacher(torch.randn(x.shape, generator=generator), 2.0)
    if name == "top-K":
        ids = torch.randint(0, V, (*shape, 3), generator=generator)
        inputs["teacher"] = hl.TopKTeacher(
            ids, torch.rand(ids.shape, generator=generator).log_softmax(-1)
        )
    needed = head.input_names
    inputs = {key: pickle.loads(pickle.dumps(inputs[key])) for key in needed}
    one, other = (h(x, labels, inputs=inputs) for h in (head, again))
    assert torch.equal(one.loss, other.loss) and one.loss.isfinite()
    assert all(torch.equal(one.metrics[key], other.metrics[key]) for key in one.metrics)


WITHOUT_GRADIENT = {
    "a statistic that has none": (("rank",), lambda stats: stats.rank.log()),
    "detached": ((), lambda stats: stats.log_prob.detach()),
    "a constant": ((), lambda stats: torch.zeros(()).expand(stats.lse.shape)),
}


@pytest.mark.parametrize("others", [[], [hl.CrossEntropy()]], ids=["alone", "beside another"])
@pytest.mark.parametrize("case", WITHOUT_GRADIENT)
def test_a_term_that_trains_nothing_is_a_warning(case, others):
    want, function = WITHOUT_GRADIENT[case]
    head = hl.HeadLoss([*others, hl.Term("own", function, want=want)])
    logits, labels = torch.randn(3, 7), torch.tensor([0, 6, -100])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert head(logits, labels).loss.isfinite()  # nothing is trained
        with torch.no_grad():
            head(logits.requires_grad_(), labels)
    with pytest.warns(UserWarning, match="term 'own' has no gradient here .* make it a Metric"):
        head(logits, labels)


STATISTICS = {"rank": False, "mass": False, "hits": False, "teacher_entropy": False}
STATISTICS |= dict.fromkeys(("lse", "log_prob", "target_logit", "entropy", "total"), True)


@pytest.mark.parametrize("statistic", STATISTICS)
def test_a_term_of_a_statistic_without_a_gradient_is_a_warning(statistic):
    inputs = ("teacher",) if statistic.startswith("teacher") else ()
    term = hl.Term("own", StatisticValue(statistic), inputs=inputs)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        hl.HeadLoss([hl.CrossEntropy(), term])
    words = f"term 'own' has no gradient here ('{statistic}' has none), so that it trains nothing"
    assert [words in str(x.message) for x in found] == [True] * (not STATISTICS[statistic])


@pytest.mark.parametrize("field", ["square", "negative"])
@pytest.mark.parametrize("value", [3, "no", None, 1.0])
def test_flags_of_a_statistic_value_are_true_or_false(field, value):
    with pytest.raises(TypeError, match=f"{field} must be True or False, got "):
        hl.Term("own", StatisticValue("lse", **{field: value}))


def test_a_default_in_the_place_of_an_input_of_the_call_is_a_warning():
    def focal(stats, gamma=2.0):
        return -((1 - stats.log_prob.exp()) ** gamma) * stats.log_prob

    reads = hl.Metric(lambda stats, gamma: {"gamma": gamma}, inputs=("gamma",))
    words = r"the function of term 'f' takes \['gamma'\], .* name them in its inputs=\('gamma',\)"
    with pytest.warns(UserWarning, match=words):
        hl.HeadLoss(hl.Term("f", focal), metrics=reads)
    with pytest.warns(UserWarning, match="a metric takes"):
        hl.HeadLoss(
            hl.Term("f", focal, inputs=("gamma",)), metrics=hl.Metric(lambda s, gamma=1: {})
        )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hl.HeadLoss(hl.Term("f", focal, inputs=("gamma",)), metrics=reads)
        hl.HeadLoss(hl.Term("f", focal))


@pytest.mark.parametrize("name", ["transform", "shard", "inputs", "token_weight", "denominator"])
def test_arguments_of_a_call_are_no_attributes(name):
    with pytest.raises(AttributeError, match=rf"argument of a call, head_loss\(.., {name}=..\)"):
        setattr(hl.HeadLoss(), name, None)
