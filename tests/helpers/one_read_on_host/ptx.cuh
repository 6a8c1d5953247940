// What `node.cuh` needs of CUDA, on a host: it stands in the place of the kernel's `ptx.cuh`.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>

#define __device__
#define __forceinline__ inline
#define __align__(bytes) alignas(bytes)

template <class To, class From> To bits_as(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  std::memcpy(&y, &x, sizeof(y));
  return y;
}
inline float __int_as_float(int x) { return bits_as<float>(x); }
inline float __uint_as_float(unsigned x) { return bits_as<float>(x); }
inline unsigned __float_as_uint(float x) { return bits_as<unsigned>(x); }

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float ex2(float x) { return x < -126.f ? 0.f : exp2f(x); }  // .ftz
inline float lg2(float x) { return log2f(x); }
inline float reciprocal(float x) { return 1.f / x; }
inline void make_opaque(float&) {}
using std::max;
using std::min;
// Bits of an fp16.
inline float cvt_f32_f16(unsigned short x) {
  const int exponent = x >> 10 & 31, mantissa = x & 1023;
  const float size = exponent == 31 ? (mantissa ? NAN : INFINITY)
                     : exponent     ? std::ldexp(1024.f + mantissa, exponent - 25)
                                    : std::ldexp((float)mantissa, -24);
  return x >> 15 ? -size : size;
}

struct uint4 {
  unsigned x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

// A warp of one lane.
template <class T> T __shfl_xor_sync(unsigned, T x, int) { return x; }
inline int __reduce_add_sync(unsigned, int x) { return x; }
