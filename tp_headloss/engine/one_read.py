"""Losses whose forward writes the gradient, in one launch that reads each logit once: 4 bytes of memory traffic for a
logit of 2 bytes, where a forward and a backward of their own move 6. The kernel is `one_read.cu`.

On several ranks the exchange is inside of that launch: ranks write packets to each other's symmetric memory and wait
for them there, so a rank that does not come is noticed on the device. Its peers' results are NaN from then on, and
their next call raises. Results have equal bits on all ranks, and on 1, 2, 4 or 8 of them; those of two launches may
differ in the last bit, because sums are added up in another order.

Whether a call takes this way depends on facts that its ranks share alone: they must all take the same.
"""

from __future__ import annotations

import functools
import logging
from typing import NamedTuple

import torch

from .one_read_kernel import RANKS
from .one_read_launch import COLUMNS, PACKETS, TERMS, VALUES, columns_of, cuts_of, is_whole, memory_of
from .request import Facts, Request

_log = logging.getLogger("tp_headloss")
GRADIENTS = ("auto", "forward", "backward")  # values of `Options.gradient`
SUMMED = {*TERMS, "target_logit", "hits"}
FLAGS = "entropy", "argmax", "total"  # statistics besides: the kernel is compiled with their names in capitals
ALIGNED = 32  # columns of which a multiple has no gaps between the rows of a block
CAPABILITY, FEWEST, NARROWEST = (9, 0), 1 << 23, 8192  # of GPUs, logits of a rank and columns where it was faster


class InForward(NamedTuple):
    """Which upstream gradient of the loss a forward writes the gradient for; by default 1."""

    given: torch.Tensor | None = None  # [] fp32
    record: int | None = None  # the one that the record of this number foresees: see `one_read_kernel.Memory`


def is_asked_for(request: Request, options) -> bool:
    """Return True if the forward of a loss of these logits may write the gradient: in grad mode, for logits that
    require a gradient, and with "auto" only where it was measured to be faster."""
    logits = request.tensors.logits
    if options.gradient == "backward" or not (torch.is_grad_enabled() and logits.requires_grad and logits.shape[0]):
        return False
    other = options.inplace or logits.dtype != torch.bfloat16 or not logits.is_cuda
    return options.gradient == "forward" or not (other or _is_small(request))


def gradient_in_forward(request: Request, reduction, is_demanded: bool = False) -> bool:
    """Return True if the forward of a loss `is_asked_for` its gradient can write it; None is no reduction.

    Raises ValueError where it cannot and Options(gradient="forward") demands it.
    """
    # where it can, calls of this kind always can; not so on several ranks, whose group and its memory may be gone
    known = {} if request.steps is None or request.facts.world_size > 1 else request.steps
    place = "one read", reduction is None, request.tensors.logits.data_ptr() % 16
    if place not in known:
        obstacle = _obstacle(request, reduction)
        if obstacle and is_demanded:
            raise ValueError(f"gradient='forward' needs {obstacle}; gradient='backward' needs none of it")
        if obstacle:
            _log_once(obstacle)
            return False
        known[place] = True
    return True


def serves_block(request: Request, reduction) -> bool:
    """Return True if a block of a linear head's logits takes one launch: where it is faster, and all ranks' blocks are
    without gaps."""
    is_cuda, columns = request.tensors.logits.device.type == "cuda", columns_of(request)
    faster = is_cuda and columns % ALIGNED == 0 and not _is_small(request)
    return faster and gradient_in_forward(request, reduction)


@functools.cache
def _log_once(obstacle: str):
    _log.info("loss and gradient in two launches; one, which reads each logit once, needs %s", obstacle)


def _is_small(request: Request) -> bool:
    """Whether a call is smaller than those that were measured to be faster."""
    columns = columns_of(request)
    return columns < NARROWEST or request.tensors.logits.shape[0] * columns < FEWEST


def _obstacle(request: Request, reduction) -> str | None:
    """Return what a call lacks for a forward that writes the gradient, as words of an error message, or None."""
    facts, x = request.facts, request.tensors
    if reduction is None:
        return (
            "the triton backend, a reduction over tokens, weights, denominators and inputs without a gradient, and "
            f"terms that are pointwise functions of {list(TERMS)}, as a cross-entropy without class weights is"
        )
    step = columns_of(request)
    if x.temperatures is not None:
        return "logits without a scale, softcap or temperature"
    if x.bias is not None:
        return "logits without a bias"
    kind = facts, reduction.plan, reduction.rows is not None, x.logits.dtype, x.logits.device, step
    if obstacle := _obstacle_of_kind(*kind):
        return obstacle
    if request.steps is None and [tensor for tensor in x[2:] if tensor is not None]:
        return "a call without class weights, a teacher, sets, given ids or ranks"
    if facts.world_size == 1 and not is_whole(x.logits, step):
        return "contiguous logits whose width is a multiple of 8"
    if memory_of(request, cuts_of(step // facts.chunks, facts.chunks)) is None:
        return "a kernel and memory, which cannot be had here (see the log), or not while a graph is captured"
    return None


@functools.lru_cache(maxsize=1024)
def _obstacle_of_kind(
    facts: Facts, plan, in_rows: bool, dtype: torch.dtype, device: torch.device, columns: int
) -> str | None:
    """`_obstacle` as far as facts tell it that all ranks share."""
    statistics, n_terms = plan.statistics, len(plan.coefficients)
    terms, summed = statistics[:n_terms], statistics[n_terms * in_rows :]
    if not in_rows and (len(set(terms)) < n_terms or not set(TERMS).issuperset(terms)):
        return f"at most one term of each of {list(TERMS)}, got terms of {list(terms)}"
    others = not (set(FLAGS).issuperset(facts.want) and SUMMED.issuperset(summed))
    if others or len(statistics) > VALUES:
        named = dict.fromkeys((*summed, *facts.want))
        return f"no statistics but {sorted(SUMMED)}, and at most {VALUES} sums of them, got {list(named)}"
    if (facts.scale, facts.softcap, facts.temperature) != (1.0, 0.0, 1.0):
        return "logits without a scale, softcap or temperature"
    if dtype != torch.bfloat16 or device.type != "cuda":
        return f"bfloat16 logits on a GPU, got {dtype} on {device.type}"
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) != CAPABILITY:
        return "an NVIDIA GPU of compute capability {}.{}".format(*CAPABILITY)
    if columns % COLUMNS:
        return f"equal shards of a multiple of 8 ids, got {facts.vocab_size} ids on {facts.world_size} ranks"
    cuts = cuts_of(columns // facts.chunks, facts.chunks)
    if cuts.pieces * facts.world_size > PACKETS or facts.world_size > RANKS or cuts.slots < 4:
        return f"a smaller vocabulary, got {facts.vocab_size} ids"
    if facts.world_size > 1 and facts.transport not in ("auto", "symm_mem"):
        return f"symmetric memory, got transport={facts.transport!r}"
    return None
