// Every piece of inline assembly, as a function with its instruction's name. The comment above each
// names the section of the PTX ISA manual, in its chapter "Instructions" unless it says another.
#pragma once
#include "numbers.cuh"

// -- Memory barriers in shared memory -------------------------------------------------------------

// The address in the window of shared memory, as the instructions below take it.
DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// "Parallel Synchronization and Communication Instructions: mbarrier.init"
DEVICE void mbarrier_init(u64* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals));
}

// "Parallel Synchronization and Communication Instructions: membar / fence". Barriers that were
// initialised before it are seen so by the copies.
DEVICE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;"); }

// "Parallel Synchronization and Communication Instructions: mbarrier.arrive". Releases what this
// thread wrote to those who wait.
DEVICE void mbarrier_arrive(u64* barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// "Parallel Synchronization and Communication Instructions: mbarrier.arrive", with expect-tx: the
// phase ends after that many bytes of copies, too.
DEVICE void mbarrier_arrive_expect_tx(u64* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;"
               ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}

// "Parallel Synchronization and Communication Instructions: mbarrier.test_wait /
// mbarrier.try_wait". Whether the phase of this parity has ended; suspends the thread for a while
// if it has not.
DEVICE bool mbarrier_try_wait_parity(u64* barrier, u32 phase) {
  u32 done;
  asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; "
               "selp.u32 %0, 1, 0, p; }"
               : "=r"(done) : "r"(shared_address(barrier)), "r"(phase) : "memory");
  return done;
}

// -- Named barriers of some warps -----------------------------------------------------------------

// "Parallel Synchronization and Communication Instructions: bar / barrier"
template <int NUMBER, int N_WARPS> DEVICE void bar_sync() {
  asm volatile("bar.sync %0, %1;" ::"n"(NUMBER), "n"(N_WARPS * 32) : "memory");
}
template <int NUMBER, int N_WARPS> DEVICE void bar_arrive() {
  asm volatile("bar.arrive %0, %1;" ::"n"(NUMBER), "n"(N_WARPS * 32) : "memory");
}

// -- Copies between global and shared memory ------------------------------------------------------

// "Data Movement and Conversion Instructions: createpolicy". Lines that stay longest in the L2
// cache.
DEVICE u64 createpolicy_evict_last() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// "Data Movement and Conversion Instructions: cp.async.bulk", global to shared memory. `barrier`
// gets the bytes that have come.
DEVICE void cp_async_bulk_load(u32 to, const void* from, int bytes, u64* barrier, u64 policy) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
               "[%0], [%1], %2, [%3], %4;"
               ::"r"(to), "l"(from), "r"(bytes), "r"(shared_address(barrier)),
                 "l"(policy) : "memory");
}

// "Data Movement and Conversion Instructions: cp.async.bulk", shared to global memory.
DEVICE void cp_async_bulk_store(void* to, const void* from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
               ::"l"(to), "r"(shared_address(from)), "r"(bytes) : "memory");
}

// "Data Movement and Conversion Instructions: cp.async.bulk.commit_group" and
// "...: cp.async.bulk.wait_group". This thread's stores have read their shared memory.
DEVICE void cp_async_bulk_wait_read() {
  asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
}

// "Parallel Synchronization and Communication Instructions: membar / fence". Copies that begin
// after it see what this thread wrote to shared memory.
DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// "Data Movement and Conversion Instructions: prefetch, prefetchu"
DEVICE void prefetch_l1(const void* p) { asm volatile("prefetch.global.L1 [%0];" ::"l"(p)); }

// -- Loads and stores -----------------------------------------------------------------------------

// "Data Movement and Conversion Instructions: ld". Ordered by barriers alone, not by other loads.
DEVICE uint4 ld_shared_v4(u32 address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
  return v;
}

// "Data Movement and Conversion Instructions: st"
DEVICE void st_shared_v4(u32 address, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};"
               ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// "Data Movement and Conversion Instructions: st" and "...: mov". One access of 16 bytes, to any
// GPU: the memory model takes a scalar of 128 bits as a whole.
DEVICE void st_relaxed_sys_b128(uint4* p, uint4 v) {
  const u64 a = v.x | (u64)v.y << 32, b = v.z | (u64)v.w << 32;
  asm volatile("{ .reg .b128 q; mov.b128 q, {%1, %2}; st.relaxed.sys.global.b128 [%0], q; }"
               ::"l"(p), "l"(a), "l"(b) : "memory");
}

// "Data Movement and Conversion Instructions: ld" and "...: mov". The other side of that store.
DEVICE uint4 ld_relaxed_sys_b128(const uint4* p) {
  u64 a, b;
  asm volatile("{ .reg .b128 q; ld.relaxed.sys.global.b128 q, [%2]; mov.b128 {%0, %1}, q; }"
               : "=l"(a), "=l"(b) : "l"(p) : "memory");
  return make_uint4((u32)a, (u32)(a >> 32), (u32)b, (u32)(b >> 32));
}

// Chapter "Special Registers", "%globaltimer": nanoseconds.
DEVICE u64 globaltimer() {
  u64 t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

// -- Arithmetic -----------------------------------------------------------------------------------

// "Floating Point Instructions: ex2". 2^x; results below the smallest normal number are 0.
DEVICE float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// "Floating Point Instructions: lg2". log2(x) to 2^-22, for x from the smallest normal number on.
DEVICE float lg2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// "Floating Point Instructions: rcp". 1 / x to one unit in the last place.
DEVICE float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// "Half Precision Floating Point Instructions: max". Of two pairs; a NaN loses.
DEVICE u32 max_bf16x2(u32 a, u32 b) {
  u32 c;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  return c;
}

// "Half Precision Floating Point Instructions: max"
DEVICE u32 max_f16x2(u32 a, u32 b) {
  u32 c;
  asm("max.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  return c;
}

// "Half Precision Floating Point Instructions: max", where a NaN wins.
DEVICE u32 max_nan_bf16x2(u32 a, u32 b) {
  u32 c;
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  return c;
}
// "Half Precision Floating Point Instructions: max"
DEVICE u32 max_nan_f16x2(u32 a, u32 b) {
  u32 c;
  asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  return c;
}

// "Data Movement and Conversion Instructions: cvt". An fp16 in fp32.
DEVICE float cvt_f32_f16(u16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}

// "Data Movement and Conversion Instructions: cvt". Two numbers rounded to bf16, or to fp16, `a` in
// the low half.
DEVICE u32 cvt_bf16x2(float a, float b) {
  u32 c;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(c) : "f"(b), "f"(a));
  return c;
}
// "Data Movement and Conversion Instructions: cvt"
DEVICE u32 cvt_f16x2(float a, float b) {
  u32 c;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(c) : "f"(b), "f"(a));
  return c;
}

// "Inline PTX Assembly in CUDA: Incorrect Optimization". No instruction, but the compiler knows
// nothing of the number from here on, and so takes nothing that it worked out from it before.
DEVICE void make_opaque(float& x) { asm volatile("" : "+f"(x)); }
