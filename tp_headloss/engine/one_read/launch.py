"""The launch of `one_read.cu`: how rows are cut, its arguments, and what calls of one kind share.

A launch has more than fifty arguments, most of them the same for all calls of a kind. `Kind` works
these out once; a call copies the struct and fills in addresses. All outputs are allocated before
the launch, whose programs write to them while others still read logits: nothing can be allocated,
or decided on the host, between the statistics and the gradient.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from typing import Any, NamedTuple

import torch

from ...statistics import MaybeNone
from ..backend import load_backend
from ..reductions import FusedReduction
from ..request import Facts, Request, place_of
from ..transports.symmetric_memory import find_symmetric_memory
from .kernel import SHARED, Memory, kernel_of, launch_in_turn
from .params import ADDRESSES, GIVENS, OUTPUTS, SLOTS, TERMS, VALUES, Cuts, Params

# columns of a vector; vectors of a leaf, at most; packets of a row, at most
COLUMNS, LEAF, PACKETS = 8, 320, 32
LARGEST = 40_960  # bytes of an item

_log = logging.getLogger("tp_headloss")


@functools.lru_cache(maxsize=256)
def cuts_of(chunk_size: int, chunks: int) -> Cuts:
    """How rows of a shard of whole chunks are cut."""
    chunk = chunk_size // COLUMNS
    cuts = max(-(-chunk // LEAF) - 1, 0).bit_length()
    leaves = chunks << cuts
    while leaves > 1 and -(-chunk * leaves // (1 << cuts)) * 16 > LARGEST:
        leaves //= 2
    size = -(-(-(-chunk * leaves // (1 << cuts)) * 16) // 128) * 128
    return Cuts(chunk, cuts, leaves, (chunks << cuts) // leaves, min(SHARED // size, SLOTS), size)


def columns_of(request: Request) -> int:
    """Columns of each rank's shard but the last one's, as all ranks know them; 1 where they do
    not."""
    facts, shard = request.facts, request.shard
    if shard.tp_invariant:
        return facts.chunks * facts.chunk_size
    return 1 if shard.padded_size is None else -(-shard.padded_size // facts.world_size)


def is_whole(logits: torch.Tensor, columns: int) -> bool:
    """Whether the kernel can read logits where they are."""
    is_aligned = logits.shape[1] % COLUMNS == 0 and logits.data_ptr() % 16 == 0
    return logits.is_contiguous() and is_aligned and logits.shape[1] <= columns


def _whole(logits: torch.Tensor, columns: int) -> torch.Tensor:
    """A copy that the kernel can read, for a rank whose peers' logits may need none."""
    n_rows, width = logits.shape
    width = min(width, columns)
    copy = logits.new_zeros((n_rows, -(-width // COLUMNS) * COLUMNS))
    copy[:, :width] = logits[:, :width]
    return copy


# of a device: all of them, because graphs may hold the oldest; None where it has no kernel
_alone: dict[int, list[Memory] | None] = {}


def memory_of(request: Request, cuts: Cuts) -> Memory | None:
    """Memory for the packets of a call, or None where the group has no symmetric memory, or there
    is no kernel."""
    facts, device = request.facts, request.tensors.logits.device
    numel = (
        4
        * request.tensors.logits.shape[0]
        * cuts.pieces
        * facts.world_size
        * (2 if facts.want else 1)
    )
    if facts.world_size > 1:
        found = find_symmetric_memory(request, numel, of_one_read=True)
        return None if found is None else found.one_read
    known = _alone.setdefault(device.index, [])
    if known and known[-1].half * 4 >= numel:
        return known[-1]
    if known is None or torch.cuda.is_current_stream_capturing():
        return None
    buffer = torch.zeros(2 << max(numel - 1, 1 << 16).bit_length(), device=device)
    try:
        known.append(Memory(buffer, [buffer.data_ptr()], 0, 60_000))
    except (OSError, AttributeError, RuntimeError) as error:
        _log.warning("no launch that reads each logit once, two launches instead: %s", error)
        _alone[device.index] = known or None
        return None
    return known[-1]


class Kind:
    """Everything that calls of one kind share: kernel, its argument but for addresses, and the
    tensors it writes."""

    def __init__(
        self,
        facts: Facts,
        layout,
        plan,
        rows,
        cuts: Cuts,
        place: tuple,
        number: float,
        wide_labels: bool,
    ):
        """number: the divisor of the loss; 0: it is the count, or in memory."""
        n_rows, width, device = place
        factors = {
            f"{name}_{'square' if squared else 'factor'}": 2 * c if squared else c
            for name, c, squared in plan.gradients or ()
        }
        self.params = Params(
            coefficients=(ctypes.c_float * VALUES)(*plan.coefficients),
            n_values=len(plan.statistics),
            squares=plan.squares,
            negatives=plan.negatives,
            bools=sum((name == "hits") << i for i, name in enumerate(plan.statistics)),
            start=facts.start,
            ignore_index=facts.ignore_index,
            number=number,
            **factors,
            rows=n_rows,
            width=width,
            valid_width=facts.valid_width,
            wide_labels=wide_labels,
            **cuts._asdict(),
            ranks=facts.world_size,
        )
        self.items, self.shared = n_rows * cuts.pieces, cuts.slots * cuts.slot_bytes
        self.n_outputs = 2 + len(layout.flags)
        has_term = (
            rows.has_entropy if rows else "entropy" in [name for name, *_ in plan.gradients or ()]
        )
        flags = *map(str.upper, facts.want), *["TERM"] * has_term
        self.kernel = kernel_of(device, rows and rows.source, *flags)
        like = torch.empty((), device=device)
        outputs = layout.empty_outputs(like, n_rows, torch.float32)
        n_sums, n_found = len(plan.statistics) + 1, rows.n_terms + len(TERMS) if rows else 0
        others = (
            like,
            like.new_empty(n_sums),
            like.new_empty(2).double(),
            like.new_empty((n_found, n_rows)),
        )
        # for `empty_like`, the quickest way to allocate; expanded, so that they take no memory
        self.allocated = [x.new_empty(()).expand(x.shape) for x in (*outputs, *others)]
        self.allocated = self.allocated[: len(self.allocated) - (rows is None)]
        # name -> which of them, and how many bytes from its start
        at = {
            name: (i, 0) for i, name in enumerate((*layout.flags, "loss", "sums", "inverse", ""), 2)
        }
        for i, names in enumerate((layout.merged, layout.values)):
            at |= {name: (i, 4 * n_rows * k) for k, name in enumerate(names)}
        self.places = [at.get(name) for name in OUTPUTS]
        values = [
            at[name] if name else (at[""][0], 4 * n_rows * i)
            for i, name in enumerate(plan.statistics)
        ]
        self.places += [*values, *[None] * (VALUES - len(values)), at[""] if rows else None]
        self.slopes = rows.n_terms if rows else None  # from which row of the last one on they are
        self.late: dict[
            tuple, Any
        ] = {}  # `LateGradient`s by places of logits and labels, and whether there are weights

    def argument(
        self, memory: Memory, calls: list[int], allocated: list[torch.Tensor], given: list[int]
    ) -> Params:
        """The kernel's argument. calls, given: addresses."""
        params, starts = Params.from_buffer_copy(self.params), [x.data_ptr() for x in allocated]
        places = [0 if place is None else starts[place[0]] + place[1] for place in self.places]
        ADDRESSES.pack_into(params, 0, *calls, *places, *given, *[0] * (GIVENS - len(given)))
        params.memory, params.half, params.rank = memory.addresses, memory.half, memory.rank
        params.timeout = memory.timeout_ms * 1_000_000
        return params


kind_of = functools.lru_cache(maxsize=1024)(Kind)


class Upstream(NamedTuple):
    """Which upstream gradient of the loss a forward writes the gradient for; by default 1."""

    given: torch.Tensor | MaybeNone = None  # [] fp32
    # the one that the record of this number foresees: see `kernel.Memory`
    record: int | MaybeNone = None


def statistics_and_gradient(
    request: Request, reduction: FusedReduction, inplace: bool, upstream: Upstream
):
    """Compute what `merge_packets` and `token_sums` do, and the gradient, in one launch.

    Returns [merged rows, values, *flags]; the loss, its sums, [1 / its divisor, the upstream
    gradient of the loss that the gradient is written for, NaN if it is not], and derivatives [4, N]
    by `TERMS` of a row function's loss, or None; the gradient [N, width]; how the backward
    completes it (`Late`), or None where the upstream gradient is known.
    """
    facts, x = request.facts, request.tensors
    given, step = x.logits, columns_of(request)
    cuts = cuts_of(step // facts.chunks, facts.chunks)
    memory = memory_of(request, cuts)
    assert memory is not None
    memory.expect_alive()
    logits = given if is_whole(given, step) else _whole(given, step)
    plan, weight, denominator, rows, inputs = reduction
    forecast = None if upstream.record is None else memory.forecast(upstream.record)
    divisor_address, number = 0, 0.0  # of a divisor in memory; a number; neither: it is the count
    if isinstance(denominator, torch.Tensor):
        divisor_address = denominator.data_ptr()
    elif denominator is not None:
        number = float(denominator) or float("inf")
    place, wide_labels = (*logits.shape, logits.device), x.labels.dtype == torch.int64
    kind = kind_of(facts, request.layout, plan, rows, cuts, place, number, wide_labels)
    # its own version counter: the gradient is no change of what autograd saves
    gradient = logits.data if inplace else torch.empty_like(logits)
    allocated = [*map(torch.empty_like, kind.allocated)]
    calls = [
        logits.data_ptr(),
        gradient.data_ptr(),
        x.labels.data_ptr(),
        0 if weight is None else weight.data_ptr(),
        0 if upstream.given is None else upstream.given.data_ptr(),
        0 if forecast is None else forecast.data_ptr(),
        divisor_address,
    ]
    params = kind.argument(memory, calls, allocated, [x.data_ptr() for x in inputs])
    # in turn, because each launch takes all multiprocessors, and waits there
    launch_in_turn(logits.device, kind.kernel.launch, params, kind.items, kind.shared)
    if logits is not given:
        columns, gradient = gradient, given.data if inplace else torch.empty_like(given)
        gradient.zero_()[:, : columns.shape[1]] = columns[:, : given.shape[1]]
    outputs, (loss, sums, inverse, *found) = (
        allocated[: kind.n_outputs],
        allocated[kind.n_outputs :],
    )
    slopes = found[0][kind.slopes :] if found else None
    late = None if forecast is None else late_gradient(kind, request, plan, weight, forecast)
    return outputs, (loss, sums, inverse, slopes), gradient, late


class Late(NamedTuple):
    """How the backward of a call completes the gradient, and the record of upstream gradients that
    it adds to."""

    gradient: Any  # a `LateGradient`
    forecast: torch.Tensor

    def complete(self, gradient: torch.Tensor, loss: torch.Tensor, saved) -> bool:
        """Complete the gradient [N, width] for an upstream gradient of the loss. False, and nothing
        is done, where hooks of saved tensors have laid something out in another way. saved: as
        `autograd.Statistics` has them."""
        logits, labels, merged, _valid, weight, inverse, *values = saved
        if not self.gradient.serves(gradient, logits, labels, merged, inverse, *values):
            return False
        is_slopes = values[0].dim() == 2  # of a row function
        terms = values[0] if is_slopes else values
        launch_in_turn(
            gradient.device,
            self.gradient,
            gradient,
            self.forecast,
            logits,
            labels,
            merged,
            weight,
            inverse,
            terms,
            loss,
        )
        return True


def late_gradient(kind: Kind, request: Request, plan, weight, forecast: torch.Tensor) -> Late:
    """How the backward of this call completes the gradient that its forward may have written."""
    place = place_of(request.tensors.logits), place_of(request.tensors.labels), weight is None
    if place not in kind.late:
        make = load_backend("triton").LateGradient
        kind.late[place] = make(request, plan, kind.slopes is not None, weight)
    return Late(kind.late[place], forecast)
