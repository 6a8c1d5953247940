"""Inputs, masks, weights, denominators and options that callers give to a policy gradient."""

import functools
import math
import re
import warnings
from pathlib import Path

import policy_oracle as oracle
import pytest
import torch
from policy_problem import B, S, needed, problem

import tp_headloss as hl
from tp_headloss.head_loss.policy_terms import OBJECTIVES


def test_inputs_are_constants_of_any_kind(options, device):
    """Not detached, float64, integers: the loss is of the same fp32 numbers, and only logits get a
    gradient."""
    x, labels, _, inputs = problem()
    labels = labels.clamp(min=0).to(device)
    old = inputs["old_log_prob"].nan_to_num()
    head = hl.HeadLoss([hl.PolicyGradient("clip"), hl.KLToReference(0.1)], options=options)
    results = []
    for kind in (torch.float32, torch.float64, torch.int64):
        local = x.clone().to(device).requires_grad_()
        own = old.to(device).requires_grad_()
        given = {
            "advantages": (inputs["advantages"] > 0).to(device, kind),
            "old_log_prob": own.double() if kind == torch.float64 else own,
            "reference_log_prob": own,
        }
        loss = head(local, labels, inputs=given).loss
        loss.backward()
        assert own.grad is None and loss.dtype == torch.float32
        results.append((loss.detach(), local.grad))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=0, atol=0)
    # a ratio to the policy itself is 1, and still has a gradient
    local = x.clone().to(device).requires_grad_()
    given = {
        "advantages": inputs["advantages"].to(device),
        "old_log_prob": hl.log_probs(local, labels).log_prob,
    }
    head = hl.HeadLoss([hl.PolicyGradient("clip")], options=options)
    assert torch.autograd.grad(head(local, labels, inputs=given).loss, local)[0].any()


@pytest.mark.parametrize(
    "reduction", ["mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
)
def test_the_callers_denominator_replaces_the_count_alone(reduction):
    x, labels, mask, inputs = problem()
    head = hl.HeadLoss([hl.PolicyGradient("clip")], reduction=reduction)
    given = needed(head, inputs, mask, "cpu", horizon=9)
    own = head(x, labels, inputs=given)
    for denominator in (7, 7.0, torch.tensor(7.0), torch.tensor(7)):
        other = head(x, labels, inputs=given, denominator=denominator)
        torch.testing.assert_close(7 * other.loss, own.count * own.loss)
    with pytest.raises(ValueError, match=r"denominator must have shape \[\], got \[1\]"):
        head(x, labels, inputs=given, denominator=torch.ones(1))


def test_a_single_token_without_dimensions_has_metrics_too():
    head = hl.HeadLoss([hl.PolicyGradient("clip")], metrics=(hl.PolicyMetrics(),))
    inputs = {"advantages": torch.tensor(1.0), "old_log_prob": torch.tensor(-2.0)}
    out = head(torch.zeros(8), torch.tensor(3), inputs=inputs)
    torch.testing.assert_close(out.metrics["max_ratio"], torch.tensor(math.exp(2) / 8))


def test_wrong_inputs_are_refused_with_what_was_expected():
    x, labels, mask, inputs = problem()
    head = hl.HeadLoss([hl.PolicyGradient("gspo")], reduction="seq-mean-token-mean")
    good = needed(head, inputs, mask, "cpu")
    for message, given in {
        "unused \\['x'\\]": {"x": x},
        r"must be \[4\], one per sequence, or \[4, 7\], one per token, got \[5\]": {
            "advantages": torch.ones(5)
        },
        "must broadcast to the tokens .*got \\[5, 1\\]": {"advantages": torch.ones(5, 1)},
        "must be of tokens \\[4, 7\\] like labels, got \\[4, 6\\]": {
            "sequences": hl.Sequences.from_mask(mask[:, 1:])
        },
    }.items():
        with pytest.raises(ValueError, match=message):
            head(x, labels, inputs=good | given)
    with pytest.raises(ValueError, match="horizon"):
        hl.HeadLoss([hl.PolicyGradient("gspo")], reduction="seq-mean-token-sum-norm")(
            x, labels, inputs=good
        )


def test_a_sequence_mask_and_token_weights_decide_which_labels_count(options, device):
    """Labels of all tokens, a mask of the answer's: as if the others were ignored, whatever garbage
    they hold."""
    x, labels, mask, inputs = problem()
    weight = torch.linspace(0.0, 2.0, B * S).view(B, S)
    every = torch.where(mask, labels, 5)
    head = hl.HeadLoss(
        [hl.PolicyGradient("clip"), hl.KLToReference(0.1)],
        metrics=("entropy", hl.PolicyMetrics()),
        reduction="seq-mean-token-mean",
        options=options,
    )
    given = needed(head, inputs, mask, device)
    outs = []
    for targets in (labels, every):
        local = x.clone().to(device).requires_grad_()
        out = head(local, targets.to(device), inputs=given, token_weight=weight.to(device))
        out.loss.backward()
        outs.append((out.loss.detach(), local.grad, out.terms, out.metrics, out.sequence_metrics))
    torch.testing.assert_close(*outs)
    log_prob = hl.log_probs(x, labels).log_prob.double()
    per_token = oracle.ppo(log_prob, inputs["advantages"], inputs["old_log_prob"], mask)
    per_token = (
        per_token + 0.1 * oracle.k3(log_prob, inputs["reference_log_prob"]).clamp(max=10)
    ) * weight
    want = oracle.aggregate(per_token, mask, "seq-mean-token-mean")
    torch.testing.assert_close(outs[0][0].double().cpu(), want, rtol=3e-6, atol=1e-6)


def test_a_log_prob_per_row_is_refused_also_where_no_function_says_what_the_input_is():
    x, labels, mask, inputs = problem()
    own = hl.Term(
        "own", lambda stats, old_log_prob: stats.log_prob - old_log_prob, inputs=("old_log_prob",)
    )
    for terms in (own, hl.KLToReference(0.1, importance_weight="old")):
        head = hl.HeadLoss([terms])
        given = {name: inputs[name] for name in head.input_names}
        head(x, labels, inputs=given)
        for some, size in ((slice(1), r"\[4, 1\]"), (0, r"\[4\]")):
            wrong = {
                "old_log_prob": given["old_log_prob"][:, some],
                "sequences": hl.Sequences.from_mask(mask),
            }
            with pytest.raises(
                ValueError,
                match=rf"'old_log_prob' must have shape \[4, 7\] to fit labels, got {size}",
            ):
                head(x, labels, inputs=given | wrong)


@pytest.mark.parametrize("zeros", [0, 1, 5])
def test_check_warns_of_log_probs_that_are_0_where_a_token_counts(zeros):
    """As those of tokens that were ignored when they were scored; of ignored ones they are right."""
    x, labels, mask, inputs = problem()
    head = hl.HeadLoss(hl.PolicyGradient(), options=hl.Options(check=True))
    place = mask.flatten().nonzero()[:zeros, 0]
    old = torch.where(mask, inputs["old_log_prob"], 0.0).clamp(max=-0.1 * mask).flatten()
    given = {"advantages": inputs["advantages"]}
    given["old_log_prob"] = old.index_fill(0, place, 0.0).view(B, S)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        head(x, labels, inputs=given)
    said = f"'old_log_prob' is exactly 0 at {zeros} of {int(mask.sum())} tokens that count"
    assert [said in str(warning.message) for warning in caught] == [True] * (zeros > 0)


SAMPLED = {
    "old_log_prob": hl.HeadLoss(hl.PolicyGradient(), options=hl.Options(check=True)),
    "generator_log_prob": hl.HeadLoss(
        metrics=hl.GeneratorMetrics(), options=hl.Options(check=True)
    ),
    "reference_log_prob": hl.HeadLoss(hl.KLToReference(0.1), options=hl.Options(check=True)),
}


@pytest.mark.parametrize("name", SAMPLED)
def test_check_names_a_token_that_its_sampler_cannot_have_drawn(name):
    """Of a reference, which may exclude ids, it is a warning. Ignored tokens may hold anything."""
    x, labels, mask, inputs = problem()
    head = SAMPLED[name]
    inputs |= {"generator_log_prob": inputs["old_log_prob"]}
    given = {own: inputs[own].nan_to_num(-1.0).clamp(max=-0.1) for own in head.input_names}
    counted, ignored = (int(x.flatten().nonzero()[0, 0]) for x in (mask, ~mask))

    def impossible_at(token):
        values = given[name].flatten().index_fill(0, torch.tensor(token), -math.inf)
        return given | {name: values.view(B, S)}

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        head(x, labels, inputs=impossible_at(ignored))
    if name == "reference_log_prob":
        with pytest.warns(UserWarning, match=rf"{name!r} is -inf at 1 of {int(mask.sum())} tokens"):
            head(x, labels, inputs=impossible_at(counted))
        return
    with pytest.raises(ValueError, match=rf"{name!r} of token {counted} .* is -inf, which no samp"):
        head(x, labels, inputs=impossible_at(counted))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_check_warns_of_log_probs_in_half_precision(dtype):
    """Whose rounding moves ratios of a policy that has not changed out of a clip."""
    x, labels, _, inputs = problem()
    clip = {"clip": (0.001, 0.001)}
    head = hl.HeadLoss(metrics=hl.PolicyMetrics(**clip), options=hl.Options(check=True))
    given = {"advantages": inputs["advantages"]}
    given["old_log_prob"] = hl.log_probs(x, labels).log_prob.detach().to(dtype)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = head(x, labels, inputs=given)
    rounded = dtype.itemsize == 2
    said = f"input 'old_log_prob' is {dtype}: keep log-probs in fp32"
    assert [said in str(x.message) for x in caught if "float" in str(x.message)] == [True] * rounded
    assert bool(out.metrics["clip_fraction"] > 0) == rounded


def test_every_log_prob_of_a_token_is_described_with_its_precision():
    for function in (hl.losses.ppo_clip, hl.losses.policy_metrics, hl.losses.icepop):
        lines = function.__doc__.split("Returns:")[0].replace("\n        ", " ").splitlines()
        entries = [x for x in lines if x.strip().split(":")[0].endswith("log_prob")]
        assert len(entries) >= 2 and all("best in fp32" in x for x in entries)


def test_the_page_says_which_objectives_are_tokenwise():
    page = Path(__file__).parents[2].joinpath("docs", "guides", "policy.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| `")]
    said = {}
    for name in OBJECTIVES:  # "gspo-length-weighted" is within another's row
        said[name] = next(row[2] for row in rows if f'`"{name}"`' in row[0] + row[1])
    tokenwise = {name: hl.PolicyGradient(name).tokenwise for name in OBJECTIVES}
    assert said == {name: "yes" if value else "no" for name, value in tokenwise.items()}


SCORED = {
    **{f"{name}, input": hl.PolicyGradient(name) for name in OBJECTIVES},
    "kl, input": hl.KLToReference(0.1, importance_weight="generator"),
    "own, input": hl.Term(
        "own", lambda stats, their_log_prob: stats.log_prob, inputs=("their_log_prob",)
    ),
}
FEWER = {
    "a sum for each sequence": lambda x: x.sum(1),
    "a row of sums": lambda x: x.sum(1, keepdim=True),
    "one for all": lambda x: x.sum(),
    "of the first sequence": lambda x: x[:1],
}


def lines_of_log_probs():
    """Each line of log-probs per token, by the function of `losses` or the term, and its name."""
    functions = {name: vars(hl.losses)[name] for name in hl.losses.__all__}
    found = {name: getattr(function, "lines", {}) for name, function in functions.items()}
    heads = {name: hl.HeadLoss(term) for name, term in SCORED.items()}
    found |= {name: head._definition.plan.inputs for name, head in heads.items()}
    named = {
        f"{function}, {name}": next(iter(getattr(line, "lines", (line,))))
        for function, lines in found.items()
        for name, line in lines.items()
        # the rest of a teacher's top K, which may be one for all tokens
        if name.endswith("log_prob") and name != "tail_log_prob"
    }
    return {name: line for name, line in named.items() if getattr(line, "shape", 0) == ("..",)}


@pytest.mark.parametrize("fewer", FEWER)
def test_the_sum_of_a_sequences_log_probs_is_never_to_be_expanded(fewer):
    log_prob = -torch.rand(B, S)
    lines = lines_of_log_probs()
    assert len(lines) > 30
    for line in lines.values():
        line.check("x", log_prob, {"..": ((B, S), "labels")})
        with pytest.raises(ValueError, match="log-probs are per token, not summed over a sequence"):
            line.check("x", FEWER[fewer](log_prob), {"..": ((B, S), "labels")})
        with pytest.raises(ValueError, match=rf"pass its .reshape\({B}, {S}\)"):
            line.check("x", log_prob.flatten(), {"..": ((B, S), "labels")})


def nested(x, lengths):
    """Rows [B, S, ..] of so many tokens as a nested tensor, which verl has of a batch."""
    rows = [row[:length] for row, length in zip(x, lengths)]
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


@pytest.mark.parametrize("wrong", ["logits", "labels", "old_log_prob", "log_probs", "losses"])
def test_nested_tensors_are_refused_with_what_to_write(wrong):
    logits, labels = torch.zeros(2, 3, 7), torch.zeros(2, 3, dtype=torch.long)
    given = {"logits": logits, "labels": labels, "old_log_prob": torch.zeros(2, 3)}
    given |= {name: nested(x, (3, 2)) for name, x in given.items() if name == wrong}
    inputs = {"advantages": torch.ones(2, 1), "old_log_prob": given["old_log_prob"]}
    packed = re.escape("a nested one: packed, pass the .values() of all nested arguments, with")
    with pytest.raises(TypeError, match=packed):
        if wrong == "log_probs":
            hl.log_probs(nested(logits, (3, 2)), labels)
        elif wrong == "losses":
            hl.losses.reinforce(nested(torch.zeros(2, 3), (3, 2)), advantages=torch.ones(2, 3))
        else:
            hl.HeadLoss(hl.PolicyGradient())(given["logits"], given["labels"], inputs=inputs)


def test_what_the_error_of_nested_tensors_advises_is_one_loss():
    generator = torch.Generator().manual_seed(0)
    lengths = 3, 2
    x = torch.randn(2, 3, 7, generator=generator)
    y = torch.randint(0, 7, (2, 3), generator=generator)
    old = torch.randn(2, 3, generator=generator) - 2.0
    logits, labels, old_log_prob = (nested(each, lengths) for each in (x, y, old))
    advantages = torch.tensor([1.5, -0.5])
    grpo = hl.GRPO()
    packed = {
        "advantages": advantages,
        "old_log_prob": old_log_prob.values(),
        "sequences": hl.Sequences.from_cu_seqlens(labels.offsets()),
    }
    of_packed = grpo(logits.values(), labels.values(), inputs=packed).loss
    shown = labels.to_padded_tensor(-100)
    padded = {
        "advantages": advantages[:, None],
        "old_log_prob": old_log_prob.to_padded_tensor(0.0),
        "sequences": hl.Sequences.from_mask(shown != -100),
    }
    of_padded = grpo(logits.to_padded_tensor(0.0), shown, inputs=padded).loss
    log_p = x.log_softmax(-1).gather(-1, y[..., None])[..., 0]
    ratio = (log_p - old).exp()
    a = advantages[:, None]
    per_token = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
    expected = torch.stack([per_token[0].mean(), per_token[1, :2].mean()]).mean()
    torch.testing.assert_close(of_packed, expected)
    torch.testing.assert_close(of_padded, expected)


def test_other_nested_tensors_are_told_only_what_they_can_do():
    rows = [torch.zeros(3, 7), torch.zeros(2, 7)]
    with pytest.raises(TypeError, match=r"a nested one: pad it, to_padded_tensor\(0.0\), of lab"):
        hl.vocab_statistics(torch.nested.nested_tensor(rows))
    turned = torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 2)
    with pytest.raises(TypeError, match=r"shows a part of its memory, make it .contiguous\(\)"):
        hl.vocab_statistics(turned)


LISTS = torch.zeros(2, 3).tolist()
X, LABELS, OLD = torch.zeros(2, 3, 8), torch.zeros(2, 3).long(), torch.full((2, 3), -2.0)
AS_TENSOR = "got list: write torch.tensor(.., dtype=torch.float32), of tensors torch.stack(..)"
# a function of what is given in the place of an engine's log-probs
OF_ENGINES = {
    "weights": lambda x: hl.losses.truncated_importance_weight(OLD, generator_log_prob=x),
    "icepop": lambda x: hl.losses.icepop(OLD, generator_log_prob=x),
    "metrics": lambda x: hl.HeadLoss(metrics=hl.GeneratorMetrics())(
        X, LABELS, inputs={"old_log_prob": OLD, "generator_log_prob": x}
    ),
    "a function of one's own": lambda x: hl.HeadLoss(
        hl.Term(
            "own",
            lambda stats, generator_log_prob: stats.log_prob - generator_log_prob,
            inputs=("generator_log_prob",),
        )
    )(X, LABELS, inputs={"generator_log_prob": x}),
}


@pytest.mark.parametrize("name", OF_ENGINES)
def test_the_trainers_log_probs_are_never_advised_in_the_place_of_the_engines(name):
    call = OF_ENGINES[name]
    for given, words in (
        (LISTS, f"{AS_TENSOR}, in the shape of the tokens"),
        (None, "got NoneType: what the engine that sampled returned for each token, in the shape"),
        (X, "got [2, 3, 8]: what the engine that sampled returned for each token, in the shape"),
    ):
        with pytest.raises((TypeError, ValueError), match=re.escape(words)) as error:
            call(given)
        assert "log_probs(" not in str(error.value)


OF_LISTS = {
    "old": lambda x: hl.losses.ppo_clip(OLD, advantages=OLD, old_log_prob=x),
    "own": lambda x: hl.losses.reinforce(x, advantages=OLD),
    "reference": lambda x: hl.losses.kl_estimate(OLD, reference_log_prob=x),
    "advantages": lambda x: hl.losses.reinforce(OLD, advantages=x),
    "token_weight": lambda x: hl.HeadLoss()(X, LABELS, token_weight=x),
    "rollout_weight": lambda x: hl.HeadLoss(hl.PolicyGradient("reinforce", rollout_weight=True))(
        X, LABELS, inputs={"advantages": OLD, "rollout_weight": x}
    ),
}


@pytest.mark.parametrize("name", OF_LISTS)
def test_a_list_of_numbers_is_to_be_made_a_tensor(name):
    with pytest.raises(TypeError, match=re.escape(AS_TENSOR)):
        OF_LISTS[name](LISTS)


def test_logits_are_scored_by_the_model_that_they_are_of():
    with pytest.raises(ValueError, match=r": of logits pass log_probs\(logits, labels\).log_prob"):
        hl.losses.ppo_clip(OLD, advantages=OLD, old_log_prob=X)
    for given in (X, None):
        words = r": of the logits of its own model pass log_probs\(its_logits, labels\).log_prob"
        with pytest.raises((TypeError, ValueError), match=words):
            hl.losses.kl_estimate(OLD, reference_log_prob=given)


def test_each_objective_has_the_function_that_its_help_names():
    said = " ".join(hl.PolicyGradient.__doc__.split())
    assert (
        '`losses.ppo_clip` for "clip", and for any other one the function of its own name' in said
    )
    for name, (function, _inputs) in OBJECTIVES.items():
        own = "ppo_clip" if name == "clip" else name.replace("-", "_")
        assert function is vars(hl.losses)[own]


OTHER_CLIPS = {
    "a preset": (
        lambda metrics: hl.PPO((0.01, 0.02), metrics=metrics),
        hl.PolicyMetrics(),
        "clip=(0.01, 0.02)",
    ),
    "by default": (
        lambda metrics: hl.DAPO(metrics=metrics),
        hl.PolicyMetrics(),
        "clip=(0.2, 0.28)",
    ),
    "a dual clip": (
        lambda metrics: hl.HeadLoss(hl.PolicyGradient(dual_clip=3.0), metrics=metrics),
        hl.PolicyMetrics(),
        "clip=(0.2, 0.2), dual_clip=3.0",
    ),
    "a level": (
        lambda metrics: hl.GSPO(metrics=metrics),
        hl.PolicyMetrics((3e-4, 4e-4)),
        "clip=(0.0003, 0.0004), level='sequence'",
    ),
    "CISPO": (
        lambda metrics: hl.CISPO((0.2, 0.5), metrics=metrics),
        hl.PolicyMetrics(),
        "clip=(0.2, 0.5)",
    ),
    "CISPO's bound": (
        lambda metrics: hl.CISPO((0.0, 5.0), "bound", metrics=metrics),
        hl.PolicyMetrics((0.0, 5.0)),
        "clip=(1, 4)",
    ),
    "GMPO": (
        lambda metrics: hl.HeadLoss(hl.PolicyGradient("gmpo"), metrics=metrics),
        hl.PolicyMetrics(),
        "clip=(0.3297, 0.4918)",
    ),
    "clip-cov": (
        lambda metrics: hl.HeadLoss(
            hl.PolicyGradient("clip-cov", clip=(0.1, 0.2)), metrics=metrics
        ),
        hl.PolicyMetrics(),
        "clip=(0.1, 0.2)",
    ),
}


@pytest.mark.parametrize("case", OTHER_CLIPS)
def test_metrics_of_another_clip_than_the_objectives_are_a_warning(case):
    made, metrics, right = OTHER_CLIPS[case]
    with pytest.warns(UserWarning, match=re.escape(f"write PolicyMetrics({right})")):
        made(metrics)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made(eval(f"hl.PolicyMetrics({right})"))
        hl.HeadLoss(hl.PolicyGradient("sapo"), metrics=metrics)
        hl.HeadLoss(metrics=metrics)
        own = functools.partial(lambda stats: stats.lse)
        hl.HeadLoss(hl.Term("own", own), metrics=(metrics, hl.Metric(functools.partial(dict))))


LISTS_OF_OPTIONS = {
    "a clip": (lambda x: hl.PolicyGradient("clip", clip=x), [0.2, 0.28], 5.0),
    "a preset's": (lambda x: hl.GRPO(clip=x), [0.2, 0.28], 5.0),
    "temperatures": (lambda x: hl.PolicyGradient("sapo", temperatures=x), [1.0, 1.05], -1.0),
    "a shape": (lambda x: hl.PolicyGradient("vespo", shape=x), [[2.0, 3.0], [3.0, 2.0]], 9.0),
    "of metrics": (lambda x: hl.PolicyMetrics(x), [0.2, 0.28], 5.0),
    "bounds": (lambda x: hl.GeneratorMetrics(x), [0.5, 2.0], 5.0),
}


@pytest.mark.parametrize("case", LISTS_OF_OPTIONS)
def test_lists_of_options_may_be_changed_later(case):
    make, numbers, other = LISTS_OF_OPTIONS[case]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        logits, recorded = torch.randn(2, 9, 8), torch.randn(2, 9).abs().neg()
    labels = torch.zeros(2, 9, dtype=torch.long)

    def results(made):
        part = {"metrics": made} if isinstance(made, hl.Metric) else {"terms": made}
        head_loss = made if isinstance(made, hl.HeadLoss) else hl.HeadLoss(**part)
        known = {
            "advantages": torch.ones(2, 9),
            "old_log_prob": recorded,
            "generator_log_prob": recorded / 2,
            "sequences": hl.Sequences.from_mask(labels == 0),
        }
        inputs = {name: known[name] for name in head_loss.input_names}
        return head_loss(logits, labels, inputs=inputs).means()

    expected, made = results(make(numbers)), make(numbers)
    innermost = numbers[0] if isinstance(numbers[0], list) else numbers
    innermost[0] = other
    torch.testing.assert_close(results(made), expected, rtol=0, atol=0)


@pytest.mark.parametrize("case", ["CISPO's bound", "GMPO"])
def test_metrics_with_the_clip_that_the_warning_names_count_what_the_objective_clips(case):
    made, _, right = OTHER_CLIPS[case]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        log_ratio = torch.randn(1, 500)
    logits, labels = torch.zeros(1, 500, 8), torch.zeros(1, 500, dtype=torch.long)
    log_prob = hl.log_probs(logits, labels).log_prob
    inputs = {
        "advantages": torch.ones(1, 1),
        "old_log_prob": log_prob - log_ratio,
        "sequences": hl.Sequences.from_mask(labels == 0),
    }
    out = made(eval(f"hl.PolicyMetrics({right})"))(logits, labels, inputs=inputs)
    is_clipped = log_ratio.exp() > 5 if "bound" in case else log_ratio.abs() > 0.4
    assert out.metrics["clip_fraction"] == is_clipped.sum() > 10


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_denominator_that_was_rounded_is_a_warning(dtype):
    """As FSDP2's policy casts it."""
    logits, labels = torch.zeros(2, 4), torch.tensor([0, 1])
    with pytest.warns(UserWarning, match=f"denominator is {dtype}, which rounds counts"):
        hl.HeadLoss()(logits, labels, denominator=torch.tensor(65.0).to(dtype))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for right in (65, torch.tensor(65), torch.tensor(65.0)):
            hl.HeadLoss()(logits, labels, denominator=right)
