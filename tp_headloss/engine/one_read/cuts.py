"""How rows of logits must lie in memory for `one_read.cu`, and how it cuts them: into vectors,
leaves and items."""

from __future__ import annotations

import functools

import torch

from ..request import Facts, Request, Tensors
from .kernel import ROOM_OF_TEACHER, SHARED
from .params import OF_ENTRIES, SLOTS, Cuts

# bytes of a vector; vectors of a leaf, at most; packets of a row, at most
VECTOR, LEAF, PACKETS = 16, 320, 32
LARGEST = 40_960  # bytes of an item


@functools.lru_cache(maxsize=256)
def cuts_of(chunk: int, chunks: int, teacher_vectors: int = 0, has_entries: bool = False) -> Cuts:
    """How rows of a shard of whole chunks are cut. chunk: its vectors; teacher_vectors: of a
    teacher, beside each of these; has_entries: of a top-K teacher.

    An item with a teacher has fewer columns, so that a slot is as large and each of its leaves has
    a warp.
    """
    matrices = 1 + teacher_vectors
    cuts = max(-(-chunk * matrices // LEAF) - 1, 0).bit_length()
    leaves = chunks << cuts
    while leaves > 1 and -(-chunk * leaves // (1 << cuts)) * VECTOR * matrices > LARGEST:
        leaves //= 2
    size = matrices * -(-(-(-chunk * leaves // (1 << cuts)) * VECTOR) // 128) * 128
    slots = (SHARED - ROOM_OF_TEACHER * (teacher_vectors > 0 or has_entries)) // size
    return Cuts(chunk, cuts, leaves, (chunks << cuts) // leaves, min(slots, SLOTS), size)


def cuts_of_call(request: Request) -> Cuts:
    """How rows of a call are cut."""
    facts, x = request.facts, request.tensors
    vectors = columns_of(request) // columns_of_vector(x.logits.dtype)
    chunk = vectors // facts.chunks
    return cuts_of(chunk, facts.chunks, teacher_vectors(x), has_entries(facts))


def has_entries(facts: Facts) -> bool:
    """Whether a call compares with the entries of a top-K teacher."""
    return not {*facts.want}.isdisjoint(OF_ENTRIES)


def teacher_vectors(tensors: Tensors) -> int:
    """Vectors of a teacher beside each of the student's, 0 without a teacher."""
    student, teacher = tensors.logits, tensors.teacher
    return 0 if teacher is None else teacher.dtype.itemsize // student.dtype.itemsize


def columns_of_vector(dtype: torch.dtype) -> int:
    """Columns of logits that lie in a vector."""
    return VECTOR // dtype.itemsize


def columns_of(request: Request) -> int:
    """Columns of each rank's shard but the last one's, as all ranks know them; 1 where they do
    not."""
    facts, shard = request.facts, request.shard
    if shard.tp_invariant:
        return facts.chunks * facts.chunk_size
    return 1 if shard.padded_size is None else -(-shard.padded_size // facts.world_size)


def obstacle_to_rows(logits: torch.Tensor, inplace: bool, columns: int | None = None) -> str | None:
    """Return what rows [N, width] lack for a kernel that reads them where they are, a vector at a
    time. inplace: and writes over them. columns: that it reads at a time, of vectors by default."""
    n_rows, width = logits.shape
    aligned = columns_of_vector(logits.dtype)
    columns = aligned if columns is None else columns
    stride, step = logits.stride()
    if width == 0:
        return None
    is_aligned = logits.data_ptr() % VECTOR == 0 and (n_rows < 2 or stride % aligned == 0)
    if (step != 1 and width > 1) or not is_aligned:
        return (
            f"rows that begin at multiples of {VECTOR} bytes, as those of a multiple of {aligned} "
            f"columns do, got strides {list(logits.stride())}"
        )
    if inplace and (width % columns or not logits.is_contiguous()):
        return f"contiguous logits of a multiple of {columns} columns for inplace=True, got {width}"
    whole = -(-width // columns) * columns
    end = logits.storage_offset() + (n_rows - 1) * stride + whole
    if end * logits.element_size() > logits.untyped_storage().nbytes():
        return f"memory behind the last row, for the rest of {columns} columns"
    return None


def obstacle_to_teacher(request: Request) -> str | None:
    """Return what rows of a teacher lack for the kernel, None without a teacher."""
    x = request.tensors
    if x.teacher is None:
        return None
    return obstacle_to_rows(x.teacher, False, columns_of_vector(x.logits.dtype))


def whole_vectors(columns: int, dtype: torch.dtype) -> int:
    """That many columns, or the next number of them that fills whole vectors."""
    step = columns_of_vector(dtype)
    return -(-columns // step) * step
