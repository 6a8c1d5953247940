"""Names of verl, TRL, torch and others: a synonym is taken, and for every other name the error says
what to write."""

import functools
import inspect
import math
import re
import typing
from pathlib import Path
from unittest import mock

import pytest
import torch

import tp_headloss
from tp_headloss import (
    GRPO,
    PPO,
    AcceptanceRate,
    BitsPerByte,
    CausalLMLoss,
    CrossEntropy,
    Distillation,
    GeneratorMetrics,
    HeadLoss,
    IdSets,
    KLToReference,
    Linear,
    Metric,
    Options,
    PolicyGradient,
    SamplingRule,
    Sequences,
    Term,
    TopKDistillation,
    TopKTeacher,
    Transform,
    VocabShard,
    ZLoss,
    kept_ids,
    linear_vocab_statistics,
    log_probs,
    losses,
    register_statistic,
    sample,
    statistics,
    topk_log_probs,
    vocab_statistics,
)
from tp_headloss.integrations.sampling_masks import from_vllm
from tp_headloss.spec import Instance, OneOf, lines_within
from tp_headloss.spec.alias_table import HEAD
from tp_headloss.spec.aliases import (
    ALIASES,
    INSTALLATIONS,
    KEYWORDS,
    ROWS,
    hint,
    rows,
    synonym,
)
from tp_headloss.spec.checks import hint_of_label
from tp_headloss.spec.lines import AnyOf, TupleOf

PAGE = Path(__file__).parents[2] / "docs" / "names.md"
PUBLIC = [getattr(module, name) for module in (tp_headloss, losses) for name in module.__all__] + [
    Sequences.aggregate
]
CHOICES = [
    line
    for function in PUBLIC
    for line in lines_within(function).values()
    if isinstance(line, OneOf)
]
# the outputs of fuse_log_probs, which needs TRL: hosts/trl_cases.py gives them to it
CHOICES.append(OneOf(("log_probs", "is_top1")))
LOGITS, LABELS = torch.randn(2, 5, 11), torch.zeros(2, 5, dtype=torch.int64)
MADE = HeadLoss()
LAYER_SHARD = VocabShard.from_group(None, 53)
# what is no keyword
OF_VALUES = "value", "term", "metric", "input", "want", "package"


def of_kind(*kinds):
    found = [
        alias for alias in ALIASES if (alias.of if alias.of in OF_VALUES else "keyword") in kinds
    ]
    return pytest.mark.parametrize("alias", found, ids=lambda a: f"{a.name}-{a.of}-{a.ours}")


@of_kind("value")
def test_a_value_is_taken_or_refused_with_what_to_write(alias):
    meant = [line for line in CHOICES if alias.ours in line.names and alias.name not in line.names]
    assert meant, "no public function has our name"
    for line in meant:
        first = next(
            x for x in ALIASES if x.name == alias.name and x.of == "value" and x.ours in line.names
        )
        said = f"got {alias.name!r}: write {first.write or repr(first.ours)}"
        with pytest.raises(ValueError, match=re.escape(said)):
            line.check("argument", alias.name, {})
        # "token-sum" is a reduction, not the transport "sum"
        is_other = alias.name.startswith("token-") and not {"mean", "sum"} <= {*line.names}
        is_kept = first.write or is_other
        assert synonym(alias.name, line.names) == (alias.name if is_kept else first.ours)


@of_kind("term", "metric")
def test_a_name_in_the_place_of_a_term_or_metric_is_refused_with_the_call(alias):
    given = {"terms" if alias.of == "term" else "metrics": [alias.name]}
    with pytest.raises((TypeError, ValueError), match=re.escape(f": write {alias.ours}")):
        HeadLoss(**given)


@of_kind("want")
def test_a_name_in_want_is_refused_with_what_to_write(alias):
    with pytest.raises(ValueError, match=re.escape(f"{alias.name!r}]: write {alias.ours}")):
        vocab_statistics(LOGITS, LABELS, want=(alias.name,))
    with pytest.raises(ValueError, match=re.escape(f": write {alias.ours}")):
        Term("mine", len, want=(alias.name,))


@of_kind("input")
def test_an_input_is_refused_with_what_to_write(alias):
    said = f"{alias.name!r}: write {alias.write or alias.ours}"
    metrics = GeneratorMetrics() if alias.ours == "generator_log_prob" else ()
    with pytest.raises(ValueError, match=re.escape(said)):
        HeadLoss(PolicyGradient(), metrics=metrics)(
            LOGITS, LABELS, inputs={alias.name: LOGITS[..., 0]}
        )


SPELLINGS = {
    "old_logprobs": ": did you mean 'old_log_prob'?",
    "odd_logp": "",  # a distance of two letters of three
    "referense_log_probs": ": did you mean 'reference_log_prob'?",
    "ref_logps": ": write 'reference_log_prob'",
    "ref_logprob": ": write 'reference_log_prob'",
    "their_log_prob": "",
    "log_prob": "",
    "advantage": ": did you mean 'advantages'?",
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_log_probs_of_one_policy_are_never_advised_in_the_place_of_anothers(name):
    """Which would be silently wrong. A spelling of the word for log-probs is no other policy."""
    known = "advantages", "old_log_prob", "reference_log_prob"
    assert hint(name, known, "input") == SPELLINGS[name]


@pytest.mark.parametrize("name", ["rollout_logprobs", "vllm_logps", "behavior_log_probs"])
def test_log_probs_of_an_engine_are_the_generators_in_any_spelling(name):
    with pytest.raises(ValueError, match=f"{name!r}: write 'generator_log_prob', of Generator"):
        HeadLoss(metrics=GeneratorMetrics())(LOGITS, LABELS, inputs={name: LOGITS[..., 0]})
    with pytest.raises(ValueError, match=f"{name!r}: write 'rollout_weight', losses.truncated"):
        HeadLoss(PolicyGradient())(LOGITS, LABELS, inputs={name: LOGITS[..., 0]})


def test_a_label_that_is_ignored_already_is_not_told_to_be():
    """As on one rank, where others do not ignore it."""
    assert hint_of_label(-1, -100) == ": is it ignored? Then ignore_index=-1"
    assert hint_of_label(-100, -100) == hint_of_label(7, -100) == ""


@of_kind("package")
def test_a_name_of_the_package_is_refused_with_what_to_write(alias):
    says = re.escape(f"{alias.name!r}: write {alias.ours}")
    with pytest.raises(AttributeError, match=says):
        getattr(tp_headloss, alias.name)
    with pytest.raises(ImportError, match=says):
        exec(f"from tp_headloss import {alias.name}", {})
    assert not hasattr(tp_headloss, alias.name)


OF_ADAPTERS = [x for x in ALIASES if x.of == "package" and "integrations" in x.ours]


@pytest.mark.parametrize("alias", OF_ADAPTERS, ids=lambda alias: alias.name)
def test_a_name_of_an_adapter_is_there(alias):
    """By its text, as hosts are not installed."""
    *folders, module, name = alias.ours.split(".")
    files = Path(tp_headloss.__file__).parents[1].joinpath(*folders).rglob(f"{module}*/*.py")
    files = [*files, *Path(tp_headloss.__file__).parents[1].joinpath(*folders).glob(f"{module}.py")]
    assert any(re.search(rf"^(def|class) {name}\b", x.read_text(), re.MULTILINE) for x in files)


@of_kind("keyword")
def test_a_keyword_is_refused_with_what_to_write(alias):
    for name in alias.of.split(", "):
        owner, _, method = name.partition(".")
        if owner in (*INSTALLATIONS, HEAD):  # hosts have them, and their tests these words
            continue
        function = getattr(tp_headloss, owner, None) or getattr(losses, owner)
        function = getattr(function, method) if method else function
        assert alias.name not in lines_within(function)
        with pytest.raises(TypeError, match=re.escape(f"{alias.name!r}: write {alias.ours}")):
            function(**{alias.name: 1.0})


def test_what_is_to_be_written_exists():
    calls = {
        name
        for alias in ALIASES
        for name in re.findall(r"\b([A-Z]\w+)[.(]", alias.write or alias.ours)
    }
    assert len(calls) > 10 and not {name for name in calls if not hasattr(tp_headloss, name)}


def test_the_page_is_the_table():
    assert PAGE.read_text().rstrip().splitlines()[-len(ROWS) - 2 :] == rows()


def test_synonyms_are_our_names_wherever_they_are_written():
    head = HeadLoss(reduction="token-mean")
    assert head.reduction == "mean"
    head.reduction = "token-sum"
    assert head.reduction == "sum"
    assert (
        KLToReference(0.1, "low_var_kl").function.args[1]
        == KLToReference(0.1, estimator="low_var_kl").function.args[1]
    )
    assert PolicyGradient("gpg").function.args[0] is losses.reinforce
    x = torch.tensor([-1.0, -2.0])
    given = {"reference_log_prob": x - 1}
    torch.testing.assert_close(
        losses.kl_estimate(x, estimator="low_var_kl", **given), losses.kl_estimate(x, **given)
    )


def test_a_class_of_another_copy_of_the_package_is_named_with_its_module():
    """Of every argument that is an object of a class of ours, of terms and of the shard."""
    found = {}
    for function in PUBLIC:
        for name, line in lines_within(function).items():
            parts = line.lines if isinstance(line, AnyOf) else (line,)
            for part in parts:
                if isinstance(part, Instance) and part.kind.__module__.startswith("tp_headloss"):
                    found[part.kind] = lambda x, name=name, part=part: part.check(name, x, {})
    assert {VocabShard, Options, Linear, Transform} <= {*found}
    checks = [*found.items(), (Term, lambda x: HeadLoss([x]))]
    checks += [(VocabShard, lambda x: vocab_statistics(LOGITS, LABELS, shard=x))]
    assert Term.remedy  # which is of a misplaced term of this copy
    for kind, check in checks:
        remedy = getattr(kind, "remedy", "")
        other = type(kind.__name__, (), {"__module__": "copy_of_it.part", "remedy": remedy})()
        said = f"of copy_of_it.part in the place of that of {kind.__module__}: two copies"
        with pytest.raises(TypeError, match=re.escape(said)):
            check(other)


def test_a_class_of_another_copy_is_named_where_one_of_several_is_taken():
    """Where a value may be of several classes, or a list of one."""
    found = {}
    for function in PUBLIC:
        for name, line in lines_within(function).items():
            for part in line.lines if isinstance(line, AnyOf) else ():
                kind = getattr(getattr(part, "line", part), "kind", None)
                if isinstance(kind, type) and kind.__module__.startswith("tp_headloss"):
                    found[kind, isinstance(part, TupleOf)] = name, line
    assert {x for _, x in found} == {True, False}
    for (kind, is_list), (name, line) in found.items():
        other = type(kind.__name__, (), {"__module__": "copy_of_it.part"})()
        said = f"of copy_of_it.part in the place of that of {kind.__module__}: two copies"
        with pytest.raises(TypeError, match=re.escape(said)):
            line.check(name, [other] if is_list else other, {})
    out = HeadLoss()(LOGITS, LABELS)
    with pytest.raises(TypeError, match=r"got \[HeadLossOutput, int\]$"):  # of this copy
        tp_headloss.mean_metrics([out, 1])


def test_a_type_checker_takes_the_synonyms_that_a_call_takes():
    """A choice that is written as a Literal has them all; others grow, and are any text."""
    found = []
    for function in PUBLIC:
        is_class = isinstance(function, type)
        plain = inspect.unwrap(function.__init__ if is_class else function)
        hints = typing.get_type_hints(plain) if hasattr(plain, "__annotations__") else {}
        for name, line in lines_within(function).items():
            literals = set(typing.get_args(hints.get(name)))
            if not isinstance(line, OneOf) or not literals >= set(line.names):
                continue
            if name == "transport":  # whose "sum" is no reduction
                continue
            taken = {x.name for x in ALIASES if x.of == "value" and not x.write}
            taken = {x for x in taken if x not in line.names and synonym(x, line.names) != x}
            assert literals == {*line.names, *taken}, (function, name)
            found += taken
    assert {"token-mean", "low_var_kl", "gpg", "rkl", "nla"} <= {*found}


def my_loss(stats):
    return stats.lse


class Own(statistics.Family):
    """The number of ids with a positive logit."""

    statistics = packet = ("own",)

    def local(self, tile, softmax, rows):
        return {"own": (tile.z > 0).sum(-1)}

    def finish(self, sums, joined):
        return {"own": sums["own"]}, {}


# a call -> words of its error
MESSAGES = {
    "one clip": (
        lambda: PolicyGradient("clip", clip=0.2),
        "such as (0.2, 0.28), got 0.2: for both, (0.2, 0.2)",
    ),
    "a KL's weight by position": (
        lambda: GRPO((0.2, 0.2), 0.04),
        "where the clip ends, got 0.04: a KL's weight is kl= of a whole loss, as PPO(kl=..)",
    ),
    "one bound": (
        lambda: GeneratorMetrics(2.0),
        "the highest, such as (0.0, 2.0), got 2.0: for at most 2.0, (0.0, 2.0)",
    ),
    "spelling": (
        lambda: HeadLoss(reduction="seq_mean_token_sum"),
        "did you mean 'seq-mean-token-sum'?",
    ),
    "a synonym of something else": (lambda: KLToReference(0.1, "token-mean"), "got 'token-mean'"),
    "case": (lambda: KLToReference(0.1, "K3"), "did you mean 'k3'?"),
    "keyword's spelling": (
        lambda: CrossEntropy(label_smooth=0.1),
        "did you mean 'label_smoothing'?",
    ),
    "metric's spelling": (lambda: HeadLoss(metrics="acuracy"), "did you mean 'accuracy'?"),
    "several metrics": (
        lambda: HeadLoss(metrics=("top5_accuracy", "top1_accuracy", "zzz")),
        "'zzz']; 'top1_accuracy': write \"accuracy\"; 'top5_accuracy': write TopKAccuracy(5)",
    ),
    "several statistics": (
        lambda: Metric(lambda stats: {}, want=("entropi", "argmaxx")),
        "; 'argmaxx': did you mean 'argmax'?; 'entropi': did you mean 'entropy'?",
    ),
    "a metric without brackets": (
        lambda: HeadLoss(metrics=BitsPerByte),
        "got BitsPerByte: call it, BitsPerByte(..)",
    ),
    "a whole loss as a term": (
        lambda: HeadLoss([PPO(), ZLoss(1e-4)]),
        "it is a whole loss, whose terms go here: write HeadLoss([*loss.terms, ..]), or where it",
    ),
    "a whole loss of sequences as a term": (
        lambda: HeadLoss([GRPO(ignore_index=0, options=Options()), KLToReference(0.01)]),
        "write HeadLoss([*loss.terms, ..], reduction='seq-mean-token-mean', ignore_index=0, "
        "options=loss.options), or where it is a preset such as GRPO(..) its own kl= (of",
    ),
    "another module as a term": (
        lambda: HeadLoss([CausalLMLoss()]),
        "got CausalLMLoss: it is a whole loss, whose terms go here",
    ),
    "two terms that take a name": (
        lambda: HeadLoss([KLToReference(0.1), KLToReference(0.2, "k2")]),
        "or give another name: PolicyGradient, KLToReference, Distillation and TopKDistillation",
    ),
    "verl's straight-through k3": (
        lambda: KLToReference(0.01, "low_var_kl+"),
        "got 'low_var_kl+': write \"k3+\"",
    ),
    "verl's straight-through k1": (
        lambda: KLToReference(0.01, "kl+"),
        "got 'kl+': write estimator=\"k1+\", input_clamp=None",
    ),
    "verl's k2, whose gradient is its own": (
        lambda: losses.kl_estimate(LOGITS, reference_log_prob=LOGITS, estimator="mse+"),
        "got 'mse+': write estimator=\"k2\", input_clamp=None",
    ),
    "a list of temperatures": (
        lambda: Transform(temperature=[0.7, 1.0]),
        "got [0.7, 1.0]: one per row of tokens [B, S] is torch.tensor(..)[:, None].expand(B, S)",
    ),
    "a list of a teacher's temperatures": (
        lambda: tp_headloss.Teacher(LOGITS, temperature=[0.7, 1.0]),
        "got [0.7, 1.0]: one per row of tokens [B, S] is torch.tensor(..)[:, None].expand(B, S)",
    ),
    "a list of top_p": (
        lambda: SamplingRule(top_p=[0.7, 1.0]),
        "got [0.7, 1.0]: one per row of tokens [B, S] is torch.tensor(..)[:, None].expand(B, S)",
    ),
    "a list of labels": (
        lambda: HeadLoss()(LOGITS, LABELS.tolist()),
        "labels must be a tensor, got list: write torch.tensor(..), of tensors torch.stack(..)",
    ),
    "a list as mask": (
        lambda: tp_headloss.Sequences.from_mask([[1, 1, 0]]),
        "mask must be a tensor, got list: write torch.tensor(..), of tensors torch.stack(..)",
    ),
    "lists of a few tokens each": (
        lambda: losses.truncated_importance_weight(
            LOGITS, generator_log_prob=[[-1.0], [-2.0, -3.0]]
        ),
        "got list: write x = torch.zeros(mask.shape); x[mask] = torch.tensor([a for row in .. for",
    ),
    "lists of ids": (
        lambda: tp_headloss.vocab_statistics(LOGITS, LABELS, sets=[[1, 3], [2]]),
        "sets must be an IdSets, got list: write IdSets(torch.tensor(..)), or of lists of",
    ),
    "uneven lists of ids": (
        lambda: tp_headloss.IdSets([[1, 3], [2]]),
        "sets.ids must be a tensor, got list: write integrations.sampling_masks.from_vllm([lists])",
    ),
    "a loss in the place of an output": (
        lambda: tp_headloss.mean_metrics(HeadLoss()(LOGITS, LABELS).loss),
        "got Tensor: pass the output itself, not its .loss",
    ),
    "losses in the place of outputs": (
        lambda: tp_headloss.mean_metrics([HeadLoss()(LOGITS, LABELS).loss]),
        "got [Tensor]: pass the output itself, not its .loss",
    ),
    "a sum over a horizon that is not there": (
        lambda: tp_headloss.DrGRPO()(
            LOGITS,
            LABELS,
            inputs={
                "advantages": torch.ones(2, 1),
                "old_log_prob": torch.zeros(2, 5),
                "sequences": tp_headloss.Sequences.from_mask(LABELS >= 0),
            },
        ),
        "needs a horizon, got None: write Sequences.from_mask(mask, horizon=L)",
    ),
    "torch's topk as a teacher": (
        lambda: TopKTeacher(LOGITS.topk(5)),
        "got ids: of torch's topk write TopKTeacher(x.indices, x.values)",
    ),
    "a transform of a teacher's head": (
        lambda: tp_headloss.topk_log_probs(
            tp_headloss.TeacherHead(LOGITS, torch.ones(3, 11)), 2, transform=tp_headloss.Transform()
        ),
        "a TeacherHead has its own weight, transform and temperature, got ['transform'], too: leave",
    ),
    "weights in the place of a flag": (
        lambda: PolicyGradient(rollout_weight=torch.ones(2, 3)),
        "must be True or False, got Tensor: the weights are an input of the call, inputs={..}",
    ),
    "a class in the place of its object": (
        lambda: tp_headloss.vocab_statistics(LOGITS, LABELS, transform=tp_headloss.Transform),
        "got the class Transform: call it, Transform(..)",
    ),
    "an id for each row of a mask": (
        lambda: tp_headloss.Sequences.from_ids(LABELS[:, 0], 2, LABELS >= 0),
        "got [2, 5]: for a sequence in each row pass ids[:, None].expand(2, 5)",
    ),
    "no outputs": (
        lambda: tp_headloss.mean_metrics([]),
        "got an empty list: a rank without batches passes that of a call with no tokens, head_loss(",
    ),
    "a token without a set": (
        lambda: from_vllm([[None, [3]]]),
        "got one of None, ..: a token without a set has every id, range(vocab_size), or is left out",
    ),
    "a completion without sets": (
        lambda: from_vllm([None]),
        "or a list of ids per token, got None: ask the engine for it, return_sampling_mask=True",
    ),
    "sets of one completion": (
        lambda: from_vllm([[3, 42], [7]]),
        "got one of 3, ..: of one completion write [lists]",
    ),
    "a generator as seed": (
        lambda: sample(LOGITS, seed=torch.Generator(), positions=LABELS),
        "seed must be an int, got Generator: pass its .initial_seed()",
    ),
    "a tensor as seed": (
        lambda: sample(LOGITS, seed=torch.tensor(3), positions=LABELS),
        "seed must be an int, got Tensor: pass its .item()",
    ),
    "no seed": (
        lambda: sample(LOGITS, seed=None, positions=LABELS),
        "seed must be an int, got None: one number for all draws, equal on all ranks of the group",
    ),
    "positions of a row": (
        lambda: sample(LOGITS, seed=0, positions=torch.arange(5)),
        "got [5]: one number for each token that no other draw with this seed has, in a first one",
    ),
    "one position": (
        lambda: sample(LOGITS, seed=0, positions=torch.tensor(3)),
        "got []: one number for each token that no other draw",
    ),
    "positions that would be equal": (
        lambda: sample(LOGITS, seed=0, positions=torch.arange(2)[:, None]),
        "got [2, 1]: one number for each token that no other draw",
    ),
    "a number as positions": (
        lambda: sample(LOGITS, seed=0, positions=3),
        "got int: one number for each token that no other draw with this seed has, in a first one "
        "torch.arange(B * S).view(B, S) for tokens [B, S]",
    ),
    "a top_p of 0": (
        lambda: SamplingRule(top_p=0),
        "in (0, 1], got 0: None is for all ids, and top_k=1 for the likeliest alone",
    ),
    "one statistic": (
        lambda: Term("own", lambda stats: stats.lse, want="entropy"),
        "got 'entropy': write ('entropy',)",
    ),
    "an input that is not named": (
        lambda: Term("own", lambda stats, margin: margin - stats.lse),
        "what it takes besides is named in inputs=(..)",
    ),
    "a mask that is added": (
        lambda: HeadLoss(options=Options(check=True))(LOGITS, LABELS, token_weight=LABELS - 1e4),
        "token_weight of token 0 (flat index) must not be below 0 where a mean divides by the "
        "weights' sum",
    ),
    "a function": (lambda: HeadLoss([my_loss]), "got my_loss: wrap it, Term('my_loss', function)"),
    "a term without brackets": (lambda: HeadLoss([ZLoss]), "got ZLoss: call it, ZLoss(..)"),
    "torch's layout": (
        lambda: HeadLoss()(LOGITS.movedim(-1, 1), LABELS),
        "[*[2, 5], V], the vocabulary comes last",
    ),
    "soft labels": (
        lambda: HeadLoss()(LOGITS, LOGITS.softmax(-1)),
        "inputs={'teacher': Teacher(q.log())}",
    ),
    "soft labels of statistics": (
        lambda: vocab_statistics(LOGITS, LOGITS.softmax(-1)),
        "q are for the term Distillation",
    ),
    "labels in floating point": (
        lambda: HeadLoss()(LOGITS, LABELS.float()),
        "got torch.float32: pass its .long()",
    ),
    "a mask as labels": (
        lambda: HeadLoss()(LOGITS, LABELS > 0),
        "got torch.bool: ids, not a mask (torch.where(mask, labels, -100), or",
    ),
    "positions in floating point": (
        lambda: sample(LOGITS[0], positions=torch.ones(5), seed=0),
        "positions must be int64 or int32, got torch.float32: one number for each token that no",
    ),
    "Hinton's alpha": (
        lambda: Distillation(alpha=0.5),
        "write [CrossEntropy(1 - alpha), Distillation(alpha)]",
    ),
    "a module of torch": (
        lambda: Term("ce", torch.nn.CrossEntropyLoss()),
        "term 'ce': function must take (stats), got (input: torch.Tensor, target",
    ),
    "an advantage per row that is none": (
        lambda: HeadLoss(PolicyGradient("reinforce"))(
            LOGITS,
            LABELS,
            inputs={"advantages": torch.ones(3), "sequences": Sequences.from_mask(LABELS == 0)},
        ),
        "input 'advantages' must be [2], one per sequence, or [2, 5], one per token, got [3]",
    ),
    "a reference without a KL": (
        lambda: PPO(kl=0)(
            LOGITS, LABELS, inputs=dict.fromkeys((*PPO().input_names, "reference_log_prob"), LOGITS)
        ),
        "which none of them takes; a whole loss such as PPO(kl=0) has no KL and takes none",
    ),
    "a reference beside metrics alone": (
        lambda: HeadLoss(metrics=tp_headloss.PolicyMetrics())(
            LOGITS,
            LABELS,
            inputs=dict.fromkeys(("advantages", "old_log_prob", "reference_log_prob"), LOGITS),
        ),
        "takes none, and PolicyMetrics(..) with reference=True alone",
    ),
    "rows and ids that are swapped": (
        lambda: tp_headloss.select_rows(LABELS[0], LOGITS[0]),
        "ids must be int64 or int32, got torch.float32: the order is select_rows(weight, ids)",
    ),
    "two terms of one objective": (
        lambda: HeadLoss([PolicyGradient(), PolicyGradient()]),
        "add up the weights of equal ones, or give another name: PolicyGradient, KLTo",
    ),
    "no teacher": (
        lambda: HeadLoss(Distillation())(LOGITS, LABELS),
        "missing ['teacher']; write inputs={'teacher': Teacher(..)}",
    ),
    "a support in the place of the divergence": (
        lambda: TopKDistillation(1.0, "tail"),
        "got 'tail': write TopKDistillation(.., support=\"tail\")",
    ),
    "sequences of a mask": (
        lambda: Sequences(LABELS == 0),
        "got mask: write Sequences.from_mask(mask), .from_cu_seqlens(..) or .from_ids(..)",
    ),
    "a teacher's log-probs as its ids": (
        lambda: TopKTeacher(LOGITS, LABELS[..., None]),
        "teacher.ids must be int64 or int32, got torch.float32: the order is TopKTeacher(ids, log_",
    ),
    "an infinite log-prob outside": (
        lambda: TopKDistillation(1.0, "reverse_kl", "vocabulary", outside_log_prob=-math.inf),
        "outside_log_prob must be a log-prob, at most 0 and finite, got -inf",
    ),
    "a reduction as a transport": (
        lambda: Options(transport="token-sum"),
        "transport must be one of ('auto', 'gather', 'sum', 'symm_mem'), got 'token-sum'",
    ),
    "ids as a metric": (
        lambda: HeadLoss(metrics="argmax"),
        'got [\'argmax\']: write "accuracy", or a Metric with want=("argmax",)',
    ),
    "lengths as bounds": (
        lambda: Sequences.from_cu_seqlens(torch.tensor([3, 7]), torch.ones(10, dtype=torch.bool)),
        "got [3, 7]: lengths? Pass torch.nn.functional.pad(lengths.cumsum(0), (1, 0))",
    ),
    "probabilities": (
        lambda: HeadLoss(KLToReference(0.1), options=Options(check=True))(
            LOGITS, LABELS, inputs={"reference_log_prob": LOGITS.sigmoid()[..., 0]}
        ),
        "such tokens: are these probabilities? Pass their log()",
    ),
    "negated log-probs": (
        lambda: HeadLoss(KLToReference(0.1), options=Options(check=True))(
            LOGITS, LABELS, inputs={"reference_log_prob": torch.linspace(0.1, 3.0, 10).view(2, 5)}
        ),
        "such tokens: negated? Pass log-probs, which are never above 0",
    ),
    "hidden states of a CausalLMLoss": (
        lambda: CausalLMLoss().linear(LOGITS, LOGITS, LABELS),
        "got hidden states: call HeadLoss.linear, with labels that you move yourself, torch.nn.",
    ),
    "an input that CausalLMLoss cannot move": (
        lambda: CausalLMLoss(HeadLoss(PolicyGradient("reinforce")))(
            LOGITS, LABELS, inputs={"advantages": LOGITS[..., 0]}
        ),
        "got 'advantages': call HeadLoss with it and with moved labels",
    ),
    "a constructor that is not for users": (
        lambda: Sequences(max_length=4),
        "'max_length': write Sequences.from_mask(mask), ",
    ),
    "ranks as a group": (
        lambda: VocabShard.from_group([0, 1], 100),
        "got [0, 1]: torch.distributed.new_group(ranks), which every rank",
    ),
    "a mesh's dimension as a group": (
        lambda: VocabShard.from_group("tp", 100),
        "got 'tp': of a mesh's dimension, mesh.get_group('tp')",
    ),
    "a group as a mesh": (
        lambda: VocabShard.from_mesh(torch.distributed.ProcessGroup(0, 1), 100),
        "DeviceMesh, got ProcessGroup: use VocabShard.from_group",
    ),
    "several ids as labels": (
        lambda: log_probs(LOGITS, LABELS[..., None].expand(2, 5, 3)),
        "several ids for each token are ids= of vocab_statistics(want=('log_probs_at',))",
    ),
    "a clip in the place of a weight": (
        lambda: PolicyGradient("clip", (0.2, 0.28)),
        "or a scalar tensor of floating point, got (0.2, 0.28): write clip=(0.2, 0.28)",
    ),
    "an estimator in the place of a weight": (
        lambda: GRPO(kl="k3"),
        "kl must be a number, got 'k3': kl= is the weight of the KL, whose estimator is k3",
    ),
    "log-probs of nobody": (
        lambda: HeadLoss(PolicyGradient())(LOGITS, LABELS, inputs={"our_logprobs": LOGITS[..., 0]}),
        "unused ['our_logprobs'], which none of them takes",
    ),
    "an argument of what takes none": (
        lambda: AcceptanceRate(beta=0.5),
        "got an unexpected keyword argument 'beta': it takes none",
    ),
    "a choice in the place of a weight": (
        lambda: Distillation("reverse_kl"),
        "got 'reverse_kl': write divergence='reverse_kl'",
    ),
    "a list of means": (
        lambda: tp_headloss.mean_metrics([HeadLoss()(LOGITS, LABELS).means()]),
        "got [Means], whose sum is none: pass the outputs, mean_metrics(outputs, group)",
    ),
    "a teacher to search": (
        lambda: topk_log_probs(tp_headloss.Teacher(LOGITS), 2),
        "an export its .logits, with transform=Transform(temperature=..)",
    ),
    "a temperature in a teacher head's transform": (
        lambda: tp_headloss.TeacherHead(LOGITS, LOGITS[0], transform=Transform(temperature=2.0)),
        "write TeacherHead(.., temperature=..)",
    ),
    "an unknown keyword of a preset": (
        lambda: GRPO(xyz=1),
        "GRPO() got an unexpected keyword argument 'xyz'",
    ),
    "spelling of a preset's keyword": (
        lambda: GRPO(metric="rank"),
        "'metric': did you mean 'metrics'?",
    ),
    "a top-k that is off": (
        lambda: SamplingRule(top_k=-1),
        "top_k must be at least 1, got -1: None is for all ids",
    ),
    "a temperature of 0": (
        lambda: Transform(temperature=0),
        "in fp32, got 0: for 0, which is greedy, SamplingRule(top_k=1) or argmax",
    ),
    "a statistic registered again": (
        lambda: [register_statistic(Own()) for _ in range(2)],
        "['own'] are taken: in one process, register a family once, and start another to change it",
    ),
    "a teacher of temperature 0": (
        lambda: tp_headloss.Teacher(LOGITS, temperature=0),
        "teacher.temperature must be positive and finite in fp32, got 0: for 0, where one id",
    ),
    "an input as keyword": (
        lambda: HeadLoss(metrics=BitsPerByte())(LOGITS, LABELS, num_bytes=LABELS),
        """'num_bytes': write inputs={"num_bytes": ..}""",
    ),
    "the keywords of a preset": (
        lambda: GRPO(keywords={}),
        "'keywords': it takes clip, dual_clip, kl, entropy, compile, ignore_index, metrics, options",
    ),
    "terms one after the other": (
        lambda: HeadLoss(PolicyGradient(), KLToReference(0.1)),
        "HeadLoss() takes terms by position, got 1 more: write one list, HeadLoss([.., ..])",
    ),
    "a term and something else": (
        lambda: HeadLoss(PolicyGradient(), "mean"),
        "got 1 more: write metrics=.., reduction=..",
    ),
    "hidden states and a weight": (
        lambda: tp_headloss.log_probs(LOGITS, torch.zeros(8, 4), LABELS),
        "1 more: of hidden states and a weight write linear_vocab_statistics(hidden, weight, labels",
    ),
    "hidden states and a weight of a loss": (
        lambda: HeadLoss()(LOGITS, torch.zeros(8, 4), LABELS),
        "1 more: of hidden states and a weight write HeadLoss(..).linear(hidden, weight, labels, ..)",
    ),
    "a softcap of a term": (
        lambda: PolicyGradient("clip", softcap=3.0),
        "'softcap': write HeadLoss(..)(.., transform=Transform(softcap=..)), an argument of the call",
    ),
    "an option of a preset": (lambda: GRPO(check=True), "'check': write options=Options(check=..)"),
    "a clip in the place of the objective": (
        lambda: PolicyGradient((0.2, 0.28)),
        "got (0.2, 0.28): a clip is given by name, clip=(low, high)",
    ),
    "a weight of hidden states that is transposed": (
        lambda: HeadLoss().linear(LOGITS, torch.zeros(LOGITS.shape[-1], 30), LABELS),
        f"got [{LOGITS.shape[-1]}, 30]: transposed? Pass its .t(), or pass hidden states [.., 30]",
    ),
    "a teacher's head of another size": (
        lambda: HeadLoss(Distillation()).linear(
            LOGITS,
            torch.zeros(30, LOGITS.shape[-1]),
            LABELS,
            inputs={"teacher": tp_headloss.TeacherHead(LOGITS, torch.zeros(30, 3))},
        ),
        "got [30, 3]: or pass hidden states [.., 3]",
    ),
    "a host's name of an input that something needs": (
        lambda: HeadLoss(PolicyGradient(), metrics=GeneratorMetrics())(
            LOGITS, LABELS, inputs={"rollout_log_probs": LABELS}
        ),
        "'rollout_log_probs': write 'generator_log_prob', of GeneratorMetrics",
    ),
    "a part of sequences": (
        lambda: Sequences.from_mask(LABELS == 0)[:1],
        "Sequences must be made anew of a part of its tensors, Sequences.from_mask(mask[..])",
    ),
    "a part of a teacher": (
        lambda: TopKTeacher(LABELS[..., None], LOGITS[..., :1])[0],
        "must be made anew of a part of its tensors, TopKTeacher(ids[..], log_probs[..], ..)",
    ),
    "another dimension": (
        lambda: topk_log_probs(LOGITS, 2, dim=1),
        "'dim': write logits.movedim(dim, -1): the vocabulary is the last dimension",
    ),
    "a flag for a choice": (
        lambda: Options(validate=True),
        """got True: write validate="full\"""",
    ),
    "another flag for a choice": (lambda: Options(validate=False), "'checksums'), got False"),
    "options in a dict": (
        lambda: HeadLoss(options={"check": True, "inplace": True}),
        "options must be an Options, got dict: write Options(check=.., inplace=..)",
    ),
    "a transform in a dict": (
        lambda: log_probs(LOGITS, LABELS, transform={"temperature": 2.0}),
        "transform must be a Transform, got dict: write Transform(temperature=..)",
    ),
    "text for bytes": (
        lambda: Linear(budget="64MB"),
        "budget must be a number, got '64MB': bytes, 64 << 20 for 64 MiB",
    ),
    "transposed labels": (
        lambda: HeadLoss()(LOGITS, LABELS.T),
        "labels must have shape [2, 5] to fit logits, got [5, 2]: transposed? Pass its .T",
    ),
    "labels by rows of flat logits": (
        lambda: HeadLoss()(LOGITS.flatten(0, 1), LABELS),
        "labels must have shape [10] to fit logits, got [2, 5]: pass its .reshape(10)",
    ),
    "labels and weight swapped": (
        lambda: HeadLoss().linear(LOGITS, LABELS, LOGITS[0]),
        "got torch.float32 (are labels and weight swapped?)",
    ),
    "labels and hidden states swapped": (
        lambda: HeadLoss().linear(LABELS, LOGITS[0], LOGITS),
        "got torch.float32 (are labels and hidden states swapped?)",
    ),
    "hidden states and weight swapped": (
        lambda: HeadLoss().linear(LOGITS[0], LOGITS, LABELS),
        "[*[2, 5], H] for these labels, got [5, 11] (are hidden states and weight swapped?)",
    ),
    "hidden states of another dtype": (
        lambda: HeadLoss().linear(LOGITS.bfloat16(), LOGITS[0], LABELS),
        "pass hidden.to(weight.dtype), or call under torch.autocast('cpu')",
    ),
    "hidden states that autocast does not convert": (
        lambda: HeadLoss().linear(LOGITS.double(), LOGITS[0], LABELS),
        "got torch.float64 and torch.float32: pass hidden.to(weight.dtype)",
    ),
    "labels of another ignore_index": (
        lambda: HeadLoss(options=Options(check=True))(LOGITS, LABELS - 1),
        "which no shard owns; 10 such tokens: is it ignored? Then ignore_index=-1",
    ),
    "labels of another ignore_index beside few valid tokens": (
        lambda: HeadLoss(options=Options(check=True)).linear(
            LOGITS, LOGITS[0], LABELS - 1, linear=Linear(max_valid_tokens=10)
        ),
        "got -1; 10 such tokens: is it ignored? Then ignore_index=-1",
    ),
    "a number as term": (
        lambda: HeadLoss(0.1),
        "write CrossEntropy(label_smoothing=0.1) or ZLoss(",
    ),
    "a number as term that smooths nothing": (
        lambda: HeadLoss(11),
        "terms must be Terms, got int: write ZLoss(11) or ignore_index=11, whose argument it may",
    ),
    "an ignore_index as term": (lambda: HeadLoss(-1), "got int: write ignore_index=-1, whose"),
    "a keyword like one that was given": (
        lambda: MADE.linear(LOGITS, LOGITS[0], LABELS, weigth=LOGITS),
        "'weigth': it takes hidden, weight, labels, bias, shard, token_weight",
    ),
    "token weights by another name": (
        lambda: MADE.linear(LOGITS, LOGITS[0], LABELS, weights=LOGITS),
        "'weights': write token_weight=",
    ),
    "a z-loss of a call": (
        lambda: MADE(LOGITS, LABELS, z_loss=1e-4),
        "'z_loss': write HeadLoss([CrossEntropy(), ZLoss(1e-4)])",
    ),
    "a z-loss's weight of a call": (
        lambda: MADE.linear(LOGITS, LOGITS[0], LABELS, z_loss_weight=1e-4),
        "'z_loss_weight': write HeadLoss([CrossEntropy(), ZLoss(z_loss_weight)])",
    ),
    "a smoothing of a call": (
        lambda: MADE(LOGITS, LABELS, label_smoothing=0.1),
        "'label_smoothing': write HeadLoss(CrossEntropy(label_smoothing=0.1))",
    ),
    "a smoothing of an output layer": (
        lambda: tp_headloss.VocabParallelHead(4, LAYER_SHARD, label_smoothing=0.1),
        "'label_smoothing': write head_loss=HeadLoss(CrossEntropy(label_smoothing=..))",
    ),
    "a z-loss of an output layer": (
        lambda: tp_headloss.VocabParallelHead(4, LAYER_SHARD, z_loss=1e-4),
        "'z_loss': write head_loss=HeadLoss([CrossEntropy(), ZLoss(1e-4)])",
    ),
    "a loss's argument of an output layer": (
        lambda: tp_headloss.VocabParallelHead(4, LAYER_SHARD, metrics="rank"),
        "'metrics': write head_loss=HeadLoss(metrics=..)",
    ),
    "a loss of unshifted labels of an output layer": (
        lambda: tp_headloss.VocabParallelHead(4, LAYER_SHARD, head_loss=CausalLMLoss()),
        "must be a HeadLoss, got CausalLMLoss: pass a HeadLoss, and labels that you move yourself, "
        "torch.nn.functional.pad(labels[..., 1:], (0, 1), value=-100)",
    ),
    "a number among terms": (
        lambda: HeadLoss([CrossEntropy(), 0.1]),
        "got float: write CrossEntropy(",
    ),
    "a host's call": (
        lambda: HeadLoss()(hidden_states=LOGITS, attention_mask=None, output_layer=None),
        "'output_layer': write install(model, ..) of integrations.megatron",
    ),
    "terms by name": (
        lambda: HeadLoss({"ce": CrossEntropy()}),
        "terms must be Terms, got dict: write a list of its values",
    ),
    "two terms of one name": (
        lambda: HeadLoss([CrossEntropy(), CrossEntropy(0.5)]),
        "and of any other term dataclasses.replace(term, name=..) has another one",
    ),
    "a shard without its group": (
        lambda: VocabShard.from_group(53),
        "got group: write VocabShard.from_group(group, vocab_size), with None for one rank",
    ),
    "hidden states of another width": (
        lambda: MADE.linear(LOGITS, torch.ones(7, 9), LABELS),
        "weight must have shape [width, 11] to fit hidden states, got [7, 9]: or pass hidden "
        "states [.., 9]",
    ),
    "a tied weight without padding": (
        lambda: tp_headloss.VocabParallelHead(
            4,
            VocabShard.from_group(None, 53, padded_size=64),
            weight=torch.nn.Parameter(torch.ones(53, 4)),
        ),
        "weight must be [64, 4], this rank's rows with padding (padded_size=64), got [53, 4]: make "
        "the module that owns it with the same shard",
    ),
    "a set of metrics": (lambda: HeadLoss(metrics={"rank"}), "got set: write a list"),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_says_what_to_do(name):
    call, words = MESSAGES[name]
    with (
        mock.patch.object(statistics, "FAMILIES", statistics.FAMILIES),
        pytest.raises((TypeError, ValueError), match=re.escape(words)),
    ):
        call()


# a result by the name of its class
RESULTS = {
    "HeadLossOutput": lambda: HeadLoss(metrics="perplexity")(LOGITS, LABELS),
    "VocabStatistics": lambda: vocab_statistics(LOGITS, LABELS),
    "LogProbs": lambda: log_probs(LOGITS, LABELS),
    "TopK": lambda: topk_log_probs(LOGITS, 2),
    "Sample": lambda: tp_headloss.sample(LOGITS, seed=0, positions=LABELS),
}


WITH_LINES = {
    function.__qualname__: function
    for function in PUBLIC
    if lines_within(function)
    and not isinstance(function, functools.partial)
    # some hand on keywords of any name
    and all(x.kind != x.VAR_KEYWORD for x in inspect.signature(function).parameters.values())
}


@pytest.mark.parametrize("name", WITH_LINES)
def test_a_keyword_that_nobody_knows_is_refused_with_those_there_are(name):
    function = WITH_LINES[name]
    with pytest.raises(TypeError, match="unexpected keyword argument 'qqqqq'") as error:
        function(qqqqq=1)
    missing = [x for x in lines_within(function) if not re.search(rf"\b{x}\b", str(error.value))]
    assert not missing, error.value


@pytest.mark.parametrize("name", RESULTS)
def test_a_name_in_brackets_is_refused_with_the_attribute_to_write(name):
    result = RESULTS[name]()
    assert type(result).__name__ == name
    for place, field in enumerate(result._fields):
        assert result[place] is getattr(result, field) and result[place:][:1] == (result[place],)
        with pytest.raises(TypeError, match=rf"no items: write \.{field}$"):
            result[field]
    with pytest.raises(TypeError, match="no 'nothing': "):
        result["nothing"]


def test_a_mean_in_brackets_is_refused_with_where_it_is():
    for name, key in (("perplexity", "perplexity"), ("cross_entropy", "loss/cross_entropy")):
        with pytest.raises(TypeError, match=re.escape(f"write out.means()[{key!r}]")):
            RESULTS["HeadLossOutput"]()[name]


def test_a_loss_per_token_is_no_number_and_its_errors_say_what_to_write():
    logits = LOGITS.clone().requires_grad_()
    out = HeadLoss(reduction="none")(logits, LABELS)
    for use in (out.backward, out.__float__, lambda: f"{out:.3f}"):
        with pytest.raises(RuntimeError, match=r"per token, \[2, 5\].*reduce it first"):
            use()
    out.backward(gradient=torch.ones_like(out.loss))
    assert logits.grad is not None
    HeadLoss(reduction="none")(logits[:1, :1], LABELS[:1, :1]).backward()  # of one token


ATTRIBUTES = {
    "sequences on another device": (
        lambda: Sequences.from_mask(LABELS == 0).to("cpu"),
        "Sequences has no 'to': it must be made anew of its tensors, Sequences.from_mask(mask.to(",
    ),
    "a teacher without a gradient": (
        lambda: tp_headloss.Teacher(LOGITS).detach(),
        "Teacher has no 'detach': it must be made anew of its tensors, Teacher(logits.detach(..), ..)",
    ),
    "a teacher on another device": (
        lambda: TopKTeacher(LABELS[..., None], LOGITS[..., :1]).cuda(),
        "anew of its tensors, TopKTeacher(ids.cuda(..), log_probs.cuda(..), ..)",
    ),
    "a transform on another device": (
        lambda: Transform(temperature=torch.ones(2, 5)).cpu(),
        "anew of its tensors, Transform(temperature=temperature.cpu(..))",
    ),
    "a rule on another device": (
        lambda: SamplingRule(top_p=torch.ones(2, 5)).to("cpu"),
        "anew of its tensors, SamplingRule(top_p=top_p.to(..))",
    ),
    "sets on another device": (
        lambda: IdSets(LABELS[..., None]).cuda(),
        "IdSets have no 'cuda': write .to('cuda')",
    ),
    "a method of tensors": (
        lambda: log_probs(LOGITS, LABELS).sum,
        "LogProbs has no 'sum': its fields are .log_prob, .entropy, .lse",
    ),
    "a field of torch.topk": (
        lambda: topk_log_probs(LOGITS, 2).indices,
        "TopK has no 'indices': its fields are .ids, .log_probs",
    ),
    "a function of losses": (
        lambda: tp_headloss.cross_entropy,
        "'cross_entropy': tp_headloss.losses.cross_entropy",
    ),
    "a name that is nearly ours": (lambda: tp_headloss.Headloss, "did you mean 'HeadLoss'?"),
    "a metric that was not asked for": (
        lambda: HeadLoss()(LOGITS, LABELS).perplexity,
        "no 'perplexity': HeadLoss(.., metrics='perplexity') has it in out.means()",
    ),
    "a method of statistics": (
        lambda: vocab_statistics(LOGITS, LABELS).mean,
        "no 'mean': they are several tensors, write it of one, such as .lse.mean",
    ),
    "a statistic that is nearly so named": (
        lambda: vocab_statistics(LOGITS, LABELS).log_probs,
        "no 'log_probs': did you mean .log_prob?",
    ),
    "a metric of statistics": (
        lambda: vocab_statistics(LOGITS, LABELS).accuracy,
        "no 'accuracy': with want=('argmax',) they have .correct",
    ),
    "a size of sets": (
        lambda: IdSets(LABELS[..., None]).shape,
        "IdSets have no 'shape': they have .ids and .spans, and .tolist()",
    ),
    "a statistic that was not asked for": (
        lambda: HeadLoss()(LOGITS, LABELS).entropy,
        "no 'entropy': it was not wanted: write metrics='entropy' of the HeadLoss",
    ),
    "a statistic that is no metric": (
        lambda: HeadLoss()(LOGITS, LABELS).collision,
        "it was not wanted: write Metric(lambda stats: {'collision': stats.collision}",
    ),
    "a metric of policies": (
        lambda: HeadLoss()(LOGITS, LABELS).approx_kl,
        "no 'approx_kl': HeadLoss(.., metrics=PolicyMetrics(..)) has it in out.means()",
    ),
    "a metric's mean": (
        lambda: HeadLoss(metrics="perplexity")(LOGITS, LABELS).perplexity,
        "no 'perplexity': write out.means()['perplexity']",
    ),
    "a term's mean": (
        lambda: HeadLoss()(LOGITS, LABELS).cross_entropy,
        "no 'cross_entropy': write out.means()['loss/cross_entropy']",
    ),
    "a method of the loss": (
        lambda: HeadLoss()(LOGITS, LABELS).item,
        "no 'item': its loss is the tensor out.loss",
    ),
}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_an_attribute_that_a_result_does_not_have_is_refused_with_those_it_has(name):
    call, words = ATTRIBUTES[name]
    with pytest.raises(AttributeError, match=re.escape(words)):
        call()


CALLED = LOGITS, LABELS
# a function of a loss -> a call of it with a keyword, and where its arguments are written
KINDS = {
    "HeadLoss": (lambda **given: HeadLoss(**given), "HeadLoss(.., {}=..)"),
    "HeadLoss.forward": (lambda **given: MADE(*CALLED, **given), "HeadLoss(..)(.., {}=..)"),
    "HeadLoss.linear": (
        lambda **given: MADE.linear(LOGITS, *CALLED, **given),
        "HeadLoss(..).linear(.., {}=..)",
    ),
}
WITHOUT_A_CALL = {
    "CausalLMLoss": CausalLMLoss,
    "CrossEntropy": CrossEntropy,
    "PolicyGradient": PolicyGradient,
}
OTHERS = (
    WITHOUT_A_CALL
    | {"GRPO": GRPO, "BitsPerByte": BitsPerByte}
    | {name: call for name, (call, _) in KINDS.items()}
)


@pytest.mark.parametrize("place", KINDS)
@pytest.mark.parametrize("name", OTHERS)
def test_an_argument_in_the_wrong_place_is_refused_with_its_place(name, place):
    """Every argument of every function of a call, to all those that do not take it."""

    def takes(owner):
        return set(KEYWORDS[owner]) - {"self"}

    for keyword in takes(place) - takes(name):
        written = [KINDS[other][1].format(keyword) for other in KINDS if keyword in takes(other)]
        written += [x.ours for x in ALIASES if x.name == keyword and name in x.of.split(", ")]
        with pytest.raises(TypeError, match=re.escape(f"{keyword!r}: write ")) as error:
            OTHERS[name](**{keyword: None})
        assert any(f": write {text}" in str(error.value) for text in written), (
            error.value,
            written,
        )


RECORDS = {
    "transform": (Transform, (sample, kept_ids, topk_log_probs, vocab_statistics, MADE.linear)),
    "rule": (SamplingRule, (sample, kept_ids)),
    "options": (Options, (sample, kept_ids, topk_log_probs, vocab_statistics, HeadLoss)),
    "linear": (Linear, (linear_vocab_statistics, MADE.linear)),
}


@pytest.mark.parametrize("parameter", RECORDS)
def test_an_argument_of_a_record_is_refused_with_the_record(parameter):
    """Every argument of it, to functions that take it and no argument of that name."""
    record, functions = RECORDS[parameter]
    for function in functions:
        own = lines_within(function)
        assert parameter in own
        for keyword in set(lines_within(record)) - set(own):
            said = rf"argument '{keyword}': write .*{record.__name__}\(|{keyword}': write HeadLoss"
            with pytest.raises(TypeError, match=said):
                function(**{keyword: None})


@pytest.mark.parametrize("place", KINDS)
def test_an_argument_of_a_record_of_another_part_of_the_call_is_refused_with_that_part(place):
    for parameter, (record, _) in RECORDS.items():
        if parameter in KEYWORDS[place] or parameter == "rule":
            continue
        others = {*lines_within(record)}.difference(*(KEYWORDS[other] for other in KINDS))
        for keyword in others:
            known = [x.ours for x in ALIASES if x.name == keyword and place in x.of.split(", ")]
            written = [f"{parameter}={record.__name__}({keyword}=..)", *known]
            with pytest.raises(TypeError) as error:
                KINDS[place][0](**{keyword: None})
            assert any(text in str(error.value) for text in written), error.value


@pytest.mark.parametrize("name", ["Teacher", "TopKTeacher", "TeacherHead", "Transform"])
def test_arguments_of_a_teacher_and_of_its_term_are_not_confused(name):
    """Each record's own numbers, given to the terms and to the other records."""
    terms = Distillation, TopKDistillation
    record = getattr(tp_headloss, name)
    tensors = {"logits", "ids", "log_probs", "mask", "tail_log_prob", "hidden", "weight", "bias"}
    numbers = set(lines_within(record)) - tensors - {"transform", "renormalize"}
    for term in terms:
        for keyword in numbers - {"scale", "softcap"}:
            with pytest.raises(TypeError, match=f"argument '{keyword}': write .*Teacher"):
                term(**{keyword: 2.0})
    others = ("T",) if name == "Transform" else ("T", "divergence", "temperature_squared")
    for other in others:
        with pytest.raises(TypeError, match=f"argument '{other}': write "):
            record(**{other: 2.0})


def test_a_sample_in_the_place_of_its_log_probs_is_refused_with_them():
    drawn = sample(LOGITS, positions=LABELS, seed=0)
    with pytest.raises(TypeError, match=r"got Sample: .* \.full_log_probs for log-probs"):
        HeadLoss(PolicyGradient())(
            LOGITS, LABELS, inputs={"advantages": LOGITS[..., 0], "old_log_prob": drawn}
        )


def test_a_preset_has_its_own_reduction_and_says_so():
    with pytest.raises(TypeError, match="'reduction': write HeadLoss"):
        tp_headloss.GRPO(reduction="mean")


def test_a_tensor_in_the_place_of_a_teacher_says_what_to_write():
    with pytest.raises(TypeError, match=r"got Tensor: write Teacher\(logits\)"):
        HeadLoss(Distillation())(LOGITS, LABELS, inputs={"teacher": LOGITS})


def test_a_misspelt_option_of_an_objective_says_what_is_meant():
    with pytest.raises(TypeError, match=r"got \['dual_clp'\]: did you mean 'dual_clip'"):
        PolicyGradient("clip", dual_clp=3.0)
