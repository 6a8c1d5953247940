"""What compute-sanitizer's racecheck follows in a ring of mbarriers, by kernels that have no race:

compute-sanitizer --tool racecheck python scripts/check/racecheck_ring.py {one,all}

A warp writes a slot, the next one reads it, and lane 0 of each (`one`) or all its lanes (`all`)
arrive at the barrier that the other waits for, behind a __syncwarp().
"""

import argparse

import torch

SOURCE = r"""
typedef unsigned long long u64;
typedef unsigned int u32;
__device__ u32 address(u64* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ void wait(u64* barrier, u32 phase) {
  u32 done = 0;
  while (!done) {
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; "
                 "selp.u32 %0, 1, 0, p; }"
                 : "=r"(done) : "r"(address(barrier)), "r"(phase) : "memory");
  }
}
__device__ void arrive(u64* barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(address(barrier)) : "memory");
}
extern "C" __global__ void ring(int arrivals, int laps, int* out) {
  __shared__ u64 full, free;
  __shared__ int slot[32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address(&full)), "r"(arrivals));
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address(&free)), "r"(arrivals));
  }
  __syncthreads();
  int sum = 0;
  for (int i = 0; i < laps; i++) {
    if (warp == 0) {
      if (i) wait(&free, (i & 1) ^ 1);
      slot[lane] = i;
    } else {
      wait(&full, i & 1);
      sum += slot[lane];
    }
    __syncwarp();
    if (lane < arrivals) arrive(warp == 0 ? &full : &free);
  }
  if (warp) out[lane] = sum;
}
"""


def main():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("lanes", choices=("one", "all"), help="which arrive")
    arrivals, laps = {"one": 1, "all": 32}[parser.parse_args().lanes], 8
    out = torch.zeros(32, dtype=torch.int32, device="cuda")
    ring = torch.cuda._compile_kernel(SOURCE, "ring")
    ring(grid=(1, 1, 1), block=(64, 1, 1), args=(arrivals, laps, out))
    assert (out == sum(range(laps))).all(), out
    print("the kernel ran, with right results")


if __name__ == "__main__":
    main()
