"""The launch of `one_read.cu`: how rows are cut, the memory of its packets, its arguments, and its compilation."""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .request import Facts, Request

TERMS = "lse", "log_prob", "entropy", "total"  # statistics of such a loss
SUMMED = {*TERMS, "target_logit", "hits"}
FLAGS = {"entropy": "ENTROPY", "argmax": "ARGMAX", "total": "TOTAL"}  # statistics besides, and what the kernel is compiled with
COLUMNS, LEAF, PACKETS = 8, 160, 32  # columns of a vector; vectors of a leaf, at most; packets of a row, at most
# as in the kernel: slots and ranks, at most, values that are summed, at most, and threads of a program
SLOTS, RANKS, VALUES, GIVENS, THREADS = 10, 8, 6, 8, 736
LARGEST, SHARED = 40_960, 224 * 1024  # bytes of an item, and of shared memory for all slots
CUDA_SUCCESS, MOST_DYNAMIC_SHARED_MEMORY = 0, 8

_log = logging.getLogger("tp_headloss")


class Cuts(NamedTuple):
    """How rows are cut into leaves and items; the leaves depend on the vocabulary alone."""

    chunk: int  # vectors of a chunk
    cuts: int  # log2 of its leaves
    leaves: int  # of an item, a power of 2
    pieces: int  # items of a row
    slots: int
    slot_bytes: int


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
    """Columns of each rank's shard but the last one's, as all ranks know them; 1 where they do not."""
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


class Params(ctypes.Structure):
    """The kernel's argument, see there."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in (
            "logits", "gradient", "labels", "weight", "upstream", "denominator", "assumed", "lse", "log_prob",
            "target_logit", "owners", "valid", "entropy", "mean", "total", "mass", "argmax", "hits", "shift", "sum",
            "others", "target", "loss", "sums", "inverse",
        )],
        ("values", ctypes.c_void_p * VALUES), ("given", ctypes.c_void_p * GIVENS), ("found", ctypes.c_void_p),
        ("control", ctypes.c_void_p), ("failed", ctypes.c_void_p),
        ("packets", ctypes.c_uint64 * RANKS), ("start", ctypes.c_int64), ("ignore_index", ctypes.c_int64),
        ("half", ctypes.c_int64), ("timeout", ctypes.c_uint64), ("number", ctypes.c_double),
        *[(f"{name}_{kind}", ctypes.c_float) for name in TERMS for kind in ("factor", "square")],
        ("coefficients", ctypes.c_float * VALUES),
        *[(name, ctypes.c_int) for name in (
            "n_values", "squares", "negatives", "bools", "rows", "width", "valid_width", "wide_labels", *Cuts._fields,
            "rank", "ranks",
        )],
    ]  # fmt: skip


class Memory:
    """Packets of one device or group, the numbers that its launches share, and whether one of them has failed."""

    def __init__(self, buffer: torch.Tensor, addresses: list[int], rank: int, timeout_ms: int):
        kernel_of(buffer.device)  # first: where there is none, memory is of no use
        self.buffer, self.rank, self.timeout_ms = buffer, rank, timeout_ms
        self.packets = (ctypes.c_uint64 * RANKS)(*addresses)
        self.control = torch.zeros(4, dtype=torch.int32, device=buffer.device)
        self.failed = torch.zeros(1, dtype=torch.int32).pin_memory()
        self.half = buffer.numel() // 8  # packets

    def expect_alive(self):
        """Raise RuntimeError if an earlier launch waited for a rank that did not come."""
        if ctypes.c_int.from_address(self.failed.data_ptr()).value:
            raise RuntimeError(
                f"an earlier step waited {self.timeout_ms / 1000:g} s for a rank of its group that did not come, its "
                "results are NaN, and the ranks no longer agree: make a new process group, or use gradient='backward'"
            )


# of a device: all of them, because graphs may hold the oldest; None where it has no kernel
_alone: dict[int, list[Memory] | None] = {}
_last_stream: dict[int, torch.cuda.Stream] = {}


def memory_of(request: Request, cuts: Cuts) -> Memory | None:
    """Memory for the packets of a call, or None where the group has no symmetric memory, or there is no kernel."""
    facts, device = request.facts, request.tensors.logits.device
    numel = 4 * len(request.tensors.logits) * cuts.pieces * facts.world_size * (2 if facts.want else 1)
    if facts.world_size > 1:
        from .transports.symmetric_memory import find_symmetric_memory

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
        _alone[device.index] = None
        return None
    return known[-1]


def take_turns(device: torch.device):
    """Let launches of a device run one after the other, in the order of the calls, whatever their streams and groups:
    each takes all multiprocessors, and waits for its peers there."""
    _last_stream[device.index] = stream_after(_last_stream.get(device.index), device)


def stream_after(last: torch.cuda.Stream | None, device: torch.device) -> torch.cuda.Stream:
    """Return the device's current stream, after letting it wait for the last one if that is another."""
    if last is not None and last.cuda_stream == torch._C._cuda_getCurrentRawStream(device.index):
        return last
    current = torch.cuda.current_stream(device)
    if last is not None:
        with torch.cuda.stream(last):
            last_is_captured = torch.cuda.is_current_stream_capturing()
        if last_is_captured == torch.cuda.is_current_stream_capturing():  # a capture cannot wait for what it is not in
            current.wait_stream(last)
    return current


@functools.lru_cache(maxsize=1024)
def _fixed(facts: Facts, plan, cuts: Cuts, n_rows: int, width: int, number: float, wide_labels: bool) -> Params:
    """Return the kernel's argument without addresses, which calls of one kind share.

    number: the divisor of the loss; 0: it is the count, or in memory.
    """
    factors = {
        f"{name}_{'square' if squared else 'factor'}": 2 * c if squared else c
        for name, c, squared in plan.gradients or ()
    }
    return Params(
        coefficients=(ctypes.c_float * VALUES)(*plan.coefficients), n_values=len(plan.statistics), squares=plan.squares,
        negatives=plan.negatives, bools=sum((name == "hits") << i for i, name in enumerate(plan.statistics)),
        start=facts.start, ignore_index=facts.ignore_index, number=number, **factors, rows=n_rows, width=width,
        valid_width=facts.valid_width, wide_labels=wide_labels, **cuts._asdict(), ranks=facts.world_size,
    )  # fmt: skip


def statistics_and_gradient(request: Request, reduction: Any, inplace: bool):
    """[merged rows, values, *flags] of a call as `merge_packets`; its loss, sums, 1 / its divisor, and derivatives
    [4, N] by `TERMS` of a row function's loss, or None; the gradient [N, width] for the expected upstream gradient of
    the loss, and that."""
    facts, x, layout = request.facts, request.tensors, request.layout
    given, step = x.logits, columns_of(request)
    cuts = cuts_of(step // facts.chunks, facts.chunks)
    memory = memory_of(request, cuts)
    assert memory is not None
    memory.expect_alive()
    logits = given if is_whole(given, step) else _whole(given, step)
    n_rows, width = logits.shape
    plan, weight, denominator, expected, rows, given_rows = reduction
    # its own version counter: the gradient is no change of what autograd saves
    gradient = logits.data if inplace else torch.empty_like(logits)
    outputs = merged, values, *flags = layout.empty_outputs(logits, n_rows, torch.float32)
    sums, loss, assumed = values.new_empty(len(plan.statistics) + 1), values.new_empty(()), values.new_empty(())
    inverse = loss.new_empty((), dtype=torch.float64)
    place = dict(zip(layout.flags, map(torch.Tensor.data_ptr, flags)))
    for names, part in (layout.merged, merged), (layout.values, values):
        first = part.data_ptr()
        place |= {name: first + 4 * n_rows * i for i, name in enumerate(names)}
    in_memory = isinstance(denominator, torch.Tensor)
    number = 0.0 if in_memory or denominator is None else float(denominator) or float("inf")
    fixed = _fixed(facts, plan, cuts, n_rows, width, number, x.labels.dtype == torch.int64)
    params = Params.from_buffer_copy(fixed)
    addresses: dict[str, Any] = {
        "logits": logits.data_ptr(), "gradient": gradient.data_ptr(), "labels": x.labels.data_ptr(),
        "weight": None if weight is None else weight.data_ptr(), "upstream": expected.data_ptr(),
        "denominator": denominator.data_ptr() if in_memory else None, "assumed": assumed.data_ptr(),
        "loss": loss.data_ptr(), "sums": sums.data_ptr(), "inverse": inverse.data_ptr(),
        "control": memory.control.data_ptr(), "failed": memory.failed.data_ptr(), "packets": memory.packets,
        "rank": memory.rank, "half": memory.half, "timeout": memory.timeout_ms * 1_000_000,
    }  # fmt: skip
    for name, value in (place | addresses).items():
        setattr(params, name, value)
    slopes = None
    if rows is not None:
        found = values.new_empty((rows.n_terms + len(TERMS), n_rows))
        slopes = found[rows.n_terms :]
        params.found, params.given[: len(given_rows)] = found.data_ptr(), [x.data_ptr() for x in given_rows]
    for i, name in enumerate(plan.statistics):
        params.values[i] = place[name] if name else params.found + 4 * n_rows * i
    take_turns(logits.device)
    has_term = fixed.entropy_factor != 0 or fixed.entropy_square != 0 or (rows is not None and rows.has_entropy)
    flags_of_kernel = *[FLAGS[name] for name in facts.want], *["TERM"] * has_term
    kernel_of(logits.device, rows and rows.source, *flags_of_kernel).launch(
        params, n_rows * cuts.pieces, cuts.slots * cuts.slot_bytes
    )
    if logits is not given:
        columns, gradient = gradient, given.data if inplace else torch.empty_like(given)
        gradient.zero_()[:, : columns.shape[1]] = columns[:, : given.shape[1]]
    return outputs, (loss, sums, inverse, slopes), gradient, assumed


class Kernel:
    """The kernel on one device, with a row function or None and some flags, compiled by the NVRTC that torch brings."""

    def __init__(self, index: int, rows: str | None, *flags: str):
        # depends on NVRTC and on the driver's library, so that it knows both by their names
        self.library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libcaffe2_nvrtc.so"))
        self.programs = torch.cuda.get_device_properties(index).multi_processor_count
        with torch.cuda.device(index):
            torch.cuda.current_stream()  # makes the device's context
            major, minor = torch.cuda.get_device_capability(index)
            self.image = compiled(self.library, f"sm_{major}{minor}", rows, *flags)
            self.module, self.function = ctypes.c_void_p(), ctypes.c_void_p()
            self._call("cuModuleLoadData", ctypes.byref(self.module), self.image)
            self._call("cuModuleGetFunction", ctypes.byref(self.function), self.module, b"one_read")
            self._call("cuFuncSetAttribute", self.function, MOST_DYNAMIC_SHARED_MEMORY, SHARED)
        self.index = index

    def _call(self, name: str, *args):
        error = getattr(self.library, name)(*args)
        if error != CUDA_SUCCESS:
            raise RuntimeError(f"{name} of the one-read kernel failed with CUDA error {error}")

    def launch(self, params: Params, items: int, shared: int):
        """Launch it on the current stream of its device."""
        if self.index != torch._C._cuda_getDevice():
            with torch.cuda.device(self.index):
                return self.launch(params, items, shared)
        stream = ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(self.index))
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        sizes = min(self.programs, items), 1, 1, THREADS, 1, 1, shared
        self._call("cuLaunchKernel", self.function, *map(ctypes.c_uint, sizes), stream, arguments, None)


def compiled(library, architecture: str, rows: str | None, *flags: str) -> ctypes.Array:
    """The kernel's cubin. library: with NVRTC; rows: source of a `row_function` or None; flags: of the kernel."""
    source = (rows or "").encode() + (Path(__file__).parent / "one_read.cu").read_bytes()
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    given = f"--gpu-architecture={architecture}", "--std=c++17", *(f"-D{flag}" for flag in flags)
    options = (ctypes.c_char_p * len(given))(*map(str.encode, given))
    library.nvrtcCreateProgram(ctypes.byref(program), source, b"one_read.cu", 0, None, None)
    if library.nvrtcCompileProgram(program, len(options), options):
        library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        library.nvrtcGetProgramLog(program, text)
        raise RuntimeError(f"the one-read kernel does not compile for {architecture}: {text.value.decode()}")
    library.nvrtcGetCUBINSize(program, ctypes.byref(size))
    image = ctypes.create_string_buffer(size.value)
    library.nvrtcGetCUBIN(program, image)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return image


@functools.cache
def kernel_of(device: torch.device, rows: str | None = None, *flags: str) -> Kernel:
    """The kernel of a row function and some flags. Raises OSError, AttributeError or RuntimeError where it cannot be
    had."""
    return Kernel(device.index, rows, *flags)
