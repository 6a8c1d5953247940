"""Compile every kernel ahead of time: `python tests/helpers/aot.py 80 90 100` (compute
capabilities; needs no GPU), or for AMD's GPUs by `gfx942 gfx950`.

The variants are those that the launchers ask for: public functions are called with small CPU
tensors while a recorder stands in for Triton's launch, and Triton's own specialisation says what is
compiled for each call. The calls cover every two values of every two axes (`CALLS`, `HEADS`). Of
each kernel's variants those are looked at that together have everything that any of them tells the
compiler, see `told`. Triton's language has to understand each of them. The one that tells most
becomes machine code for every capability, and so do, where there are several of NVIDIA's, those
with most statistics, for one capability each in turn. (`--whole`: all that are looked at become
machine code, for one capability each in turn; with one capability, or for AMD's GPUs, half of them.
`--all`: all variants do, for every capability.) For AMD's GPUs the others are translated with `--whole` alone: the
language is that of NVIDIA's. Run without TRITON_INTERPRET, in a process of its own.

Prints one line per kernel with the most that a variant takes, one per failure, and a total. A
variant that spills registers, or takes more shared memory than every GPU gives without asking, is a
failure.
"""

import collections
import contextlib
import gc
import itertools
import math
import re
import subprocess
import sys
import tempfile
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import triton
from torch.testing._internal.distributed.fake_pg import FakeStore
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

import tp_headloss as hl
from tp_headloss.call import request_of as calls
from tp_headloss.engine import launch, linear_triton, sums_triton
from tp_headloss.engine.one_read.late_gradient_triton import LateGradient
from tp_headloss.engine.one_read.params import TERMS as TERMS_OF_ONE_READ
from tp_headloss.engine.transports import TRANSPORTS
from tp_headloss.engine.transports.symmetric_memory import SymmetricMemory
from tp_headloss.head_loss.reduction import fused_reduction
from tp_headloss.linear_head import epilogue
from tp_headloss.statistics import FULL_TEACHER, TOPK_TEACHER, numerics_triton
from tp_headloss.statistics.topk import has_tail

SHARED_LIMIT, GEMM_SHARED_LIMIT = 48 << 10, 227 << 10  # bytes
# of capability 9.0 and later
GEMMS = "gemm_triton.linear_statistics_kernel", "gemm_triton.linear_gradient_kernel"
# with capability 8.9 comes the conversion
TO_FP8 = ("fp8_products_triton.turn_to_fp8_kernel",)
# Bytes of the stack, where spilled registers go. A version of Triton may spill a few where a kernel
# has every optional part; all statistics of a whole teacher at once have more per-token
# coefficients than registers.
SPILL_LIMIT, CROWDED_SPILL_LIMIT = 16, 128
# It is held to 48 registers, and has more optional parts than these: label smoothing with weights of
# tokens spills 24 bytes by Triton 3.6 and 48 by 3.9.
LATE_GRADIENT, LATE_SPILL_LIMIT = "late_kernel_triton.late_gradient_kernel", 48
# Registers of a thread with which a multiprocessor of capability 9.0 has all programs that it can
# have; with one more the gradient of a plain cross-entropy takes 4 % longer.
PLAIN, PLAIN_LIMITS = (), {"kernels.gradient_kernel": 32, "kernels.statistics_kernel": 64}
# Accumulators take half of the registers: with capability 9.0 Triton 3.9 spills a few, and 3.6
# none.
GEMM_SPILL_LIMITS = {90: 0 if launch.TRITON == launch.OLDEST else 256, 100: SPILL_LIMIT}
# Characters of assembly of a merge of 512 packets; a loop takes 52,000 at most, for AMD's GPUs
# 136,000.
LOOP_LIMIT, AMD_LOOP_LIMIT = 100_000, 200_000

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Each list of wanted statistics of a teacher or of sets makes other packets, another merge or
# another gradient.
TEACHERS = [
    (),
    ("forward_kl",), ("reverse_kl",), ("forward_kl", "teacher_entropy"), ("jsd",), ("reverse_kl", "total_variation"),
    FULL_TEACHER,
    ("topk_forward_kl",), ("topk_reverse_kl", "topk_jsd"), ("topk_log_mass", "vocab_jsd"), ("vocab_forward_kl",),
    ("vocab_forward_kl", "tail_log_mass"), ("topk_reverse_kl", "tail_entropy"), TOPK_TEACHER,
    ("set_log_mass",), ("set_log_mass", "set_log_prob"), ("set_log_mass", "set_entropy", "set_log_prob", "forward_kl"),
    ("log_probs_at", "rank"), ("log_probs_at", "topk_forward_kl"),
    ("log_probs_at", "set_log_prob", "set_log_mass", "topk_log_mass"),
]  # fmt: skip
# The lists that take most registers.
MOST = FULL_TEACHER, TOPK_TEACHER, TEACHERS[-1]
CALLS = {
    "teacher": TEACHERS,
    "group": [(1, False), (2, True), (3, False), (8, True), (512, True)],  # ranks, symmetric memory
    "place": ["aligned", "odd", "padded", "far", "transposed"],  # of the logits, see `placed`
    "dtype": DTYPES,
    "teacher_dtype": DTYPES,
    "labels": [torch.int64, torch.int32, None],
    "upstream": ["all", "log_prob", "others"],  # statistics that have upstream gradients
    "total": [None, "plain", "weighted"],
    "bias": [None, torch.float32, torch.bfloat16],
    "temperature": [1.0, 2.0, "per token"],
    "teacher_temperature": [1.0, 2.0, "per token"],
    "entries": [64, 50, 300],
    "entropy": [True, False], "collision": [True, False], "argmax": [True, False], "softcap": [None, 30.0],
}  # fmt: skip
HEADS = {
    "terms": [("smoothing",), ("cross_entropy", "z_loss"), ("cross_entropy", "own"), ("cross_entropy", "entropy")],
    "linear": [None, "recompute", "one_sweep", "blocks", "main_grad"],
    "dtype": DTYPES,
    "denominator": [None, 8.0, "tensor", "sum"],  # sum: the reduction that divides by nothing
    "width": [512, 513],
    "token_weight": [True, False], "metrics": [("accuracy", "entropy"), ()],
}  # fmt: skip
STEPS = {  # those that are repeated, whose launches are prepared
    "terms": [("cross_entropy",), ("cross_entropy", "z_loss"), ("cross_entropy", "entropy")],
    "place": ["aligned", "odd", "padded", "transposed"],
    "dtype": [torch.bfloat16, torch.float32], "labels": [torch.int64, torch.int32],
    "denominator": [None, 8.0, torch.tensor(8.0)], "metrics": [("accuracy",), ()],
}  # fmt: skip
# logits with gaps, whose gradient has none: strides of one kind become strides of two kinds
STEPS_WITH_GAPS = {key: values[:1] for key, values in STEPS.items()} | {
    "place": ["gaps", "gaps, transposed"]
}
EPILOGUES = {  # of a linear head's GEMMs
    "capability": [90, 100],
    "labels": [torch.int64, None],
    "dtype": [torch.bfloat16, torch.float16], "exact": [True, False], "width": [4096, 4000],
    "want": [(), ("entropy",), ("argmax", "collision"), ("entropy", "argmax", "total")],
    "bias": [None, torch.float32], "softcap": [None, 30.0], "temperature": [1.0, "per token"],
}  # fmt: skip
FP8 = {  # sweeps whose gradient products are in fp8
    "width": [512, 513], "labels": [torch.int64, torch.int32], "exact": [True, False], "tokens": [256, 250],
    "temperature": [1.0, 2.0, "per token"], "frozen": [None, "hidden", "weight"],
    "main_grad": [True, False],
}  # fmt: skip
SAMPLES = {  # calls of `sample`: with a rule the race is among candidates
    "rule": [None, hl.SamplingRule(top_k=5), hl.SamplingRule(top_p=0.5), hl.SamplingRule(top_p=0.5, min_p=0.1)],
    "width": [4096, 4097], "dtype": DTYPES,
}  # fmt: skip
TERMS = {
    "cross_entropy": hl.CrossEntropy(), "smoothing": hl.CrossEntropy(label_smoothing=0.1), "z_loss": hl.ZLoss(1e-4),
    "entropy": hl.Entropy(0.01), "own": hl.Term("own", lambda stats: 2 * stats.lse, tokenwise=True),
}  # fmt: skip
OPTIONS = hl.Options(backend="triton")


def product(axes: dict) -> list:
    """All rows of the product of the axes."""
    return [
        *itertools.starmap(collections.namedtuple("Case", axes), itertools.product(*axes.values()))
    ]


def pairwise(axes: dict) -> list:
    """Rows of the product of the axes, few of them, that together have every two values of every
    two axes."""
    row_type = collections.namedtuple("Case", axes)
    cells = [[(name, value) for value in axis] for name, axis in axes.items()]
    pairs = (pair for two in itertools.combinations(cells, 2) for pair in itertools.product(*two))
    used, rows = collections.Counter(dict.fromkeys(map(frozenset, pairs), 0)), []
    while missing := next((pair for pair, count in used.items() if not count), None):
        row = dict(missing)
        for name, axis in axes.items():
            if name not in row:
                # pairs that are missing, then those that are rare
                counts = [
                    [used[frozenset({(name, value), cell})] for cell in row.items()]
                    for value in axis
                ]
                row[name] = axis[
                    max(range(len(axis)), key=lambda i: (counts[i].count(0), -sum(counts[i])))
                ]
        used.update(map(frozenset, itertools.combinations(row.items(), 2)))
        rows.append(row_type(**row))
    return rows


class Variant(NamedTuple):
    """What Triton compiles for a launch."""

    kernel: JITFunction
    options: dict
    signature: dict
    constants: dict
    attributes: dict
    case: Any  # the first call that needs it

    @property
    def name(self) -> str:
        return f"{self.kernel.__module__.rsplit('.', 1)[-1]}.{self.kernel.__name__}"

    @property
    def oldest(self) -> int:
        """The least capability, 9.0 where a kernel begins while another still runs."""
        if self.name in TO_FP8:
            return 89
        names = self.kernel.arg_names
        is_early = self.options.get("launch_pdl") or (
            "EARLY" in names and self.constants[(names.index("EARLY"),)]
        )
        return 90 if is_early else 0

    @property
    def source(self) -> ASTSource:
        return ASTSource(self.kernel, self.signature, self.constants, self.attributes)

    def compile(self, architecture: int | str):
        target = target_of(architecture)
        return triton.compile(self.source, target=target, options=self.options)

    def translate(self, architecture: int | str):
        """From Triton's language, which takes a tenth of the time that machine code takes: what is
        no Triton is found here."""
        target, source, context = target_of(architecture), self.source, ir.context()
        backend = make_backend(target)
        ir.load_dialects(context)
        backend.load_dialects(context)
        options = backend.parse_options(self.options | source.parse_options())
        functions, modules = backend.get_codegen_implementation(options), backend.get_module_map()
        source.make_ir(target, options, functions, modules, context)


def target_of(architecture: int | str) -> GPUTarget:
    """A compute capability, or the name of an AMD architecture."""
    return (
        GPUTarget("hip", architecture, 64)
        if isinstance(architecture, str)
        else GPUTarget("cuda", architecture, 32)
    )


class NothingCompiled:
    """Takes the place of the launchers' table of compiled kernels: has none, and notes which one
    was looked for."""

    key = None

    def get(self, key):
        self.key = key

    def __len__(self):
        return 0

    def __setitem__(self, key, value):
        pass


class Recorder:
    """Takes the place of `JITFunction.run`: `variants` has what Triton would have compiled, once
    each.

    Raises ValueError where a launcher has one key for two variants: it would launch the first in
    the place of both."""

    def __init__(self, architecture):
        self.variants, self.case, self.is_amd = {}, None, isinstance(architecture, str)
        self.table, self.by_key, self.binders = NothingCompiled(), {}, {}
        self.backend = make_backend(target_of(architecture))

    def __call__(self, kernel, *arguments, grid, warmup, **options):
        if kernel not in self.binders:
            self.binders[kernel] = create_function_from_signature(
                kernel.signature, kernel.params, self.backend
            )
        bound, specialization, _ = self.binders[kernel](*arguments, **options)
        key, told_apart = (kernel.fn, str(specialization), str(options)), specialization
        # they read their tuple of pointers under a loaded mask, never in wide accesses
        if kernel in (sums_triton.sums_kernel, sums_triton.sums_gradient_kernel):
            told_apart = [
                (kinds, None if type(kinds) is tuple else how) for kinds, how in specialization
            ]
        told_apart = kernel.fn, str(told_apart), str(options)
        first, case = self.by_key.setdefault(self.table.key, (told_apart, self.case))
        if first != told_apart:
            raise ValueError(
                f"one key for two variants, of {case} and {self.case}:\n{first}\n{told_apart}"
            )
        if key not in self.variants:
            _, *what = kernel._pack_args(self.backend, options, bound, specialization, None)
            self.variants[key] = Variant(kernel, options, *what, self.case)

    @contextlib.contextmanager
    def recording(self):
        """No kernel runs, and "triton" takes CPU tensors."""

        def run(kernel, *arguments, **options):
            self(kernel, *arguments, **options)

        def resolve(name, device):
            return name or "torch"

        with (
            mock.patch.object(JITFunction, "run", run),
            mock.patch.object(launch, "DIRECT", True),
            mock.patch.object(launch, "_compiled", self.table),
            mock.patch.object(launch, "_direct_call", lambda kernel: None),
            mock.patch.object(calls, "resolve_backend", resolve),
        ):
            yield


class Memory(SymmetricMemory):
    """Symmetric memory without peers."""

    def __init__(self, request):
        numel = math.prod(request.packets_shape)
        self.slot, self.handle, self.timeout_ms = 1 << (numel - 1).bit_length(), mock.Mock(), 0
        self.buffer, self.turns = torch.zeros(2 * self.slot), torch.zeros(2, dtype=torch.int32)
        self.peers = torch.zeros(request.facts.world_size, dtype=torch.int64)

    def _take_turns(self):
        pass


def placed(place: str, tokens: int, width: int, dtype) -> torch.Tensor:
    """Zeros [tokens, width] in memory as the place says."""
    if place == "far":  # rows whose distance needs 64 bits
        return torch.zeros(width, dtype=dtype).as_strided((1, width), ((1 << 31) + 16, 1))
    if place == "transposed":
        return torch.zeros(width, tokens, dtype=dtype).t()
    if place == "gaps":
        return torch.zeros(tokens, 2 * width, dtype=dtype)[:, ::2]
    if place == "gaps, transposed":
        return torch.zeros(width, 2 * tokens, dtype=dtype)[:, ::2].t()
    return torch.zeros(tokens, width, dtype=dtype)


def per_token(temperature, tokens: int):
    return torch.ones(tokens) if temperature == "per token" else temperature


def teacher_of(case, tokens: int, width: int):
    """The teacher of a call, or None."""
    given = per_token(case.teacher_temperature, tokens)
    if not set(case.teacher) & {*TOPK_TEACHER}:
        logits = placed(case.place, tokens, width, case.teacher_dtype)
        return (
            hl.Teacher(logits, temperature=given) if set(case.teacher) & {*FULL_TEACHER} else None
        )
    shape, tail = (tokens, case.entries), has_tail(case.teacher)
    ids = torch.zeros(shape, dtype=case.labels or torch.int64)
    mask = torch.ones(shape, dtype=torch.bool) if case.bias else None
    # a temperature leaves no tail
    temperatures = {"student_temperature" if tail else "temperature": given}
    log_probs = torch.zeros(shape, dtype=case.teacher_dtype)
    return hl.TopKTeacher(ids, log_probs, mask, renormalize=not tail, **temperatures)


def sets_of(case, tokens: int):
    """The sets of a call, or None."""
    if "set_log_mass" not in case.teacher:
        return None
    ids = torch.zeros(tokens, case.entries, dtype=case.labels or torch.int64)
    if case.entries == 50:  # of any size
        return hl.IdSets.from_csr(ids.flatten(), torch.arange(0, ids.numel() + 1, 50))
    return hl.IdSets(ids)


def ids_of(case, tokens: int):
    """The ids of a call whose log-probs are asked for, or None."""
    if "log_probs_at" not in case.teacher:
        return None
    return torch.zeros(tokens, case.entries, dtype=case.labels or torch.int64)


def call_statistics(case, groups):
    """Forward and backward of `vocab_statistics`."""
    ranks, shares_memory = case.group
    width = 4097 if case.place == "odd" else 4096
    tokens = {"odd": 3, "far": 1}.get(case.place, 4)
    vocab_size = ranks * width
    shard = hl.VocabShard.from_group(groups[ranks], vocab_size)
    if case.place == "padded":
        start = vocab_size - width
        shard = hl.VocabShard(start, vocab_size, vocab_size - 96, groups[ranks])
    logits = placed(case.place, tokens, width, case.dtype).requires_grad_()
    flags = {name: getattr(case, name) for name in ("entropy", "collision", "total", "argmax")}
    choice = TRANSPORTS["auto"]._replace(shared=Memory if shares_memory else None)
    with mock.patch.dict(TRANSPORTS, auto=choice):
        stats = hl.vocab_statistics(
            logits,
            None if case.labels is None else torch.zeros(tokens, dtype=case.labels),
            shard=shard,
            want=(
                *(name for name, wanted in flags.items() if wanted),
                *(
                    name
                    for name in case.teacher
                    if case.labels or name not in ("set_log_prob", "rank")
                ),
            ),
            transform=hl.Transform(
                bias=case.bias and torch.zeros(width, dtype=case.bias),
                softcap=case.softcap,
                temperature=per_token(case.temperature, tokens),
            ),
            teacher=teacher_of(case, tokens, width),
            sets=sets_of(case, tokens),
            ids=ids_of(case, tokens),
            total_weight=torch.ones(width) if case.total == "weighted" else None,
            options=OPTIONS,
        )
    differentiable = [
        (name, x) for name, x in stats._asdict().items() if getattr(x, "requires_grad", False)
    ]
    softmax = "lse", "log_prob", "target_logit"
    kept = {"all": lambda name: name != "target_logit", "log_prob": lambda name: name == "log_prob"}
    keep = kept.get(case.upstream, lambda name: name not in softmax)
    values = [x for name, x in differentiable if keep(name)] or [stats.lse]
    sum(x.sum() for x in values).backward()


OF_ENTRIES = hl.HeadLoss(
    [hl.CrossEntropy(), hl.TopKDistillation(support="vocabulary")], options=OPTIONS
)


def call_late_gradient(head, logits, labels, token_weight, denominator):
    """The backward of one read, of terms that are statistics and of a row function."""
    inputs = {}
    if head is OF_ENTRIES:
        inputs = {"teacher": hl.TopKTeacher(labels[:, None], labels[:, None].float())}
    given = head._given(logits, labels, None, None)._replace(teacher=inputs.get("teacher"))
    call, request = head._checked(given, token_weight, denominator, inputs)
    reduction = fused_reduction(call, logits, "triton")
    row, inverse = torch.zeros(len(labels)), torch.zeros(2, dtype=torch.float64)
    merged, forecast = (
        torch.zeros(len(request.layout.merged), len(labels)),
        torch.zeros(4, dtype=torch.int32),
    )
    for has_slopes in (False, True):
        if has_slopes or reduction.plan.gradients is not None:
            strides = logits.grad.stride()
            late = LateGradient(request, reduction.plan, has_slopes, reduction.weight, strides)
            values = (
                torch.zeros(len(TERMS_OF_ONE_READ), len(labels))
                if has_slopes
                else [row] * len(head.terms)
            )
            saved = merged, reduction.weight, inverse, values
            late(logits.grad, forecast, request.tensors, *saved, torch.zeros(()))


def call_head(case, groups):
    """Forward and backward of a `HeadLoss` over logits, or of a linear head."""
    tokens, hidden_size = 256, 16 if case.width % 16 == 0 else 15
    labels = torch.zeros(tokens, dtype=torch.int64)
    reduction = "sum" if case.denominator == "sum" else "mean"
    denominator = {"sum": None, "tensor": torch.tensor(8.0)}.get(case.denominator, case.denominator)
    terms = [TERMS[name] for name in case.terms]
    head = hl.HeadLoss(terms, metrics=case.metrics, reduction=reduction, options=OPTIONS)
    given = {
        "token_weight": torch.ones(tokens) if case.token_weight else None,
        "denominator": denominator,
    }
    if case.linear is None:
        logits = torch.zeros(tokens, case.width, dtype=case.dtype, requires_grad=True)
        head(logits, labels, **given).loss.backward()
        sums_triton.gradient_for(logits.grad, torch.zeros(()))
        if case.dtype == torch.bfloat16 and case.denominator is None:  # which it does not depend on
            call_late_gradient(head, logits, labels, **given)
            call_late_gradient(OF_ENTRIES, logits, labels, **given)
        return
    hidden = torch.zeros(tokens, hidden_size, dtype=case.dtype, requires_grad=True)
    weight = torch.nn.Parameter(torch.zeros(case.width, hidden_size, dtype=case.dtype))
    weight.main_grad = torch.zeros(weight.shape)
    mode = "recompute" if case.linear == "recompute" else "one_sweep"
    two_blocks = 192 * (case.width + 16) * case.dtype.itemsize + 4 * weight.numel()
    linear = hl.Linear(
        mode=mode,
        main_grad=case.linear == "main_grad",
        upstream=1.0 if mode == "one_sweep" and case.dtype == torch.float16 else None,
        budget=two_blocks if case.linear == "blocks" else None,
    )
    head.linear(hidden, weight, labels, linear=linear, **given).loss.backward()


def call_step(case, groups):
    """Steps of a `HeadLoss` of one kind, of which the third launches what the first two
    prepared."""
    tokens, width = (17, 513) if "gaps" in case.place else (16, 513 if case.place == "odd" else 512)
    logits = placed(case.place, tokens, width, case.dtype).requires_grad_()
    shard = (
        hl.VocabShard.from_group(None, vocab_size=510, padded_size=512)
        if case.place == "padded"
        else None
    )
    labels = torch.zeros(tokens, dtype=case.labels)
    head = hl.HeadLoss([TERMS[name] for name in case.terms], metrics=case.metrics, options=OPTIONS)
    for _ in range(3):
        head(logits, labels, shard=shard, denominator=case.denominator).loss.backward()


def call_plain():
    """Forward and backward of a mean cross-entropy, aligned, in bf16."""
    logits = torch.zeros(16, 4096, dtype=torch.bfloat16, requires_grad=True)
    hl.HeadLoss([hl.CrossEntropy()], options=OPTIONS)(
        logits, torch.zeros(16, dtype=torch.int64)
    ).loss.backward()


def call_epilogue(case, groups):
    """Forward and backward of a linear head's statistics that are epilogues."""
    with (
        mock.patch.object(linear_triton, "_major_capability", lambda device: case.capability // 10),
        mock.patch.object(epilogue, "is_default", lambda device: True),
    ):
        _call_epilogue(case)


def _call_epilogue(case):
    tokens = 256
    hidden = torch.zeros(tokens, 64, dtype=case.dtype, requires_grad=True)
    weight = torch.zeros(case.width, 64, dtype=case.dtype, requires_grad=True)
    shard = hl.VocabShard(0, case.width, 4096 if case.width == 4096 else 3990)
    stats = hl.linear_vocab_statistics(
        hidden, weight, None if case.labels is None else torch.zeros(tokens, dtype=case.labels),
        bias=case.bias and torch.zeros(case.width, dtype=case.bias), shard=shard, want=case.want,
        transform=hl.Transform(softcap=case.softcap, temperature=per_token(case.temperature, tokens)), options=OPTIONS,
        linear=hl.Linear(exact_logits=case.exact),
    )  # fmt: skip
    sum(x.sum() for x in stats if getattr(x, "requires_grad", False)).backward()


def call_fp8(case, groups):
    """Forward and backward of a linear head whose gradient products are in fp8, the weight's last
    ids padding."""
    kind = {"dtype": torch.bfloat16, "requires_grad": True}
    hidden = torch.zeros(case.tokens, 64, **kind)
    weight = torch.nn.Parameter(torch.zeros(case.width, 64, dtype=torch.bfloat16))
    weight.main_grad = torch.zeros(weight.shape)
    if case.frozen is not None:
        {"hidden": hidden, "weight": weight}[case.frozen].requires_grad_(False)
    hl.HeadLoss([TERMS["cross_entropy"], TERMS["z_loss"]], options=OPTIONS).linear(
        hidden,
        weight,
        torch.zeros(case.tokens, dtype=case.labels),
        shard=hl.VocabShard.from_group(None, vocab_size=500, padded_size=case.width),
        transform=hl.Transform(temperature=per_token(case.temperature, case.tokens)),
        linear=hl.Linear(gradients="fp8", exact_logits=case.exact, main_grad=case.main_grad),
    ).loss.backward()


def call_sample(case, groups):
    """A sample, with a rule or without."""
    logits = torch.zeros(4, case.width, dtype=case.dtype)
    hl.sample(logits, seed=0, positions=torch.arange(4), rule=case.rule, options=OPTIONS)


def record_variants(architecture: int | str = 90) -> list[Variant]:
    """The variants that the calls need."""
    # its collectives do nothing
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=512)
    groups = {1: None, 512: dist.group.WORLD} | {
        n: dist.new_group(list(range(n))) for n in (2, 3, 8)
    }
    recorder = Recorder(architecture)
    with recorder.recording():
        recorder.case = PLAIN
        call_plain()
        calls = [(CALLS, call_statistics), (HEADS, call_head), (SAMPLES, call_sample)]
        for axes, call in (
            calls
            if isinstance(architecture, str)
            else [*calls, (EPILOGUES, call_epilogue), (FP8, call_fp8)]
        ):
            for recorder.case in pairwise(axes):
                call(recorder.case, groups)
        # among them any two that differ in one axis alone
        for recorder.case in [*product(STEPS), *product(STEPS_WITH_GAPS)]:
            call_step(recorder.case, groups)
    dist.destroy_process_group()
    return list(recorder.variants.values())


def dumped(compiled, what: str) -> str:
    """What cuobjdump says about a kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, what, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def check_waits(compiled):
    """Raise ValueError where a GEMM waits for each multiplication: the assembler makes it so, and
    only says it in a message, if anything else may read or write accumulators meanwhile. A third
    more time. Of capability 9.0."""
    products = [line for line in dumped(compiled, "-sass").splitlines() if "HGMMA" in line]
    if len(products) > 1 and all("gsb0" in line for line in products):
        raise ValueError("multiplications of the tensor cores must not wait for each other")


class Resources(NamedTuple):
    registers: int  # per thread
    stack: int  # bytes per thread
    shared: int  # bytes per program
    # characters of PTX without debug information, to which the time of compilation is proportional
    code: int

    @classmethod
    def of(cls, compiled) -> "Resources":
        if "amdgcn" in compiled.asm:
            code = compiled.asm["amdgcn"]
            names = "vgpr_count", "private_segment_fixed_size"
            registers, stack = (int(re.search(rf"\.{name}: +(\d+)", code)[1]) for name in names)
            return cls(registers, stack, compiled.metadata.shared, len(code))
        report = dumped(compiled, "-res-usage")
        registers, stack = (
            int(re.search(rf"{name}:(\d+)", report)[1]) for name in ("REG", "STACK")
        )
        code = re.sub(r"(?m)^\s*(\.loc|//).*\n", "", compiled.asm["ptx"].split(".section")[0])
        return cls(registers, stack, compiled.metadata.shared, len(code))

    def check(self, variant: Variant, architecture: int | str):
        """Raise ValueError where a variant takes too much."""
        is_amd = isinstance(architecture, str)
        crowded = set(getattr(variant.case, "teacher", ())) >= {
            "forward_kl",
            "reverse_kl",
            "teacher_entropy",
        }
        spills = CROWDED_SPILL_LIMIT if crowded else SPILL_LIMIT
        most = SHARED_LIMIT
        if variant.name in GEMMS:
            most, spills = GEMM_SHARED_LIMIT, GEMM_SPILL_LIMITS[architecture]
        elif variant.name == LATE_GRADIENT:
            spills = LATE_SPILL_LIMIT
        if self.shared > most or self.stack > spills:
            raise ValueError(f"at most {most} bytes shared and {spills} spilled, got {self}")
        if (
            variant.case == PLAIN
            and not is_amd
            and self.registers > (limit := PLAIN_LIMITS.get(variant.name, 255))
        ):
            raise ValueError(f"a plain cross-entropy has at most {limit} registers, got {self}")
        names = variant.kernel.arg_names
        packets = variant.constants[(names.index("PACKETS"),)] if "PACKETS" in names else 0
        if packets > 8 and self.code > (limit := AMD_LOOP_LIMIT if is_amd else LOOP_LIMIT):
            raise ValueError(
                f"a merge of many ranks must be a loop of at most {limit} characters, got {self}"
            )


def leaves(at: tuple, value):
    """Places and values within nested tuples; a record's fields have their names."""
    if not isinstance(value, tuple):
        yield at, value
        return
    for name, part in zip(getattr(value, "_fields", range(len(value))), value):
        yield from leaves((*at, name), part)


def told(variant: Variant) -> set:
    """What the compiler is told: types of the arguments, what is known of their values, constants.

    Of a family the place among the others is left out, and of a row in a buffer its number."""
    names = variant.kernel.arg_names
    families = names.index("families") if "families" in names else None
    facts = {
        (place, str(kind))
        for name, argument in variant.signature.items()
        if name != "families"
        for place, kind in leaves((name,), argument)
    }
    for at, constant in variant.constants.items():
        place = (at[0], *at[2:]) if at[0] == families else at
        value = getattr(constant, "value", constant)
        if not isinstance(value, tuple):
            facts.add((place, repr(value)))
        facts |= {(field, row is None) for field, row in leaves(place, value) if field != place}
    return facts | {(at, str(known)) for at, known in variant.attributes.items()}


def covering(variants: list[Variant]) -> list[Variant]:
    """A few of a kernel's variants that together tell the compiler all that any of them does,
    those with the most statistics at once among them."""
    facts = [told(variant) for variant in variants]
    for variant, of_variant in zip(variants, facts):
        wanted = getattr(variant.case, "teacher", ())
        if wanted in MOST:
            of_variant.add(wanted)
    missing, chosen = set().union(*facts), []
    while missing:
        most = max(range(len(variants)), key=lambda i: len(facts[i] & missing))
        chosen.append(variants[most])
        missing -= facts[most]
    return chosen


class Job(NamedTuple):
    variant: Variant
    architecture: int | str
    whole: bool = True  # to machine code


def with_most_statistics(variants: list[Variant]) -> list[Variant]:
    """The first variant with each list of `MOST`, of the kernels that take more registers for
    each."""
    first = {}
    for variant in variants:
        wanted = getattr(variant.case, "teacher", ())
        if variant.name.startswith("kernels.") and wanted in MOST:
            first.setdefault(wanted, variant)
    return [*first.values()]


def of_gemm(variants: list[Variant], capabilities, how: str):
    """Jobs of a kernel that takes seconds, and has a tile for each architecture."""
    for capability in capabilities:
        served = [variant for variant in variants if variant.case.capability == capability]
        for number, variant in enumerate(served if how == "all" else covering(served)):
            yield Job(variant, capability, whole=how != "" or number == 0)


def of_kernel(variants: list[Variant], capabilities, how: str):
    """Jobs of another kernel."""
    if 90 in capabilities:
        yield from (Job(variant, 90) for variant in variants if variant.case == PLAIN)
    if how == "all":
        every = itertools.product(variants, capabilities)
        yield from (Job(v, c) for v, c in every if c >= v.oldest)
        return
    chosen = covering(variants)
    largest, most = chosen[0], with_most_statistics(chosen)
    to_machine_code = len(chosen) if how == "whole" else 1
    if len(capabilities) == 1 or isinstance(capabilities[0], str):
        # an older Triton, GPUs of others: the half that has most of the values
        most, to_machine_code = [], -(-to_machine_code // 2)
    yield from (Job(largest, c) for c in served_by(largest, capabilities))
    if isinstance(capabilities[0], str) and how == "":
        return
    # architectures differ little for what is Triton's own
    for number, variant in enumerate(chosen[1:], 1):
        served = served_by(variant, capabilities)
        whole = number < to_machine_code or variant in most
        yield Job(variant, served[(number - 1) % len(served)], whole)


def served_by(variant: Variant, capabilities) -> list:
    """Those of the capabilities that a variant is launched for, or the first that it is."""
    if isinstance(capabilities[0], str):
        return capabilities
    return [c for c in capabilities if c >= variant.oldest] or [variant.oldest]


def to_compile(capabilities, how: str):
    """What is to be done for GPUs of these capabilities; `how` is "all", "whole" or ""."""
    kernels = collections.defaultdict(list)
    for variant in record_variants(capabilities[0]):
        kernels[variant.name].append(variant)
    for name, variants in kernels.items():
        yield from (of_gemm if name in GEMMS else of_kernel)(variants, capabilities, how)


def main(capabilities, how: str):
    if isinstance(capabilities[0], str):
        # as where torch is built for AMD's GPUs
        numerics_triton.PTX = triton.language.constexpr(False)
    if how != "all":
        # to look for garbage among millions of small objects takes a fifth of all time
        gc.disable()
    translated, compiled, failures, taken = 0, 0, [], collections.defaultdict(list)
    for variant, capability, whole in to_compile(capabilities, how):
        try:
            if not whole:
                variant.translate(capability)
                translated += 1
                continue
            kernel = variant.compile(capability)
            resources = Resources.of(kernel)
            architecture = capability if isinstance(capability, str) else f"sm_{capability}"
            taken[f"{variant.name} {architecture}"].append(resources)
            resources.check(variant, capability)
            if variant.name in GEMMS and capability == 90:
                check_waits(kernel)
            compiled += 1
        except Exception as error:  # every failure is listed before the exit
            while error.__cause__ is not None:
                error = error.__cause__
            failures.append(
                f"{variant.name} {capability} {variant.case}: {type(error).__name__}: {error}"
            )
    for name, each in sorted(taken.items()):
        registers, stack, shared, code = map(max, zip(*each))
        spilling = sum(r.stack > 0 for r in each)
        print(
            f"{name}: {len(each)} variants, at most {registers} registers, {shared} bytes shared, ",
            end="",
        )
        print(f"{stack} spilled ({spilling} variants), {code >> 10} KiB of assembly")
    total = f"compiled {compiled}, translated {translated}, failed {len(failures)}"
    print(*failures, total, sep="\n")
    return bool(failures)


if __name__ == "__main__":
    architectures = [int(a) if a.isdigit() else a for a in sys.argv[1:] if a[0] != "-"]
    how = [a.removeprefix("--") for a in sys.argv[1:] if a in ("--all", "--whole")]
    sys.exit(main(architectures, *how or [""]))
