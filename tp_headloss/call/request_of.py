"""From a public call to a `Request`: every check of its metadata, then the order of its tokens and
its static facts."""

import functools

import torch

from ..arguments.id_sets import masked_ids
from ..arguments.teachers import Teacher, TeacherHead, TopKTeacher
from ..engine.backend import resolve_backend
from ..engine.operators import distinct_ids
from ..engine.request import Facts, Request, Tensors, TokenOrder
from ..ranks.shard import ShardFacts
from ..spec import sizes_of
from ..statistics import (
    AT_IDS,
    FULL_TEACHER,
    TOPK_TEACHER,
    known_statistics,
    layout_of,
    names_without_sums,
)
from ..statistics.at_ids import known_ids
from ..validation import expect_number, refuse_float_labels
from .given import Given
from .sets import check_entries, check_ids, check_sets, expect_both, set_tensors, validate_sets

LOGITS_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def build_request(given: Given, order_of=None) -> Request:
    """Validate a call and bring its tensors into rows [N, ..], in the order of `order_of` [..,
    any], or of the logits.

    Raises ValueError or TypeError from facts that every rank shares, so that an error is the same
    on all of them.
    """
    (
        logits,
        labels,
        shard,
        want,
        transform,
        teacher,
        sets,
        ids,
        total_weight,
        ignore_index,
        options,
        *_,
    ) = given
    # a view of a conjugate's imaginary part has its sign elsewhere than in memory
    logits = logits.resolve_neg()
    backend, ignore_index = _validate_call(given), int(ignore_index)
    if sets is not None and options.check:
        check_sets(sets, labels, ignore_index, shard.vocab_size)
    if ids is not None and options.check:
        check_ids(ids, labels, ignore_index, shard.vocab_size)
    if isinstance(teacher, TopKTeacher) and options.check:
        check_entries(teacher, labels, ignore_index, shard.vocab_size)
    temperature, temperatures = transform.temperature, None
    if isinstance(temperature, torch.Tensor):
        temperatures = _known_temperatures(temperature, logits)
        temperature = 1.0
    # torch.compile would trace through the cache and warn about it
    make_facts = _facts.__wrapped__ if torch.compiler.is_compiling() else _facts
    numbers = float(transform.scale), float(transform.softcap or 0.0), float(temperature)
    teacher_factors, teacher_scales = _teacher_scales(teacher, transform.temperature, logits)
    beta = 0.5 if teacher is None else float(teacher.beta)
    names = ignore_index, backend, options.transport
    facts = make_facts(shard.facts, tuple(want), *numbers, *names, *teacher_factors, beta)
    order = TokenOrder(
        logits if order_of is None else order_of, options.inplace, shard.world_size == 1
    )
    tensors = Tensors(
        order.flatten(logits),
        labels=None if labels is None else order.flatten(labels).contiguous(),
        temperatures=None if temperatures is None else order.flatten(temperatures).contiguous(),
        bias=None if transform.bias is None else transform.bias.contiguous(),
        column_weight=None if total_weight is None else total_weight.detach().float().contiguous(),
        **_teacher_tensors(teacher, teacher_scales, order, facts),
        **set_tensors(sets, logits.shape[:-1], order, facts),
        ids=None if ids is None else known_ids(order.flatten(ids), facts.vocab_size).contiguous(),
    )
    return Request(
        tensors, facts, layout_of(labels is not None, facts.want, tensors.ids), order, shard
    )


def _teacher_tensors(teacher, scales, order: TokenOrder, facts: Facts) -> dict[str, torch.Tensor]:
    """The tensors of a teacher by rows [N, ..]."""
    if teacher is None:
        return {}
    out = (
        {}
        if scales is None
        else {"scales": torch.stack([order.flatten(scale) for scale in scales])}
    )
    if isinstance(teacher, Teacher):
        return out | {"teacher": order.flatten(teacher.logits.detach().resolve_neg())}
    given = [
        order.flatten(x).contiguous() for x in (masked_ids(teacher), teacher.log_probs.detach())
    ]
    how = None if scales is None else out["scales"][0], facts.teacher_scale, teacher.renormalize
    entries = distinct_ids("entries", *given, *how, facts.vocab_size, facts.backend)
    return out | dict(zip(("entries", "entry_log_probs"), entries))


# by plain values: a process group in its keys would never be freed
@functools.lru_cache(maxsize=256)
def _facts(shard: ShardFacts, want: tuple[str, ...], *others) -> Facts:
    """The facts, in the order of their fields, of which those of the shard are the first."""
    return Facts(*shard, tuple(name for name in known_statistics() if name in want), *others)


def _teacher_scales(teacher, temperature, logits):
    """(1 / T_teacher, T / T_student) as numbers, or both per token [..] if any of the three
    temperatures is."""
    if teacher is None:
        return (1.0, 1.0), None
    student = teacher.student_temperature_or_default
    temperatures = teacher.temperature, temperature, student
    if not any(isinstance(t, torch.Tensor) for t in temperatures):
        return (1.0 / teacher.temperature, temperature / student), None
    given, own, student = (
        _known_temperatures(t, logits).expand(logits.shape[:-1]) for t in temperatures
    )
    return (1.0, 1.0), (1.0 / given, own / student)


def _known_temperatures(temperature, logits) -> torch.Tensor:
    """A number or temperatures [..] in the precision of the logits' statistics; NaN where it is not
    positive."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    temperatures = torch.as_tensor(temperature, dtype=dtype, device=logits.device).detach()
    return torch.where(temperatures > 0, temperatures, torch.nan)


def _validate_call(given: Given) -> str:
    """Facts that every rank shares, so that an error is the same on all of them. -> the backend's
    name."""
    logits, labels, shard, want, transform, teacher, *_, options = given[:11]
    refuse_float_labels(logits, labels)
    backend, of = (
        resolve_backend(options.backend, logits.device),
        "logits" if given.linear is None else "hidden states",
    )
    allowed = LOGITS_DTYPES + ((torch.float64,) if backend == "torch" else ())
    if logits.dtype not in allowed:
        raise TypeError(
            f"logits must be one of {list(map(str, allowed))} for backend {backend!r}, got "
            f"{logits.dtype}"
        )
    if _vocabulary_is_second(logits, labels):
        raise ValueError(
            f"logits must be [*{list(logits.shape[:1] + logits.shape[2:])}, V], the vocabulary "
            f"comes last, got {list(logits.shape)}: logits.movedim(1, -1)"
        )
    shard.expect_width("logits", logits.shape[-1], "columns")
    names = "labels", "want", "transform", "teacher", "ids", "sets", "total_weight", "ignore_index"
    given.check(sizes_of(of, logits, logits.shape[:-1], width=shard.width), *names)
    if labels is None and options.check:
        raise ValueError(
            "check=True checks labels, got none: leave it out of a call without labels"
        )
    if counted := [
        name for name in ("argmax", "rank") if name in want and shard.vocab_size > 1 << 24
    ]:
        raise ValueError(
            f"{counted[0]} needs a vocabulary of at most 2^24 ids, got {shard.vocab_size}"
        )
    if "rank" in want and labels is None:
        raise ValueError("rank is that of a label, got no labels")
    if options.transport == "sum" and (alone := names_without_sums(tuple(want))):
        reader = ", which the metric 'accuracy' reads," * (alone[0] == "argmax")
        raise ValueError(f"{alone[0]}{reader} is not a sum: it needs transport='gather', got 'sum'")
    if options.transport == "symm_mem" and (backend != "triton" or not logits.is_cuda):
        raise ValueError(
            f"transport='symm_mem' needs the triton backend on CUDA, got {backend!r} on "
            f"{logits.device}"
        )
    if given.total_weight is not None and "total" not in want:
        raise ValueError('total_weight weights the statistic "total", which is not in want')
    _validate_teacher(teacher, transform, logits, want, options)
    expect_both("ids", given.ids, AT_IDS, want, "ids [.., K], got none: ids=ids")
    validate_sets(given.sets, labels, want, logits)
    return backend


def _vocabulary_is_second(logits, labels) -> bool:
    """True for logits [B, V, ..] and labels [B, ..], as torch.nn.functional.cross_entropy takes
    them."""
    shapes = logits.shape, getattr(labels, "shape", ())
    return logits.dim() > 2 and (shapes[0][0], *shapes[0][2:]) == shapes[1] != shapes[0][:-1]


def _validate_teacher(teacher, transform, logits, want, options):
    served = TOPK_TEACHER if isinstance(teacher, TopKTeacher) else FULL_TEACHER
    wanted = [name for name in (*FULL_TEACHER, *TOPK_TEACHER) if name in want]
    if teacher is None:
        if wanted:
            raise ValueError(f"{wanted} need a teacher, got none")
        return
    if isinstance(teacher, TeacherHead):
        raise ValueError(
            "a TeacherHead is for linear heads, got logits: use HeadLoss.linear or "
            "linear_vocab_statistics, or make the teacher's logits, Teacher(F.linear(hidden, "
            "weight))"
        )
    if not wanted or not set(wanted) <= set(served):
        raise ValueError(
            f"a {type(teacher).__name__} serves the statistics {served}, got {wanted} in want"
        )
    name, values = (
        ("logits", teacher.logits)
        if isinstance(teacher, Teacher)
        else ("log_probs", teacher.log_probs)
    )
    expect_as_student(f"teacher.{name}", values.dtype, logits.dtype)
    if isinstance(teacher, TopKTeacher):
        _validate_entries(teacher)
    if isinstance(teacher, Teacher) and options.inplace and _overlaps(logits, teacher.logits):
        raise ValueError(
            "inplace=True writes the gradient over the logits: the teacher's must be exactly these "
            "or share no memory with them, got some that overlap"
        )
    student_temperature = teacher.student_temperature_or_default
    for name, x in (
        ("temperature", teacher.temperature),
        ("student_temperature", student_temperature),
    ):
        if not any(isinstance(t, torch.Tensor) for t in (x, transform.temperature)):
            expect_number(f"temperature / teacher.{name}", transform.temperature / x)


def _overlaps(logits, others) -> bool:
    """Whether tensors [.., width] of one shape may share elements that are not at the same
    place."""

    def end(x):
        last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride()))
        return x.data_ptr() + (last + 1) * x.element_size()

    if (
        logits.numel() == 0
        or logits.untyped_storage().data_ptr() != others.untyped_storage().data_ptr()
    ):
        return False
    apart = others.data_ptr() - logits.data_ptr()
    if (
        logits.dtype == others.dtype
        and logits.stride() == others.stride()
        and logits.stride(-1) == 1
    ):
        size, width = logits.element_size(), logits.shape[-1]
        row = (
            min((s for n, s in zip(logits.shape[:-1], logits.stride()) if n > 1), default=width)
            or width
        )
        # other columns of the same rows
        beside = width * size <= apart % (row * size) <= (row - width) * size
        if apart == 0 or beside:
            return False
    return logits.data_ptr() < end(others) and others.data_ptr() < end(logits)


def expect_as_student(name: str, dtype: torch.dtype, student: torch.dtype):
    """Raise TypeError unless a teacher's dtype is one of logits, and float64 only if the student's
    is."""
    allowed = LOGITS_DTYPES + ((torch.float64,) if student == torch.float64 else ())
    if dtype not in allowed:
        raise TypeError(f"{name} must be one of {[str(d) for d in allowed]}, got {dtype}")


def _validate_entries(teacher):
    if teacher.ids.shape[-1] == 0:
        raise ValueError(f"teacher.ids must be [.., K] with K > 0, got {list(teacher.ids.shape)}")
    tempered = isinstance(teacher.temperature, torch.Tensor) or teacher.temperature != 1
    if not teacher.renormalize and tempered:
        raise ValueError(
            f"a temperature of {teacher.temperature} needs renormalize=True, because only the "
            "entries are known; with a tail, export them at T, topk_log_probs(.., "
            "transform=Transform(temperature=T)), and pass student_temperature=T instead"
        )
    if teacher.renormalize and teacher.tail_log_prob is not None:
        raise ValueError("renormalize=True leaves no tail, got a tail_log_prob")
