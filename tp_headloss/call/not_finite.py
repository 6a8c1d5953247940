"""`Options(check=True)`: a ValueError on every rank about the NaN that made statistics NaN."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ..engine.request import Request
from ..ranks.comm import gather_objects, sum_over_ranks


def expect_finite(name: str, x: Any, where: torch.Tensor):
    """Raise ValueError if a replicated tensor [.., *] holds NaN or an infinity at a token.

    Tokens count that are True in `where` [..]. Where the name says that they are log-probs, they
    may be -inf, and must not be above 0, but for rounding.
    """
    if not isinstance(x, torch.Tensor) or not x.is_floating_point():
        return
    has_log_probs = name.strip("'").endswith(("log_prob", "log_probs"))
    refused = x > 1e-3 if has_log_probs else x.isinf()
    bad = _any_beyond(x.isnan() | refused, where.dim())
    tokens = (bad.expand(where.shape) & where).flatten().nonzero().flatten().tolist()
    if tokens:
        by_token = x.expand(*where.shape, *x.shape[where.dim() :]).flatten(0, where.dim() - 1)
        value = by_token[tokens[0]]
        said = _log_prob_hint(by_token[tokens]) if has_log_probs else ""
        raise ValueError(
            f"{name} of token {tokens[0]} (flat index) holds {_word(value)}; "
            f"{_such(len(tokens), 'token')}{said}"
        )


def _log_prob_hint(values: torch.Tensor) -> str:
    """Return what values above 0 in the place of log-probs may be, "" if there are none."""
    if not (values > 1e-3).any():
        return ""
    if (values > 1 + 1e-3).any():
        return ": negated? Pass log-probs, which are never above 0"
    return ": are these probabilities? Pass their log()"


def expect_known(
    outputs: dict[str, torch.Tensor],
    request: Request,
    operands: dict[str, torch.Tensor],
    overwritten: bool,
):
    """Raise ValueError, equal on all ranks of the group, if statistics of valid tokens are NaN.

    The error names the argument that holds NaN, an infinity that makes NaN, nothing above -inf, or
    a temperature that is not positive. Ranks exchange only if there is one: equal statistics tell
    all of them.

    Args:
        outputs: statistics [..] by name.
        operands: hidden states and weight of a linear head; empty: logits were given.
        overwritten: the gradient may be in the place of the logits, so that columns say nothing.
    """
    valid = outputs["valid"]
    group = request.shard.group
    nan = [_any_beyond(x.isnan(), valid.dim()) for x in outputs.values() if x.is_floating_point()]
    unknown = torch.stack(nan).any(0)  # none is ignored: their statistics are 0
    if not unknown.any():
        return
    here = dict(_not_finite(request, unknown, operands))
    _refuse_found([here] if group is None else gather_objects(here, group), overwritten)
    _refuse_rows(request, unknown, overwritten or bool(operands))
    tokens = (unknown & outputs["lse"].isnan()).flatten().nonzero().flatten().tolist()
    if operands and tokens and request.tensors.temperatures is None:
        raise ValueError(
            f"logits of token {tokens[0]} are beyond {request.tensors.logits.dtype}, from finite "
            f"hidden states and weight; {_such(len(tokens), 'token')}"
        )


def _refuse_rows(request: Request, unknown: torch.Tensor, are_gone: bool):
    """Raise ValueError, equal on all ranks, for temperatures that are not positive, and for rows
    with nothing above -inf, of tokens that are True in `unknown` [..].

    are_gone: there are no logits to look at.
    """
    x, width = request.tensors, request.facts.valid_width
    numbers = torch.arange(unknown.numel(), device=unknown.device).view(unknown.shape)
    token = request.order.flatten(numbers)
    counts = unknown.flatten()[token]
    of_teacher, of_student = (None, None) if x.scales is None else x.scales.unbind(0)
    temperatures = {
        "temperature": x.temperatures,
        "temperature of the teacher": of_teacher,
        "student_temperature or temperature": of_student,
    }
    for name, values in temperatures.items():  # NaN where they are not positive
        if values is not None:
            _refuse_tokens(
                f"{name} of", "must be positive and finite", values.isnan(), counts, token
            )
    logits = {"logits of": None if are_gone else x.logits, "logits of the teacher of": x.teacher}
    for name, columns in logits.items():
        if columns is not None:
            some = (columns[:, :width] > -math.inf).any(1).double()
            is_empty = sum_over_ranks(some, request.shard.group) == 0
            _refuse_tokens(name, "are all -inf", is_empty, counts, token)


def _refuse_tokens(name: str, wrong: str, bad: torch.Tensor, counts: torch.Tensor, token):
    """Raise ValueError about the first of some rows [N], by their tokens' flat indices [N]."""
    found = token[bad & counts].tolist()
    if found:
        raise ValueError(f"{name} token {min(found)} {wrong}; {_such(len(found), 'token')}")


class _Found(NamedTuple):
    """NaN or infinities that an argument of one rank holds."""

    one: str  # what a row of it is, "token" or "id"
    rows: list[int]  # numbers of all bad rows
    first: tuple[int, int, str]  # row, column and value of the first


def _refuse_found(ranks: list[dict[str, tuple]], overwritten: bool):
    """Raise ValueError about the first argument, by name, of which some rank has a `_Found`."""
    names = [name for rank_found in ranks for name in rank_found]
    if not names:
        return
    name = names[0]
    found = {rank: _Found(*own[name]) for rank, own in enumerate(ranks) if name in own}
    one = next(iter(found.values())).one
    rows = {row for own in found.values() for row in own.rows}
    row, column, value, rank = min((*own.first, rank) for rank, own in found.items())
    place = f"in column {column} of rank {rank}"
    if overwritten and name == "logits":
        place = f"on rank {rank}"
    verb = "holds" if one == "id" else "hold"
    raise ValueError(f"{name} of {one} {row} {verb} {value} {place}; {_such(len(rows), one)}")


def _not_finite(request: Request, unknown: torch.Tensor, operands) -> Iterator[tuple[str, tuple]]:
    """Yield the name of each argument of this rank that holds NaN or a harmful infinity.

    With it comes a `_Found`, as a plain tuple. Only tokens that are True in `unknown` [..] count.
    """
    facts = request.facts
    numbers = torch.arange(unknown.numel(), device=unknown.device).view(unknown.shape)
    token = request.order.flatten(numbers)
    counts = unknown.flatten()[token]
    rank = 0 if request.shard.group is None else request.shard.group.rank()
    infinity = math.inf if facts.scale > 0 else -math.inf
    for name, x in _token_arguments(request, operands).items():
        if x is None:
            continue
        is_logits = "hidden" not in name
        bad = x.isnan() | (x == infinity if is_logits else x.isinf())
        # this rank's tokens
        rows = slice(None) if len(x) == len(token) else slice(rank * len(x), (rank + 1) * len(x))
        start = facts.start if is_logits else 0
        yield from _first(name, "token", x, bad & counts[rows, None], token[rows], start)
    ids = torch.arange(facts.start, facts.start + facts.valid_width, device=unknown.device)
    for name, x in _id_arguments(request, operands).items():
        if x is not None:
            # [V] -> [V, 1]; a rank may own none
            x = x[: facts.valid_width].unsqueeze(-1).flatten(1)
            yield from _first(name, "id", x, ~x.isfinite(), ids, 0)


def _token_arguments(request: Request, operands) -> dict[str, torch.Tensor | None]:
    """Return the arguments by rows [N, *] of tokens, without columns of padding."""
    width = request.facts.valid_width
    teacher = request.tensors.teacher
    return {
        **{name: x for name, x in operands.items() if name != "weight"},
        "logits": None if operands else request.tensors.logits[:, :width],
        "logits of the teacher": None if teacher is None else teacher[:, :width],
        "hidden states of the teacher": request.teacher_head.teacher_hidden,
    }


def _id_arguments(request: Request, operands) -> dict[str, torch.Tensor | None]:
    """Return the arguments by rows [width, *] of ids."""
    return {
        "weight": operands.get("weight"),
        "bias": request.tensors.bias,
        "weight of the teacher": request.teacher_head.teacher_weight,
        "bias of the teacher": request.teacher_head.teacher_bias,
    }


def _any_beyond(bad: torch.Tensor, dims: int) -> torch.Tensor:
    """Return [..], any of [*], of [.., *] with at most so many leading dimensions."""
    while bad.dim() > dims:
        bad = bad.any(-1)
    return bad


def _first(name: str, one: str, x: torch.Tensor, bad: torch.Tensor, rows: torch.Tensor, start: int):
    """Yield the entry of `_not_finite`, if there is any.

    Args:
        rows: [n], the numbers of the rows of x [n, *].
        start: the number of its first column.
    """
    found = bad.any(-1)
    if found.any():
        numbers = rows.masked_fill(~found, torch.iinfo(rows.dtype).max)
        at = int(numbers.argmin())
        column = int(bad[at].to(torch.uint8).argmax())
        first = int(rows[at]), start + column, _word(x[at, column])
        yield name, (one, rows[found].tolist(), first)


def _word(values: torch.Tensor) -> str:
    """Return "NaN", an infinity, or else the largest of some values."""
    if values.isnan().any():
        return "NaN"
    infinite = values[values.isinf()]
    largest = infinite.max() if len(infinite) else values.max()
    return f"{float(largest):g}"


def _such(count: int, one: str) -> str:
    return f"{count} such {one}{'s' * (count > 1)}"
