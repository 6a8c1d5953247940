"""The ways of a call on logits, the quickest first, and the one function that chooses among
them."""

from __future__ import annotations

import functools
import logging
from typing import NamedTuple

import torch

from .one_read import OneRead
from .prepared import Prepared
from .way import Case, Way

_log = logging.getLogger("tp_headloss")


class Explanation(NamedTuple):
    """Which way a call takes, and what stands in the way of each quicker one.

    Attributes:
        way: its name.
        obstacles: by the names of the quicker ways, the quickest first.

    Examples:
        >>> hidden = torch.ones(2, 8, requires_grad=True)
        >>> weight = torch.nn.Parameter(torch.ones(4, 8))
        >>> print(HeadLoss(reduction="none").explain_linear(hidden, weight, torch.tensor([0, 1])))
        the way is blocks
        one sweep: a loss per token has no scalar upstream gradient
        epilogues: they were not compared with blocks of logits on such a device
    """

    way: str
    obstacles: dict[str, str]

    @classmethod
    def of(cls, kinds, sentence: str, *call) -> Explanation:
        """Explain the first of some kinds of ways without an obstacle, of which the last has none.

        sentence: with a place for an obstacle. call: arguments of their `obstacle`.
        """
        obstacles: dict[str, str] = {}
        for kind in kinds:
            obstacle = kind.obstacle(*call)
            if obstacle is None:
                break
            obstacles[kind.name] = sentence.format(obstacle)
        return cls(kind.name, obstacles)

    def __str__(self) -> str:
        lines = [
            f"the way is {self.way}",
            *[f"{name}: {obstacle}" for name, obstacle in self.obstacles.items()],
        ]
        return "\n".join(lines)


WAYS: tuple[type[Way], ...] = (OneRead, Prepared, Way)
GENERAL, IN_PLACE = Way(False), Way(True)


def general(inplace: bool) -> Way:
    """Return the way of any statistics, with any upstream gradients."""
    return IN_PLACE if inplace else GENERAL


def way_of(case: Case) -> Way:
    """Return the quickest way of a call. Ways without an obstacle are kept for calls of its kind:
    one that is not ready now may be later."""
    if torch.compiler.is_compiling():  # which takes operators, and must not trace what follows
        return general(case.inplace)
    kept = case.request.ways
    if kept is None:
        return chosen(case)[-1]
    place = _place(case)
    for way in kept.get(place, ()):
        if way.is_ready(case.request):
            return way
    kept[place] = chosen(case)
    return kept[place][-1]


def chosen(case: Case) -> list[Way]:
    """Return the ways without an obstacle, the quickest first, up to the first that is ready.

    Raises ValueError where one is demanded that is not.
    """
    obstacles: dict[str, str] = {}
    ways: list[Way] = []
    for kind in WAYS:
        obstacle = kind.obstacle(case)
        if obstacle is None:
            ways.append(kind.of_kind(case))
            if ways[-1].is_ready(case.request):
                _log_once(kind.name, *obstacles.items())
                return ways
            obstacle = kind.not_ready
        if kind.is_demanded(case):
            raise _refusal(obstacle)
        obstacles[kind.name] = obstacle
    raise AssertionError("the general way serves every call")


def explained(case: Case) -> Explanation:
    """Explain which way a call takes, from its metadata alone. Raises as `chosen`."""
    for kind in WAYS:
        if kind.is_demanded(case) and (obstacle := kind.obstacle(case)):
            raise _refusal(obstacle)
    return Explanation.of(WAYS, "needs {}", case)


def _refusal(obstacle: str) -> ValueError:
    return ValueError(f"gradient='forward' needs {obstacle}; gradient='backward' needs none of it")


@functools.lru_cache(maxsize=256)
def _log_once(name: str, *obstacles: tuple[str, str]):
    quicker = [f"{way} needs {obstacle}" for way, obstacle in obstacles]
    _log.info("loss of logits: %s", "; ".join([f"the way is {name}", *quicker]))


def _place(case: Case) -> tuple:
    """Return facts of a call that its kind does not know, and that decide between ways or are
    compiled in."""
    logits, labels, *_ = case.request.tensors
    given = case.loss.denominator
    divisor = given.data_ptr() % 16 if isinstance(given, torch.Tensor) else type(given)
    return case.needs_gradient, logits.data_ptr() % 16, labels.data_ptr() % 16, divisor
