"""Terms as the source of a function of one token: compiled for this CPU, it has the values and
derivatives of torch."""

import ctypes
import math
import shutil
import subprocess
from types import SimpleNamespace

import pytest
import torch

from tp_headloss import (
    CrossEntropy,
    Distillation,
    Entropy,
    HeadLoss,
    KLToReference,
    LKLoss,
    PolicyGradient,
    Term,
    ZLoss,
)
from tp_headloss.engine.one_read import kernel as one_read_kernel
from tp_headloss.engine.one_read.rows import SLOPES, STATISTICS, NotArithmetic, row_function
from tp_headloss.engine.reductions import StatisticValue
from tp_headloss.losses import KL_ESTIMATORS
from tp_headloss.statistics import VocabStatistics

PRELUDE = """
#include <cmath>
#define __device__
#define __forceinline__ static inline
#define __int_as_float(x) ((x) == 0x7f800000 ? INFINITY : NAN)
"""
ENTRY = f"""
constexpr int KNOWN = {len(STATISTICS)}, SLOPES = {len(SLOPES)};"""
ENTRY += """
extern "C" void rows(const float* x, float* out, int n) {
  for (int i = 0; i < n; i++) {
    const Row row = row_function(x + i * (KNOWN + GIVEN + TERMS));
    for (int k = 0; k < TERMS; k++) *out++ = row.value[k];
    for (int k = 0; k < SLOPES; k++) *out++ = row.by[k];
  }
}
"""


def _own(stats, scale):
    kept = (stats.log_prob > -3) & ~(stats.lse < 0) | stats.entropy.isnan()
    kept = kept * (stats.entropy < 1) + (stats.log_prob == 0)
    smooth = (
        stats.log_prob.exp().clamp(max=0.5).sqrt()
        + stats.lse.clamp(min=1.0).log()
        + stats.entropy.tanh()
    )
    return (
        torch.where(kept, smooth * scale, 1 / (1 + stats.lse**2))
        + stats.log_prob.sigmoid() ** 3
        - (2 - stats.lse)
    )


def _with_teacher(stats, scale):
    return (scale * stats.forward_kl).clamp(max=0.7)


SETS = {
    "statistics": (CrossEntropy(), ZLoss(0.1), Entropy(0.2)),
    "smoothing": (CrossEntropy(label_smoothing=0.1), CrossEntropy(0.5, 0.2, "megatron")),
    "GRPO": (PolicyGradient("clip", clip=(0.2, 0.28)), KLToReference(0.05), Entropy(0.01)),
    "dual clip": (PolicyGradient("clip", dual_clip=3.0, rollout_weight=True),),
    "cispo": (
        PolicyGradient("cispo", 0.5),
        PolicyGradient("cispo", convention="bound", clip=(0.0, 5.0), name="bound"),
    ),
    "a teacher": (
        CrossEntropy(0.5, 0.1),
        Distillation(0.5),
        Distillation(0.3, "reverse_kl", temperature_squared=True),
        Distillation(0.2, "cross_entropy"),
        Term("own", _with_teacher, want=("forward_kl",), inputs=("scale",), pointwise=True),
    ),
    "LK": (LKLoss(0.7), LKLoss(0.2, eta=0.0)),
    "LK, alpha": (LKLoss(0.7, "alpha"),),
    "sapo": (PolicyGradient("sapo"), PolicyGradient("reinforce")),
    "own": (Term("own", _own, want=("entropy",), inputs=("scale",), pointwise=True),),
    **{f"kl {name}": (KLToReference(0.3, name),) for name in KL_ESTIMATORS},
    **{
        f"kl {name} {w}": (KLToReference(0.3, name, importance_weight=w),)
        for name in ("k3", "k1+")
        for w in ("on-policy", "old", "generator")
    },
}
V = 100
ROWS = 20_000
NUMBERS = 0.0, -1.0, -0.3, -2.5, -40.0, 1.5, 0.4, -0.3, -2.5, -math.inf, math.nan


def in_torch(terms, inputs, x):
    """The terms' values, and derivatives of their weighted sum, [n, terms + slopes]."""
    known = [column.clone().requires_grad_() for column in x.unbind(1)[: len(STATISTICS)]]
    stats = VocabStatistics._make([None] * len(VocabStatistics._fields))
    stats = stats._replace(vocab_size=V, **dict(zip(STATISTICS, known)))
    given = dict(zip(inputs, x.unbind(1)[len(STATISTICS) :]))
    if "teacher" in given:
        given["teacher"] = SimpleNamespace(student_temperature_or_default=given["teacher"])
    values = [
        term.function(stats)
        if isinstance(term.function, StatisticValue)
        else term.function(stats, **{name: given[name] for name in term.inputs})
        for term in terms
    ]
    sum(term.weight * value.sum() for term, value in zip(terms, values)).backward()
    slopes = [
        torch.zeros(len(x)) if leaf.grad is None else leaf.grad for leaf in known[: len(SLOPES)]
    ]
    return torch.stack([value.detach() for value in values] + slopes, 1)


@pytest.mark.parametrize("name", SETS)
def test_the_source_has_the_values_and_derivatives_of_the_terms(name, tmp_path):
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler here")
    terms = SETS[name]
    function = row_function(terms, V)
    source, library = tmp_path / "rows.cpp", tmp_path / "rows.so"
    source.write_text(PRELUDE + function.source + ENTRY)
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-std=c++17", source, "-o", library], check=True
    )
    width = len(STATISTICS) + len(function.inputs)
    generator = torch.Generator().manual_seed(width)
    x = torch.tensor(NUMBERS)[torch.randint(len(NUMBERS), (ROWS, width), generator=generator)]
    weights = torch.tensor([float(term.weight) for term in terms]).expand(len(x), -1)
    arguments, found = (
        torch.cat([x, weights], 1),
        torch.full((len(x), len(terms) + len(SLOPES)), 7.0),
    )
    call = ctypes.CDLL(str(library)).rows
    call(ctypes.c_void_p(arguments.data_ptr()), ctypes.c_void_p(found.data_ptr()), len(x))
    assert torch.allclose(
        found, in_torch(terms, function.inputs, x), rtol=1e-5, atol=1e-6, equal_nan=True
    )
    assert function.has_entropy == (
        name in ("statistics", "GRPO", "own")
    ) and function.n_terms == len(terms)


@pytest.mark.parametrize(
    "function",
    [
        lambda stats: stats.lse - stats.lse.mean(),
        lambda stats: stats.lse * torch.ones(2),
        lambda stats: stats.lse if stats.lse.sum() > 1 else stats.log_prob,
        lambda stats: stats.lse + torch.rand_like(stats.lse),
        lambda stats: stats.lse.double(),
        lambda stats: stats.target_logit + 1,
        lambda stats: stats.lse + (stats.lse > 1) / 2,
        lambda stats: stats.lse + (stats.lse > 1) * 2,
        lambda stats: stats.lse.cumsum(0),
        lambda stats: stats.lse.sort().values,
        lambda stats: torch.stack([stats.lse, stats.log_prob]).unbind(0)[1],
        lambda stats: torch.frexp(stats.lse)[0],
        lambda stats: torch.erfinv(stats.log_prob),
        lambda stats: stats.nothing,
        lambda stats: stats.lse + float(stats.lse[0]),
        lambda stats: stats.lse.tolist(),
        lambda stats: None,
        lambda stats: stats.lse.to("meta"),
    ],
)
def test_terms_that_are_more_than_arithmetic_have_none(function):
    with pytest.raises(NotArithmetic, match="arithmetic on a token's numbers, got "):
        row_function([Term("own", function, pointwise=True)])


def test_a_value_that_is_no_number_is_not_arithmetic():
    terms = [CrossEntropy(), Term("own", lambda stats: stats.lse > 1, pointwise=True)]
    with pytest.raises(NotArithmetic, match="a value that is no float"):
        row_function(terms, V)


@pytest.mark.parametrize("term", [Term("own", lambda stats: 2 * stats.lse), PolicyGradient("gspo")])
def test_terms_that_promise_nothing_have_none(term):
    with pytest.raises(NotArithmetic, match=rf"Term.pointwise\), got \['{term.name}'\]"):
        row_function([term])


def test_another_weight_is_the_same_source():
    """So that a weight which changes at every step compiles no kernel."""
    first, second = (
        [PolicyGradient(weight=w), KLToReference(2 * w), Entropy(-w)] for w in (1.0, 0.3)
    )
    assert row_function(first, V) == row_function(second, V)


class Counted(torch.autograd.graph.saved_tensors_hooks):
    """Hooks of saved tensors, as those of a checkpoint, that count what is saved."""

    def __init__(self):
        self.count = 0
        super().__init__(self.pack, lambda x: x)

    def pack(self, x):
        self.count += 1
        return x


def test_a_trace_knows_nothing_of_the_callers_contexts():
    terms = [PolicyGradient("clip", clip=(0.2, 0.28)), CrossEntropy(label_smoothing=0.1)]
    hooks = Counted()
    with hooks:
        assert row_function(terms, V) == row_function(terms, V) is not None
    assert hooks.count == 0
    for context in (
        torch.device("meta"),
        torch.autocast("cpu", torch.bfloat16),
        torch.autograd.graph.disable_saved_tensors_hooks("no"),
        torch.no_grad(),
    ):
        with context:
            assert row_function(terms, V) is not None


def test_the_fourth_kernel_with_other_numbers_says_so(caplog):
    device = torch.device("cuda", 77)
    said = []
    for clip in (0.1, 0.2, 0.25, 0.3, 0.4):
        one_read_kernel.expect_few(
            device, row_function([PolicyGradient(clip=(clip, 0.3))], V).source
        )
        other = row_function([KLToReference(0.1, "k3" if clip < 0.2 else "k2")], V).source
        if clip < 0.3:
            one_read_kernel.expect_few(device, other)
        said.append(len(caplog.records))
    assert said == [0, 0, 0, 1, 1]
    assert "weight of a term, or into inputs=" in caplog.text


def test_few_kernels_are_kept():
    assert one_read_kernel.kernel_of.cache_info().maxsize == one_read_kernel.KERNELS


# what gives a statistic that is not its own
GIVES = {"mass": "total", "teacher_mass": "vocab_forward_kl"}


@pytest.mark.parametrize("name", STATISTICS)
def test_a_term_sees_no_statistic_that_nothing_wants(name):
    """The kernel has 0 there, where a call without it has none, and says so."""
    term = Term("own", lambda stats: getattr(stats, name) - stats.log_prob, pointwise=True)
    want = [other for other in STATISTICS if other not in (name, GIVES.get(name))]
    if name in ("lse", "log_prob"):
        assert row_function([term], V, ()).n_terms == 1
        return
    if name == "teacher_mass":
        want = [other for other in want if "kl" not in other and "tail" not in other]
    with pytest.raises(NotArithmetic):
        row_function([term], V, want)
    assert row_function([term], V, [GIVES.get(name, name)]).n_terms == 1


@pytest.mark.parametrize(
    "name", sorted({*STATISTICS} - {"lse", "log_prob", "mass", "teacher_mass"})
)
def test_a_head_says_what_nothing_wants(name, device):
    """Whatever way it takes."""
    term = Term("own", lambda stats: getattr(stats, name) - stats.log_prob, pointwise=True)
    n_rows, width = (64, 1 << 16) if device == "cuda" else (4, 32)  # there it takes one read
    logits = torch.randn(n_rows, width, device=device).bfloat16().requires_grad_()
    labels = torch.zeros(n_rows, dtype=torch.int64, device=device)
    with pytest.raises((ValueError, TypeError)):
        HeadLoss([term])(logits, labels)
