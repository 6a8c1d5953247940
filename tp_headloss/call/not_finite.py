"""`Options(check=True)`: which NaN, or infinity, made statistics NaN, as a ValueError on every
rank."""

import math
from collections.abc import Iterator
from typing import Any

import torch

from ..engine.request import Request
from ..ranks.comm import gather_objects, sum_over_ranks


def expect_finite(name: str, x: Any, where: torch.Tensor):
    """Raise ValueError if a replicated tensor [.., *] holds NaN or an infinity at one of some
    tokens, True in `where` [..], or, where its name says that it has log-probs, which may be -inf,
    a number above 0, but for rounding."""
    if not isinstance(x, torch.Tensor) or not x.is_floating_point():
        return
    has_log_probs = name.strip("'").endswith(("log_prob", "log_probs"))
    bad = _any_beyond(x.isnan() | (x > 1e-3 if has_log_probs else x.isinf()), where.dim())
    tokens = (bad.expand(where.shape) & where).flatten().nonzero().flatten().tolist()
    if tokens:
        value = x.expand(*where.shape, *x.shape[where.dim() :]).flatten(0, where.dim() - 1)[
            tokens[0]
        ]
        said = ": are these probabilities? Pass their log()" * bool(
            has_log_probs and (value > 1e-3).any()
        )
        raise ValueError(
            f"{name} of token {tokens[0]} (flat index) holds {_word(value)}; "
            f"{_such(len(tokens), 'token')}{said}"
        )


def expect_known(
    outputs: dict[str, torch.Tensor],
    request: Request,
    operands: dict[str, torch.Tensor],
    overwritten: bool,
):
    """Raise ValueError, equal on all ranks of the group, if statistics of valid tokens are NaN
    because an argument holds NaN, or an infinity that makes NaN. Only then ranks exchange: equal
    statistics tell all of them.

    outputs: statistics [..] by name. operands: hidden states and weight of a linear head; empty:
    logits were given. overwritten: the gradient may be in the place of the logits, so that columns
    say nothing.
    """
    valid, group = outputs["valid"], request.shard.group
    nan = [_any_beyond(x.isnan(), valid.dim()) for x in outputs.values() if x.is_floating_point()]
    unknown = torch.stack(nan).any(0)  # none is ignored: their statistics are 0
    if not unknown.any():
        return
    here = dict(_not_finite(request, unknown, operands))
    ranks = [here] if group is None else gather_objects(here, group)
    for name, one in dict.fromkeys(
        (name, found[0]) for ranks_found in ranks for name, found in ranks_found.items()
    ):
        rows = {row for found in ranks if name in found for row in found[name][1]}
        row, column, value, rank = min(
            (*found[name][2], r) for r, found in enumerate(ranks) if name in found
        )
        place = (
            f"on rank {rank}"
            if overwritten and name == "logits"
            else f"in column {column} of rank {rank}"
        )
        verb = "holds" if one == "id" else "hold"
        raise ValueError(f"{name} of {one} {row} {verb} {value} {place}; {_such(len(rows), one)}")
    tokens = (unknown & outputs["lse"].isnan()).flatten().nonzero().flatten().tolist()
    if operands and tokens and request.tensors.temperatures is None:
        raise ValueError(
            f"logits of token {tokens[0]} are beyond {request.tensors.logits.dtype}, from finite "
            f"hidden states and weight; {_such(len(tokens), 'token')}"
        )


def expect_teacher_logits(request: Request, valid: torch.Tensor):
    """Raise ValueError, equal on all ranks of the group, if the logits of a whole teacher are
    probabilities at every valid token [..]: not negative, with a sum of 1. Ranks exchange their
    parts of the sums wherever there is one."""
    if request.tensors.teacher is None or not valid.numel():
        return
    part = request.tensors.teacher[:, : request.facts.valid_width]
    part = part.sum(1, dtype=torch.float64).masked_fill((part < 0).any(1), torch.nan)
    rows = ((sum_over_ranks(part, request.shard.group) - 1).abs() <= 1e-2)[
        request.order.flatten(valid)
    ]
    if len(rows) and rows.all():
        raise ValueError(
            "teacher.logits must be logits or log-probs, got probabilities, with a sum of 1 at "
            f"each of {len(rows)} valid tokens: pass Teacher(q.log())"
        )


def _not_finite(request: Request, unknown: torch.Tensor, operands) -> Iterator[tuple[str, tuple]]:
    """Yield the name of each argument of this rank that holds NaN or a harmful infinity, with what
    a row of it is, all such rows, and (row, column, value) of the first. Only tokens that are True
    in `unknown` [..] count."""
    tensors, facts, head = request.tensors, request.facts, request.teacher_head
    token = request.order.flatten(
        torch.arange(unknown.numel(), device=unknown.device).view(unknown.shape)
    )
    counts, rank = (
        unknown.flatten()[token],
        0 if request.shard.group is None else request.shard.group.rank(),
    )
    infinity = math.inf if facts.scale > 0 else -math.inf
    of_tokens = {
        **{name: x for name, x in operands.items() if name != "weight"},
        "logits": None if operands else tensors.logits[:, : facts.valid_width],
        "logits of the teacher": None
        if tensors.teacher is None
        else tensors.teacher[:, : facts.valid_width],
        "hidden states of the teacher": head.teacher_hidden,
    }
    for name, x in of_tokens.items():
        if x is None:
            continue
        is_logits = "hidden" not in name
        bad = x.isnan() | (x == infinity if is_logits else x.isinf())
        # this rank's tokens
        rows = slice(None) if len(x) == len(token) else slice(rank * len(x), (rank + 1) * len(x))
        yield from _first(
            name, "token", x, bad & counts[rows, None], token[rows], facts.start if is_logits else 0
        )
    of_ids = operands.get("weight"), tensors.bias, head.teacher_weight, head.teacher_bias
    ids = torch.arange(facts.start, facts.start + facts.valid_width, device=unknown.device)
    for name, x in zip(("weight", "bias", "weight of the teacher", "bias of the teacher"), of_ids):
        if x is not None:
            # [V] -> [V, 1]; a rank may own none
            x = x[: facts.valid_width].unsqueeze(-1).flatten(1)
            yield from _first(name, "id", x, ~x.isfinite(), ids, 0)


def _any_beyond(bad: torch.Tensor, dims: int) -> torch.Tensor:
    """[.., *] of so many leading dimensions, at most -> [..], any of [*]."""
    while bad.dim() > dims:
        bad = bad.any(-1)
    return bad


def _first(name: str, one: str, x: torch.Tensor, bad: torch.Tensor, rows: torch.Tensor, start: int):
    """Yield the entry of `_not_finite`, if there is any: rows [n] name those of x [n, *], start its
    first column."""
    found = bad.any(-1)
    if found.any():
        numbers = rows.masked_fill(~found, torch.iinfo(rows.dtype).max)
        at = int(numbers.argmin())
        column = int(bad[at].to(torch.uint8).argmax())
        yield (
            name,
            (one, rows[found].tolist(), (int(rows[at]), start + column, _word(x[at, column]))),
        )


def _word(values: torch.Tensor) -> str:
    """ "NaN", an infinity, or else the largest of some values."""
    infinite = values[values.isinf()]
    return (
        "NaN"
        if values.isnan().any()
        else f"{float((infinite if len(infinite) else values).max()):g}"
    )


def _such(count: int, one: str) -> str:
    return f"{count} such {one}{'s' * (count > 1)}"
