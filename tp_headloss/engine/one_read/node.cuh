// The arithmetic of a row: nodes are joined, a joined row is solved, and the factors of its
// gradient follow. Nothing here knows a thread, so that it compiles for a host, too.
#pragma once
#include "statistics.cuh"

// -- Joins ----------------------------------------------------------------------------------------

// The sums of two parts of a row relative to the larger maximum. Each operation rounds by itself,
// so that both orders of the arguments have the same bits.
DEVICE Node join(Node a, Node b) {
  const float max = fmaxf(a.max, b.max), shift = finite(max);
  Drop left, right;
  left.drop = __fsub_rn(a.max, shift);
  right.drop = __fsub_rn(b.max, shift);
  left.factor = ex2(__fmul_rn(left.drop, LOG2E));
  right.factor = ex2(__fmul_rn(right.drop, LOG2E));
  Node x = nothing();
  x.max = max;
  x.sum = __fadd_rn(__fmul_rn(a.sum, left.factor), __fmul_rn(b.sum, right.factor));
  Optional::join(x, a, b, left, right);
  return x;
}

// -- Packets --------------------------------------------------------------------------------------

// An item's node on its way to other ranks: WORDS stores of 16 bytes, each with the launch's tag.
//   first    max     sum    count, or the label's logit << 16   tag << 2, or flags
//   second   moment  index  total                               tag << 2
// An item has fewer columns than 2^16, and a logit in bf16 no more bits.
struct Packet {
  uint4 first, second;
  DEVICE bool has_come(u32 tag) const {
    return first.w >> 2 == tag && (WORDS == 1 || second.w >> 2 == tag);
  }
  DEVICE int count() const { return first.z & 0xffffu; }
  DEVICE float logit() const { return __uint_as_float(first.z & 0xffff0000u); }
  DEVICE bool has(u32 flag) const { return first.w & flag; }
  DEVICE Node node() const {
    return {__uint_as_float(first.x),  __uint_as_float(first.y), __uint_as_float(second.x),
            __uint_as_float(second.z), count(),                  (int)second.y};
  }
};
// Both stores; logit: in the upper half of 32 bits.
DEVICE uint4 first_store(const Node& x, u32 logit, u32 tag, u32 flags) {
  return make_uint4(__float_as_uint(x.max), __float_as_uint(x.sum), logit | x.count,
                    tag << 2 | flags);
}
DEVICE uint4 second_store(const Node& x, u32 tag) {
  return make_uint4(__float_as_uint(x.moment), x.index, __float_as_uint(x.total), tag << 2);
}
DEVICE Packet no_packet() {
  return {make_uint4(__float_as_uint(-INF), 0, 0, 0), make_uint4(0, NO_INDEX, 0, 0)};
}

// -- A row ----------------------------------------------------------------------------------------

// A row's statistics, each rounded once by whoever stores it; as in `softmax_triton`.
DEVICE Solved solve(Node x, float logit) {
  Solved r = {};
  const double m = x.max, y = logit;
  const bool is_top = y >= m, lonely = logit == -INF;
  const double smaller = lonely || x.max == -INF ? 0.0 : exp(-fabs(m - y));
  r.is_top = is_top;
  r.smaller = smaller;
  r.top = is_top ? y : m;
  r.offset = lonely ? y : y - r.top;
  r.others = is_top ? x.sum * smaller : x.sum;
  r.label = lonely ? 0.0 : is_top ? 1.0 + r.offset : smaller;  // NaN for infinity
  r.whole = r.others + r.label;
  r.log_sum = log1p(is_top ? r.others : r.others - 1.0 + r.label);
  r.lse = r.top + r.log_sum;
  r.log_prob = 0.0 - (is_top ? r.log_sum : r.log_sum - r.offset);
  Optional::solve(r, x, logit);
  return r;
}

DEVICE Softmax softmax_of(const Node& x, float logit) {
  const float top = fmaxf(x.max, logit), shift = finite(top);
  const float label = ex2((logit - shift) * LOG2E);
  const float others = x.sum * ex2((x.max - shift) * LOG2E);
  return {top, shift, label, others, others + label, logit};
}

// The gradient of a logit z: 2^t * (each + slope * t) + flat with t = by * z - at, where z is above
// -inf; that of the label; whether no logit is -inf.
struct __align__(16) Factors {
  float by, at, each, slope, flat, label;
  bool is_plain;
};

// The factors of a row's gradient. owners: of its label, see `owners_of`; scale: upstream gradient
// over divisor; by: derivatives of a row function's terms.
DEVICE Factors factors_of(const Params& q, int row, Node x, float logit, int owners, double scale,
                          const Row& by) {
  const Softmax softmax = softmax_of(x, logit);
  const float whole = softmax.whole;
  float by_lse = q.lse_factor, by_log_prob = q.log_prob_factor;
  if (q.lse_square != 0.f || q.log_prob_square != 0.f) {
    const float log_sum = softmax.log_sum();
    if (q.lse_square != 0.f) by_lse += q.lse_square * (softmax.top + log_sum);
    if (q.log_prob_square != 0.f) {
      const bool is_top = logit == softmax.top;
      by_log_prob += q.log_prob_square * (is_top ? -log_sum : logit - softmax.top - log_sum);
    }
  }
  if constexpr (HAS_ROWS) {
    by_lse += by.by[0];
    by_log_prob += by.by[1];
  }
  const float factor = (float)(scale * (q.weight ? (double)q.weight[row] : 1.0));
  by_lse *= factor;
  by_log_prob *= factor;
  Slopes g = {};
  g.each = (by_lse - by_log_prob) / whole;
  g.label = by_lse * (softmax.label / whole) + by_log_prob * (softmax.others / whole);
  Optional::differentiate(g, q, by, x, softmax, factor);
  if (!(whole > 0.f) || owners != 1) g.each = g.label = NONE;
  const Base2 base = base2(softmax.shift);
  const float moved = ex2(-base.rest);
  const float each = (g.each - g.slope * LN2 * base.rest) * moved;
  return {base.by, base.at, each, g.slope * LN2 * moved, g.flat, g.label};
}

DEVICE float gradient_of(const Factors& f, float z, bool is_plain) {
  float each = f.each;
  const float t = fmaf(z, f.by, -f.at);
  // where 2^t underflows the factor stays finite, so that their product is 0
  if constexpr (HAS_ENTROPY_TERM) each = fmaf(f.slope, fmaxf(t, -300.f), each);
  if constexpr (WANTS_TOTAL) {
    if (!is_plain && z == -INF) return each * ex2(t);
  }
  return fmaf(each, ex2(t), f.flat);
}
