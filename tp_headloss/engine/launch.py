"""How kernels are launched: tile sizes with the measurements behind them, and a direct way around
Triton's dispatch."""

import functools
from typing import NamedTuple

import torch
import triton

from .backend import version_numbers

OLDEST, TRITON = (3, 6), version_numbers(triton.__version__)
if TRITON < OLDEST:
    raise ImportError(
        "the triton backend needs Triton >= 3.6, which torch >= 2.11 brings, got "
        f"{triton.__version__}: upgrade torch, or use Options(backend='torch')"
    )

# ruff: noqa: E402
from triton import knobs

from .. import statistics
from ..statistics import names_stated, numerics_triton

INTERPRETED = numerics_triton.INTERPRETED.value
# versions whose compiled kernels take the arguments that `launch` gives them (its fast path was run
# on the first)
DIRECT = not INTERPRETED and torch.version.hip is None and TRITON <= (3, 9)


class Launch(NamedTuple):
    """Size of a tile, warps of a program, and the most registers that a thread of it may have,
    where that is set."""

    block: int
    warps: int
    registers: int | None = None


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up (Triton's own, also for device code, is slow to call)."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of 2 that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


# Tables of the tuning script: H200, torch 2.11.0, triton 3.6.0, bf16, 8192 tokens, block/warps and
# microseconds. Other GPUs get the same values.


@functools.lru_cache(maxsize=1024)
def statistics_launch(chunk_size: int, has_teacher: bool = False, is_lean: bool = False) -> Launch:
    """Tile of the forward. Its width decides the order of additions, so it depends on the
    vocabulary alone.

    One warp needs no barrier for its maxima and sums.
    2 chunks of 16032: 1024/1 137.5, 512/1 138.5, 256/1 142.8, 1024/2 163.2, 2048/4 253.9
    the same, entropy and argmax: 512/1 149.6, 256/1 164.8, 1024/1 166.9, 1024/2 236.0
    8 chunks of 4016: 512/1 141.6, 256/1 153.9, 1024/1 170.8; with entropy and argmax: 512/1 186.9,
    256/1 192.6 8 chunks of 16032: 1024/1 485.9, 512/1 488.7, 256/1 504.7; with entropy and argmax:
    512/1 587.0, 256/1 627.7 forward_kl, 2 chunks of 16032: 256/1 288.7, 512/1 289.2, 1024/1 318.7;
    8 of 4016: 256/1 319.1, 512/1 336.1 reverse_kl, 2 chunks of 16032: 256/1 320.7, 512/1 338.2,
    128/1 396.9; 8 of 4016: 256/1 358.3, 128/1 413.7 a top-K teacher's tail, 8 of 4016: 512/1 228.5,
    at most 72 registers 203.2, 64 203.2, 56 206.1; with more beside it they spill
    jsd's second exchange, 8 of 4016: 256/1 262.0, 512/1 280.8, 1024/1 292.1; 8 of 16032: 256/1
    1049, 1024/1 1060
    """
    block = min(256 if has_teacher else 512, max(128, next_power_of_2(chunk_size)))
    return Launch(block, 1, 72 if is_lean else None)


@functools.lru_cache(maxsize=1024)
def gradient_launch(
    width: int, grads: tuple[str, ...], has_softcap: bool = False, is_transformed: bool = False
) -> Launch:
    """Tile of the backward, by the names of the statistics that have upstream gradients, of which
    families state what the tile depends on. A name has one family as long as the process lives.

    32064 wide: 2048/2 251, 4096/4 252, 2048/4 254, 1024/2 281, 512/1 326; with entropy: 4096/4 263,
    2048/4 272 128256 wide: 2048/2 986, 1024/2 988, 2048/4 989, 4096/4 998; with entropy: 4096/4
    1005, 2048/4 1039 8032 wide: 2048/4 70.0, 4096/4 71.1; with entropy: 4096/4 72.7, 2048/4 73.8
    32064 wide, with a softcap: 512/1 341, 1024/2 365, 2048/4 380; 128256 wide: 512/1 1321, 1024/1
    1383, 2048/4 1421 32064 wide, of forward_kl alone: 2048/4 369, 1024/2 369, 512/1 382; of
    reverse_kl: 1024/1 368, 1024/2 368, 512/1 383 128256 wide, of forward_kl: 1024/1 1441, 1024/2
    1447, 512/1 1472; and log_prob: 1024/2 1541, 512/1 1543, 1024/1 1621 128256 wide, of reverse_kl
    alone: 1024/1 1445, 2048/4 1445, 1024/2 1446, 512/1 1476 32064 wide, of jsd alone: 4096/4 375,
    2048/2 376, 4096/8 395; 128256 wide: 2048/2 1444, 4096/4 1445, 4096/8 1525 128256 wide, with a
    top-K teacher: 2048/4 1064, at most 48 registers 1018, 40 1062; log_probs_at 1026, 1015, 1013
    128256 wide, with its tail: 1024/2 1272, at most 80 registers 1156, 64 1089, 56 1117; 2048/4, 64
    1201
    """
    widest = max(256, next_power_of_2(width))
    if not names_stated("wide_gradients").isdisjoint(grads):
        return Launch(min(4096, widest), 4)
    if has_softcap:
        return Launch(min(512, widest), 1)
    is_narrow = not names_stated("narrow_gradients").isdisjoint(grads)
    how = Launch(min(1024, widest), 2, 64) if is_narrow else Launch(min(2048, widest), 4, 48)
    is_lean = names_stated("lean_gradients").issuperset(grads) and not is_transformed
    return how if is_lean and _read_lists(grads) else how._replace(registers=None)


def _read_lists(grads: tuple[str, ...]) -> bool:
    """True if one of these gradients is another one at the ids of a list."""
    families = (family for family in statistics.FAMILIES if family.id_list)
    return any(name in family.gradients for family in families for name in grads)


def list_launch(n_ids: int) -> Launch:
    """Tile of the second exchange over a token's list of ids."""
    return Launch(min(128, max(16, next_power_of_2(n_ids))), 1)


def small_sets_launch(most: int | None) -> Launch:
    """Tile of a set that is sorted if its ids do not ascend; most: the most ids that a set can
    have, None: unknown.

    8192 sets of 1024 of 128256 ids, ascending and by probability: 1024/1 37, 130; at most 80
    registers 35, 131; 1024/2 37, 459; 1024/4 35, 404; by a bit per id, after this kernel has found
    no small one 54, 153. Of 64 ids: 64/1 6.5
    """
    block = min(1024, max(32, next_power_of_2(1024 if most is None else most)))
    return Launch(block, 1)


class TileLaunch(NamedTuple):
    """Rows and columns of a tile, warps of a program."""

    block: tuple[int, int]
    warps: int
    registers: int | None = None


class GemmLaunch(NamedTuple):
    """Tile of a GEMM, warps of a program, stages of its pipeline, columns of the gradient that are
    stored at once.

    A tile: rows, columns, steps over H, columns of epilogue strips, rows of tiles that share
    columns in the cache.
    """

    block: tuple[int, int, int, int, int]
    warps: int
    stages: int
    stored: int = 64
    registers: int | None = None


def gemm_launch(chunk_size: int, capability: int) -> GemmLaunch:
    """Tile of a linear head's GEMMs with epilogues. Its columns and steps decide the order of
    additions, so they depend on the vocabulary and the GPU's compute capability (its first number)
    alone.

    Over one cuBLAS GEMM, in turns of 60 ms; strips/stages, rows of tiles in a group.
    Statistics with the fold, 8192 tokens, H 4096, V 128256 (12482 us), shards of 32064 (3163) and
    16032 ids (1560): 32/3, 16 1.043, 1.040, 1.051; 16/3, 16 1.061, 1.035, 1.051; 64/3, 16 1.059,
    1.039, 1.042; 64/3, 8 1.047, 1.045, 1.054; 32/3, 32 1.067, 1.048, 1.057; 32/4, 16 1.057, 1.053,
    1.069; 32/3, 8 1.059, 1.054, 1.081; 32/4, 8 1.061, 1.084, 1.057.
    Strips of 64 spill registers with several families, and bits must not depend on the families.
    Capability 10 was compiled, not timed: a tile of 256 columns spills up to 240 bytes there, and
    this one at most 8. Gradient, 8192 x 7168 (694), 2048 x 6016 (150), 1024 x 16032 (204); columns
    stored/stages, group: 64/4, 16 1.059, 1.063, 1.065; 64/3, 16 1.070, 1.072, 1.059; 64/3, 8 1.095,
    1.055, 1.062; 32/4, 8 1.083, 1.092, 1.089 Older ones, V 128256, gradient of 16032 ids: 128x256/8
    1.045, 1.051; 128x128/8 1.305, 1.111; 128x128/4, two programs 1.123, 1.435; 256x128/8 1.234, -;
    64x256/4, two programs 1.490, -
    """
    columns = min(256, max(32, next_power_of_2(chunk_size)))
    if INTERPRETED:
        return GemmLaunch((32, min(columns, 64), 16, 16, 8), 4, 1, 32)
    if capability >= 10:
        columns = min(columns, 128)
        return GemmLaunch((128, columns, 64, 16, 16), 8 if columns > 64 else 4, 3, min(columns, 64))
    return GemmLaunch((128, columns, 64, 32, 16), 8 if columns > 64 else 4, 3, min(columns, 64))


# 63 parts of one chunk, of 8: 32/1 17.6, 31.4, 64/2 18.4, 30.7; without a pipeline 43.3, 46.6
FOLD = Launch(32, 1)
# 8 packets: 32/1 7.7, 128/4 8.6, 64/2 8.7; with entropy and argmax: 64/2 8.0, 32/1 8.5
MERGE = Launch(64, 2)
# The only program: its time is the latency of its loads, and wider ones spill.
# 1 value: 8192/32 6.6, 2048/16 8.2; 5 values: 2048/16 10.6, 4096/32 15.1, 8192/32 28.4
SUMS = Launch(2048, 16)
SCALE = Launch(4096, 4)
AGAIN = Launch(4096, 4)  # of a gradient over the logits that is multiplied by an upstream gradient
AGAIN_PROGRAMS = 528
LATE_PROGRAMS = 132 * 16  # of a gradient that the forward may have written already
# Gradients in fp8: tiles of 4 tokens each and of 4 columns each; marks of 4 tokens each, by programs,
# and columns of a mark; of an operand that is turned; of entries at once and columns of the hidden
# states, with programs for each of these columns; entries and columns of one token; places of its
# list; tokens. H200, 8192 x 128256 random logits in bf16 of 11.6 nats, and of 4.9: split 32x32/4 1477,
# 16x32/4 1680 (of 80 registers 1554), 16x16/2 1720, 32x32/8 1764, 32x64/16 2557; marks 64x32/1 125,
# 349, 64x64/1 90, 444, 128x32/1 98, 370, 64x16/1 236, 375. 8192 x 32064 bf16, H 2048, states of 3.4 to
# 3.9 nats: entries with their order 128x64/2 353, 128x32/1 361, 64x64/2 397, 16x64/1 671, 32x128/1
# 516; one token 4x512/1 57, 4x1024/2 56, 16x512/4 443 where 8x512/1 is 106
# by bytes of a logit: fp32 ones take twice the registers
FP8_GRADIENT = {2: TileLaunch((32, 32), 4), 4: TileLaunch((16, 16), 2)}
FP8_MARKS, FP8_TURN = TileLaunch((64, 32), 1), TileLaunch((64, 64), 4)
FP8_ROW = TileLaunch((4, 512), 1)
# of ids that have many entries, and of those that have at most FP8_FEW (not measured): the first
# tile for all took 4.4 ms of 26,000 ids that have one or two, in 8192 x 128256, H 4096
FP8_ENTRIES, FP8_FEW = ((TileLaunch((128, 64), 2), 132), (TileLaunch((4, 512), 1), 2112)), 16
FP8_LIST, FP8_UNITS = Launch(512, 1), Launch(128, 1)
AT_IDS = Launch(32, 4)  # of each of a tile of tokens; not measured
LABELS = Launch(32, 1)  # tokens whose labels' logits are found; not measured
# Sets of more ids than are sorted. Before any were: 8192 sets of 1024 ids in ascending order:
# 1024/4 45, 256/2 88; by probability, of 32064 and of 128256 ids: 1024/4 in 1024 programs 179, 223,
# in 2048 162, 198; 1024/8 166, 225; 512/4 in 2048 172, 205; each program has a bit per id
SETS, SETS_PROGRAMS = Launch(1024, 4), 2048
# Race of 262 rows of 128256 fp32 logits, H200: 512/2 210, 1024/4 215, 2048/8 250, 1024/2 330; the
# others not measured
RACE, MAXIMA, LARGEST = Launch(512, 2), Launch(512, 4), Launch(1024, 4)
SUMS_GRADIENT = Launch(1024, 4)  # 1 value: 512/4 4.1, 1024/4 4.9; 3 values: 1024/4 5.2, 512/4 5.5


_compiled: dict = {}


def _observed() -> bool:
    """Whether a profiler hooked into Triton's dispatch."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def int_key(number: int):
    """The part of the compile key that an integer contributes: whether it is 1 or a multiple of 16,
    and its type."""
    return number if number == 1 else (number % 16 == 0, number >= 2**31)


def pointer_key(tensor):
    """The part of the compile key that a pointer contributes."""
    return None if tensor is None else (tensor.dtype, tensor.data_ptr() % 16)


def dtype_key(tensor):
    """The part of the compile key that a vector contributes which is never read in wide accesses.

    It is read one by one, or under a mask that was loaded, so whether rows of [K, N] are aligned
    makes no difference.
    """
    return tensor if tensor is None else tensor.dtype


def launch(
    kernel, programs: int, variant: tuple, how: Launch | TileLaunch | GemmLaunch, *arguments
):
    """kernel[(programs,)](*arguments, how.block) on the device of `variant`'s first element, a
    torch.device.

    Triton's own dispatch takes longer than most of these kernels, so what was launched before is
    launched again directly: a `variant` with the same kernel and launch parameters is what Triton
    would not compile anew.
    """
    device = variant[0]
    if device.index is not None and device.index != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            return launch(kernel, programs, variant, how, *arguments)
    if not DIRECT or _observed():
        kernel[(programs,)](*arguments, how.block, **_options(how))
        return
    key = kernel.fn, how, variant  # the function, because Triton computes the hash of a kernel anew
    compiled = _compiled.get(key)
    if compiled is None:
        if len(_compiled) >= 4096:  # a temperature that changes with every step, say
            _compiled.clear()
        result = kernel[(programs,)](*arguments, how.block, **_options(how))
        _compiled[key] = _direct_call(result)
        return
    run, constant = compiled
    stream = torch._C._cuda_getCurrentRawStream(device.index)  # pyright: ignore[reportArgumentType]  # of a tensor
    run(programs, 1, 1, stream, *constant, *arguments, how.block)


class PreparedLaunch:
    """A launch of a fixed number of programs and a fixed variant, which is looked up once. On the
    current device."""

    def __init__(self, kernel, programs: int, variant: tuple, how: Launch):
        self.programs, self.how, self.kernel, self.variant = programs, how, kernel, variant
        self.compiled = None

    def __call__(self, *arguments):
        if self.compiled is None or _observed():
            launch(self.kernel, self.programs, self.variant, self.how, *arguments)
            self.compiled = (
                _compiled.get((self.kernel.fn, self.how, self.variant)) if DIRECT else None
            )
            return
        run, constant = self.compiled
        stream = torch._C._cuda_getCurrentRawStream(self.variant[0].index)
        run(self.programs, 1, 1, stream, *constant, *arguments, self.how.block)


def _options(how: Launch | TileLaunch | GemmLaunch) -> dict:
    """Options of a kernel's compilation."""
    options = {"num_warps": how.warps, "enable_fp_fusion": True}
    if isinstance(how, GemmLaunch):
        options["num_stages"] = how.stages
    limited = how.registers is not None and numerics_triton.PTX.value  # others know no such option
    return options | {"maxnreg": how.registers} if limited else options


def _direct_call(kernel):
    """A compiled kernel -> a function that launches it, and its arguments between the stream and
    the kernel's own.

    Without hooks. Triton 3.6's launcher does nothing but allocate scratch memory before it calls a
    C function.
    """
    run, metadata = kernel.run, kernel.packed_metadata
    hooks = None, None, None  # metadata for them, before, after
    if (
        TRITON == OLDEST
        and type(run).__name__ == "CudaLauncher"
        and not (run.global_scratch_size or run.profile_scratch_size)
    ):
        options = run.launch_cooperative_grid, run.launch_pdl
        return run.launch, (kernel.function, *options, None, None, metadata, *hooks)
    return run, (kernel.function, metadata, *hooks)
