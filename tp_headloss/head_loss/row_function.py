"""A loss's terms as the source of a CUDA function of one token, traced from the PyTorch that defines them.

A kernel that calls it has the loss and its derivatives where it merges a row, so that any arithmetic on a token's
statistics and inputs takes one launch: see `engine.one_read`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from ..statistics import VocabStatistics
from .statistic_value import StatisticValue

SLOPES = "lse", "log_prob", "entropy", "total"  # statistics with a gradient
STATISTICS = (*SLOPES, "mass")  # arguments of the function, before the inputs
MOST_INPUTS = 8  # as in the kernel

INFINITE = "__int_as_float(0x7f800000)"
# operation of torch -> expression of its operands, which are floats and bools
OPERATIONS = {
    "add": "{0} + {1}", "sub": "{0} - {1}", "rsub": "{1} - {0}", "mul": "{0} * {1}", "div": "{0} / {1}",
    "neg": "-{0}", "reciprocal": "1.f / {0}", "exp": "expf({0})", "expm1": "expm1f({0})", "log": "logf({0})",
    "log1p": "log1pf({0})", "sqrt": "sqrtf({0})", "tanh": "tanhf({0})", "sigmoid": "1.f / (1.f + expf(-{0}))",
    "sigmoid_backward": "{0} * ((1.f - {1}) * {1})", "tanh_backward": "{0} * (1.f - {1} * {1})", "abs": "fabsf({0})",
    "eq": "{0} == {1}", "ne": "{0} != {1}", "lt": "{0} < {1}",
    "le": "{0} <= {1}", "gt": "{0} > {1}", "ge": "{0} >= {1}", "isnan": "{0} != {0}",
    "isinf": f"fabsf({{0}}) == {INFINITE}",
    "bitwise_and": "{0} && {1}", "bitwise_or": "{0} || {1}", "logical_and": "{0} && {1}", "logical_not": "!{0}",
    "bitwise_not": "!{0}", "where": "{0} ? (float){1} : (float){2}", "masked_fill": "{1} ? (float){2} : {0}",
    "clamp": "{0} < {1} ? {1} : {0} > {2} ? {2} : {0}", "clamp_min": "{0} < {1} ? {1} : {0}",
    "clamp_max": "{0} > {1} ? {1} : {0}", "full_like": "{1}", "zeros_like": "0.f", "ones_like": "1.f",
    "scalar_tensor": "{0}",
    **dict.fromkeys(("sgn", "sign"), "(float)(0.f < {0}) - (float)({0} < 0.f)"),
    **dict.fromkeys(("detach", "alias", "view", "view_as", "expand", "clone", "lift_fresh_copy"), "{0}"),
}  # fmt: skip
POWERS = {1: "{0}", 2: "{0} * {0}", 3: "{0} * {0} * {0}", 0.5: "sqrtf({0})", -1: "1.f / {0}"}
IGNORED = {"dtype", "layout", "device", "pin_memory", "memory_format"}  # arguments that no expression depends on


class RowFunction(NamedTuple):
    """The weighted terms of a loss as a function of one token."""

    source: str  # of `row_function`, see `one_read.cu`
    n_terms: int
    inputs: tuple[str, ...]  # whose values [N] it takes, in this order
    has_entropy: bool  # whether a derivative by the entropy is not 0


class _NotArithmetic(Exception):
    """A term is more than arithmetic on a token's numbers."""


def row_function(terms, vocab_size: int = 0) -> RowFunction | None:
    """The terms' function; None if one is more than arithmetic on `STATISTICS`, on the size of the vocabulary and on
    inputs of a number per token, or does not promise to stay the same, `Term.pointwise`."""
    if not all(term.pointwise or isinstance(term.function, StatisticValue) for term in terms):
        return None
    from torch.fx.experimental.proxy_tensor import make_fx  # which loads much

    inputs = tuple(dict.fromkeys(name for term in terms for name in term.inputs))
    if len(inputs) > MOST_INPUTS:
        return None
    used: list[bool] = []

    def values_and_slopes(*rows):
        with torch.enable_grad():
            known = [row.detach().requires_grad_() for row in rows[: len(STATISTICS)]]
            absent = VocabStatistics._make([None] * len(VocabStatistics._fields))
            stats = absent._replace(vocab_size=vocab_size, **dict(zip(STATISTICS, known)))
            given = dict(zip(inputs, rows[len(STATISTICS) :]))
            values = [term.function(stats, **{name: given[name] for name in term.inputs}) for term in terms]
            total = torch.zeros_like(known[0])
            for term, value in zip(terms, values):
                total = total + float(term.weight) * value
            by = known[: len(SLOPES)]
            slopes = torch.autograd.grad(total, by, torch.ones_like(known[0]), allow_unused=True)
            used[:] = [slope is not None for slope in slopes]
        return [*values, *(torch.zeros_like(known[0]) if slope is None else slope for slope in slopes)]

    rows = torch.zeros(len(STATISTICS) + len(inputs), 2).unbind(0)
    try:
        source = _source(make_fx(values_and_slopes)(*rows).graph, len(terms), inputs)
    except (_NotArithmetic, TypeError, AttributeError, RuntimeError, ValueError):
        return None
    return RowFunction(source, len(terms), inputs, used[SLOPES.index("entropy")])


def _source(graph, n_terms: int, inputs) -> str:
    """CUDA C++ of a traced function. Raises _NotArithmetic."""
    lines: list[str] = []
    results: list[str] = []
    names, n_arguments = {}, 0
    for node in graph.nodes:
        if node.op == "placeholder":
            names[node], n_arguments = f"x[{n_arguments}]", n_arguments + 1
        elif node.op == "output":
            results = [names[result] for result in node.args[0]]
        elif node.op == "call_function":
            names[node] = f"v{len(lines)}"
            lines.append(f"  const auto {names[node]} = {_expression(node, names)};")
        else:  # a tensor that the function closes over
            raise _NotArithmetic(node.op)
    values, by = ", ".join(results[:n_terms]), ", ".join(results[n_terms:])
    body = "\n".join(lines)
    return (
        "#define ROWS\n"
        f"constexpr int TERMS = {n_terms}, GIVEN = {len(inputs)};\n"
        f"struct Row {{ float value[TERMS], by[{len(SLOPES)}]; }};\n"
        f"__device__ __forceinline__ Row row_function(const float* x) {{\n{body}\n"
        f"  return {{{{{values}}}, {{{by}}}}};\n}}\n"
    )


def _expression(node, names) -> str:
    """An operation of the trace in C++. Raises _NotArithmetic."""
    name, args = node.target.overloadpacket.__name__.removesuffix("_"), list(node.args)
    to = OPERATIONS.get(name)
    if name == "_to_copy":
        to = {torch.float32: "(float)({0})", torch.bool: "{0} != 0.f"}.get(node.kwargs.get("dtype", torch.float32))
    elif name == "pow":
        to = None if isinstance(args[1], torch.fx.Node) else POWERS.get(args[1])
    elif name == "clamp" and None in (*args[1:], None)[:2]:
        to, args = OPERATIONS["clamp_min" if args[1] is not None else "clamp_max"], [x for x in args if x is not None]
    if to is None or {k for k, x in node.kwargs.items() if x is not None} - IGNORED:
        raise _NotArithmetic(node.target)
    return to.format(*[_operand(x, names) for x in args])


def _operand(x: Any, names) -> str:
    if isinstance(x, torch.fx.Node):
        return names[x]
    if isinstance(x, bool):
        return str(x).lower()
    if not isinstance(x, (int, float)):  # sizes, which no expression reads
        return ""
    if math.isnan(x):
        return "__int_as_float(0x7fc00000)"
    if math.isinf(x):
        return INFINITE if x > 0 else f"(-{INFINITE})"
    return f"({float(torch.tensor(x, dtype=torch.float32)).hex()}f)"
