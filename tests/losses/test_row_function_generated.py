"""Random terms of one's own, whose source is compiled for this CPU, beside torch: values,
derivatives, infinities."""

import contextlib
import ctypes
import itertools
import math
import os
import random
import shutil
import subprocess

import pytest
import torch
from test_row_function import PRELUDE

from tp_headloss import Term
from tp_headloss.engine.one_read.rows import SLOPES, STATISTICS, NotArithmetic, row_function
from tp_headloss.statistics import VocabStatistics

FULL = bool(os.environ.get("TP_HEADLOSS_FULL"))
TERMS = 350 if FULL else 100  # of a seed; to trace one takes most of the time
INPUTS = "a", "b"
NUMBERS = 0.0, 1.0, -0.5, 2.0, -3.0, 0.8, 1.2
UNARY = {
    "exp": torch.exp, "expm1": torch.expm1, "log": torch.log, "log1p": torch.log1p, "sqrt": torch.sqrt,
    "tanh": torch.tanh, "sigmoid": torch.sigmoid, "abs": torch.abs, "neg": torch.neg, "sign": torch.sign,
    "reciprocal": torch.reciprocal, "detach": torch.detach, "logsigmoid": torch.nn.functional.logsigmoid,
    "softplus": torch.nn.functional.softplus, "relu": torch.relu, "zeros_like": torch.zeros_like,
    "to bool and back": lambda x: x.bool().float(), "nan_to_num": torch.nan_to_num, "round": torch.round,
}  # fmt: skip
BINARY = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "maximum": torch.maximum,
    "minimum": torch.minimum, "add twice": lambda x, y: torch.add(x, y, alpha=2), "rsub": torch.rsub,
    "sub twice": lambda x, y: torch.sub(x, y, alpha=2), "rsub twice": lambda x, y: torch.rsub(x, y, alpha=2),
    "pow": lambda x, y: x**y, "floor div": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "clamp below": lambda x, y: torch.clamp(x, min=y), "clamp above": lambda x, y: torch.clamp(x, max=y),
}  # fmt: skip
COMPARISONS = {
    "<": torch.lt,
    "<=": torch.le,
    ">": torch.gt,
    ">=": torch.ge,
    "==": torch.eq,
    "!=": torch.ne,
}
OF_MASKS = {
    "and": torch.bitwise_and, "or": torch.bitwise_or, "logical and": torch.logical_and, "sum": torch.add,
    "product": torch.mul, "xor": torch.bitwise_xor, "less": torch.lt,
}  # fmt: skip


def number(choices):
    return (
        "number",
        choices.choice(
            (*NUMBERS, math.inf, -math.inf, math.nan) if choices.random() < 0.1 else NUMBERS
        ),
    )


def value(choices, depth):
    """A random expression of floats, as nested tuples."""
    if depth == 0 or choices.random() < 0.1:
        return ("value", choices.choice((*SLOPES, *INPUTS)))
    x, y = value(choices, depth - 1), value(choices, depth - 1)
    kind = choices.choice(
        ["unary", "unary", "binary", "binary", "with number", "power", "clamp", "mask"]
    )
    if kind == "unary":
        return ("call", UNARY, choices.choice(list(UNARY)), x)
    if kind == "binary":
        return ("call", BINARY, choices.choice(list(BINARY)), x, y)
    if kind == "with number":
        return ("call", BINARY, choices.choice(["add", "sub", "mul", "div", "rsub", "clamp below", "clamp above"]), x,
                number(choices))  # fmt: skip
    if kind == "power":
        return ("power", x, choices.choice([2, 3, 0.5, -1, 4]))
    if kind == "clamp":
        return ("clamp", x, *choices.sample([*NUMBERS, None], 2))
    how = choices.choice(["where", "where number", "fill", "times", "as float", "plus"])
    return (
        how,
        mask(choices, depth - 1),
        x,
        number(choices) if how in ("where number", "fill") else y,
    )


def mask(choices, depth):
    """A random expression of bools."""
    if depth <= 0 or choices.random() < 0.4:
        x = value(choices, max(depth - 1, 0))
        if choices.random() < 0.2:
            return (
                "call",
                {"isnan": torch.isnan, "isinf": torch.isinf},
                choices.choice(["isnan", "isinf"]),
                x,
            )
        other = number(choices) if choices.random() < 0.7 else value(choices, 0)
        return ("call", COMPARISONS, choices.choice(list(COMPARISONS)), x, other)
    x, y = mask(choices, depth - 1), mask(choices, depth - 1)
    if choices.random() < 0.2:
        return ("call", {"not": torch.logical_not}, "not", x)
    return ("call", OF_MASKS, choices.choice(list(OF_MASKS)), x, y)


def evaluated(node, known):
    kind, *rest = node
    if kind == "number":
        return rest[0]
    if kind == "value":
        return known[rest[0]]
    if kind == "call":
        functions, name, *operands = rest
        return functions[name](*[evaluated(x, known) for x in operands])
    if kind == "power":
        return evaluated(rest[0], known) ** rest[1]
    if kind == "clamp":
        low, high = rest[1:]
        return torch.clamp(evaluated(rest[0], known), low, high)
    here, x, y = (evaluated(part, known) for part in rest)
    if kind in ("where", "where number"):
        return torch.where(here, x, y)
    if kind == "fill":
        return x.masked_fill(here, y)
    if kind == "times":
        return here * x
    return here.float() * x if kind == "as float" else here + x


def term_of(expression) -> Term:
    def function(stats, a, b):
        # so that it depends on a statistic, without which a loss has no gradient
        known = {name: getattr(stats, name) for name in SLOPES} | {"a": a, "b": b}
        return evaluated(expression, known) + 0.0 * stats.lse.clamp(0.0, 0.0)

    return Term("own", function, want=("entropy", "total"), inputs=INPUTS, pointwise=True)


def in_torch(term, x):
    """The term's values and derivatives [n, 1 + 4], in the dtype of x; None where torch takes no
    such operands."""
    known = [column.clone().requires_grad_() for column in x.unbind(1)[: len(STATISTICS)]]
    stats = VocabStatistics._make([None] * len(VocabStatistics._fields))._replace(
        **dict(zip(STATISTICS, known))
    )
    try:
        values = term.function(stats, **dict(zip(INPUTS, x.unbind(1)[len(STATISTICS) :])))
        values.sum().backward()
    except RuntimeError:
        return None
    slopes = [
        torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in known[: len(SLOPES)]
    ]
    return torch.stack([values.detach(), *slopes], 1)


def compiled(sources, folder):
    """A library with a function for each source, in one compilation."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler here")
    parts = [PRELUDE]
    for i, source in enumerate(sources):
        loop = (
            f'extern "C" void rows_{i}(const float* x, float* out, int n) {{'
            "for (int i = 0; i < n; i++) {"
            f" const Row row = row_function(x + i * ({len(STATISTICS)} + GIVEN + TERMS));"
            " *out++ = row.value[0];"
            f" for (int k = 0; k < {len(SLOPES)}; k++) *out++ = row.by[k]; }} }}"
        )
        parts.append(f"namespace n{i} {{\n#undef ROWS\n{source}\n{loop}\n}}")
    file, library = folder / "rows.cpp", folder / "rows.so"
    file.write_text("\n".join(parts))
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O0", "-std=c++17", file, "-o", library], check=True
    )
    return ctypes.CDLL(str(library))


def points(choices, count):
    """Statistics, two inputs and a weight of 1 [count, ..]: ordinary numbers, and some that are NaN
    or infinite."""
    rows, size = [], len(STATISTICS) + 2
    for _ in range(count):
        row = [
            choices.choice([choices.uniform(-3, 3), choices.choice(NUMBERS)]) for _ in range(size)
        ]
        if choices.random() < 0.3:
            row[choices.randrange(size)] = choices.choice([math.nan, math.inf, -math.inf])
        rows.append([*row, 1.0])
    return torch.tensor(rows)


@pytest.mark.parametrize("seed", range(4 if FULL else 1))
def test_random_terms_have_the_values_and_derivatives_of_torch(seed, tmp_path):
    choices = random.Random(seed)
    found = []
    for expression in (value(choices, choices.choice([2, 3, 4])) for _ in range(TERMS)):
        term = term_of(expression)
        # the others have an operation that is not arithmetic, or has another meaning
        with contextlib.suppress(NotArithmetic):
            found.append((expression, term, row_function([term])))
    assert len(found) > TERMS // 4
    library, wrong = compiled([function.source for *_, function in found], tmp_path), []
    for i, (expression, term, _) in enumerate(found):
        x = points(choices, 60)
        out = torch.full((len(x), 1 + len(SLOPES)), 7.0)
        getattr(library, f"rows_{i}")(
            ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(out.data_ptr()), len(x)
        )
        expected, exact = in_torch(term, x), in_torch(term, x.double())
        assert expected is not None
        own_error = (expected.double() - exact).abs().nan_to_num(nan=math.inf)
        tolerance = 1e-4 + 1e-4 * expected.abs() + 10 * own_error
        alike = torch.isclose(out, expected, rtol=0, atol=0, equal_nan=True) | (
            (out - expected).abs() <= tolerance
        )
        if not alike.all():
            at = (~alike).nonzero()[0].tolist()
            wrong.append(
                (expression, x[at[0]].tolist(), out[tuple(at)].item(), expected[tuple(at)].item())
            )
    assert not wrong, wrong[0]


MASKS = list(itertools.product(("sum", "product"), ("times", "as float", "where")))


@pytest.mark.parametrize("of_masks, how", MASKS)
def test_masks_are_added_and_multiplied_as_bools(of_masks, how, tmp_path):
    masks = [("call", COMPARISONS, "<", ("value", "lse"), ("number", x)) for x in (0.8, 1.2)]
    both = ("call", OF_MASKS, of_masks, *masks)
    term = term_of((how, both, ("value", "log_prob"), ("value", "a")))
    x = points(random.Random(1), 30)
    out, function = torch.zeros(30, 1 + len(SLOPES)), row_function([term])
    compiled([function.source], tmp_path).rows_0(
        ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(out.data_ptr()), 30
    )
    assert torch.allclose(out, in_torch(term, x), equal_nan=True)


@pytest.mark.parametrize("bounds", [(math.nan, None), (None, math.nan), (0.0, math.nan)])
def test_a_bound_that_is_nan_is_left_to_torch(bounds):
    """Its meaning differs between versions."""
    low, high = bounds
    with pytest.raises(NotArithmetic, match=r"clamp.* to NaN"):
        row_function([Term("own", lambda stats: stats.lse.clamp(low, high), pointwise=True)])
