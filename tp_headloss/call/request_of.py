"""From a public call to a `Request`.

Every check of the call's metadata comes first, then the order of its tokens and its static facts.
"""

import functools

import torch

from ..arguments.id_sets import masked_ids
from ..arguments.teachers import Teacher, TeacherHead, TopKTeacher
from ..engine.backend import resolve_backend
from ..engine.operators import distinct_ids
from ..engine.request import Facts, Request, Tensors, TokenOrder
from ..ranks.shard import ShardFacts
from ..spec import sizes_of
from ..spec.checks import expect_number, refuse_float_labels
from ..statistics import (
    AT_IDS,
    FULL_TEACHER,
    TOPK_TEACHER,
    known_statistics,
    layout_of,
    names_about_labels,
    names_without_sums,
)
from ..statistics.at_ids import known_ids
from .given import Given
from .sets import check_entries, check_ids, check_sets, expect_both, set_tensors, validate_sets

LOGITS_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def build_request(given: Given, order_of=None) -> Request:
    """Validate a call and bring its tensors into rows [N, ..].

    The rows are in the order of `order_of` [.., any], or of the logits. Raises ValueError or
    TypeError from facts that every rank shares, so that an error is the same on all of them.
    """
    # a view of a conjugate's imaginary part has its sign elsewhere than in memory
    logits = given.logits.resolve_neg()
    backend = _validate_call(given)
    if given.options.check:
        _check_ids_of_call(given)
    labels = given.labels
    transform = given.transform
    temperatures = None
    if isinstance(transform.temperature, torch.Tensor):
        temperatures = known_temperatures(transform.temperature, logits)
    teacher_factors, teacher_scales = _teacher_scales(given.teacher, transform.temperature, logits)
    facts = _facts_of(given, backend, teacher_factors)
    order_of = logits if order_of is None else order_of
    order = TokenOrder(order_of, given.options.inplace, given.shard.world_size == 1)

    def rows(x: torch.Tensor | None) -> torch.Tensor | None:
        return None if x is None else order.flatten(x).contiguous()

    ids = None
    if given.ids is not None:
        ids = known_ids(order.flatten(given.ids), facts.vocab_size).contiguous()
    column_weight = given.total_weight
    if column_weight is not None:
        column_weight = column_weight.detach().float().contiguous()
    tensors = Tensors(
        order.flatten(logits),
        labels=rows(labels),
        temperatures=rows(temperatures),
        bias=None if transform.bias is None else transform.bias.contiguous(),
        column_weight=column_weight,
        **_teacher_tensors(given.teacher, teacher_scales, order, facts),
        **set_tensors(given.sets, logits.shape[:-1], order, facts),
        ids=ids,
    )
    layout = layout_of(labels is not None, facts.want, tensors.ids)
    return Request(tensors, facts, layout, order, given.shard)


def _check_ids_of_call(given: Given):
    """Raise ValueError for the first token of whose sets, ids or entries one is no id."""
    labels, ignore_index = given.labels, int(given.ignore_index)
    if labels is None:  # any that are not ignored
        labels = torch.zeros(given.logits.shape[:-1], dtype=torch.int64, device=given.logits.device)
        ignore_index = -1
    known = labels, ignore_index, given.shard.vocab_size
    if given.sets is not None:
        check_sets(given.sets, *known, has_labels=given.labels is not None)
    if given.ids is not None:
        check_ids(given.ids, *known)
    if isinstance(given.teacher, TopKTeacher):
        check_entries(given.teacher, *known)


def _facts_of(given: Given, backend: str, teacher_factors: tuple) -> Facts:
    """Return the static facts of a call. teacher_factors: as `_teacher_scales` returns them."""
    transform = given.transform
    per_token = isinstance(transform.temperature, torch.Tensor)
    temperature = 1.0 if per_token else float(transform.temperature)
    numbers = float(transform.scale), float(transform.softcap or 0.0), temperature
    names = int(given.ignore_index), backend, given.options.transport
    beta = 0.5 if given.teacher is None else float(given.teacher.beta_or_default)
    # torch.compile would trace through the cache and warn about it
    make_facts = _facts.__wrapped__ if torch.compiler.is_compiling() else _facts
    return make_facts(
        given.shard.facts, tuple(given.want), *numbers, *names, *teacher_factors, beta
    )


def _teacher_tensors(teacher, scales, order: TokenOrder, facts: Facts) -> dict[str, torch.Tensor]:
    """Return the tensors of a teacher by rows [N, ..]."""
    if teacher is None:
        return {}
    out: dict[str, torch.Tensor] = {}
    entry_scales = None
    if scales is not None:
        out["scales"] = torch.stack([order.flatten(scale) for scale in scales])
        entry_scales = out["scales"][0]
    if isinstance(teacher, Teacher):
        return out | {"teacher": order.flatten(teacher.logits.detach().resolve_neg())}
    ids = order.flatten(masked_ids(teacher)).contiguous()
    log_probs = order.flatten(teacher.log_probs.detach()).contiguous()
    how = entry_scales, facts.teacher_scale, teacher.renormalize
    entries = distinct_ids("entries", ids, log_probs, *how, facts.vocab_size, facts.backend)
    return out | dict(zip(("entries", "entry_log_probs"), entries))


# by plain values: a process group in its keys would never be freed
@functools.lru_cache(maxsize=256)
def _facts(shard: ShardFacts, want: tuple[str, ...], *others) -> Facts:
    """Return the facts, in the order of their fields, of which those of the shard are the first."""
    return Facts(*shard, tuple(name for name in known_statistics() if name in want), *others)


def _teacher_scales(teacher, temperature, logits):
    """Return the factors (1 / T_teacher, T / T_student), and both per token [..].

    The factors are 1 if any of the three temperatures is per token, else there is nothing per
    token.
    """
    if teacher is None:
        return (1.0, 1.0), None
    student = teacher.student_temperature_or_default
    temperatures = teacher.temperature, temperature, student
    if not any(isinstance(t, torch.Tensor) for t in temperatures):
        return (1.0 / teacher.temperature, temperature / student), None
    tokens = logits.shape[:-1]
    given, own, student = [known_temperatures(t, logits).expand(tokens) for t in temperatures]
    return (1.0, 1.0), (1.0 / given, own / student)


def known_temperatures(temperature, logits) -> torch.Tensor:
    """Return a number or temperatures [..] in the precision of the logits' statistics.

    One that is not positive becomes NaN.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    if isinstance(temperature, torch.Tensor):
        temperatures = temperature.detach().to(logits.device, dtype)
    else:  # without a copy, for which the host would wait
        temperatures = torch.full((), temperature, dtype=dtype, device=logits.device)
    return torch.where(temperatures > 0, temperatures, torch.nan)


def _validate_call(given: Given) -> str:
    """Raise TypeError or ValueError unless the arguments fit together; return the backend's name.

    Reads only facts that every rank shares, so that an error is the same on all of them.
    """
    logits = given.logits
    refuse_float_labels(logits, given.labels)
    backend = resolve_backend(given.options.backend, logits.device)
    allowed = LOGITS_DTYPES + ((torch.float64,) if backend == "torch" else ())
    if logits.dtype not in allowed:
        raise TypeError(
            f"logits must be one of {list(map(str, allowed))} for backend {backend!r}, got "
            f"{logits.dtype}"
        )
    expect_labels_of_tokens(given)
    names = "want", "transform", "teacher", "ids", "sets", "total_weight", "ignore_index"
    sizes = sizes_of(
        _tokens_name(given), logits, logits.shape[:-1], width=given.shard.width, shard=given.shard
    )
    given.check(sizes, *names)
    _validate_want(given)
    _validate_transport(given, backend)
    if given.total_weight is not None and "total" not in given.want:
        raise ValueError('total_weight weights the statistic "total", which is not in want')
    _validate_teacher(given)
    expect_both("ids", given.ids, AT_IDS, given.want, "ids [.., K], got none: ids=ids")
    validate_sets(given.sets, given.labels, given.want, logits)
    return backend


def expect_labels_of_tokens(given: Given):
    """Raise TypeError or ValueError unless logits have the shard's columns, and labels are of the
    tokens of the logits or hidden states.

    A loss looks at this first: everything else per token is compared with the labels.
    """
    x, lead = given.tokens, given.tokens_shape
    if given.linear is None:
        if x.dim() and x.shape == getattr(given.labels, "shape", None):
            raise ValueError(
                f"logits must be [*{list(x.shape)}, V] for these labels, got {list(x.shape)}: of "
                "losses, or log-probs of the labels, pass the logits that they were made of; of "
                "one-hot labels pass their .argmax(-1)"
            )
        if _vocabulary_is_second(x, given.labels):
            raise ValueError(
                f"logits must be [*{list(x.shape[:1] + x.shape[2:])}, V], the vocabulary "
                f"comes last, got {list(x.shape)}: logits.movedim(1, -1)"
            )
        given.shard.expect_width("logits", x.shape[-1], "columns")
    given.check(sizes_of(_tokens_name(given), x, lead, shard=given.shard), "labels")


def _tokens_name(given: Given) -> str:
    """Return what errors call the tensor that the tokens are of."""
    if given.linear is None:
        return "logits"
    if given.linear.hidden_grad != "reduce_scatter":
        return "hidden states"
    return (
        f"hidden states, which hidden_grad='reduce_scatter' gathers from {given.shard.world_size} "
        "ranks (whole ones need 'all_reduce')"
    )


def _vocabulary_is_second(logits, labels) -> bool:
    """Return True for logits [B, V, ..] and labels [B, ..], as F.cross_entropy takes them."""
    shape = logits.shape
    tokens = getattr(labels, "shape", ())
    return len(shape) > 2 and (shape[0], *shape[2:]) == tokens != shape[:-1]


def _validate_want(given: Given):
    """Raise ValueError unless the labels and the vocabulary are as the statistics need them."""
    vocab_size = given.shard.vocab_size
    for name in ("argmax", "rank"):
        if name in given.want and vocab_size > 1 << 24:
            raise ValueError(f"{name} needs a vocabulary of at most 2^24 ids, got {vocab_size}")
    if given.labels is None and (names := names_about_labels(tuple(given.want))):
        raise ValueError(f"{names[0]} is that of a label, got no labels")


def _validate_transport(given: Given, backend: str):
    """Raise ValueError unless the transport carries the statistics, and exists here."""
    transport = given.options.transport
    if transport == "sum" and (alone := names_without_sums(tuple(given.want))):
        reader = ", which the metric 'accuracy' reads," * (alone[0] == "argmax")
        raise ValueError(f"{alone[0]}{reader} is not a sum: it needs transport='gather', got 'sum'")
    if transport == "symm_mem" and (backend != "triton" or not given.logits.is_cuda):
        raise ValueError(
            f"transport='symm_mem' needs the triton backend on CUDA, got {backend!r} on "
            f"{given.logits.device}"
        )


def _validate_teacher(given: Given):
    """Raise TypeError or ValueError unless the teacher fits the statistics and the logits."""
    teacher = given.teacher
    wanted = [name for name in (*FULL_TEACHER, *TOPK_TEACHER) if name in given.want]
    if teacher is None:
        if wanted:
            made = "TopKTeacher(ids, log_probs)" if wanted[0] in TOPK_TEACHER else "Teacher(..)"
            raise ValueError(
                f"{wanted} need a teacher, got none: teacher={made}, of a HeadLoss "
                f"inputs={{'teacher': {made}}}"
            )
        return
    if isinstance(teacher, TeacherHead):
        raise ValueError(
            "a TeacherHead is for linear heads, got logits: use HeadLoss.linear or "
            "linear_vocab_statistics, or make the teacher's logits, Teacher(F.linear(hidden, "
            "weight))"
        )
    is_topk = isinstance(teacher, TopKTeacher)
    served = TOPK_TEACHER if is_topk else FULL_TEACHER
    if not wanted or not set(wanted) <= set(served):
        said = f": write want=({served[0]!r},), of the call or of the term that takes it"
        if wanted:
            other = "Teacher(..)" if is_topk else "TopKTeacher(ids, log_probs)"
            said = f": Distillation takes a Teacher, TopKDistillation a TopKTeacher; pass {other}"
        if set(wanted) & set(served):
            said = ": a call has one teacher, so make a call for each"
        raise ValueError(
            f"a {type(teacher).__name__} serves the statistics {served}, got {wanted} in want"
            + said
        )
    if isinstance(teacher, TopKTeacher):
        expect_as_student("teacher.log_probs", teacher.log_probs.dtype, given.logits.dtype)
        _validate_entries(teacher)
    else:
        expect_as_student("teacher.logits", teacher.logits.dtype, given.logits.dtype)
        of_student = given.logits, given.hidden, given.weight, given.transform.bias
        expect_not_swapped(teacher.logits, of_student)
        _validate_memory(given.logits, teacher.logits, given.options)
    temperature = given.transform.temperature
    _expect_ratio("temperature", temperature, teacher.temperature)
    _expect_ratio("student_temperature", temperature, teacher.student_temperature_or_default)


def _expect_ratio(name: str, temperature, of_teacher):
    """Raise ValueError unless kernels can divide the logits' temperature by one of the teacher."""
    if not isinstance(temperature, torch.Tensor) and not isinstance(of_teacher, torch.Tensor):
        expect_number(f"temperature / teacher.{name}", temperature / of_teacher)


def _validate_memory(logits, teacher_logits, options):
    """Raise ValueError if the gradient would overwrite a teacher's logits before it reads them."""
    if options.inplace and _overlaps(logits, teacher_logits):
        raise ValueError(
            "inplace=True writes the gradient over the logits: the teacher's must be exactly these "
            "or share no memory with them, got some that overlap"
        )


def _overlaps(logits, others) -> bool:
    """Return True if tensors [.., width] of one shape may share elements at different places."""
    same_storage = logits.untyped_storage().data_ptr() == others.untyped_storage().data_ptr()
    if logits.numel() == 0 or not same_storage:
        return False
    same_strides = logits.stride() == others.stride() and logits.stride(-1) == 1
    if logits.dtype == others.dtype and same_strides:
        apart = others.data_ptr() - logits.data_ptr()
        size = logits.element_size()
        width = logits.shape[-1]
        strides = [s for n, s in zip(logits.shape[:-1], logits.stride()) if n > 1]
        row = min(strides, default=width) or width
        # other columns of the same rows
        beside = width * size <= apart % (row * size) <= (row - width) * size
        if apart == 0 or beside:
            return False
    return logits.data_ptr() < _end(others) and others.data_ptr() < _end(logits)


def _end(x) -> int:
    """Return the address behind the last element of a tensor."""
    last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride()))
    return x.data_ptr() + (last + 1) * x.element_size()


def expect_as_student(name: str, dtype: torch.dtype, student: torch.dtype):
    """Raise TypeError unless a teacher's dtype is one of logits.

    float64 is one only if the student's is.
    """
    allowed = LOGITS_DTYPES + ((torch.float64,) if student == torch.float64 else ())
    if dtype not in allowed:
        raise TypeError(
            f"{name} must be one of {[str(d) for d in allowed]}, got {dtype}: pass its .float()"
        )


def expect_not_swapped(of_teacher: torch.Tensor, of_student):
    """Raise ValueError if a teacher's tensor requires a gradient and no tensor of its student does.

    torch's own error would come from the backward, and name neither.
    """
    if not torch.is_grad_enabled() or not of_teacher.requires_grad:
        return
    if not any(x is not None and x.requires_grad for x in of_student):
        raise ValueError(
            "the teacher requires a gradient, which it never gets, and the student does not: are "
            "they swapped? If not, detach the teacher's, Teacher(logits.detach())"
        )


def _validate_entries(teacher):
    if teacher.ids.shape[-1] == 0:
        raise ValueError(
            f"teacher.ids must be [.., K] with K > 0, got {list(teacher.ids.shape)}: where a token "
            "has no ids, pass one of -1"
        )
    tempered = isinstance(teacher.temperature, torch.Tensor) or teacher.temperature != 1
    if not teacher.renormalize and tempered:
        raise ValueError(
            f"a temperature of {teacher.temperature} needs renormalize=True, because only the "
            "entries are known; with a tail, export them at T, topk_log_probs(.., "
            "transform=Transform(temperature=T)), and pass student_temperature=T instead"
        )
    if teacher.renormalize and teacher.tail_log_prob is not None:
        raise ValueError(
            "renormalize=True leaves no tail, got a tail_log_prob: pass renormalize=False with it, "
            "or leave it out"
        )
