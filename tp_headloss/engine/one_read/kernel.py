"""The kernel of `one_read.cu` as this process has it: compilation, launches in turn, and the memory
that they share."""

from __future__ import annotations

import collections
import ctypes
import functools
import logging
import re
import threading
from collections.abc import Iterable
from pathlib import Path

import torch

from .params import OF_ENTRIES, OF_TEACHER, RANKS, THREADS, agreement

FOLDER = Path(__file__).parent
SHARED = 224 * 1024  # bytes of shared memory for all slots
ROOM_OF_TEACHER = 3072  # less than that in calls with a teacher, whose sums take room, too
FORECASTS = 1024
ARGUMENTS = ctypes.c_void_p * 1
KERNELS = 256  # that a process keeps
NUMBERS = re.compile(r"-?0x[\da-f.]+p[-+]\d+f")  # of a row function
SAYS_SO = 4  # how many kernels of row functions that differ in numbers alone
CUDA_SUCCESS, MOST_DYNAMIC_SHARED_MEMORY = 0, 8
CALLS = "cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute", "cuLaunchKernel"


class Memory:
    """Packets of one device or group, the numbers that its launches share, and whether one of them
    has failed.

    It also has `FORECASTS` records of which upstream gradient of the loss the next backward will
    bring, int32 each: the bits in which that gradient differs from 1; how often it came in a row;
    how often it must, for the forward to write the gradient for it. A forward whose gradient nobody
    could use doubles the last number, one whose gradient was used lowers it. So a sequence of
    upstream gradients has at most 10 more of the former than of the latter, and all other steps
    move as many bytes as two launches. A record decides on last bits of results alone: heads may
    share one.

    All of this lives as long as the process, because a CUDA graph may hold it.
    """

    def __init__(self, buffer: torch.Tensor, addresses: list[int], rank: int, timeout_ms: int):
        kernel_of(buffer.device)  # first: where there is none, memory is of no use
        self.buffer, self.rank, self.timeout_ms = buffer, rank, timeout_ms
        self.control = torch.zeros(4 * (1 + FORECASTS), dtype=torch.int32, device=buffer.device)
        self.forecasts: dict[int, torch.Tensor] = {}  # parts of it, by their numbers
        self.failed = torch.zeros(1, dtype=torch.int32, device="cpu").pin_memory()
        own = self.control.data_ptr(), self.failed.data_ptr()
        self.addresses = (ctypes.c_uint64 * (2 + RANKS))(*own, *addresses)
        self.half = buffer.numel() // 8  # packets

    def forecast(self, number: int) -> torch.Tensor:
        """[4] int32: the record of a head's number."""
        number %= FORECASTS
        if number not in self.forecasts:
            first = 4 + 4 * number
            self.forecasts[number] = self.control[first : first + 4]
        return self.forecasts[number]

    def expect_alive(self):
        """Raise RuntimeError if an earlier launch waited for a rank that did not come."""
        if ctypes.c_int.from_address(self.failed.data_ptr()).value:
            raise RuntimeError(
                f"an earlier step waited {self.timeout_ms / 1000:g} s for a rank of its group that "
                "did not come, its results are NaN, and the ranks no longer agree: make a new "
                "process group, or use gradient='backward'"
            )


def stream_after(last: torch.cuda.Stream | None, device: torch.device) -> torch.cuda.Stream:
    """Return the device's current stream, after letting it wait for the last one if that is
    another."""
    if last is not None and last.cuda_stream == torch._C._cuda_getCurrentRawStream(device.index):
        return last
    current = torch.cuda.current_stream(device)
    if last is not None:
        with torch.cuda.stream(last):
            last_is_captured = torch.cuda.is_current_stream_capturing()
        # a capture cannot wait for what it is not in
        if last_is_captured == torch.cuda.is_current_stream_capturing():
            current.wait_stream(last)
    return current


class Turns:
    """On one device, launches that use a `Memory` come one after the other, whatever their streams,
    groups and threads: each takes all multiprocessors, and waits there for other ranks.

    A context, in which the launch is made.
    """

    def __init__(self, device: torch.device):
        self.device, self.lock = device, threading.Lock()
        self.stream: torch.cuda.Stream | None = None  # of the last launch

    def __enter__(self):
        self.lock.acquire()
        try:
            self.stream = stream_after(self.stream, self.device)
        except BaseException:
            self.lock.release()
            raise

    def __exit__(self, *_):
        self.lock.release()


_turns: dict[int, Turns] = {}  # by device


def turns_on(device: torch.device) -> Turns:
    """Return the turns of a device, the same ones to all threads."""
    found = _turns.get(device.index)
    return found or _turns.setdefault(device.index, Turns(device))


def expect_success(error: int, function, _):
    """Raise RuntimeError if a call of the driver failed. For ctypes, after the call."""
    if error != CUDA_SUCCESS:
        raise RuntimeError(
            f"{function.__name__} of the one-read kernel failed with CUDA error {error}"
        )


class Kernel:
    """The kernel on one device, with a row function or None and some flags, compiled by the NVRTC
    that torch brings."""

    def __init__(self, index: int, rows: str | None, *flags: str):
        # depends on NVRTC and on the driver's library, so that it knows both by their names
        path = Path(torch.__file__).parent / "lib" / "libcaffe2_nvrtc.so"
        self.library = driver = ctypes.CDLL(str(path))
        for name in CALLS:
            getattr(driver, name).errcheck = expect_success
        self.programs = torch.cuda.get_device_properties(index).multi_processor_count
        with torch.cuda.device(index):
            torch.cuda.current_stream()  # makes the device's context
            major, minor = torch.cuda.get_device_capability(index)
            self.image = compiled(self.library, f"sm_{major}{minor}", rows, *flags)
            self.module, self.function = ctypes.c_void_p(), ctypes.c_void_p()
            driver.cuModuleLoadData(ctypes.byref(self.module), self.image)
            driver.cuModuleGetFunction(ctypes.byref(self.function), self.module, b"one_read")
            of_teacher = {*OF_TEACHER, *OF_ENTRIES} & {flag.lower() for flag in flags}
            most = SHARED - ROOM_OF_TEACHER * bool(of_teacher)
            driver.cuFuncSetAttribute(self.function, MOST_DYNAMIC_SHARED_MEMORY, most)
        self.index, pointer = index, ctypes.c_void_p
        driver.cuLaunchKernel.argtypes = (
            pointer,
            *[ctypes.c_uint] * 7,
            pointer,
            ARGUMENTS,
            pointer,
        )

    def launch(self, params: ctypes.Structure, items: int, shared: int):
        """Launch it on the current stream of its device."""
        if self.index != torch._C._cuda_getDevice():
            with torch.cuda.device(self.index):
                return self.launch(params, items, shared)
        stream = torch._C._cuda_getCurrentRawStream(self.index)
        arguments = ARGUMENTS(ctypes.addressof(params))
        sizes = min(self.programs, items), 1, 1, THREADS, 1, 1, shared
        self.library.cuLaunchKernel(self.function, *sizes, stream, arguments, None)


def compiled(library, architecture: str, rows: str | None, *flags: str) -> ctypes.Array:
    """Compile the kernel and return its cubin.

    Args:
        library: NVRTC.
        architecture: as "sm_90".
        rows: source of a `row_function`, or None.
        flags: of the kernel, see `one_read.cu`.
    """
    kernel = (FOLDER / "one_read.cu").read_text()
    source = (rows or "") + kernel + agreement(*flags)
    headers = {path.name: path.read_bytes() for path in FOLDER.glob("*.cuh")}
    given = f"--gpu-architecture={architecture}", "--std=c++20", *(f"-D{flag}" for flag in flags)

    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    library.nvrtcCreateProgram(
        ctypes.byref(program),
        source.encode(),
        b"one_read.cu",
        len(headers),
        _strings(headers.values()),
        _strings(map(str.encode, headers)),
    )
    if library.nvrtcCompileProgram(program, len(given), _strings(map(str.encode, given))):
        library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        library.nvrtcGetProgramLog(program, text)
        raise RuntimeError(
            f"the one-read kernel does not compile for {architecture}: {text.value.decode()}"
        )
    library.nvrtcGetCUBINSize(program, ctypes.byref(size))
    image = ctypes.create_string_buffer(size.value)
    library.nvrtcGetCUBIN(program, image)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return image


def _strings(values: Iterable[bytes]) -> ctypes.Array:
    """An array of C strings."""
    strings = list(values)
    return (ctypes.c_char_p * len(strings))(*strings)


_log = logging.getLogger("tp_headloss")
_compiled: collections.Counter[tuple] = collections.Counter()  # of kernels that differ in numbers


def expect_few(device: torch.device, rows: str, *flags: str):
    """Log a warning if row functions whose numbers alone differ were often compiled."""
    alike = device, NUMBERS.sub("", rows), *flags
    if len(_compiled) >= KERNELS and alike not in _compiled:
        _compiled.clear()
    _compiled[alike] += 1
    if _compiled[alike] == SAYS_SO:
        _log.warning(
            "a loss compiles its kernel for time %s, with other numbers in its terms, and each "
            "time takes about a second: a number that changes between steps belongs into the "
            "weight of a term, or into inputs=",
            SAYS_SO,
        )


@functools.lru_cache(maxsize=KERNELS)
def kernel_of(device: torch.device, rows: str | None = None, *flags: str) -> Kernel:
    """The kernel of a row function and some flags. Raises OSError, AttributeError or RuntimeError
    where it cannot be had.

    A kernel that is forgotten stays loaded, because a CUDA graph may hold it.
    """
    if rows is not None:
        expect_few(device, rows, *flags)
    return Kernel(device.index, rows, *flags)
