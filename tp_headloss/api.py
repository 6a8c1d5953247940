"""The public function: validate from metadata, resolve options, call."""

from __future__ import annotations

import functools
import math
import numbers
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .agreement import VALIDATIONS, Agreement
from .autograd import OUTPUTS, Statistics, top_entries
from .backends import BACKENDS, resolve_backend
from .comm import TRANSPORTS
from .dtensor import local, local_logits
from .shard import ShardFacts, VocabShard
from .stats import OF_TEACHER, OF_TOPK, OPTIONAL, HeadSpec, Inputs, VocabStatistics
from .validation import expect_ids, expect_instance, expect_int, expect_number, expect_tensor

LOGITS_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Transform:
    """z = softcap * tanh((x + bias) * scale / softcap) / temperature, computed inside the kernels in fp32.

    bias: [width] of this rank's shard, differentiable. temperature: a number, or one per token (the logits' leading
    shape, not differentiable). softcap: None for none (Gemma 2, arXiv:2408.00118, section 2).
    """

    bias: torch.Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    temperature: float | torch.Tensor = 1.0

    def __post_init__(self):
        expect_number("scale", self.scale, positive=False)
        _expect_temperature("temperature", self.temperature)
        if self.softcap is not None:
            expect_number("softcap", self.softcap)
            expect_number("scale / softcap", self.scale / self.softcap, positive=False)
        if not isinstance(self.temperature, torch.Tensor):
            expect_number("scale / temperature", self.scale / self.temperature, positive=False)
            expect_number("softcap / temperature", (self.softcap or 1.0) / self.temperature)


def _expect_temperature(name, temperature):
    if isinstance(temperature, torch.Tensor):
        if temperature.requires_grad:
            raise ValueError(f"{name} gets no gradient: pass {name}.detach()")
        return
    if not isinstance(temperature, (int, float, numbers.Real)):
        raise TypeError(f"{name} must be a number or a tensor, got {temperature!r}")
    expect_number(name, temperature)


@dataclass(frozen=True)
class Options:
    """How, not what: no option changes a result by more than rounding. ValueError or TypeError for what does not exist.

    backend: "triton", "torch" or None (triton on CUDA, torch elsewhere). transport: "gather", "symm_mem", "sum" or
    "auto", see `comm`. inplace: the backward writes the gradient over the logits (eager only). check: raise a
    ValueError that names the first token with a bad label, on every rank, at the price of a host synchronisation.
    validate: "metadata" looks at what this rank can see, "full" has the ranks of the group compare their calls first,
    so that a mistake on one of them is the same exception on all, see `agreement` (eager only; for debugging);
    "checksums" is "full" and compares the bits of replicated hidden states, too.
    """

    backend: str | None = None
    transport: str = "auto"
    inplace: bool = False
    check: bool = False
    validate: str = "metadata"

    def __post_init__(self):
        if self.backend is not None and self.backend not in BACKENDS:
            raise ValueError(f"backend must be one of {BACKENDS} or None (by device), got {self.backend!r}")
        for name, known in (("transport", TRANSPORTS), ("validate", VALIDATIONS)):
            if (value := getattr(self, name)) not in known:
                raise ValueError(f"{name} must be one of {known}, got {value!r}")
        for name in ("inplace", "check"):
            if not isinstance(value := getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {value!r}")


@dataclass(frozen=True)
class Teacher:
    """What a student is distilled from: logits of the same shard, compared at temperatures of their own.

    logits: [.., width] sharded on V like the student's, any float dtype, never differentiated; log-probs are logits,
    too. Columns at or beyond the shard's ``vocab_size`` take no part, so a teacher with more ids than the student is
    compared on the common ones if that is the vocab_size (and its logits are cut at the same bounds).
    temperature: of the teacher, a number or one per token [..]. student_temperature: divides the student's logits (with
    bias, scale and softcap, whatever ``Transform.temperature`` is); None: the same as the teacher's. beta: of the
    Jensen-Shannon divergence, the teacher's share of the mixture, in (0, 1).
    """

    logits: torch.Tensor
    temperature: float | torch.Tensor = 1.0
    student_temperature: float | torch.Tensor | None = None
    beta: float = 0.5

    def __post_init__(self):
        _expect_temperature("teacher.temperature", self.temperature)
        _expect_temperature("teacher.student_temperature", self.of_student)
        if not 0 < self.beta < 1:
            raise ValueError(f"beta must be in (0, 1), got {self.beta}; at its ends use forward_kl or reverse_kl")

    @property
    def of_student(self) -> float | torch.Tensor:
        return self.temperature if self.student_temperature is None else self.student_temperature


@dataclass(frozen=True)
class TopKTeacher:
    """What a student is distilled from if only some ids of the teacher are known, as `topk_log_probs` exports them.

    ids: [.., K] int64 or int32, global, replicated, in any order. log_probs: [.., K] any float dtype. An entry with a
    negative id, a log-prob of -inf, or False in ``mask`` [.., K] is none; entries of the same id add up; an id at or
    beyond the vocabulary makes its token's distillation NaN (mask the ids that a student does not have).
    tail_log_prob: [..] log-prob of everything else, for losses that know a tail; None: of 1 - the entries' probability,
    which is as exact as their log-probs are (give it, if they are of half precision and nearly everything).
    temperature: of the teacher, a number or one per token [..]: log_probs / temperature, renormalised; 1 for log-probs
    that were exported at a temperature. student_temperature, beta: as in `Teacher`. renormalize: the entries'
    probabilities are divided by their sum, so that there is no tail; needed with a temperature.
    """

    ids: torch.Tensor
    log_probs: torch.Tensor
    mask: torch.Tensor | None = None
    tail_log_prob: torch.Tensor | None = None
    temperature: float | torch.Tensor = 1.0
    student_temperature: float | torch.Tensor | None = None
    renormalize: bool = True
    beta: float = 0.5

    of_student = Teacher.of_student
    __post_init__ = Teacher.__post_init__


NO_TRANSFORM, DEFAULTS = Transform(), Options()


def vocab_statistics(
    logits: torch.Tensor,
    labels: torch.Tensor | None = None,
    *,
    shard: VocabShard | None = None,
    want: tuple[str, ...] = (),
    transform: Transform | None = None,
    teacher: Teacher | TopKTeacher | None = None,
    total_weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    options: Options | None = None,
) -> VocabStatistics:
    """Differentiable per-token statistics of the whole vocabulary, from this rank's columns of the logits.

    Without labels and with want=("argmax",) it also samples: the argmax of logits + Gumbel noise, where each rank adds
    noise of its own columns, is a sample of softmax(logits), the same on every rank.

    logits [.., width] sharded on V, labels [..] replicated -> statistics [..] fp32 replicated. One collective forward
    (none at one rank), backward: no communication; gradients meet in one kernel and are rounded once.

    logits: fp32, bf16 or fp16 (float64 with the torch backend), any leading shape and strides; never written unless
        ``options.inplace``, when the backward overwrites them and a later use of the old values by autograd raises.
    labels: int32 or int64 global ids. ``ignore_index`` wins over everything, a valid id included. Any other label
        outside ``[0, vocab_size)`` makes its token NaN on every rank (``options.check`` raises instead).
    shard: the columns this rank owns; None means that ``logits`` hold the whole vocabulary, or are a DTensor that says
        it, ``Shard(-1)`` on one dimension of its mesh (labels and the like then plain or DTensors; results are plain).
    want: of "entropy", "total" and "argmax", with a `Teacher` of `stats.OF_TEACHER`, with a `TopKTeacher` of
        `stats.OF_TOPK`; lse is always there, log_prob and target_logit with labels. The Jensen-Shannon divergences and
        "total_variation" take a second, small collective, all others together one.
    total_weight: [width] fp32 column weights w of ``total`` (class weights), not differentiable.

    Raises ValueError or TypeError, from metadata alone and hence on every rank, for what does not fit together.
    """
    return run_statistics(logits, labels, shard, want, transform, teacher, total_weight, ignore_index, options)[0]


class LogProbs(NamedTuple):
    """Per token, fp32, the labels' shape: what a trainer needs of its own policy, or of a reference."""

    log_prob: torch.Tensor  # log p of the label, never above 0; 0 where ignored
    entropy: torch.Tensor | None  # -sum p log p over the whole vocabulary, nats
    lse: torch.Tensor  # log sum exp of the transformed logits


def log_probs(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    shard: VocabShard | None = None,
    entropy: bool = True,
    differentiable: bool = True,
    transform: Transform | None = None,
    ignore_index: int = -100,
    options: Options | None = None,
) -> LogProbs:
    """Log-prob of each label with entropy and lse: logits [.., width] sharded on V, labels [..] -> [..] replicated.

    `vocab_statistics` under the name that RL trainers look for, same arguments and errors; one collective forward, none
    backward. Nothing is shifted: labels[t] is scored by logits[t]. Sampling temperature: ``transform``.

    differentiable: False saves nothing for a backward (old and reference policies; the model that makes the logits
    wants `torch.no_grad` of its own). Otherwise all three have gradients,
    and what takes part in no loss costs nothing backward; entropy=False spares its forward, too.
    """
    want = ("entropy",) if entropy else ()
    with torch.set_grad_enabled(differentiable and torch.is_grad_enabled()):
        stats = vocab_statistics(
            logits,
            labels,
            shard=shard,
            want=want,
            transform=transform,
            ignore_index=ignore_index,
            options=options,
        )
    return LogProbs(stats.log_prob, stats.entropy, stats.lse)


def run_statistics(
    logits, labels, shard, want, transform, teacher, total_weight, ignore_index, options, reduction=None
):
    """`vocab_statistics`, and what a `Reduction` gives (Triton backend, labels): its loss and sums, else None."""
    expect_instance("options", options, Options)
    transform, options = transform or NO_TRANSFORM, options or DEFAULTS
    with Agreement(options, shard) as agreement:
        logits, shard = local_logits(logits, shard)
        labels, transform, teacher = (local(x, shard) for x in (labels, transform, teacher))
        agreement.on(
            "vocab_statistics", shard, logits=logits, labels=labels, want=want, transform=transform, teacher=teacher,
            total_weight=total_weight, ignore_index=ignore_index, options=options,
        )  # fmt: skip
        rows, spec, inputs = flat_inputs(
            logits, labels, shard, want, transform, teacher, total_weight, ignore_index, options
        )
    if reduction is not None and reduction.weight is not None:
        reduction = reduction._replace(weight=rows.flatten(reduction.weight).float().contiguous())
    *values, loss, sums = Statistics.apply(*inputs, spec, options.inplace, reduction)
    return assembled(values, rows, labels, shard, options.check), loss, sums


def assembled(values, rows, labels, shard, check: bool = False) -> VocabStatistics:
    """Statistics [N] in the order of `OUTPUTS` -> [..]."""
    out = {name: None if value is None else rows.unflatten(value) for name, value in zip(OUTPUTS, values)}
    owners = out.pop("owners")
    if check:
        _check_labels(labels, owners, out["valid"], shard)
    return VocabStatistics(**out, labels=labels, vocab_size=shard.vocab_size)


def flat_inputs(logits, labels, shard, want, transform, teacher, total_weight, ignore_index, options, order_of=None):
    """Validated: the order of the tokens (of `order_of` [.., any], else of the logits), the static facts of the pass,
    and what the backends take, by rows [N, ..]."""
    backend = _validate(logits, labels, shard, want, transform, teacher, total_weight, options)
    ignore_index = expect_int("ignore_index", ignore_index)
    if not -(1 << 63) <= ignore_index < 1 << 63:
        raise ValueError(f"ignore_index must be in the range of int64, got {ignore_index}")
    temperature, temperatures = transform.temperature, None
    if isinstance(temperature, torch.Tensor):
        temperature, temperatures = 1.0, temperature.to(torch.promote_types(logits.dtype, torch.float32))
    # torch.compile would trace through the cache and warn about it
    head_spec = _head_spec.__wrapped__ if torch.compiler.is_compiling() else _head_spec
    numbers = float(transform.scale), float(transform.softcap or 0.0), float(temperature)
    of_teacher = _teacher_scales(teacher, transform.temperature, logits)
    beta = 0.5 if teacher is None else float(teacher.beta)
    static = tuple(want), *numbers, ignore_index, backend, options.transport
    spec = head_spec(shard.facts, *static, *of_teacher[0], beta)
    rows = _TokenOrder(logits if order_of is None else order_of, options.inplace, shard.world_size == 1)
    vectors = {"labels": labels, "temperatures": temperatures}
    vectors = {name: None if x is None else rows.flatten(x).contiguous() for name, x in vectors.items()}
    inputs = Inputs(
        rows.flatten(logits),
        bias=None if transform.bias is None else transform.bias.contiguous(),
        total_weight=None if total_weight is None else total_weight.detach().float().contiguous(),
        **vectors,
        **_of_teacher(teacher, of_teacher[1], rows, spec),
    )
    return rows, spec, inputs


def _of_teacher(teacher, scales, rows, spec) -> dict[str, torch.Tensor]:
    if teacher is None:
        return {}
    out = {} if scales is None else {"scales": torch.stack([rows.flatten(scale) for scale in scales])}
    if isinstance(teacher, Teacher):
        return out | {"teacher": rows.flatten(teacher.logits.detach())}
    given = teacher.ids, teacher.log_probs.detach(), teacher.mask
    given = (None if x is None else rows.flatten(x).contiguous() for x in given)
    scale = None if scales is None else out["scales"][0]
    entries = top_entries(*given, scale, spec.teacher_scale, teacher.renormalize, spec.vocab_size, spec.backend)
    return out | dict(zip(("entries", "entry_log_probs"), entries))


@functools.lru_cache(maxsize=256)  # by plain values: a process group in its keys would never be freed
def _head_spec(
    facts: ShardFacts, want, scale, softcap, temperature, ignore_index, backend, transport,
    teacher_scale, student_scale, beta,
) -> HeadSpec:  # fmt: skip
    return HeadSpec(
        **facts._asdict(),
        want=tuple(name for name in OPTIONAL if name in want),
        scale=scale,
        softcap=softcap,  # 0: none
        temperature=temperature,
        ignore_index=ignore_index,
        backend=backend,
        transport=transport,
        teacher_scale=teacher_scale,
        student_scale=student_scale,
        beta=beta,
    )


def _teacher_scales(teacher, temperature, logits):
    """(1 / T_teacher, T / T_student) as numbers, or both per token [..] if any of the three temperatures is."""
    if teacher is None:
        return (1.0, 1.0), None
    temperatures = teacher.temperature, temperature, teacher.of_student
    if not any(isinstance(t, torch.Tensor) for t in temperatures):
        return (1.0 / teacher.temperature, temperature / teacher.of_student), None
    dtype = torch.promote_types(logits.dtype, torch.float32)
    one, own, of_student = (
        torch.as_tensor(t, dtype=dtype, device=logits.device).detach().expand(logits.shape[:-1]) for t in temperatures
    )
    return (1.0, 1.0), (1.0 / one, own / of_student)


class _TokenOrder:
    """Tokens in the logits' memory order, so that a transposed [S, B, V] needs no copy: only per-token vectors move.

    On several ranks in their logical order: all must have the same, and each sees only its own logits' memory.
    """

    def __init__(self, logits: torch.Tensor, inplace: bool, alone: bool):
        lead = logits.dim() - 1
        if lead == 1 and not inplace:  # already a row of tokens
            self.permutation, self.shape, self.rows = None, logits.shape[:1], logits.shape[0]
            return
        order = []  # by descending stride; by hand, because a traced stride may be compared but not sorted
        for d in range(lead):
            at = len(order)
            while alone and at > 0 and logits.stride(order[at - 1]) < logits.stride(d):
                at -= 1
            order.insert(at, d)
        self.permutation = None if order == list(range(lead)) else order
        self.shape = [logits.shape[d] for d in order]
        self.rows = math.prod(self.shape)
        if inplace and self.rows and not self._can_be_overwritten(logits, order):
            raise ValueError(
                "inplace=True needs logits whose leading dimensions form one row stride and whose elements do not "
                f"share memory, got shape {list(logits.shape)} with strides {list(logits.stride())}"
            )

    def _can_be_overwritten(self, logits, order) -> bool:
        sizes = [(logits.shape[d], logits.stride(d)) for d in order if logits.shape[d] != 1]
        collapses = all(s == n_next * s_next for (_, s), (n_next, s_next) in zip(sizes, sizes[1:]))
        row, column, width = sizes[-1][1] if sizes else 0, logits.stride(-1), logits.shape[-1]
        apart = row > (width - 1) * column or column > (self.rows - 1) * row
        return collapses and (self.rows == 1 or row > 0) and (width <= 1 or column > 0) and apart

    def flatten(self, x: torch.Tensor) -> torch.Tensor:
        trailing = x.shape[len(self.shape) :]
        if self.permutation is not None:
            x = x.permute(*self.permutation, *range(len(self.shape), x.dim()))
        return x.reshape(self.rows, *trailing) if len(self.shape) != 1 else x

    def unflatten(self, x: torch.Tensor) -> torch.Tensor:
        """[N, ..] -> [.., ..]"""
        if len(self.shape) == 1:
            return x
        trailing = x.shape[1:]
        x = x.view([*self.shape, *trailing])
        if self.permutation is None:
            return x
        lead = len(self.shape)
        return x.permute(*(self.permutation.index(d) for d in range(lead)), *range(lead, lead + len(trailing)))


def _validate(logits, labels, shard, want, transform, teacher, total_weight, options) -> str:
    """Facts that every rank shares, so that an error is the same on all of them. -> the backend's name."""
    backend = resolve_backend(options.backend, logits.device)
    allowed = LOGITS_DTYPES + ((torch.float64,) if backend == "torch" else ())
    if logits.dtype not in allowed:
        swapped = labels is not None and labels.is_floating_point() and not logits.is_floating_point()
        hint = " (are logits and labels swapped?)" if swapped else ""
        raise TypeError(
            f"logits must be one of {[str(d) for d in allowed]} for backend {backend!r}, got {logits.dtype}{hint}"
        )
    if logits.shape[-1] != shard.width:
        raise ValueError(
            f"logits must have the shard's {shard.width} columns [{shard.start}, {shard.stop}), "
            f"got {logits.shape[-1]}{_why_another_width(logits.shape[-1], shard)}"
        )
    lead = logits.shape[:-1]
    if labels is not None:
        expect_ids("labels", labels)
        expect_tensor("labels", labels, lead, logits.device)
    elif options.check:
        raise ValueError("check=True checks labels, got none")
    if unknown := set(want) - set(OPTIONAL):
        raise ValueError(f"want must be of {OPTIONAL}, got {sorted(unknown)}")
    if "argmax" in want and shard.vocab_size > 1 << 24:
        raise ValueError(f"argmax needs a vocabulary of at most 2^24 ids, got {shard.vocab_size}")
    if options.inplace and torch.compiler.is_compiling():
        raise ValueError("inplace=True is for eager: torch.compile plans memory itself and may not see it overwritten")
    if options.transport == "sum" and "argmax" in want:
        raise ValueError("argmax is not a sum: it needs transport='gather', got 'sum'")
    if options.transport == "symm_mem" and (backend != "triton" or not logits.is_cuda):
        raise ValueError(f"transport='symm_mem' needs the triton backend on CUDA, got {backend!r} on {logits.device}")
    if total_weight is not None:
        if "total" not in want:
            raise ValueError('total_weight weights the statistic "total", which is not in want')
        expect_tensor("total_weight", total_weight, (shard.width,), logits.device)
    if transform.bias is not None:
        expect_tensor("bias", transform.bias, (shard.width,), logits.device)
    if isinstance(transform.temperature, torch.Tensor):
        expect_tensor("temperature", transform.temperature, lead, logits.device)
    _validate_teacher(teacher, transform, logits, want, options)
    return backend


def _why_another_width(columns: int, shard: VocabShard) -> str:
    """A likely reason for logits that are not as wide as the shard."""
    if shard.world_size > 1 and columns in (shard.vocab_size, shard.padded_size):
        return " (these look like gathered logits)"
    if columns > shard.width:
        padded = columns * shard.world_size
        return f" (a padded vocabulary? VocabShard.from_group(group, {shard.vocab_size}, padded_size={padded}))"
    return f" (is vocab_size={shard.vocab_size} right?)"


def _validate_teacher(teacher, transform, logits, want, options):
    served = OF_TOPK if isinstance(teacher, TopKTeacher) else OF_TEACHER
    wanted = [name for name in (*OF_TEACHER, *OF_TOPK) if name in want]
    if teacher is None:
        if wanted:
            raise ValueError(f"{wanted} need a teacher, got none")
        return
    if not isinstance(teacher, (Teacher, TopKTeacher)):
        raise TypeError(f"teacher must be a Teacher or a TopKTeacher, got {type(teacher).__name__}")
    if not wanted or not set(wanted) <= set(served):
        raise ValueError(f"a {type(teacher).__name__} serves the statistics {served}, got {wanted} in want")
    lead, device = logits.shape[:-1], logits.device
    allowed = LOGITS_DTYPES + ((torch.float64,) if logits.dtype == torch.float64 else ())
    given = {"logits": teacher.logits} if isinstance(teacher, Teacher) else {"log_probs": teacher.log_probs}
    if isinstance(teacher, TopKTeacher):
        _validate_entries(teacher, lead, device)
    else:
        expect_tensor("teacher.logits", teacher.logits, logits.shape, device)
    for name, x in given.items():
        if x.dtype not in allowed:
            raise TypeError(f"teacher.{name} must be one of {[str(d) for d in allowed]}, got {x.dtype}")
    for name, x in (("temperature", teacher.temperature), ("student_temperature", teacher.of_student)):
        if isinstance(x, torch.Tensor):
            expect_tensor(f"teacher.{name}", x, lead, device)
        elif not isinstance(transform.temperature, torch.Tensor):
            expect_number(f"temperature / teacher.{name}", transform.temperature / x)
    if options.transport == "sum":
        raise ValueError(f"{wanted} need transport='gather', got 'sum'")


def _validate_entries(teacher, lead, device):
    expect_ids("teacher.ids", teacher.ids)
    if teacher.ids.dim() == 0 or teacher.ids.shape[-1] == 0:
        raise ValueError(f"teacher.ids must be [.., K] with K > 0, got {list(teacher.ids.shape)}")
    shape = (*lead, teacher.ids.shape[-1])
    expect_tensor("teacher.ids", teacher.ids, shape, device)
    expect_tensor("teacher.log_probs", teacher.log_probs, shape, device)
    if teacher.mask is not None:
        if teacher.mask.dtype != torch.bool:
            raise TypeError(f"teacher.mask must be bool, got {teacher.mask.dtype}")
        expect_tensor("teacher.mask", teacher.mask, shape, device)
    if teacher.tail_log_prob is not None:
        expect_tensor("teacher.tail_log_prob", teacher.tail_log_prob, lead, device)
        if not teacher.tail_log_prob.is_floating_point():
            raise TypeError(f"teacher.tail_log_prob must be floating point, got {teacher.tail_log_prob.dtype}")
    tempered = isinstance(teacher.temperature, torch.Tensor) or teacher.temperature != 1
    if not teacher.renormalize and tempered:
        raise ValueError(f"a temperature of {teacher.temperature} needs renormalize=True: only the entries are known")
    if teacher.renormalize and teacher.tail_log_prob is not None:
        raise ValueError("renormalize=True leaves no tail, got a tail_log_prob")


def _check_labels(labels, owners, valid, shard):
    bad = (valid & (owners != 1)).flatten().nonzero()
    if len(bad):
        token = int(bad[0])
        lonely = int(owners.flatten()[token]) == 0
        hint = ": are these logits one rank's columns? Then pass shard=" if shard.group is None else ""
        raise ValueError(
            f"label of token {token} (flat index) must be the ignore_index or in [0, {shard.vocab_size}), got "
            f"{int(labels.flatten()[token])}, which {'no shard owns' if lonely else 'ranks do not agree on'}; "
            f"{len(bad)} such tokens{hint}"
        )
