"""Every argument of a checked function has a line, and what the line rules out is refused by the
argument's name."""

import contextlib
import importlib
import inspect
import re
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from energy_statistic import Energy
from known import modules_of_integrations
from lines import MASK, OF_OTHERS, B, S, right, wrong

import tp_headloss as hl
from tp_headloss.integrations import ms_swift, nemo_rl, skyrl, slime, specforge, speculators
from tp_headloss.integrations.verl import functions

LOGITS, IDS, HIDDEN, WEIGHT = (
    torch.zeros(B, S, 8),
    torch.zeros(B, S).long(),
    torch.zeros(B, S, 6),
    torch.zeros(8, 6),
)
BOUNDS = {"vocab_start_index": 0, "vocab_end_index": 8}
NEXT = BOUNDS | {"target": IDS, "tp_group": None}
PACKED = {"cu_seqlens_padded": torch.tensor([0, S]), "unpacked_seqlen": S}
NEXT_PACKED = BOUNDS | PACKED | {"target": IDS[:1], "group": None}
ACTIONS = PACKED | {
    "num_actions": 1,
    "attention_mask": MASK[:1],
    "loss_mask": None,
    "cp_group": None,
    "tp_group": None,
}
DRAFT = {"student_logits": LOGITS, "teacher_logits": LOGITS, "mask": MASK.float()}
DRAFT_LOSS = {"logits": LOGITS, "targets": LOGITS}
PROBABILITIES = {"target_p": LOGITS.softmax(-1), "target_p_on_draft": LOGITS.softmax(-1) / 2}
POSITIONS = {"position_mask": MASK[..., None]}
LK = {"lk_loss_type": "lambda", "kl_scale": 1.0, "kl_decay": 1.0}
SPECFORGE_MODEL = SimpleNamespace(draft_model=SimpleNamespace(d2t=torch.zeros(8).long()), **LK)
REDUCTIONS = SimpleNamespace(
    reduce_metrics=lambda local_correct, local_denom: (local_correct, local_denom),
    reduce_loss=lambda loss: loss,
)
STATES = {"hidden": HIDDEN, "lm_head_weight": WEIGHT}
TEACHER_OUTPUT = SimpleNamespace(
    full_logits=LOGITS, topk_logprobs=None, topk_indices=None, labels=None
)
OWN_PART = hl.Linear(hidden_grad="none")
HOSTS = {  # functions of hosts, whose arguments go together: a right call of each
    nemo_rl.get_next_token_logprobs_from_logits: {"input_ids": IDS, "next_token_logits": LOGITS},
    nemo_rl.from_parallel_logits_to_logprobs: NEXT | {"vocab_parallel_logits": LOGITS},
    nemo_rl.from_parallel_logits_to_logprobs_packed_sequences: NEXT_PACKED | {"vocab_parallel_logits": LOGITS[:1]},
    nemo_rl.from_parallel_hidden_states_to_logprobs: NEXT
    | {"tensor_parallel_hidden_states": HIDDEN.transpose(0, 1), "output_weight_layer": WEIGHT}
    | {"runtime_gather_output": None, "linear": OWN_PART},
    nemo_rl.get_distillation_topk_logprobs_from_logits: {
        "student_logits": LOGITS, "teacher_topk_logits": torch.zeros(B, S, 2), "zero_outside_topk": True,
        "teacher_topk_indices": torch.zeros(B, S, 2).long(), "calculate_entropy": True,
    },
    skyrl.from_parallel_logits_to_logprobs_packed_sequences: NEXT_PACKED | {"vocab_parallel_logits": LOGITS[:1]},
    skyrl.from_parallel_hidden_to_logprobs: NEXT | STATES,
    skyrl.from_parallel_hidden_to_logprobs_packed_sequences: NEXT_PACKED | STATES | {"hidden": HIDDEN[:1]},
    skyrl.vocab_parallel_entropy_packed_sequences: ACTIONS | {"vocab_parallel_logits": LOGITS[:1]},
    skyrl.from_parallel_hidden_to_entropy_packed_sequences: ACTIONS | STATES | {"hidden": HIDDEN[:1]},
    skyrl.draft_soft_ce: DRAFT,
    skyrl.draft_soft_ce_topk: DRAFT | {"k": 2},
    **{
        getattr(speculators, name): DRAFT_LOSS
        for name in speculators.__all__ if name.endswith("_loss")
    },
    speculators.compute_metrics: {"logits": LOGITS, "targets": LOGITS, "loss_mask": MASK, "prev_correct": MASK.clone(),
                                  "ttt_step": 1, "ttt_step_loss_decay": 0.8},
    specforge.compute_acceptance_rate: POSITIONS | {"logits": LOGITS, "target_probs": LOGITS.softmax(-1) / 2},
    specforge.compute_loss_and_acceptance_rate: PROBABILITIES | POSITIONS | LK | {"logits": LOGITS},
    specforge.acc_and_loss: PROBABILITIES | POSITIONS | {
        "model": SPECFORGE_MODEL, "logits": LOGITS, "target_token_ids": IDS, "loss_mask": MASK[..., None],
        "adapter": REDUCTIONS,
    },
    specforge.compute_target_p_padded_from_hidden: {
        "hidden": HIDDEN, "lm_head_weight": WEIGHT, "t2d": torch.arange(8) < 4, "loss_mask": MASK[..., None],
        "length": 1,
    },
    slime.calculate_log_probs_and_entropy: {"logits": LOGITS[0], "tokens": IDS[0], "tp_group": None},
    ms_swift.compute_logps_and_entropy_from_logits: {"logits": LOGITS, "labels": IDS, "tp_group": None},
    ms_swift.vocab_parallel_topk: {"logits": LOGITS, "k": 2, "tp_group": None},
    ms_swift.gkd_loss: {"student_logits": LOGITS, "teacher_output": TEACHER_OUTPUT, "labels": IDS, "beta": 0.5}
    | {"temperature": 1.0, "tp_group": None},
    functions.logits_processor: {"group": None, "vocab_size": 8},
    functions.linear_cross_entropy: {"hidden": HIDDEN, "weight": WEIGHT, "labels": IDS},
}  # fmt: skip


def of_terms(**keywords):
    """`HeadLoss.forward` with two inputs."""
    return hl.HeadLoss([hl.PolicyGradient("clip")])(**keywords)


def of_terms_from_hidden_states(**keywords):
    """`HeadLoss.linear` with two inputs."""
    return hl.HeadLoss([hl.PolicyGradient("clip")]).linear(**keywords)


def of_a_family(**keywords):
    """`register_statistic`, forgotten afterwards."""
    with mock.patch.object(hl.statistics, "FAMILIES", hl.statistics.FAMILIES):
        hl.register_statistic(**keywords)


INPUTS = {"inputs": {"advantages": torch.ones(B, S), "old_log_prob": torch.zeros(B, S)}}
CALL, LINEAR_CALL = (
    {"logits": LOGITS, "labels": IDS},
    {"hidden": HIDDEN, "weight": WEIGHT, "labels": IDS},
)
ALL = {"sets": hl.IdSets(IDS[..., None]), "ids": IDS[..., None], "total_weight": torch.ones(8)}
ALL |= {
    "want": ("total", "set_log_prob", "log_probs_at", "topk_forward_kl"),
    "teacher": hl.TopKTeacher(IDS[..., None], -HIDDEN[..., :1]),
}
SHARD = hl.VocabShard(0, 8, 8)
CORE = {
    hl.HeadLoss: {}, hl.CausalLMLoss: {"head_loss": hl.HeadLoss()},
    hl.VocabParallelHead: {"hidden_size": 6, "shard": SHARD},
    hl.VocabParallelEmbedding: {"hidden_size": 6, "shard": SHARD}, hl.vocab_statistics: CALL | ALL, hl.log_probs: CALL,
    hl.linear_vocab_statistics: LINEAR_CALL | ALL | {"bias": torch.zeros(8)},
    hl.topk_log_probs: {"logits": HIDDEN, "weight": WEIGHT, "k": 2, "top_p": 0.5},
    hl.kept_ids: {"logits": HIDDEN, "weight": WEIGHT, "rule": hl.SamplingRule(2)}, of_a_family: {"family": Energy()},
    hl.sample: {"logits": HIDDEN, "weight": WEIGHT, "seed": 1, "positions": IDS},
    of_terms: CALL | INPUTS | {"token_weight": torch.ones(B, S), "denominator": torch.tensor(2.0)},
    of_terms_from_hidden_states: LINEAR_CALL | INPUTS | {"token_weight": torch.ones(B, S), "bias": torch.zeros(8)},
}  # fmt: skip
CONSTRUCTORS = {
    hl.Term: {"name": "own", "function": len, "want": ("total",), "class_weight": torch.ones(8)},
    hl.VocabShard: {"start": 0, "stop": 8, "vocab_size": 8},
    hl.VocabShard.from_group: {"group": None, "vocab_size": 8},
    hl.VocabShard.from_boundaries: {"boundaries": [0, 8], "vocab_size": 8},
    hl.Sequences.from_mask: {"mask": MASK},
    hl.Sequences.from_cu_seqlens: {"cu_seqlens": torch.tensor([0, B * S]), "mask": MASK},
    hl.Sequences.from_ids: {"ids": IDS, "count": 1, "mask": MASK},
    hl.multi_token_targets: {"labels": IDS, "depths": 2, "cu_seqlens": torch.tensor([0, B * S])},
    hl.IdSets.from_csr: {"ids": IDS[0], "offsets": torch.tensor([0, S])},
    hl.select_rows: {"weight": WEIGHT, "ids": torch.tensor([1, 2]), "shard": SHARD},
    hl.reduce_metrics: {"metrics": {"count": torch.ones(())}, "group": None},
    hl.mean_metrics: {"outputs": hl.HeadLoss()(LOGITS, IDS)},
    hl.combine_metrics: {"parts": [{"count": torch.ones(())}]},
    hl.clip_grad_norm_: {"parameters": [torch.nn.Parameter(torch.ones(2))], "max_norm": 1.0},
    **{preset: {} for preset in (hl.PPO, hl.GRPO, hl.DAPO, hl.DrGRPO, hl.GSPO, hl.CISPO)},
}


def sequences_of(**keywords):
    """`Sequences`, of all arguments of its constructor."""
    return hl.Sequences(**keywords)


ORDERED = {
    "ids": torch.zeros(B, S).long(),
    "order": torch.arange(B * S),
    "offsets": torch.tensor([0, B * S]),
}
CONSTRUCTORS |= {
    hl.IdSets.cat: {"parts": [hl.IdSets(IDS)], "dim": 0},
    hl.IdSets.stack: {"parts": [hl.IdSets(IDS)], "dim": 0},
    hl.Sequences.from_mask(MASK).aggregate: {"reduction": "seq-mean-token-mean"},
    sequences_of: {
        "mask": MASK,
        **ORDERED,
        "bounds": ORDERED["offsets"],
        "lengths": torch.tensor([6.0]),
        "group": None,
    },
}
CORE |= CONSTRUCTORS
sequences_of.lines = hl.Sequences.__init__.lines
of_terms.lines, of_terms_from_hidden_states.lines = (
    hl.HeadLoss.forward.lines,
    hl.HeadLoss.linear.lines,
)
of_a_family.lines = hl.register_statistic.lines
HOSTS |= CORE
CHECKED = {
    name: f
    for name, f in {**vars(hl.losses), **vars(hl)}.items()
    if callable(f) and hasattr(f, "lines")
}
del CHECKED["register_statistic"]  # of which all later tests would know
CHECKED |= {
    f"{f.__module__.rsplit('.')[-1]}.{f.__name__}": f for f in HOSTS if f not in CHECKED.values()
}


def test_every_loss_has_lines():
    assert set(LOSSES) <= set(CHECKED)


def functions_of_hosts() -> list:
    """Checked functions of tensors in the adapters that can be imported without their host."""
    found = []
    for name in modules_of_integrations():
        with contextlib.suppress(ImportError):
            module = importlib.import_module(f"tp_headloss.integrations.{name}")
            functions = [f for f in vars(module).values() if inspect.isfunction(f)]
            own = [f for f in functions if f.__module__ == module.__name__ and hasattr(f, "lines")]
            found += [f for f in own if any(map(tensor_line, f.lines.values()))]
    return found


def test_every_function_of_a_host_has_a_right_call():
    found = functions_of_hosts()
    assert len(found) > 10
    missing = sorted({f"{f.__module__}.{f.__name__}" for f in found if f not in HOSTS})
    assert not missing, f"no right call of {missing} in HOSTS of tests/promises/test_spec.py"


def tensor_line(line):
    """The line of a tensor in a line, or None."""
    return next(
        (x for x in getattr(line, "lines", (line,)) if isinstance(x, hl.spec.TensorLine)), None
    )


def sets_sizes(function, name, what) -> bool:
    """True if another argument than this one has the shape (or for "meta" the device) of the
    tokens."""
    own = tensor_line(function.lines[name])
    for other, line in function.lines.items():
        tensor = tensor_line(line)
        if isinstance(line, hl.spec.Instance) and line.kind in (hl.Sequences, hl.VocabStatistics):
            return True
        alike = (
            tensor is not None
            and tensor.shape != ()
            and (tensor.shape is None) == (own.shape is None)
        )
        if other != name and alike and (what == "meta" or ".." in tensor.shape):
            return True
    return False


def arguments_of(function) -> dict:
    """Arguments that a function takes; of a loss or an option all of them."""
    if function in HOSTS:
        return HOSTS[function]
    given = {name: right(name, line) for name, line in function.lines.items()}
    return given | ({"objective": "vespo"} if "objective" in given else {})


CASES = [
    pytest.param(f, name, value, id=f"{key}-{name}-{what.replace(' ', '_')}")
    for key, f in CHECKED.items()
    for name, line in f.lines.items()
    for what, value in wrong(line).items()
    if what not in OF_OTHERS or sets_sizes(f, name, what)
]


@pytest.mark.parametrize("name", CHECKED)
def test_what_the_lines_take_is_taken(name):
    CHECKED[name](**arguments_of(CHECKED[name]))


def number_line(line):
    """The line of a number in a line, or None."""
    return next(
        (
            x
            for x in getattr(line, "lines", (line,))
            if isinstance(x, (hl.spec.NumberLine, hl.spec.IntLine))
        ),
        None,
    )


NUMBERS = [
    pytest.param(f, name, number_line(line), id=f"{key}-{name}")
    for key, f in CHECKED.items()
    for name, line in f.lines.items()
    if number_line(line)
]


@pytest.mark.parametrize(("function", "name", "line"), NUMBERS)
def test_numbers_of_numpy_are_numbers(function, name, line):
    """Any value that a line takes, 0 and others, of any type of NumPy's, is taken as Python's
    is."""
    given = arguments_of(function)
    usual = given.get(name)
    usual = usual if isinstance(usual, (int, float)) else right(name, line)
    for number in {float(np.float32(usual)) if isinstance(usual, float) else usual, 0, 1, 0.25}:
        kinds = (np.int64,) if isinstance(line, hl.spec.IntLine) else (np.float64, np.float32)
        outcomes = {
            outcome_of(function, given | {name: kind(number)}) for kind in (type(usual), *kinds)
        }
        assert len(outcomes) == 1, number


def outcome_of(function, given) -> str:
    """ "taken", or the kind of error, whose words have another number."""
    try:
        function(**given)
    except (TypeError, ValueError, IndexError) as error:
        assert ", got " in str(error), error
        return type(error).__name__
    return "taken"


@pytest.mark.parametrize(("function", "name", "value"), CASES)
def test_what_a_line_rules_out_is_refused_by_name(function, name, value):
    given = arguments_of(function)
    first = next(iter(given), "")
    # logits or hidden states, as the other arguments say
    said = ["hidden states"] * (name in ("logits", "hidden"))
    # the first sets sizes, so another may be the one that differs
    others = [name, *said] if name != first else [*given, *said]
    with pytest.raises(
        (TypeError, ValueError), match="|".join(rf"\b{re.escape(n)}\b" for n in others)
    ):
        function(**given | {name: value})


# numbers per token that a loss differentiates; its line says of every other one that it is a
# constant
TRAINED = {"log_prob", "other", "chosen", "rejected", "values"}
LOSSES = [name for name in hl.losses.__all__ if inspect.isfunction(getattr(hl.losses, name))]


def arguments_of_loss(name) -> tuple[dict, set, set]:
    """Arguments of a loss by name, all real numbers of other values; names of those, and of the
    constants of them."""
    loss = getattr(hl.losses, name)
    lines = {
        key: found
        for key, line in loss.lines.items()
        if (found := tensor_line(line)) and not found.constant
    }
    real = {key for key, line in lines.items() if line.kind in ("floating point", "real numbers")}
    parameters, generator = inspect.signature(loss).parameters, torch.Generator().manual_seed(0)
    given = {
        key: x
        for key, x in arguments_of(loss).items()
        if key in lines or parameters[key].default is inspect._empty
    }
    given |= {
        key: given[key] * (0.5 + torch.rand(given[key].shape, generator=generator))
        for key in sorted(real)
    }
    given |= {"support": "tail"} if "support" in given else {}
    return given, real, {key for key in real if lines[key].detached}


def stacked(values):
    """What a loss returns, values per token or a dictionary of metrics, as one tensor."""
    return (
        values
        if isinstance(values, torch.Tensor)
        else torch.stack([x.float() for x in values.values()])
    )


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_differentiates_no_constant(name):
    """Where all constants were computed from what is trained, the gradient is that of detached
    ones."""
    loss, (given, real, constants) = getattr(hl.losses, name), arguments_of_loss(name)
    assert real - constants <= TRAINED
    given |= {key: torch.nn.Parameter(given[key]) for key in real - constants}
    leaves, gradients = (
        [given[key] for key in real - constants] + [torch.nn.Parameter(torch.ones(2))],
        [],
    )
    for trained in (False, True):
        sum_of_trained = sum(leaf.sum() for leaf in leaves)
        gap = sum_of_trained - sum_of_trained.detach()
        values = stacked(
            loss(
                **given
                | {key: given[key] + i * gap for i, key in enumerate(constants, 1) if trained}
            )
        )
        assert values.requires_grad == (bool(real - constants) and "metrics" not in name)
        gradients.append(
            torch.autograd.grad(values.sum() + 0 * leaves[-1].sum(), leaves, allow_unused=True)
        )
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


def by_position(name) -> list[str]:
    """Names of a loss's arguments up to the first one that has to be given by its name."""
    parameters = inspect.signature(getattr(hl.losses, name)).parameters.values()
    return [x.name for x in parameters if x.kind == x.POSITIONAL_OR_KEYWORD]


@pytest.mark.parametrize("name", LOSSES)
def test_constants_that_are_given_by_position_get_no_gradient(name):
    loss, (given, real, constants) = getattr(hl.losses, name), arguments_of_loss(name)
    given |= {key: torch.nn.Parameter(given[key]) for key in real}
    first = [key for key in by_position(name) if key in given]
    assert first == by_position(name)[: len(first)]  # none is left out between others
    values = stacked(
        loss(
            *[given[key] for key in first], **{key: given[key] for key in given if key not in first}
        )
    )
    assert torch.equal(values, stacked(loss(**given)))
    leaves = [given[key] for key in sorted(constants)] + [torch.nn.Parameter(torch.ones(2))]
    grads = torch.autograd.grad(values.sum() + 0 * leaves[-1].sum(), leaves, allow_unused=True)
    assert grads[:-1] == (None,) * len(constants)


def test_there_are_constants_that_can_be_given_by_position():
    found = {name for name in LOSSES if arguments_of_loss(name)[2] & {*by_position(name)}}
    assert found >= {
        "dpo",
        "ipo",
        "kto",
        "icepop",
        "truncated_importance_weight",
        "times_temperature_squared",
    }


def test_an_argument_without_a_line_does_not_import():
    def function(x: torch.Tensor, scale: hl.spec.Positive = 1.0): ...

    with pytest.raises(TypeError, match="annotation of x must be a line"):
        hl.spec.checked(function)


def test_the_docstring_of_a_checked_function_says_what_its_arguments_are():
    says = inspect.getdoc(hl.losses.dpo)
    assert (
        "beta: positive and finite in fp32. Weight of the reference." in says
        and "[pairs] floating point" in says
    )
    assert (
        "reference_chosen: constant [pairs] floating point." in says
        and "\n    chosen: [pairs] floating" in says
    )
    assert hl.losses.dpo.__name__ == "dpo"
    assert "summed" not in inspect.getdoc(hl.losses.orpo).lower()
    empty = [
        name
        for name, function in CHECKED.items()
        if re.search(r"^Args:\n\n|\. ,", inspect.getdoc(function) or "", re.M)
    ]
    assert not empty, "sections without an argument, or what follows `as in` is no sentence"
