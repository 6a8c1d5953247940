"""NeMo-RL's full-vocabulary on-policy distillation: the reverse KL to a teacher of which the hidden
states and the weight of the head are known.

NeMo-RL makes the teacher's logits, as large as the student's, and an fp32 gradient of that size.
Here they are made by blocks of tokens, in the forward and once more in the backward, and the
gradient has the dtype of the student's logits. From the student's hidden states, logits of neither
model exist as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple, TypeAlias

import torch
from torch.autograd.function import once_differentiable

from ..arguments.teachers import Teacher, TeacherHead
from ..call.statistics import vocab_statistics
from ..call.subclasses import is_dtensor
from ..linear_head import Linear, linear_vocab_statistics
from ..ranks.comm import group_size
from ..ranks.shard import VocabShard
from ..spec import CheckedBy, Count, Floating, Logits, Rows, Unused, checked
from .nemo_rl_sampling import log_probs_over
from .rl_tokens import (
    CpGroup,
    RankedTokens,
    TpGroup,
    VocabSize,
    even_shard_of_rank,
    expect_tokens_first,
    next_tokens,
    shard_of_columns,
)

SEQUENCE_PARALLEL = Linear(hidden_grad="reduce_scatter")
# NeMo-RL's default chunk_size, for a configuration without one
TOKENS_OF_A_BLOCK = 1024
COLUMNS = {"hidden_states": "teacher_full_hidden_states", "logits": "teacher_full_logits"}
TEACHER_OF_ROW = "opd_full_teacher_index"
# by whether the decomposition is asked for
WANTED = {False: ("reverse_kl",), True: ("reverse_kl", "entropy")}
RESULTS = "opd_full_divergence", "opd_full_entropy", "opd_full_cross_entropy"

Batch: TypeAlias = Annotated[
    Any,
    CheckedBy(
        "NeMo-RL's batch or a dict: input_ids [B, S], teacher_full_hidden_states [B, S, H_t] or "
        "teacher_full_logits [B, S, V], and with several teachers opd_full_teacher_index [B]"
    ),
]
LossFunction: TypeAlias = Annotated[
    Any, CheckedBy("NeMo-RL's loss function: an object with its configuration opd_full")
]
Heads: TypeAlias = Annotated[
    Any, CheckedBy("dict: weights [V/P, H_t] of the teachers' heads by the teacher's number")
]


class TeacherRows(NamedTuple):
    """Sequences of a batch that have one teacher."""

    rows: torch.Tensor | slice
    weight: torch.Tensor | None  # None: the teacher's logits are known


@checked
def prepare_opd_full_loss_input(
    logits: Logits,
    data: Batch,
    loss_fn: LossFunction,
    *,
    vocab_parallel_rank: Count | None = None,
    vocab_parallel_group: TpGroup = None,
    context_parallel_group: CpGroup = None,
    sampling_params: Unused = None,
    chunk_size: int | None = None,
    teacher_output_layer_weight_by_index: Heads | None = None,
    vocab_size: VocabSize | None = None,
) -> dict[str, torch.Tensor | None]:
    """Return what NeMo-RL's loss of full-vocabulary distillation reads: "opd_full_divergence" [B, S
    - 1] fp32, the reverse KL of student to teacher per token, replicated and differentiable.

    Takes the place of ``_prepare_opd_full_loss_input``. No temperature is applied, and masks are
    the loss function's, as there. With ``validate_decomposition`` it also has "opd_full_entropy",
    sum p log p (NeMo-RL's sign), and "opd_full_cross_entropy", both without a gradient, else None;
    with a reference_policy_kl_penalty "next_token_logprobs". One collective per block forward, and
    one per block backward.

    Args:
        logits: of the student, [B, L, V/P] as in `get_next_token_logprobs_from_logits`.
        loss_fn: of its opd_full, chunk_size is the number of tokens of each sequence in a block,
            and divergence must be "reverse_kl".
        sampling_params, chunk_size: change nothing.

    Raises:
        ValueError: what the teacher needs is missing or does not fit, and as
            `get_next_token_logprobs_from_logits`.
    """
    x, shard = even_shard_of_rank(logits, vocab_parallel_rank, vocab_parallel_group, vocab_size)
    tokens = RankedTokens(x, context_parallel_group, shard.group)
    full, ids = _configuration(loss_fn), _value(data, "input_ids")
    payload = _payload(data, full, len(x), tokens.total).to(x.device)
    payload = tokens.take(payload)
    teachers = _teachers(data, full, payload, teacher_output_layer_weight_by_index, shard)
    size = full.chunk_size or TOKENS_OF_A_BLOCK
    if full.teacher_payload == "logits":
        payload = payload[..., shard.start : shard.start + shard.width]
    found = _Divergence.apply(x, payload, teachers, shard, size, full.validate_decomposition)
    result: dict[str, torch.Tensor | None] = dict.fromkeys(RESULTS)
    for name, value in zip(RESULTS, found, strict=False):
        result[name] = tokens.join(value)[:, : ids.shape[1] - 1]
    if _needs_log_probs(loss_fn):
        result["next_token_logprobs"] = tokens.next_log_probs(
            lambda labels: log_probs_over(None, x, labels, shard), ids
        )
    return result


@checked
def prepare_opd_full_loss_input_from_hidden_states(
    tensor_parallel_hidden_states: Floating,
    output_weight_layer: Rows,
    data: Batch,
    loss_fn: LossFunction,
    *,
    vocab_parallel_group: TpGroup = None,
    teacher_output_layer_weight_by_index: Heads | None = None,
    vocab_size: VocabSize | None = None,
    linear: Linear = SEQUENCE_PARALLEL,
) -> dict[str, torch.Tensor | None]:
    """Return the same as `prepare_opd_full_loss_input`, without logits of the student, either.

    Blocks of logits have ``linear.budget`` bytes, not chunk_size tokens. One collective forward for
    each teacher.

    Args:
        tensor_parallel_hidden_states: [S/P, B, H], as in `from_parallel_hidden_states_to_logprobs`,
            plain; [S, B, H] replicated with another ``linear.hidden_grad``.
        output_weight_layer: [V/P, H], an even shard.

    Raises:
        ValueError: as `prepare_opd_full_loss_input`.
    """
    hidden, weight, group = tensor_parallel_hidden_states, output_weight_layer, vocab_parallel_group
    if is_dtensor(hidden) or is_dtensor(weight):
        raise ValueError("hidden states and weight must be plain here, got a DTensor: .to_local()")
    ranks = group_size(group)
    shard = shard_of_columns(len(weight) * ranks, group, vocab_size)
    parts = ranks if linear.hidden_grad == "reduce_scatter" else 1
    full, ids = _configuration(loss_fn), _value(data, "input_ids")
    expect_tokens_first(hidden, ids)
    length, batch = hidden.shape[0] * parts, hidden.shape[1]
    payload = _payload(data, full, batch, length).to(hidden.device).transpose(0, 1)
    teachers = _teachers(data, full, payload, teacher_output_layer_weight_by_index, shard)
    labels = next_tokens(ids, length, hidden.device).t()
    decompose, scored = full.validate_decomposition, _needs_log_probs(loss_fn)
    found = []
    for rows, head in teachers:
        own = payload[:, rows]
        if head is None:
            teacher: Teacher | TeacherHead = Teacher(
                own[..., shard.start : shard.start + shard.width]
            )
        else:
            part = own.chunk(parts)[group.rank() if parts > 1 else 0]
            teacher = TeacherHead(part.to(head.dtype), head)
        stats = linear_vocab_statistics(
            hidden[:, rows],
            weight,
            labels[:, rows] if scored else None,
            shard=shard,
            want=WANTED[decompose],
            teacher=teacher,
            linear=linear,
        )
        found.append([*_values(stats, decompose), *((stats.log_prob,) if scored else ())])
    names = [*RESULTS[: 3 if decompose else 1], *(("next_token_logprobs",) if scored else ())]
    result: dict[str, torch.Tensor | None] = dict.fromkeys(RESULTS)
    for name, values in zip(names, zip(*found, strict=True), strict=True):
        result[name] = _in_order(values, teachers).t()[:, : ids.shape[1] - 1]
    return result


class _Divergence(torch.autograd.Function):
    """Values [B, L] of student logits [B, L, V/P], of which the first, the reverse KL, has a
    gradient; by blocks."""

    @staticmethod
    def forward(ctx, x, payload, teachers, shard, size, decompose):
        ctx.save_for_backward(x, payload)
        ctx.set_materialize_grads(False)
        ctx.teachers, ctx.shard, ctx.size = teachers, shard, size
        kind = torch.promote_types(x.dtype, torch.float32)
        found = [x.new_empty(x.shape[:2], dtype=kind) for _ in RESULTS[: 3 if decompose else 1]]
        for at, weight in _blocks(teachers, size, x.shape[1]):
            stats = _statistics(x[at], payload[at], weight, shard, decompose)
            for whole, value in zip(found, _values(stats, decompose), strict=True):
                whole[at] = value
        ctx.mark_non_differentiable(*found[1:])
        return tuple(found)

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream, *_):
        if upstream is None:
            return (None,) * 6
        x, payload = ctx.saved_tensors
        gradient = torch.empty_like(x)
        for at, weight in _blocks(ctx.teachers, ctx.size, x.shape[1]):
            block = x[at].detach().requires_grad_()
            with torch.enable_grad():
                divergence = _statistics(block, payload[at], weight, ctx.shard, False).reverse_kl
            (gradient[at],) = torch.autograd.grad(divergence, block, upstream[at])
        return gradient, *(None,) * 5


def _statistics(x, payload, weight, shard: VocabShard, decompose: bool):
    """Statistics of a block of the student's logits."""
    with torch.no_grad():
        if weight is not None:
            payload = torch.nn.functional.linear(payload.to(weight.dtype), weight)
    return vocab_statistics(x, shard=shard, want=WANTED[decompose], teacher=Teacher(payload))


def _values(stats, decompose: bool) -> list[torch.Tensor]:
    """The values of `RESULTS`, the first alone unless decompose."""
    if not decompose:
        return [stats.reverse_kl]
    entropy = stats.entropy.detach()
    return [stats.reverse_kl, -entropy, stats.reverse_kl.detach() + entropy]


def _blocks(teachers: list[TeacherRows], size: int, length: int):
    """Yield indices of [B, L, ..] and the weight of the teacher's head."""
    for rows, weight in teachers:
        for start in range(0, length, size):
            yield (rows, slice(start, start + size)), weight


def _in_order(parts, teachers: list[TeacherRows]) -> torch.Tensor:
    """Return [S, B] of the teachers' [S, rows]."""
    if len(parts) == 1:
        return parts[0]
    order = torch.cat([torch.as_tensor(x.rows) for x in teachers])
    return torch.cat(list(parts), 1)[:, order.argsort()]


def _needs_log_probs(loss_fn) -> bool:
    return getattr(loss_fn, "reference_policy_kl_penalty", 0) != 0


def _configuration(loss_fn):
    """Return the loss function's opd_full; ValueError for what it may not ask for here."""
    full = getattr(loss_fn, "opd_full", None)
    if full is None:
        raise ValueError("loss_fn must have the configuration opd_full, got None")
    if full.teacher_payload not in COLUMNS:
        raise ValueError(
            f"opd_full.teacher_payload must be one of {list(COLUMNS)}, got {full.teacher_payload!r}"
        )
    divergence = getattr(full, "divergence", "reverse_kl")
    if divergence != "reverse_kl":
        raise ValueError(f"opd_full.divergence must be 'reverse_kl', got {divergence!r}")
    return full


def _value(data, name: str, said: str = "") -> torch.Tensor:
    """Return a value of the batch; TypeError or ValueError, with the names there are, without
    it."""
    if not hasattr(data, "keys"):
        raise TypeError(f"data must be NeMo-RL's batch or a dict, got {type(data).__name__}")
    if name not in data:
        raise ValueError(f"data must have {name!r}{said}, got {sorted(map(str, data.keys()))}")
    return data[name]


def _payload(data, full, batch: int, length: int) -> torch.Tensor:
    """Return what is known of the teacher, [B, length, ..], with zeros at positions that it
    lacks."""
    name = COLUMNS[full.teacher_payload]
    payload = _value(data, name, f", for teacher_payload={full.teacher_payload!r}").detach()
    if payload.dim() != 3 or len(payload) != batch or payload.shape[1] > length:
        raise ValueError(
            f"{name} must be [B, S, ..] with B = {batch} and S at most {length}, got "
            f"{list(payload.shape)}"
        )
    return torch.nn.functional.pad(payload, (0, 0, 0, length - payload.shape[1]))


def _teachers(data, full, payload, heads, shard: VocabShard) -> list[TeacherRows]:
    """Return which rows of the batch have which teacher; ValueError unless each has one that
    fits."""
    size = payload.shape[-1]
    if full.teacher_payload == "logits":
        if size < shard.start + shard.width:
            raise ValueError(
                f"teacher_full_logits must have the {shard.start + shard.width} columns up to this "
                f"rank's last, got {size}"
            )
        return [TeacherRows(slice(None), None)]
    if not isinstance(heads, Mapping) or not heads:
        raise ValueError(
            "teacher_output_layer_weight_by_index must have the weights of the teachers' heads, "
            f"{{0: weight}}, got {heads!r}"
        )
    for number, weight in heads.items():
        if tuple(weight.shape) != (shard.width, size):
            raise ValueError(
                f"the head of teacher {number} must be [V/P, H_t] = {[shard.width, size]}, as the "
                f"student's shard and the teacher's hidden states, got {list(weight.shape)}"
            )
    weights = {number: weight.detach() for number, weight in heads.items()}
    teacher_of_row = data.get(TEACHER_OF_ROW)
    if teacher_of_row is None:
        if len(heads) > 1:
            raise ValueError(
                f"data must have {TEACHER_OF_ROW!r} [B], which teacher is whose, with "
                f"{len(heads)} teachers"
            )
        return [TeacherRows(slice(None), *weights.values())]
    batch = len(data["input_ids"])
    if teacher_of_row.shape != (batch,):
        raise ValueError(
            f"{TEACHER_OF_ROW} must be [B] = {[batch]}, got {list(teacher_of_row.shape)}"
        )
    numbers = sorted(set(teacher_of_row.tolist()))
    unknown = [number for number in numbers if number not in weights]
    if unknown:
        raise ValueError(f"{TEACHER_OF_ROW} must be of {sorted(weights)}, got {unknown}")
    if len(numbers) == 1:
        return [TeacherRows(slice(None), weights[numbers[0]])]
    teacher_of_row = teacher_of_row.to(payload.device)
    rows = {number: (teacher_of_row == number).nonzero().flatten() for number in numbers}
    return [TeacherRows(rows[number], weights[number]) for number in numbers]
