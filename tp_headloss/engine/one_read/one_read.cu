// The loss and its gradient in one launch that reads each logit once, on one GPU and on several,
// which exchange their packets inside of it. What it serves: `ways/one_read.py`; who does what:
// `roles.cuh`. The parts, from the ground up:
//   numbers     types, numbers, flags                  shared   what the roles share
//   ptx         the inline assembly                    warps    sums of a warp
//   params      the kernel's argument                  tokens   stores and sums of tokens
//   statistics  a struct for each optional statistic   roles    the warps' roles
//   node        a row: joins, statistics, factors
//
// Nodes are joined in a binary tree over leaves that depends on the vocabulary alone: equal bits on
// 1, 2, 4 and 8 ranks. What it is compiled with: `numbers.cuh`.
// Before this source may stand a `row_function`, with terms of a loss and their derivatives: see
// `rows.py`.
#include "roles.cuh"

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
    one_read(const __grid_constant__ Params q) {
  extern __shared__ __align__(128) unsigned char ring[];
  __shared__ Shared s;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int items = q.rows * q.pieces, all = q.pieces * q.ranks;
  if (threadIdx.x == 0) {
    for (int i = 0; i < q.slots; i++) {
      mbarrier_init(&s.full[i], 1);
      mbarrier_init(&s.stat[i], SUM);
      mbarrier_init(&s.ready[i], 2);  // post or tell, and merge
      mbarrier_init(&s.done[i], GRAD);
      mbarrier_init(&s.free[i], 1);
      if constexpr (HAS_MIXTURE) {
        mbarrier_init(&s.of.second.known[i], 2);  // post and merge
        mbarrier_init(&s.of.second.mixed[i], MIX);
      }
    }
    fence_mbarrier_init();  // I1
  }
  const u32 epoch = *(volatile u32*)q.control + 1;
  const i64 half = (epoch & 1) * q.half;  // I8
  const bool by_count = !q.denominator && q.number == 0.0;
  __syncthreads();  // I1
  Program p = {s, ring, items, all, epoch & TAG, half, by_count, warp, lane, 0, 0};

  if (warp == 0) {
    load(q, p);
  } else if (warp < FIRST_TELL) {
    post(q, p);
  } else if (HAS_MIXTURE && warp < FIRST_MERGE) {
    tell(q, p);
  } else if (warp < FIRST_SUM) {
    merge(q, p);
  } else if (warp < FIRST_MIX) {
    sum(q, p);
  } else if (HAS_MIXTURE && warp < FIRST_GRAD) {
    mix(q, p);
  } else if (warp < STORE) {
    grad(q, p);
  } else {
    store(q, p);
  }
  const bool is_in_last = warp > 0 && warp <= LAST;
  if (is_in_last && is_last_program(q, p, epoch)) reduce(q, p);
}
