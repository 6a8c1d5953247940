"""`Way`: one way to compute a call, as a value.

The statistics of a call, its loss and their gradients can be computed in several ways, which give
the same numbers and differ in launches and in memory traffic. A way is one value. It says which
calls it cannot serve (`obstacle`), computes the forward, knows the gradient of the loss, and owns
what outlives a call:

* What it remembers of a kind of call holds no tensor of a call, and is valid for any later call of
  that kind.
* What a captured CUDA graph may read or write lives as long as the process.

`ways.way_of` chooses it, once per kind of call. Nobody else asks which way a call takes.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch

from ...statistics import MaybeNone
from .. import operators, passes
from ..passes import Reduced
from ..reductions import FusedReduction
from ..request import Request

ONCE = (
    "Options(inplace=True) writes the gradient over the logits, so that there is one backward, and "
    "nothing else may have written to the logits before it"
)


class Loss(Protocol):
    """The loss of a call in the forms that ways take, each worked out when it is asked for, or
    None."""

    denominator: torch.Tensor | float | None  # None: the count
    fused: FusedReduction | None  # by one kernel, of statistics or of what PyTorch makes of them

    @property
    def of_statistics(self) -> FusedReduction | None:
        """Its reduction by one kernel, with no PyTorch between statistics and sums."""

    def needs_of_statistics(self) -> str:
        """Return what it lacks for that, after "needs", where it is None."""
        ...

    @property
    def in_one_read(self) -> FusedReduction | None:
        """Its reduction in the launch that reads the logits."""

    def needs_in_one_read(self) -> str:
        """Return what it lacks for that, after "needs", where it is None."""
        ...


class Case(NamedTuple):
    """A call as ways look at it."""

    request: Request
    loss: Loss
    gradient: str  # of `Options`
    inplace: bool  # of `Options`
    record: int  # number of what is remembered of the upstream gradients of its `HeadLoss`

    @property
    def needs_gradient(self) -> bool:
        logits = self.request.tensors.logits
        return torch.is_grad_enabled() and logits.requires_grad and logits.shape[0] > 0


class Found(NamedTuple):
    """Results of a way's forward."""

    merged: torch.Tensor  # rows [R, N]
    outputs: tuple[torch.Tensor, ...]  # of `Layout.outputs`
    reduced: Reduced | MaybeNone = None  # the loss, where this way reduces it
    # [N, width] of the loss, where this way writes it in the forward
    gradient: torch.Tensor | MaybeNone = None
    completion: Any = None  # how the backward completes that gradient


class Way:
    """Launches that serve any statistics and any loss, also in plain PyTorch and as operators of
    torch.compile.

    Other ways differ from this one. inplace: gradients are written over the logits.
    """

    name = "general"
    not_ready = "nothing"  # the obstacle where `is_ready` is False

    def __init__(self, inplace: bool):
        self.inplace = inplace

    @staticmethod
    def obstacle(case: Case) -> str | None:
        """Return what a call lacks for this way, after "needs" in a sentence that its user can act
        on, or None.

        It looks at metadata that all ranks share, and runs nothing.
        """
        return None

    @classmethod
    def of_kind(cls, case: Case) -> Way:
        """Return the way of calls of this kind, to which there is no obstacle."""
        return cls(case.inplace)

    @staticmethod
    def is_demanded(case: Case) -> bool:
        """Return True where an obstacle is the caller's error."""
        return False

    def is_ready(self, request: Request) -> bool:
        """Return True unless something that is no fact of a call stands in its way now."""
        return True

    def reduction(self, loss: Loss) -> FusedReduction | None:
        """Return the reduction that the forward computes besides the statistics, or None."""
        return loss.of_statistics

    def forward(self, request: Request, reduction: FusedReduction | None) -> Found:
        """Compute statistics, and the loss if there is a reduction."""
        if reduction is not None:
            return Found(*passes.reduced_statistics(request, reduction))
        merged, values, *flags = operators.statistics(request)
        return Found(merged, (*values.unbind(0), *flags))

    def gradient_of_loss(self, ctx, saved: tuple, loss: torch.Tensor) -> torch.Tensor | None:
        """Return d loss / d logits for an upstream gradient of the loss alone; None: `gradient` has
        to find it.

        ctx: of `autograd.Statistics`. saved: what it saved: tensors of the request, merged rows,
        those of the loss.
        """
        return None

    def gradient(
        self, ctx, request: Request, merged: torch.Tensor, grads: dict, *loss
    ) -> torch.Tensor:
        """Return d loss / d logits; grads and loss as in `passes.write_gradient`."""
        if not self.inplace:
            return operators.logits_gradient(request, merged, grads, *loss)
        if ctx.is_taken:  # where hooks of saved tensors gave the logits, torch did not notice
            raise RuntimeError(ONCE)
        ctx.is_taken, logits = True, request.tensors.logits
        # first: what a failed kernel left is not read again
        torch.autograd.graph.increment_version(logits)
        passes.write_gradient(logits.detach(), request, merged, grads, *loss)
        return logits.detach()
