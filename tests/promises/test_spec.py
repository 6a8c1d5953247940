"""Every argument of a checked function has a line, and what the line rules out is refused by the argument's name."""

import inspect
import math
import re
from unittest import mock

import pytest
import torch
from energy_statistic import Energy

import tp_headloss
from tp_headloss import (
    CausalLMLoss,
    HeadLoss,
    IdSets,
    Linear,
    PolicyGradient,
    SamplingRule,
    Sequences,
    TopKTeacher,
    Transform,
    VocabParallelEmbedding,
    VocabParallelHead,
    VocabShard,
    VocabStatistics,
    combine_metrics,
    kept_ids,
    linear_vocab_statistics,
    log_probs,
    losses,
    mean_metrics,
    reduce_metrics,
    register_statistic,
    sample,
    select_rows,
    spec,
    statistics,
    topk_log_probs,
    vocab_statistics,
)
from tp_headloss.integrations import nemo_rl, skyrl, slime
from tp_headloss.integrations.verl import functions

B, S, V = 2, 3, 3
MASK = torch.ones(B, S, dtype=torch.bool)
WANT = "total", "entropy", "topk_forward_kl", "topk_reverse_kl", "topk_jsd", "topk_log_mass", "tail_log_mass"
STATS = vocab_statistics(
    torch.zeros(B, S, V),
    torch.zeros(B, S, dtype=torch.long),
    want=WANT,
    teacher=TopKTeacher(torch.zeros(B, S, 1, dtype=torch.long), torch.full((B, S, 1), -0.4), renormalize=False),
)
STATS = STATS._replace(forward_kl=STATS.lse, teacher_entropy=STATS.lse)  # of a whole teacher
OBJECTS = {Linear: Linear(), Sequences: Sequences.from_mask(MASK), VocabStatistics: STATS, Transform: Transform()}
RELATED = {  # values that go with others
    "clip": (0.2, 0.2),
    "dual_clip": 3.0,
    "inplace": False,
    "hidden_grad": "none",
    "scale": 1.0,
    "softcap": 2.0,
    "support": "topk",
}
NAN = math.nan
LOGITS, IDS, HIDDEN, WEIGHT = torch.zeros(B, S, 8), torch.zeros(B, S).long(), torch.zeros(B, S, 6), torch.zeros(8, 6)
BOUNDS = {"vocab_start_index": 0, "vocab_end_index": 8}
NEXT = BOUNDS | {"target": IDS, "tp_group": None}
PACKED = {"cu_seqlens_padded": torch.tensor([0, S]), "unpacked_seqlen": S}
NEXT_PACKED = BOUNDS | PACKED | {"target": IDS[:1], "group": None}
ACTIONS = PACKED | {"num_actions": 1, "attention_mask": MASK[:1], "loss_mask": None, "cp_group": None, "tp_group": None}
DRAFT = {"student_logits": LOGITS, "teacher_logits": LOGITS, "mask": MASK.float()}
STATES = {"hidden": HIDDEN, "lm_head_weight": WEIGHT}
OWN_PART = Linear(hidden_grad="none")
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
    slime.calculate_log_probs_and_entropy: {"logits": LOGITS[0], "tokens": IDS[0], "tp_group": None},
    functions.logits_processor: {"group": None, "vocab_size": 8},
    functions.linear_cross_entropy: {"hidden": HIDDEN, "weight": WEIGHT, "labels": IDS},
}  # fmt: skip


def of_terms(**keywords):
    """`HeadLoss.forward` with two inputs."""
    return HeadLoss([PolicyGradient("clip")])(**keywords)


def of_terms_from_hidden_states(**keywords):
    """`HeadLoss.linear` with two inputs."""
    return HeadLoss([PolicyGradient("clip")]).linear(**keywords)


def of_a_family(**keywords):
    """`register_statistic`, forgotten afterwards."""
    with mock.patch.object(statistics, "FAMILIES", statistics.FAMILIES):
        register_statistic(**keywords)


INPUTS = {"inputs": {"advantages": torch.ones(B, S), "old_log_prob": torch.zeros(B, S)}}
CALL, LINEAR_CALL = {"logits": LOGITS, "labels": IDS}, {"hidden": HIDDEN, "weight": WEIGHT, "labels": IDS}
ALL = {"sets": IdSets(IDS[..., None]), "ids": IDS[..., None], "total_weight": torch.ones(8)}
ALL |= {
    "want": ("total", "set_log_prob", "log_probs_at", "topk_forward_kl"),
    "teacher": TopKTeacher(IDS[..., None], -HIDDEN[..., :1]),
}
SHARD = VocabShard(0, 8, 8)
CORE = {
    HeadLoss: {},
    CausalLMLoss: {"head_loss": HeadLoss()},
    VocabParallelHead: {"hidden_size": 6, "shard": SHARD},
    VocabParallelEmbedding: {"hidden_size": 6, "shard": SHARD},
    vocab_statistics: CALL | ALL,
    log_probs: CALL,
    linear_vocab_statistics: LINEAR_CALL | ALL | {"bias": torch.zeros(8)},
    topk_log_probs: {"logits": HIDDEN, "weight": WEIGHT, "k": 2, "top_p": 0.5},
    kept_ids: {"logits": HIDDEN, "weight": WEIGHT, "rule": SamplingRule(2)},
    of_a_family: {"family": Energy()},
    sample: {"logits": HIDDEN, "weight": WEIGHT, "seed": 1, "positions": IDS},
    of_terms: CALL | INPUTS | {"token_weight": torch.ones(B, S), "denominator": torch.tensor(2.0)},
    of_terms_from_hidden_states: LINEAR_CALL | INPUTS | {"token_weight": torch.ones(B, S), "bias": torch.zeros(8)},
}
CONSTRUCTORS = {
    VocabShard: {"start": 0, "stop": 8, "vocab_size": 8},
    VocabShard.from_group: {"group": None, "vocab_size": 8},
    VocabShard.from_boundaries: {"boundaries": [0, 8], "vocab_size": 8},
    Sequences.from_mask: {"mask": MASK},
    Sequences.from_cu_seqlens: {"cu_seqlens": torch.tensor([0, S]), "mask": MASK},
    Sequences.from_ids: {"ids": IDS, "count": 1, "mask": MASK},
    IdSets.from_csr: {"ids": IDS[0], "offsets": torch.tensor([0, S])},
    select_rows: {"weight": WEIGHT, "ids": torch.tensor([1, 2]), "shard": SHARD},
    reduce_metrics: {"metrics": {"count": torch.ones(())}, "group": None},
    mean_metrics: {"outputs": HeadLoss()(LOGITS, IDS)},
    combine_metrics: {"parts": [{"count": torch.ones(())}]},
}
CORE |= CONSTRUCTORS
of_terms.lines, of_terms_from_hidden_states.lines = HeadLoss.forward.lines, HeadLoss.linear.lines
of_a_family.lines = register_statistic.lines
HOSTS |= CORE
CHECKED = {name: f for name, f in {**vars(losses), **vars(tp_headloss)}.items() if callable(f) and hasattr(f, "lines")}
del CHECKED["register_statistic"]  # of which all later tests would know
CHECKED |= {f"{f.__module__.rsplit('.')[-1]}.{f.__name__}": f for f in HOSTS if f not in CHECKED.values()}


def test_every_loss_has_lines():
    assert {name for name in losses.__all__ if inspect.isfunction(getattr(losses, name))} <= set(CHECKED)


def right(name, line):
    """A value that a line takes."""
    if isinstance(line, spec.AnyOf):
        return right(name, max(line.lines, key=lambda part: isinstance(part, spec.TensorLine)))
    if name in RELATED and not isinstance(line, spec.TensorLine):
        return RELATED[name]
    if isinstance(line, spec.TensorLine):
        sizes = {"..": (B, S), "pairs": (B,), "V": (V,), "width": (V,), "K": (2,), "H_t": (4,)}
        symbols = ("..",) if line.shape is None else line.shape
        shape = [n for symbol in symbols for n in sizes.get(symbol, (B,))]
        values = torch.full(shape, -0.5 if line.kind == "floating point" else 1.0)
        return values.bool() if line.kind == "bool" else values.long() if "int64" in line.kind else values
    if isinstance(line, spec.OneOf):
        return next(iter(line.names))
    if isinstance(line, spec.Instance):
        return OBJECTS[line.kind]
    if isinstance(line, spec.NumberLine):
        return max(line.low, 0.0) if line.high > 1 else (max(line.low, 0.0) + line.high) / 2
    if isinstance(line, spec.IntLine):
        return max(line.low, 1)
    simple = {spec.Callables: lambda stats: stats.lse, spec.Names: (), spec.Text: "text"}
    return simple[type(line)] if type(line) in simple else tuple([right("", line.line)] * line.count)


def wrong(line):
    """Values that a line rules out, by what is wrong with them."""
    if isinstance(line, spec.CheckedBy):
        return {} if line.function is None else {"text": "text", "number": 7}  # a group, or a parameter
    if isinstance(line, spec.TupleOf) and line.count is None:
        return {"number": 7, "texts": ("a",), "None": None}
    if isinstance(line, spec.AnyOf):
        others = [wrong(part) for part in line.lines]
        shared = set(others[0]).intersection(*others[1:])  # what no line takes
        return {k: v for k, v in others[0].items() if k in shared and not (v is None and line.optional)}
    values = {"text": "text", "None": None, "object": object()}
    if isinstance(line, spec.TensorLine):
        good = right("", line)
        values |= {"list": [1.0], "number": 1.5, "complex": good.to(torch.complex64), "meta": good.to("meta")}
        dtypes = {"floating point": "long bool", "bool": "float long", "int64 or int32": "float bool"}
        dtypes |= {"bool or integers": "float", "real numbers or bool": ""}
        values |= {dtype: getattr(good, dtype)() for dtype in dtypes.get(line.kind, "bool").split()}
        if line.constant:
            values["trained"] = good.clone().requires_grad_()
        if line.shape is not None:
            values["one dimension more"] = good[None]
        if line.shape is not None and good.dim() > 1:
            values["rows"] = good[:, 0]
            values |= {} if line.broadcasts else {"a column": good[:, :1]}
    elif isinstance(line, spec.OneOf):
        values |= {"unknown": "unknown", "number": 7} | ({} if line.names == (True, False) else {"flag": True})
    elif isinstance(line, spec.Callables):
        values |= {"number": 7, "class": int}
    elif isinstance(line, spec.Names):
        values |= {"number": 7, "numbers": (1,)} | ({"unknown": ("unknown",)} if line.known else {})
    elif isinstance(line, spec.Text):
        values = {"None": None, "object": object(), "number": 7, "empty": ""}
    elif isinstance(line, spec.IntLine):
        values |= {"float": 1.5, "flag": True, "tensor": torch.tensor(1), "low": line.low - 1}
    elif isinstance(line, spec.Instance):
        values |= {"number": 1.5, "tensor": torch.ones(B, S)}
        if line.kind is Sequences:
            values["of other tokens"] = Sequences.from_mask(MASK[:, :2])
    else:
        values |= {"list": [], "flag": True, "complex": 1j, "tensor": torch.tensor(0.5)}
        numbers = {"nan": NAN}
        if isinstance(line, spec.NumberLine):
            numbers |= {"low": line.low - 1 - abs(line.low)} if line.low > -math.inf else {}
            numbers |= {"high": line.high + 1 + abs(line.high)} if line.high < math.inf else {}
            values |= numbers
        else:
            values |= {"one more": (*right("", line), 0.5), "number": 0.5, "texts": ("a",) * line.count}
            if line.ordered:
                values |= {"unordered": (2.0, 1.0), "nan": (NAN, 1.0)}
    return values


OF_OTHERS = "meta", "rows", "a column", "one dimension more"  # wrong beside another argument of the tokens alone


def tensor_line(line):
    """The line of a tensor in a line, or None."""
    return next((x for x in getattr(line, "lines", (line,)) if isinstance(x, spec.TensorLine)), None)


def sets_sizes(function, name, what) -> bool:
    """True if another argument than this one has the shape (or for "meta" the device) of the tokens."""
    own = tensor_line(function.lines[name])
    for other, line in function.lines.items():
        tensor = tensor_line(line)
        if isinstance(line, spec.Instance) and line.kind in (Sequences, VocabStatistics):
            return True
        alike = tensor is not None and tensor.shape != () and (tensor.shape is None) == (own.shape is None)
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


@pytest.mark.parametrize(("function", "name", "value"), CASES)
def test_what_a_line_rules_out_is_refused_by_name(function, name, value):
    given = arguments_of(function)
    first = next(iter(given), "")
    said = ["hidden states"] * (name in ("logits", "hidden"))  # logits or hidden states, as the other arguments say
    others = (
        [name, *said] if name != first else [*given, *said]
    )  # the first sets sizes, so another may be the one that differs
    with pytest.raises((TypeError, ValueError), match="|".join(rf"\b{re.escape(n)}\b" for n in others)):
        function(**given | {name: value})


def test_an_argument_without_a_line_does_not_import():
    def function(x: torch.Tensor, scale: spec.Positive = 1.0): ...

    with pytest.raises(TypeError, match="annotation of x must be a line"):
        spec.checked(function)


def test_the_docstring_of_a_checked_function_says_what_its_arguments_are():
    says = inspect.getdoc(losses.dpo)
    assert "beta: positive and finite in fp32. Weight of the reference." in says and "[pairs] floating point" in says
    assert tp_headloss.losses.dpo.__name__ == "dpo"
