"""A loss's terms as the source of a CUDA function of one token, traced from the PyTorch that
defines them.

A kernel that calls it has the loss and its derivatives where it merges a row, so that any
arithmetic on a token's statistics and inputs takes one launch: see `engine.one_read.launch`.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from ...statistics import VocabStatistics
from ..reductions import StatisticValue
from .params import GIVENS as MOST_INPUTS
from .params import KNOWN as STATISTICS
from .params import OF_ENTRIES
from .params import TERMS as SLOPES

INFINITE = "__int_as_float(0x7f800000)"
# kinds of operands: a float or a bool of each token, a number of Python
FLOAT, BOOL, NUMBER = "fbn"
CPP = {FLOAT: "float", BOOL: "bool"}


class Operation(NamedTuple):
    """The meaning of an operation of torch for operands of some kinds, which is torch's for every
    value."""

    kinds: tuple[str, ...]  # of the operands, as many as they are: a letter each
    expression: str  # of the operands, in C++
    result: str | None = FLOAT  # None: the kind of the first operand
    of_bools: str | None = None  # the expression of two bools, whose result is one, too


def _arithmetic(expression: str, of_bools: str | None = None) -> Operation:
    """A sum, product or the like. Of a bool and a number it has another type in torch."""
    return Operation(("ff", "fn", "nf", "fb", "bf"), expression, of_bools=of_bools)


def _comparison(expression: str) -> Operation:
    return Operation(("ff", "fn", "nf"), expression, BOOL)


def _of_float(expression: str, result: str = FLOAT) -> Operation:
    return Operation((FLOAT,), expression, result)


def _of_bools(expression: str, count: int) -> Operation:
    return Operation((count * BOOL,), expression, BOOL)


SAME = Operation((FLOAT, BOOL), "{0}", None)
CHOICE = Operation(("bff", "bfn", "bnf"), "{0} ? (float){1} : (float){2}")
FILL = Operation(("fbn", "fbf"), "{1} ? (float){2} : {0}")
# NaN where one of both is
AT_LEAST, AT_MOST = (f"({{0}} {sign} {{1}} || {{1}} != {{1}} ? {{1}} : {{0}})" for sign in "<>")
SIGN = "(float)(0.f < {0}) - (float)({0} < 0.f)"
# Overload of an operation of torch -> its meaning. What is not here, or not for these kinds, is not
# arithmetic.
OPERATIONS = {
    **dict.fromkeys(("add.Tensor", "add.Scalar"), _arithmetic("{0} + {1}", "{0} || {1}")),
    **dict.fromkeys(("sub.Tensor", "sub.Scalar"), _arithmetic("{0} - {1}")),
    **dict.fromkeys(("rsub.Tensor", "rsub.Scalar"), _arithmetic("{1} - {0}")),
    **dict.fromkeys(("mul.Tensor", "mul.Scalar"), _arithmetic("{0} * {1}", "{0} && {1}")),
    **dict.fromkeys(("div.Tensor", "div.Scalar"), _arithmetic("{0} / {1}")),
    "neg.default": _of_float("-{0}"),
    "reciprocal.default": _of_float("1.f / {0}"),
    "abs.default": _of_float("fabsf({0})"),
    **dict.fromkeys(("sgn.default", "sign.default"), _of_float(SIGN)),
    "exp.default": _of_float("expf({0})"),
    "expm1.default": _of_float("expm1f({0})"),
    "log.default": _of_float("logf({0})"),
    "log1p.default": _of_float("log1pf({0})"),
    "sqrt.default": _of_float("sqrtf({0})"),
    "tanh.default": _of_float("tanhf({0})"),
    "tanh_backward.default": Operation(("ff",), "{0} * (1.f - {1} * {1})"),
    "sigmoid.default": _of_float("1.f / (1.f + expf(-{0}))"),
    "sigmoid_backward.default": Operation(("ff",), "{0} * ((1.f - {1}) * {1})"),
    **{
        f"{name}.{overload}": _comparison(f"{{0}} {sign} {{1}}")
        for name, sign in {
            "eq": "==",
            "ne": "!=",
            "lt": "<",
            "le": "<=",
            "gt": ">",
            "ge": ">=",
        }.items()
        for overload in ("Tensor", "Scalar")
    },
    "isnan.default": _of_float("{0} != {0}", BOOL),
    "isinf.default": _of_float(f"fabsf({{0}}) == {INFINITE}", BOOL),
    **dict.fromkeys(("bitwise_and.Tensor", "logical_and.default"), _of_bools("{0} && {1}", 2)),
    **dict.fromkeys(("bitwise_or.Tensor", "logical_or.default"), _of_bools("{0} || {1}", 2)),
    **dict.fromkeys(("bitwise_not.default", "logical_not.default"), _of_bools("!{0}", 1)),
    **dict.fromkeys(("where.self", "where.ScalarOther", "where.ScalarSelf"), CHOICE),
    **dict.fromkeys(("masked_fill.Scalar", "masked_fill.Tensor"), FILL),
    "threshold.default": Operation(("fnn",), "({0} <= {1} ? (float){2} : {0})"),
    "clamp_min.default": Operation(("fn",), AT_LEAST),
    "clamp_max.default": Operation(("fn",), AT_MOST),
    **dict.fromkeys(("clamp_min.Tensor", "maximum.default"), Operation(("ff",), AT_LEAST)),
    **dict.fromkeys(("clamp_max.Tensor", "minimum.default"), Operation(("ff",), AT_MOST)),
    **dict.fromkeys(
        ("clamp.default", "clamp.Tensor"),
        Operation(("fnn", "fff"), AT_MOST.replace("{1}", "{2}").replace("{0}", AT_LEAST)),
    ),
    "full_like.default": Operation(("fn",), "(float){1}"),
    "zeros_like.default": _of_float("0.f"),
    "ones_like.default": _of_float("1.f"),
    "scalar_tensor.default": Operation((NUMBER,), "(float){0}"),
    **dict.fromkeys(
        ("detach.default", "alias.default", "clone.default", "lift_fresh_copy.default"), SAME
    ),
    # sizes, which are those of a token for every operand
    **dict.fromkeys(("view.default", "expand.default"), SAME),
    "_to_copy.default": SAME,
}
POWERS = {1: "{0}", 2: "{0} * {0}", 3: "{0} * {0} * {0}", 0.5: "sqrtf({0})", -1: "1.f / {0}"}
SIZED = "view.default", "expand.default"  # whose operands after the first are sizes
CASTS = {  # kind of an operand, dtype of the result -> expression and kind of the result
    (FLOAT, torch.float32): ("(float)({0})", FLOAT),
    (BOOL, torch.float32): ("(float)({0})", FLOAT),
    (FLOAT, torch.bool): ("{0} != 0.f", BOOL),
    (BOOL, torch.bool): ("{0}", BOOL),
}
# keywords that no number depends on
IGNORED = {"layout", "device", "pin_memory", "memory_format", "implicit"}


class RowFunction(NamedTuple):
    """The weighted terms of a loss as a function of one token. Their weights are arguments: another
    weight compiles nothing."""

    source: str  # of `row_function`, see `one_read.cu`
    n_terms: int
    inputs: tuple[str, ...]  # whose values [N] it takes, in this order
    has_entropy: bool  # whether a derivative by the entropy is not 0


class TeacherOfToken(NamedTuple):
    """The part of a `Teacher` or `TopKTeacher` that terms of a row function may read, a number per
    token. The tail of the latter is what its entries leave: others have no row function."""

    student_temperature_or_default: torch.Tensor
    renormalize: bool = False
    tail_log_prob: None = None


class NotArithmetic(Exception):
    """A term is more than arithmetic on a token's numbers. Its text says what is needed, after
    "needs", and what was found."""

    @classmethod
    def found(cls, what) -> NotArithmetic:
        return cls(f"pointwise terms that are arithmetic on a token's numbers, got {what}")


def known_of(want: Iterable[str]) -> set[str]:
    """Those of `STATISTICS` that a call has which wants these optional statistics."""
    found = {"lse", "log_prob", *want} & {*STATISTICS}
    with_others = {"mass": {"total"}, "teacher_mass": {*OF_ENTRIES}}
    return found | {name for name, others in with_others.items() if found & others}


def row_function(terms, vocab_size: int = 0, want: Iterable[str] = STATISTICS) -> RowFunction:
    """The terms' function. want: optional statistics of the call; terms see no others.

    Raises NotArithmetic if one is more than arithmetic on `STATISTICS`, on the size of the
    vocabulary and on inputs of a number per token, or does not promise to stay the same,
    `Term.pointwise`.
    """
    functions = [term for term in terms if not isinstance(term.function, StatisticValue)]
    others = [term.name for term in functions if not term.pointwise]
    if others:
        raise NotArithmetic(
            "terms that are statistics, or pointwise functions of them (Term.pointwise), got "
            f"{others}"
        )
    inputs = tuple(dict.fromkeys(name for term in functions for name in term.inputs))
    if len(inputs) > MOST_INPUTS:
        raise NotArithmetic(f"at most {MOST_INPUTS} inputs of pointwise terms, got {list(inputs)}")
    from torch.fx.experimental.proxy_tensor import make_fx  # which loads much

    used: list[bool] = []

    def traced(*rows):
        values, slopes = _values_and_slopes(terms, inputs, vocab_size, known_of(want), rows)
        used[:] = [slope is not None for slope in slopes]
        nothing = torch.zeros_like(rows[0])
        return [*values, *(nothing if slope is None else slope for slope in slopes)]

    count = len(STATISTICS) + len(inputs) + len(terms)
    try:
        with _plain_torch():
            example = torch.zeros(count, 2, dtype=torch.float32, device="cpu")
            graph = make_fx(traced)(*example.unbind(0)).graph
        source = _source(graph, len(terms), inputs)
    except (TypeError, AttributeError, RuntimeError, ValueError) as error:
        unknown = {name for term in terms for name in term.want} - {*STATISTICS}
        if unknown:
            text = f"no statistics but {list(STATISTICS)}, got {sorted(unknown)}"
            raise NotArithmetic(text) from error
        raise NotArithmetic.found(f"{type(error).__name__}: {error}") from error
    return RowFunction(source, len(terms), inputs, used[SLOPES.index("entropy")])


def _values_and_slopes(terms, inputs: tuple[str, ...], vocab_size: int, known_names, rows):
    """The terms' values, and derivatives of their weighted sum by `SLOPES`, None where there is
    none. known_names: of statistics that they may read. rows: vectors of `STATISTICS`, of the
    inputs, and of the terms' weights."""
    absent = VocabStatistics._make([None] * len(VocabStatistics._fields))
    given = dict(zip(inputs, rows[len(STATISTICS) :]))
    if "teacher" in given:
        given["teacher"] = TeacherOfToken(given["teacher"])
    with torch.enable_grad():
        known = [row.detach().requires_grad_() for row in rows[: len(STATISTICS)]]
        of_call = {name: x for name, x in zip(STATISTICS, known) if name in known_names}
        stats = absent._replace(vocab_size=vocab_size, **of_call)
        values = [_value(term, stats, given) for term in terms]
        total = torch.zeros_like(known[0])
        for weight, value in zip(rows[-len(terms) :], values):
            total = total + weight * value
        by = known[: len(SLOPES)]
        one = torch.ones_like(known[0])
        slopes = torch.autograd.grad(total, by, one, allow_unused=True)
    return values, slopes


def _value(term, stats: VocabStatistics, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """A term's value of each token. A statistic is one whatever the term's inputs are."""
    if isinstance(term.function, StatisticValue):
        return term.function(stats)
    return term.function(stats, **{name: given[name] for name in term.inputs})


@contextlib.contextmanager
def _plain_torch():
    """Enter a block in which a caller's autocast and hooks of saved tensors mean nothing."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.autocast("cpu", enabled=False))
        # where they are not enabled, there are none
        if torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_same, _same))
        yield


def _same(x):
    return x


def _source(graph, n_terms: int, inputs) -> str:
    """CUDA C++ of a traced function. Raises NotArithmetic."""
    lines: list[str] = []
    results: list[str] = []
    names: dict[torch.fx.Node, str] = {}
    kinds: dict[torch.fx.Node, str] = {}
    arguments = itertools.count()
    for node in graph.nodes:
        if node.op == "placeholder":
            names[node], kinds[node] = f"x[{next(arguments)}]", FLOAT
        elif node.op == "output":
            if any(kinds[result] != FLOAT for result in node.args[0]):
                raise NotArithmetic.found("a value that is no float")
            results = [names[result] for result in node.args[0]]
        elif node.op == "call_function":
            expression, kinds[node] = _expression(node, names, kinds)
            names[node] = f"v{len(lines)}"
            lines.append(f"  const {CPP[kinds[node]]} {names[node]} = {expression};")
        else:
            raise NotArithmetic.found("a tensor that a function closes over")
    values, by = ", ".join(results[:n_terms]), ", ".join(results[n_terms:])
    body = "\n".join(lines)
    return (
        "#define ROWS\n"
        f"constexpr int TERMS = {n_terms}, GIVEN = {len(inputs)};\n"
        f"struct Row {{ float value[TERMS], by[{len(SLOPES)}]; }};\n"
        f"__device__ __forceinline__ Row row_function(const float* x) {{\n{body}\n"
        f"  return {{{{{values}}}, {{{by}}}}};\n}}\n"
    )


def _expression(node, names: dict, kinds: dict) -> tuple[str, str]:
    """An operation of the trace in C++, and the kind of its result. Raises NotArithmetic."""
    name = f"{node.target.overloadpacket.__name__.removesuffix('_')}.{node.target._overloadname}"
    operands = list(node.args[:1] if name in SIZED else node.args)
    keywords = {
        key: value for key, value in node.kwargs.items() if value is not None and key not in IGNORED
    }
    dtype = keywords.pop("dtype", None)
    if name.startswith("clamp."):
        name, operands = _clamp(name, operands)
    if name.startswith("clamp") and any(isinstance(x, float) and x != x for x in operands):
        raise NotArithmetic.found(f"{node.target} to NaN")  # versions of torch differ
    found = "".join(_kind(x, kinds) for x in operands)
    if name == "pow.Tensor_Scalar" and found == "fn":
        expression, result = POWERS.get(operands[1]), FLOAT
    else:
        expression, result = _meaning_as(dtype, name, found)
    if expression is None or keywords:
        raise NotArithmetic.found(node.target)
    return expression.format(*[_operand(x, names) for x in operands]), result


def _meaning_as(dtype: torch.dtype | None, name: str, kinds: str) -> tuple[str | None, str]:
    """As `_meaning`, of an operation whose result has a dtype that was asked for."""
    if dtype is not None and (name == "_to_copy.default" or name in SIZED):
        return CASTS.get((kinds, dtype), (None, FLOAT))
    expression, result = _meaning(name, kinds)
    if dtype is None or (dtype, result) == (torch.float32, FLOAT):
        return expression, result
    return None, result


def _meaning(name: str, kinds: str) -> tuple[str | None, str]:
    """The expression of an operation for operands of these kinds, or None, and the kind of its
    result."""
    operation = OPERATIONS.get(name)
    if operation is not None and operation.of_bools and kinds == 2 * BOOL:
        return operation.of_bools, BOOL
    if operation is None or kinds not in operation.kinds:
        return None, FLOAT
    return operation.expression, operation.result or kinds[0]


def _clamp(name: str, operands: list) -> tuple[str, list]:
    """The operation that clamps to the bounds that are there, and its operands."""
    overload = name.removeprefix("clamp.")
    low, high = (*operands[1:], None)[:2]
    if low is None:
        return f"clamp_max.{overload}", [operands[0], high]
    if high is None:
        return f"clamp_min.{overload}", [operands[0], low]
    return name, operands


def _kind(x: Any, kinds: dict) -> str:
    """The letter of an operand. Raises NotArithmetic for what is no float, bool or number."""
    if isinstance(x, torch.fx.Node):
        return kinds[x]
    if isinstance(x, (int, float)) and not isinstance(x, bool):
        return NUMBER
    raise NotArithmetic.found(f"an operand of {type(x).__name__}")


def _operand(x: torch.fx.Node | float, names: dict) -> str:
    if isinstance(x, torch.fx.Node):
        return names[x]
    if math.isnan(x):
        return "__int_as_float(0x7fc00000)"
    if math.isinf(x):
        return INFINITE if x > 0 else f"(-{INFINITE})"
    return f"({float(torch.tensor(x, dtype=torch.float32, device='cpu')).hex()}f)"
