// What a row's sums are made of, and the statistics that a call may want besides: a struct for
// each, with the arithmetic that is done for it. Besides its struct a statistic has a word of a
// packet (`node.cuh`), a slope if it may be a term (`params.py`), and a flag. The places are listed
// in docs/one_read.md.
#pragma once
#include "params.cuh"
#include "ptx.cuh"

// Statistics are those of z = scale * value, and scale > 0 is one number for each row. A value is
// the logit as it is in memory, or with a softcap tanh(before * logit). Maxima and totals are those
// of values: so differences of logits are exact, and only these are scaled.

// Sums over some columns of a row, without the label's. The name before a colon is that of the
// statistic which has the field, and leaves it alone where nobody wants it.
struct Node {
  float max;     // of the values
  float sum;     // of exp(scale * (value - max))
  float moment;  // Entropy: of exp(scale * (value - max)) * scale * (value - max)
  float total;   // Total: of the values above -inf
  int count;     // Total: how many these are
  int index;     // Argmax: lowest id of the maximum; until `post` has looked, the first such leaf
};
DEVICE Node nothing() { return {-INF, 0.f, 0.f, 0.f, 0, NO_INDEX}; }
DEVICE float finite(float max) { return max == -INF ? 0.f : max; }

// A node's way to another maximum: how far z lies below it, and what that scales sums by.
struct Drop {
  float drop, factor;
};

// exp(scale * (value - shift)) = 2^(value * by - at - rest), of which `rest` is the same for all
// values: one rounding. Logits have 16 bits, so that beyond a million all z are equal or hundreds
// apart, whatever the base; `rest` would be large there, and a power of 2 has none.
struct Base2 {
  float by, at, rest;
};
DEVICE Base2 base2(float shift, float scale) {
  const float power = __uint_as_float(__float_as_uint(scale) & 0x7f800000u);
  const bool is_far = !HAS_SOFTCAP && fabsf(shift * scale) > 1e6f;
  const float by = is_far ? power : scale * LOG2E, at = shift * by;
  return {by, at, fmaf(shift, by, -at)};
}

// A logit, and power = 2^exponent in the base of its leaf.
struct Logit {
  float value, exponent, power;
};
// A lane's sums while it reads a leaf, two logits at a time; exponents are those of base 2.
struct LaneSums {
  float even, odd;                // powers
  float moment_even, moment_odd;  // Entropy: power * exponent
  float total;                    // Total
  int count;
};

// A row's statistics in float64, from its node without the label and the label's value.
struct Solved {
  double max;      // the largest z without the label's
  double z;        // the label's
  double top;      // the larger of the two
  bool is_top;     // the label's is the larger
  double smaller;  // exp(-|max - z|): of the smaller, relative to the larger
  double others;   // sum of exp(z - top) without the label
  double label;    // exp(z - top) of the label
  double whole;    // the sum of both
  double offset;   // the label's z - top
  double log_sum;
  double lse, log_prob;
  double mean, entropy;  // Entropy: mean of z - top
  double total, mass;    // Total: over all logits above -inf, and how many these are
};

// A row's softmax in float32, from which its gradient's factors come; as `Solved`.
struct Softmax {
  float top, shift;  // values; shift: a finite top
  float label, others, whole;
  float logit;  // the label's value
  float scale;
  DEVICE float log_sum() const { return logit == top ? log1pf(others) : logf(whole); }
  // How far z of a value lies below the largest.
  DEVICE float drop(float value) const { return (value - shift) * scale; }
};

// d loss / d z = (each + slope * drop) * exp(drop) + flat, where the logit is above -inf and `drop`
// is that of `Softmax`; that of the label.
struct Slopes {
  float each, slope, flat, label;
};

// The steps of an optional statistic. Each hides those that it has; the others do nothing.
struct Statistic {
  // To a leaf's sums, two logits more. is_plain: none of the leaf is -inf.
  DEVICE static void add(LaneSums&, Logit, Logit, bool is_plain) {}
  // Not finite where a leaf is not plain.
  DEVICE static float magnitude(const LaneSums&) { return 0.f; }
  // The leaf's node from its lanes' sums: begin, add the sums `d` lanes away, end in base e.
  DEVICE static void begin(Node&, const LaneSums&) {}
  DEVICE static void add_lane(Node&, int d) {}
  DEVICE static void end(Node&, Base2) {}
  // The join of two nodes, and a copy of the node `d` lanes away.
  DEVICE static void join(Node&, const Node& a, const Node& b, Drop left, Drop right) {}
  DEVICE static void copy_lane(Node&, const Node& from, int d) {}
  // A row: its statistic, its part of the gradient, the stores.
  DEVICE static void solve(Solved&, const Node&, float logit, float scale) {}
  DEVICE static void differentiate(
      Slopes&, const Params&, const Row&, const Node&, const Softmax&, float factor) {}
  // settle(value): 0 where the token is ignored, NaN where something is bad.
  template <class Settle>
  DEVICE static void store(const Params&, const Node&, float logit, const Solved&,
                           const Settle& settle, const Item& item, bool bad) {}
};

struct Entropy : Statistic {
  DEVICE static float bounded(float exponent, bool is_plain) {
    return is_plain ? exponent : fmaxf(exponent, LOWEST_DROP);
  }
  DEVICE static void add(LaneSums& x, Logit a, Logit b, bool is_plain) {
    x.moment_even = fmaf(a.power, bounded(a.exponent, is_plain), x.moment_even);
    x.moment_odd = fmaf(b.power, bounded(b.exponent, is_plain), x.moment_odd);
  }
  DEVICE static float magnitude(const LaneSums& x) { return fabsf(x.moment_even + x.moment_odd); }

  DEVICE static void begin(Node& x, const LaneSums& from) {
    x.moment = from.moment_even + from.moment_odd;
  }
  DEVICE static void add_lane(Node& x, int d) { x.moment += __shfl_xor_sync(~0u, x.moment, d); }
  DEVICE static void end(Node& x, Base2 base) {
    x.moment = LN2 * (x.moment - base.rest * x.sum) * ex2(-base.rest);
  }

  DEVICE static float moved(const Node& x, Drop way) {
    const float drop = fmaxf(way.drop, LOWEST_DROP);
    return __fmul_rn(way.factor, __fadd_rn(x.moment, __fmul_rn(drop, x.sum)));
  }
  DEVICE static void join(Node& x, const Node& a, const Node& b, Drop left, Drop right) {
    x.moment = __fadd_rn(moved(a, left), moved(b, right));
  }
  DEVICE static void copy_lane(Node& x, const Node& from, int d) {
    x.moment = __shfl_xor_sync(~0u, from.moment, d);
  }

  DEVICE static void solve(Solved& r, const Node& x, float, float) {
    const double drop = x.max == -INF ? 0.0 : r.max - r.top;
    const double others = (r.is_top ? r.smaller : 1.0) * (x.moment + drop * x.sum);
    const double label = r.label == 0.0 ? 0.0 : r.label * r.offset;
    r.mean = (others + label) / r.whole;
    r.entropy = r.log_sum - r.mean;
  }
  // Compiled where a term of the loss is an entropy.
  DEVICE static void differentiate(Slopes& g, const Params& q, const Row& row, const Node& x,
                                   const Softmax& softmax, float factor) {
    if constexpr (!HAS_ENTROPY_TERM) return;
    const float offset = fmaxf(softmax.drop(softmax.logit), LOWEST_DROP);
    const float drop = fmaxf(softmax.drop(x.max), LOWEST_DROP);
    const float others = ex2(drop * LOG2E) * (x.moment + drop * x.sum), whole = softmax.whole;
    const float mean = (others + softmax.label * offset) / whole;
    float by = q.entropy_factor;
    if (q.entropy_square != 0.f) by += q.entropy_square * (softmax.log_sum() - mean);
    if constexpr (HAS_ROWS) by += row.by[2];
    by *= factor;
    g.slope = -by / whole;
    g.each += by * mean / whole;
    g.label -= by * (softmax.label / whole) * (offset - mean);
  }
  template <class Settle>
  DEVICE static void store(const Params& q, const Node&, float, const Solved& r,
                           const Settle& settle, const Item& item, bool) {
    q.mean[item.row] = settle(r.mean);
    q.entropy[item.row] = settle(r.entropy);
  }
};

// The sum of the logits above -inf, and their number.
struct Total : Statistic {
  DEVICE static void add_one(LaneSums& x, float logit, bool is_plain) {
    if (is_plain || logit != -INF) x.total += logit, x.count++;
  }
  DEVICE static void add(LaneSums& x, Logit a, Logit b, bool is_plain) {
    add_one(x, a.value, is_plain);
    add_one(x, b.value, is_plain);
  }
  DEVICE static float magnitude(const LaneSums& x) { return fabsf(x.total); }

  DEVICE static void begin(Node& x, const LaneSums& from) {
    x.total = from.total;
    x.count = from.count;
  }
  DEVICE static void add_lane(Node& x, int d) { x.total += __shfl_xor_sync(~0u, x.total, d); }
  DEVICE static void end(Node& x, Base2) { x.count = __reduce_add_sync(~0u, x.count); }

  DEVICE static void join(Node& x, const Node& a, const Node& b, Drop, Drop) {
    x.total = __fadd_rn(a.total, b.total);
    x.count = a.count + b.count;
  }
  DEVICE static void copy_lane(Node& x, const Node& from, int d) {
    x.total = __shfl_xor_sync(~0u, from.total, d);
    x.count = __shfl_xor_sync(~0u, from.count, d);
  }

  DEVICE static void solve(Solved& r, const Node& x, float logit, float scale) {
    const bool is_lonely = logit == -INF;
    r.total = scale * (x.total + (is_lonely ? 0.0 : (double)logit));
    r.mass = x.count + !is_lonely;
  }
  DEVICE static void differentiate(Slopes& g, const Params& q, const Row& row, const Node& x,
                                   const Softmax& softmax, float factor) {
    const bool is_lonely = softmax.logit == -INF;
    float by = q.total_factor;
    if (q.total_square != 0.f) {
      by += q.total_square * (softmax.scale * (x.total + (is_lonely ? 0.f : softmax.logit)));
    }
    if constexpr (HAS_ROWS) by += row.by[3];
    g.flat = by * factor;
    g.label += is_lonely ? 0.f : g.flat;
  }
  template <class Settle>
  DEVICE static void store(const Params& q, const Node&, float, const Solved& r,
                           const Settle& settle, const Item& item, bool) {
    q.total[item.row] = settle(r.total);
    q.mass[item.row] = settle(r.mass);
  }
};

// The lowest id of the largest logit, and whether that is the label.
struct Argmax : Statistic {
  DEVICE static void join(Node& x, const Node& a, const Node& b, Drop, Drop) {
    x.index = a.max > b.max ? a.index : b.max > a.max ? b.index : min(a.index, b.index);
  }
  DEVICE static void copy_lane(Node& x, const Node& from, int d) {
    x.index = __shfl_xor_sync(~0u, from.index, d);
  }
  template <class Settle>
  DEVICE static void store(const Params& q, const Node& x, float logit, const Solved&,
                           const Settle&, const Item& item, bool bad) {
    const i64 id = label_of(q, item.row);
    const i64 best = logit > x.max || (logit == x.max && id < x.index) ? id : x.index;
    q.argmax[item.row] = bad || item.ignored ? -1 : best;
    q.hits[item.row] = best == id && !bad && !item.ignored;
  }
};

// A step of all statistics that the kernel is compiled with.
template <class... S> struct All {
  DEVICE static void add(LaneSums& x, Logit a, Logit b, bool is_plain) {
    (S::add(x, a, b, is_plain), ...);
  }
  DEVICE static float magnitude(const LaneSums& x) { return (S::magnitude(x) + ...); }
  DEVICE static void begin(Node& x, const LaneSums& from) { (S::begin(x, from), ...); }
  DEVICE static void add_lane(Node& x, int d) { (S::add_lane(x, d), ...); }
  DEVICE static void end(Node& x, Base2 base) { (S::end(x, base), ...); }
  DEVICE static void join(Node& x, const Node& a, const Node& b, Drop left, Drop right) {
    (S::join(x, a, b, left, right), ...);
  }
  DEVICE static void copy_lane(Node& x, const Node& from, int d) {
    (S::copy_lane(x, from, d), ...);
  }
  DEVICE static void solve(Solved& r, const Node& x, float logit, float scale) {
    (S::solve(r, x, logit, scale), ...);
  }
  DEVICE static void differentiate(Slopes& g, const Params& q, const Row& row, const Node& x,
                                   const Softmax& softmax, float factor) {
    (S::differentiate(g, q, row, x, softmax, factor), ...);
  }
  template <class Settle>
  DEVICE static void store(const Params& q, const Node& x, float logit, const Solved& r,
                           const Settle& settle, const Item& item, bool bad) {
    (S::store(q, x, logit, r, settle, item, bad), ...);
  }
};
template <bool WANTED, class S> struct If {
  using Type = S;
};
template <class S> struct If<false, S> {
  using Type = Statistic;
};
using Optional = All<If<WANTS_ENTROPY, Entropy>::Type, If<WANTS_TOTAL, Total>::Type,
                     If<WANTS_ARGMAX, Argmax>::Type>;
