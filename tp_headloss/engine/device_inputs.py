"""A request's tensors and numbers as kernels take them."""

import functools
from collections.abc import Iterable
from typing import NamedTuple

import torch

from ..statistics import Layout
from ..statistics.records_triton import Inputs, Lists
from .device_layout import DeviceLayout, device_layout
from .launch import int_key
from .request import Facts, Request, Tensors


class Prepared(NamedTuple):
    """Arguments that all launches of one kind of call share: everything but tensors and the number
    of tokens."""

    rows: DeviceLayout
    numbers: tuple  # the fields of `Inputs` after its tensors
    variant: object  # one object for whatever Triton compiles about rows and inputs
    bounds: tuple  # start, valid_width, chunks, ignore_index


def inputs_of(request: Request) -> tuple[Inputs, Prepared]:
    """Return the tensors and numbers of a call as kernels take them."""
    # of a tensor [N, ..]: all but N (of the ids of all sets: all but how many)
    kinds = [
        x if x is None else (x.dtype, x.data_ptr() % 16, x.shape[1:], x.stride())
        for x in request.tensors
    ]
    prepared = _prepared(request.facts, request.layout, *kinds)
    return Inputs._make(request.tensors + prepared.numbers), prepared


def room_at_lists(names: Iterable[str], inputs: Inputs, dtype: torch.dtype) -> Lists:
    """Return uninitialised memory for the gradient at the ids of those lists."""
    return Lists(**{name: torch.empty_like(getattr(inputs, name), dtype=dtype) for name in names})


@functools.lru_cache(maxsize=1024)
def _prepared(facts: Facts, layout: Layout, *kinds) -> Prepared:
    kind = Tensors(*kinds)
    (width,), strides = kind.logits[2:]
    teacher = (None, None) if kind.teacher is None else kind.teacher[3]
    n_entries, n_ids = (None if x is None else x[2][0] for x in (kind.entries, kind.ids))
    factors = _factors(facts, kind.temperatures is not None, kind.scales is not None)
    inputs = Inputs._make(
        (*kinds, *strides, *teacher, n_entries, n_ids, width, facts.chunk_size, *factors)
    )
    rows = device_layout(layout)
    ignore_index_is_int32 = -(1 << 31) <= facts.ignore_index < 1 << 31
    compiled_in = rows, ignore_index_is_int32, *[k and k[:2] for k in kinds], *_inputs_key(inputs)
    return Prepared(
        rows,
        inputs[len(kinds) :],
        _variant(*compiled_in),
        (facts.start, facts.valid_width, facts.chunks, facts.ignore_index),
    )


@functools.cache  # as many as there are compiled kernels, which Triton keeps, too
def _variant(*_compiled_in) -> object:
    """One object for equal arguments, which is quicker to look up."""
    return object()


def _factors(facts: Facts, has_temperatures: bool, has_scales: bool) -> tuple:
    """`Inputs` from pre to beta: None where nothing is multiplied."""
    own: tuple[float | None, float | None]
    if facts.softcap:
        own = facts.scale / facts.softcap, facts.softcap / facts.temperature
    else:
        before = facts.scale / facts.temperature
        own = (before, None) if before != 1.0 or has_temperatures else (None, None)
    both = facts.teacher_scale, facts.student_scale
    return *own, *(both if has_scales or both != (1.0, 1.0) else (None, None)), facts.beta


def _inputs_key(inputs: Inputs) -> tuple:
    """Return what Triton compiles into a kernel about the inputs besides their pointers."""
    strides: tuple = (int_key(inputs.x_row), int_key(inputs.x_column))
    if inputs.teacher is not None:
        strides += int_key(inputs.teacher_row), int_key(inputs.teacher_column)
    sizes = inputs.n_entries, inputs.n_ids, inputs.width, inputs.chunk_size
    switches = inputs.pre is None, inputs.post is None, inputs.student_scale is None
    return *strides, *sizes, *switches
