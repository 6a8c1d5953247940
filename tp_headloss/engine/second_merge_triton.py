"""The merge of the second exchange, which adds up a loss of statistics that are known only now."""

import triton
import triton.language as tl

from ..statistics.numerics_triton import settle
from .merged_sums_triton import add_up


@triton.jit(do_not_specialize=["n_rows"])
def second_merge_kernel(
    out,  # Outputs: the last S rows of its merged rows [R, T] and values [K, T] are written
    packets_ptr,  # [packets, 2 S, T] fp32
    sums,  # MergedSums
    n_rows,
    SUM: tl.constexpr,  # number of the merged row of that name
    MERGED: tl.constexpr, VALUES: tl.constexpr,  # R - S, K - S
    STATISTICS: tl.constexpr, PACKETS: tl.constexpr, BLOCK: tl.constexpr,  # S
):  # fmt: skip
    """One program: the merge of the second exchange's packets of BLOCK tokens, in their order and in float64. The last
    one adds up the values of all tokens."""
    STEP: tl.constexpr = 8 if PACKETS % 8 == 0 else 1  # packets that are read at once
    n = n_rows.to(tl.int64)
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = token < n
    whole = tl.load(out.merged + SUM * n + token, mask=here, other=1.0)
    for i in tl.static_range(STATISTICS):
        value = tl.zeros([BLOCK], tl.float64)
        mean = tl.zeros([BLOCK], tl.float64)
        for first in range(0, PACKETS, STEP):
            for k in tl.static_range(STEP):
                at = packets_ptr + ((first + k) * STATISTICS + i) * 2 * n + token
                value += tl.load(at, mask=here, other=0.0).to(tl.float64)
                mean += tl.load(at + n, mask=here, other=0.0).to(tl.float64)
        value = tl.where(value < 0.0, 0.0, value)  # NaN stays
        bad = whole != whole
        tl.store(out.value + (VALUES + i) * n + token, settle(value, bad, False), mask=here)
        tl.store(out.merged + (MERGED + i) * n + token, settle(mean, bad, False), mask=here)
    if sums.parts is not None:
        valid = here & (tl.load(out.valid + token, mask=here, other=0) != 0)
        add_up(sums, out, valid, token, n, tl.program_id(0), tl.num_programs(0), BLOCK)
