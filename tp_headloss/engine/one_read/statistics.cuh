// What a row's sums are made of, and the statistics that a call may want besides: a struct for
// each, with the arithmetic that is done for it. Besides its struct a statistic has a word of a
// packet (`node.cuh`), a slope if it may be a term (`params.py`), and a flag. The places are listed
// in docs/one_read.md.
#pragma once
#include "params.cuh"
#include "ptx.cuh"

// Statistics are those of z = scale * value, and scale > 0 is one number for each row. A value is
// the logit as it is in memory, or with a softcap tanh(before * logit). Maxima and totals are those
// of values: so differences of logits are exact, and only these are scaled. A teacher's logits u
// are its scale times what is in memory, likewise. See `Scales`.

// Sums over some columns of a row, without the label's. The name before a colon is that of the
// statistic which has the field, and leaves it alone where nobody wants it.
struct Node {
  float max;     // of the values
  float sum;     // of exp(scale * (value - max))
  float moment;  // Entropy: of exp(scale * (value - max)) * scale * (value - max)
  float total;   // Total: of the values above -inf
  int count;     // Total: how many these are
  int index;     // Argmax: lowest id of the maximum; until `post` has looked, the first such leaf
  // Divergences: the teacher's maximum, sum of q = exp(u - max u), and sum of q (u - z'), with the
  // label's.
  float teacher_max, teacher_sum, cross;
  // And without the label's: sum of p = exp(z' - max z'), sum of p (z' - u).
  float student_sum, gap;
  float teacher_logit;   // of the label; 0 where it is not
  float teacher_moment;  // with the label's: sum of q (u - max u)
  // TopK: of the entries and of all other columns, the tail, their own maximum and sum; and the
  // entries' sums of tau and of tau (log tau - scale * (value - topk_max)).
  float topk_max, topk_sum, topk_mass, topk_cross, tail_max, tail_sum;
  float label_log_tau;  // -inf where the label is no entry, or not known yet
  float mixture, mixture_mean, overlap;  // Mixture: of a row, from its second round
};
DEVICE Node nothing() {
  return {-INF, 0.f, 0.f,  0.f, 0,   NO_INDEX, -INF, 0.f, 0.f,  0.f, 0.f,
          0.f,  0.f, -INF, 0.f, 0.f, 0.f,      -INF, 0.f, -INF, 0.f, 0.f, 0.f};
}
DEVICE float finite(float max) { return max == -INF ? 0.f : max; }

// A node's way to another maximum: how far z lies below it, and what that scales sums by.
struct Drop {
  float drop, factor;
};

// exp(scale * (value - shift)) = 2^(value * by - at - rest), of which `rest` is the same for all
// values: one rounding. Beyond a billion all z are equal or far apart, whatever the base; `rest`
// would be large there, and a power of 2 has none.
struct Base2 {
  float by, at, rest;
};
DEVICE Base2 base2(float shift, float scale) {
  const float power = __uint_as_float(__float_as_uint(scale) & 0x7f800000u);
  const bool is_far = !HAS_SOFTCAP && fabsf(shift * scale) > 1e9f;
  const float by = is_far ? power : scale * LOG2E, at = shift * by;
  return {by, at, fmaf(shift, by, -at)};
}

// The bases of a leaf's student and teacher.
struct Bases {
  Base2 z, u;
  float beside;  // as in `Scales`
};

// A logit, and power = 2^exponent in the base of its leaf.
struct Logit {
  float value, exponent, power;
  // Divergences: powers of teacher and student beside it, u - z', the exponent of q
  float q, p, apart, u;
};
// A lane's sums while it reads a leaf, two logits at a time; exponents are those of base 2.
struct LaneSums {
  float even, odd;                // powers
  float moment_even, moment_odd;  // Entropy: power * exponent
  float total;                    // Total
  int count;
  float teacher, cross, student, gap, teacher_moment;  // Divergences
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
  // Divergences: the largest u; the sum of p, relative to the largest z', and the mean of z' - u.
  double teacher_top, student_sum, gap, forward_kl, reverse_kl, teacher_entropy;
  // TopK: logs of the student's probabilities of the entries and of the tail.
  float log_inside, log_outside, topk_forward_kl, vocab_forward_kl, teacher_mass;
  float mixture, overlap;  // Mixture
};

// A row's softmax in float32, from which its gradient's factors come; as `Solved`.
struct Softmax {
  float top, shift;  // values; shift: a finite top
  float label, others, whole;
  float logit;  // the label's value
  Scales scales;
  DEVICE float log_sum() const { return logit == top ? log1pf(others) : logf(whole); }
  // How far z of a value lies below the largest.
  DEVICE float drop(float value) const { return (value - shift) * scales.z; }
};

// d loss / d z = (each + slope * drop) * exp(drop) + flat, where the logit is above -inf and `drop`
// is that of `Softmax`; that of the label. Divergences: and p (beside + reverse (z' - u - mean)),
// and less q * teacher.
struct Slopes {
  float each, slope, flat, label;
  float teacher, beside, reverse, mean;
  // TopK: and of an entry share times its softmax over the entries, less tau times its probability;
  // of any other column tail times its softmax over the tail.
  float share, tau, tail;
  // Mixture: and p' (mixture * slope of the column - mixture_mean), p' the student's probability.
  float mixture, mixture_mean;
};

// The steps of an optional statistic. Each hides those that it has; the others do nothing.
struct Statistic {
  // To a leaf's sums, two logits more. is_plain: none of the leaf is -inf.
  DEVICE static void add(LaneSums&, Logit, Logit, bool is_plain) {}
  // Not finite where a leaf is not plain; then `add` does more.
  DEVICE static float magnitude(const LaneSums&) { return 0.f; }
  // The leaf's node from its lanes' sums: begin, add the sums `d` lanes away, end in base e.
  DEVICE static void begin(Node&, const LaneSums&) {}
  DEVICE static void add_lane(Node&, int d) {}
  DEVICE static void end(Node&, const Bases&) {}
  // The join of two nodes, and a copy of the node `d` lanes away.
  DEVICE static void join(Node&, const Node& a, const Node& b, Drop left, Drop right,
                          Scales scales) {}
  DEVICE static void copy_lane(Node&, const Node& from, int d) {}
  // A row: its statistic, its part of the gradient, the stores.
  DEVICE static void solve(Solved&, const Node&, float logit, Scales scales) {}
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
  DEVICE static void end(Node& x, const Bases& bases) {
    const float rest = bases.z.rest;
    x.moment = LN2 * (x.moment - rest * x.sum) * ex2(-rest);
  }

  DEVICE static float moved(const Node& x, Drop way) {
    const float drop = fmaxf(way.drop, LOWEST_DROP);
    return __fmul_rn(way.factor, __fadd_rn(x.moment, __fmul_rn(drop, x.sum)));
  }
  DEVICE static void join(Node& x, const Node& a, const Node& b, Drop left, Drop right, Scales) {
    x.moment = __fadd_rn(moved(a, left), moved(b, right));
  }
  DEVICE static void copy_lane(Node& x, const Node& from, int d) {
    x.moment = __shfl_xor_sync(~0u, from.moment, d);
  }

  DEVICE static void solve(Solved& r, const Node& x, float, Scales) {
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
  DEVICE static void end(Node& x, const Bases&) { x.count = __reduce_add_sync(~0u, x.count); }

  DEVICE static void join(Node& x, const Node& a, const Node& b, Drop, Drop, Scales) {
    x.total = __fadd_rn(a.total, b.total);
    x.count = a.count + b.count;
  }
  DEVICE static void copy_lane(Node& x, const Node& from, int d) {
    x.total = __shfl_xor_sync(~0u, from.total, d);
    x.count = __shfl_xor_sync(~0u, from.count, d);
  }

  DEVICE static void solve(Solved& r, const Node& x, float logit, Scales scales) {
    const bool is_lonely = logit == -INF;
    r.total = scales.z * (x.total + (is_lonely ? 0.0 : (double)logit));
    r.mass = x.count + !is_lonely;
  }
  DEVICE static void differentiate(Slopes& g, const Params& q, const Row& row, const Node& x,
                                   const Softmax& softmax, float factor) {
    const bool is_lonely = softmax.logit == -INF;
    float by = q.total_factor;
    if (q.total_square != 0.f) {
      by += q.total_square * (softmax.scales.z * (x.total + (is_lonely ? 0.f : softmax.logit)));
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
  DEVICE static void join(Node& x, const Node& a, const Node& b, Drop, Drop, Scales) {
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
    q.argmax[item.row] = bad || item.ignored() ? -1 : best;
    q.hits[item.row] = best == id && !bad && !item.ignored();
  }
};

// KL(q || p) and KL(p || q) of a teacher's probabilities q and the student's p beside it: the means
// of u - z' by q and of z' - u by p, and the difference of both logarithms of sums; and the entropy
// of q, which has no gradient. Where q or p is 0 nothing is added, whatever the other is.
struct Divergences : Statistic {
  // A divergence that rounding has made negative is 0; NaN stays.
  template <class T> DEVICE static T at_least_0(T x) { return x < (T)0 ? (T)0 : x; }
  DEVICE static float weighed(float power, float apart, bool is_plain) {
    return !is_plain && power == 0.f ? 0.f : power * apart;
  }
  DEVICE static void add_one(LaneSums& x, Logit a, bool is_plain) {
    x.teacher += a.q;
    if constexpr (WANTS_FORWARD_KL) x.cross += weighed(a.q, a.apart, is_plain);
    if constexpr (IS_TEMPERED) x.student += a.p;
    if constexpr (WANTS_REVERSE_KL) x.gap -= weighed(a.p, a.apart, is_plain);
    if constexpr (WANTS_TEACHER_ENTROPY) x.teacher_moment += weighed(a.q, a.u, is_plain);
  }
  DEVICE static void add(LaneSums& x, Logit a, Logit b, bool is_plain) {
    add_one(x, a, is_plain);
    add_one(x, b, is_plain);
  }
  DEVICE static float magnitude(const LaneSums& x) {
    return fabsf(x.cross) + fabsf(x.gap) + fabsf(x.teacher_moment);
  }

  DEVICE static void begin(Node& x, const LaneSums& from) {
    x.teacher_sum = from.teacher;
    x.cross = from.cross;
    x.student_sum = from.student;
    x.gap = from.gap;
    x.teacher_moment = from.teacher_moment;
  }
  DEVICE static void add_lane(Node& x, int d) {
    x.teacher_sum += __shfl_xor_sync(~0u, x.teacher_sum, d);
    if constexpr (WANTS_FORWARD_KL) x.cross += __shfl_xor_sync(~0u, x.cross, d);
    if constexpr (IS_TEMPERED) x.student_sum += __shfl_xor_sync(~0u, x.student_sum, d);
    if constexpr (WANTS_REVERSE_KL) x.gap += __shfl_xor_sync(~0u, x.gap, d);
    if constexpr (WANTS_TEACHER_ENTROPY) {
      x.teacher_moment += __shfl_xor_sync(~0u, x.teacher_moment, d);
    }
  }
  DEVICE static void end(Node& x, const Bases& bases) {
    const float of_teacher = ex2(-bases.u.rest), of_student = ex2(-bases.beside * bases.z.rest);
    x.teacher_moment = LN2 * (x.teacher_moment - bases.u.rest * x.teacher_sum) * of_teacher;
    x.teacher_sum *= of_teacher;
    x.cross *= of_teacher;
    x.student_sum *= of_student;
    x.gap *= of_student;
  }

  // The label alone, which its leaf leaves out.
  DEVICE static Node label(float value, float teacher, Scales scales) {
    Node x = nothing();
    x.teacher_max = x.teacher_logit = teacher;
    x.teacher_sum = 1.f;  // a join takes none of it where the logit is -inf
    x.cross = teacher * scales.u - value * scales.z * scales.beside;
    return x;
  }
  DEVICE static float factor_of(float max, float shift, Scales scales) {
    return ex2(__fmul_rn(__fmul_rn(__fsub_rn(max, shift), scales.u), LOG2E));
  }
  // By how much a move scales sums of p.
  DEVICE static float beside(Drop way, Scales scales) {
    if constexpr (!IS_TEMPERED) return way.factor;
    return ex2(__fmul_rn(__fmul_rn(way.drop, scales.beside), LOG2E));
  }
  DEVICE static float moved(float factor, float sum) {
    return factor == 0.f ? 0.f : __fmul_rn(factor, sum);
  }
  DEVICE static void join(Node& x, const Node& a, const Node& b, Drop left, Drop right,
                          Scales scales) {
    x.teacher_max = fmaxf(a.teacher_max, b.teacher_max);
    const float shift = finite(x.teacher_max);
    const float of_a = factor_of(a.teacher_max, shift, scales);
    const float of_b = factor_of(b.teacher_max, shift, scales);
    x.teacher_sum = __fadd_rn(__fmul_rn(a.teacher_sum, of_a), __fmul_rn(b.teacher_sum, of_b));
    if constexpr (WANTS_FORWARD_KL) x.cross = __fadd_rn(moved(of_a, a.cross), moved(of_b, b.cross));
    if constexpr (WANTS_TEACHER_ENTROPY) {
      auto moment = [&](const Node& part, float factor) {
        const float drop = __fmul_rn(__fsub_rn(part.teacher_max, shift), scales.u);
        const float more = __fmul_rn(fmaxf(drop, LOWEST_DROP), part.teacher_sum);
        return __fmul_rn(factor, __fadd_rn(part.teacher_moment, more));
      };
      x.teacher_moment = __fadd_rn(moment(a, of_a), moment(b, of_b));
    }
    if constexpr (HAS_BESIDE) {
      const float own_a = beside(left, scales), own_b = beside(right, scales);
      x.student_sum = __fadd_rn(__fmul_rn(a.student_sum, own_a), __fmul_rn(b.student_sum, own_b));
      x.gap = __fadd_rn(moved(own_a, a.gap), moved(own_b, b.gap));
      x.teacher_logit = __fadd_rn(a.teacher_logit, b.teacher_logit);
    }
  }
  DEVICE static void copy_lane(Node& x, const Node& from, int d) {
    x.teacher_max = __shfl_xor_sync(~0u, from.teacher_max, d);
    x.teacher_sum = __shfl_xor_sync(~0u, from.teacher_sum, d);
    x.cross = __shfl_xor_sync(~0u, from.cross, d);
    if constexpr (WANTS_TEACHER_ENTROPY) {
      x.teacher_moment = __shfl_xor_sync(~0u, from.teacher_moment, d);
    }
    if constexpr (HAS_BESIDE) {
      x.student_sum = __shfl_xor_sync(~0u, from.student_sum, d);
      x.gap = __shfl_xor_sync(~0u, from.gap, d);
      x.teacher_logit = __shfl_xor_sync(~0u, from.teacher_logit, d);
    }
  }

  // u - z' of the label.
  DEVICE static float of_label(const Node& x, float logit, Scales scales) {
    const float a = scales.beside;
    return x.teacher_logit * scales.u - a * logit * scales.z;
  }
  // In float32, of a row: sum of p and that of the label, relative to the largest z'; the mean of
  // z' - u; lse of u less that of z'.
  struct Beside {
    float whole, label, mean, apart;
  };
  DEVICE static Beside beside_of(const Node& x, const Softmax& softmax) {
    const Scales& scales = softmax.scales;
    const float a = scales.beside;
    Beside r = {softmax.whole, softmax.label, 0.f, 0.f};
    float factor = ex2(softmax.drop(x.max) * LOG2E);
    if constexpr (IS_TEMPERED) {
      factor = ex2(a * softmax.drop(x.max) * LOG2E);
      r.label = ex2(a * softmax.drop(softmax.logit) * LOG2E);
      r.whole = x.student_sum * factor + r.label;
    }
    if constexpr (WANTS_REVERSE_KL) {
      const float label = moved(r.label, of_label(x, softmax.logit, scales));
      r.mean = (moved(factor, x.gap) - label) / r.whole;
    }
    const float log_sum = IS_TEMPERED ? logf(r.whole) : softmax.log_sum();
    r.apart = x.teacher_max * scales.u + logf(x.teacher_sum) - a * softmax.top * scales.z - log_sum;
    return r;
  }
  DEVICE static void solve(Solved& r, const Node& x, float logit, Scales scales) {
    const double a = scales.beside;
    const double factor = x.max == -INF ? 0.0 : exp(a * (r.max - r.top));
    const double label = logit == -INF ? 0.0 : exp(a * r.offset);
    r.student_sum = IS_TEMPERED ? x.student_sum * factor + label : r.whole;
    r.teacher_top = (double)x.teacher_max * scales.u;
    const double apart = r.teacher_top + log((double)x.teacher_sum) - a * r.top -
                         log(r.student_sum);
    const double nothing = x.teacher_sum > 0.f ? 0.0 : NONE;  // it has no probabilities
    r.forward_kl = at_least_0(x.cross / (double)x.teacher_sum - apart) + nothing;
    if constexpr (WANTS_TEACHER_ENTROPY) {
      const double mean = x.teacher_moment / (double)x.teacher_sum;
      r.teacher_entropy = log((double)x.teacher_sum) - mean;
    }
    if constexpr (WANTS_REVERSE_KL) {
      const double of_label = label == 0.0 ? 0.0 : label * (a * r.z - x.teacher_logit * scales.u);
      r.gap = ((factor == 0.0 ? 0.0 : x.gap * factor) + of_label) / r.student_sum;
      r.reverse_kl = at_least_0(r.gap + apart) + nothing;
    }
  }
  DEVICE static void differentiate(Slopes& g, const Params& q, const Row& row, const Node& x,
                                   const Softmax& softmax, float factor) {
    const Scales& scales = softmax.scales;
    const float a = scales.beside;
    const Beside r = beside_of(x, softmax);
    float forward = 0.f, reverse = 0.f;
    if constexpr (WANTS_FORWARD_KL) {
      forward = q.forward_kl_factor;
      if (q.forward_kl_square != 0.f) {
        forward += q.forward_kl_square * at_least_0(x.cross / x.teacher_sum - r.apart);
      }
      if constexpr (HAS_ROWS) forward += row.by[4];
    }
    if constexpr (WANTS_REVERSE_KL) {
      reverse = q.reverse_kl_factor;
      if (q.reverse_kl_square != 0.f) reverse += q.reverse_kl_square * at_least_0(r.mean + r.apart);
      if constexpr (HAS_ROWS) reverse += row.by[5];
    }
    const bool is_wanted = forward != 0.f || reverse != 0.f;
    if (is_wanted && !(x.teacher_sum > 0.f)) g.each = g.label = NONE;  // it has no probabilities
    forward *= factor * a;
    reverse *= factor * a;
    if constexpr (WANTS_FORWARD_KL) {
      g.teacher = forward == 0.f ? 0.f : forward / x.teacher_sum;
      g.beside += forward / r.whole;
      const float fall = (x.teacher_logit - finite(x.teacher_max)) * scales.u;
      g.label += forward * (r.label / r.whole) - moved(g.teacher, ex2(fall * LOG2E));
    }
    if constexpr (WANTS_REVERSE_KL) {
      g.reverse = reverse / r.whole;
      g.mean = r.mean;
      const float apart = -of_label(x, softmax.logit, scales) - r.mean;
      g.label += moved(reverse * (r.label / r.whole), apart);
    }
  }
  template <class Settle>
  DEVICE static void store(const Params& q, const Node& x, float, const Solved& r,
                           const Settle& settle, const Item& item, bool) {
    const double nothing = x.teacher_sum > 0.f ? 0.0 : NONE;
    const double a = scales_of(q, item).beside;
    const double own = r.top - (double)(float)r.top;  // the roundings of both shifts
    const double of_teacher = r.teacher_top - (double)(float)r.teacher_top;
    if constexpr (WANTS_FORWARD_KL) q.forward_kl[item.row] = settle(r.forward_kl);
    if constexpr (WANTS_REVERSE_KL) q.reverse_kl[item.row] = settle(r.reverse_kl);
    if constexpr (WANTS_TEACHER_ENTROPY) q.teacher_entropy[item.row] = settle(r.teacher_entropy);
    q.student_sum[item.row] = settle(r.student_sum * exp(a * own) + nothing);
    q.teacher_shift[item.row] = settle(r.teacher_top + nothing);
    q.teacher_sum[item.row] = settle(x.teacher_sum * exp(of_teacher) + nothing);
    q.gap[item.row] = settle(r.gap + nothing);
  }
};

// A top-K teacher's entries tau, beside the student's softmax over the entries, and the tail, all
// columns that are none; as in `topk.py`.
struct TopK : Statistic {
  // tau * value, where the value may be infinite.
  DEVICE static float weighed(float tau, float value) { return tau == 0.f ? 0.f : tau * value; }
  DEVICE static float cross_of(float tau, float log_tau, float drop) {
    return weighed(tau, log_tau - drop);
  }

  DEVICE static void join(Node& x, const Node& a, const Node& b, Drop, Drop, Scales scales) {
    auto drop_to = [&](float max, float shift) {
      return __fmul_rn(__fsub_rn(max, finite(shift)), scales.z);
    };
    auto moved = [&](float sum, float drop) { return __fmul_rn(sum, ex2(__fmul_rn(drop, LOG2E))); };
    x.topk_max = fmaxf(a.topk_max, b.topk_max);
    const float left = drop_to(a.topk_max, x.topk_max), right = drop_to(b.topk_max, x.topk_max);
    x.topk_sum = __fadd_rn(moved(a.topk_sum, left), moved(b.topk_sum, right));
    x.topk_mass = __fadd_rn(a.topk_mass, b.topk_mass);
    x.topk_cross = __fadd_rn(__fsub_rn(a.topk_cross, weighed(a.topk_mass, left)),
                             __fsub_rn(b.topk_cross, weighed(b.topk_mass, right)));
    x.tail_max = fmaxf(a.tail_max, b.tail_max);
    x.tail_sum = __fadd_rn(moved(a.tail_sum, drop_to(a.tail_max, x.tail_max)),
                           moved(b.tail_sum, drop_to(b.tail_max, x.tail_max)));
  }
  DEVICE static void copy_lane(Node& x, const Node& from, int d) {
    x.topk_max = __shfl_xor_sync(~0u, from.topk_max, d);
    x.topk_sum = __shfl_xor_sync(~0u, from.topk_sum, d);
    x.topk_mass = __shfl_xor_sync(~0u, from.topk_mass, d);
    x.topk_cross = __shfl_xor_sync(~0u, from.topk_cross, d);
    x.tail_max = __shfl_xor_sync(~0u, from.tail_max, d);
    x.tail_sum = __shfl_xor_sync(~0u, from.tail_sum, d);
  }

  // A row with its label, which all leaves leave out, among the entries or in the tail.
  DEVICE static Node with_label(const Node& x, float value, float log_tau, Scales scales) {
    Node label = nothing();
    if (log_tau != -INF) {
      label.topk_max = value;
      label.topk_sum = 1.f;  // a join takes none of it where the logit is -inf
      label.topk_mass = expf(log_tau);
      label.topk_cross = weighed(label.topk_mass, log_tau);  // where it makes that infinite
    } else {
      label.tail_max = value;
      label.tail_sum = 1.f;
    }
    Node found = x;
    join(found, x, label, Drop(), Drop(), scales);
    found.label_log_tau = log_tau;
    return found;
  }

  // A divergence that rounding has made smaller than it can be; where the student gives no
  // probability to the entries it is infinite, and without entries 0.
  DEVICE static float at_entries(const Node& x, float value, float least) {
    if (x.topk_mass == 0.f) return 0.f;
    return x.topk_sum == 0.f ? INF : value < least ? least : value;
  }
  // In float32, as its sums are: in float64 a merge warp would take twice the time for a row.
  DEVICE static void solve(Solved& r, const Node& x, float, Scales scales) {
    const float mass = x.topk_mass, log_sum = logf(x.topk_sum);
    const float apart = (x.topk_max - x.tail_max) * scales.z + (log_sum - logf(x.tail_sum));
    const float less = log1pf(expf(-fabsf(apart)));
    r.log_inside = -(less + (apart < 0.f ? -apart : 0.f));
    r.log_outside = -(less + (apart > 0.f ? apart : 0.f));
    const float least = mass * logf(mass);
    r.teacher_mass = mass;
    r.topk_forward_kl = at_entries(x, x.topk_cross + mass * log_sum, least);
    r.vocab_forward_kl = at_entries(x, x.topk_cross + mass * (log_sum - r.log_inside), least);
  }
  // factor + square * value, and a row function's derivative.
  DEVICE static float by(float factor, float square, float value, float of_row) {
    return (square == 0.f ? factor : fmaf(square, value, factor)) + of_row;
  }
  DEVICE static void differentiate(Slopes& g, const Params& q, const Row& row, const Node& x,
                                   const Softmax& softmax, float factor) {
    auto part = [&](float max, float sum) {
      return sum == 0.f ? 0.f : sum * ex2(softmax.drop(max) * LOG2E) / softmax.whole;
    };
    const float inside = part(x.topk_max, x.topk_sum), outside = part(x.tail_max, x.tail_sum);
    const float mass = x.topk_mass, kl = x.topk_cross + weighed(mass, logf(x.topk_sum));
    float topk = 0.f, vocab = 0.f, tail = 0.f;
    if constexpr (WANTS_TOPK_KL) {
      topk = by(q.topk_forward_kl_factor, q.topk_forward_kl_square, kl, row.by[6]) * factor;
    }
    if constexpr (WANTS_VOCAB_KL) {
      const float value = kl - weighed(mass, logf(inside));
      vocab = by(q.vocab_forward_kl_factor, q.vocab_forward_kl_square, value, row.by[7]) * factor;
    }
    if constexpr (WANTS_TAIL) {
      tail = by(q.tail_log_mass_factor, q.tail_log_mass_square, logf(outside), row.by[8]) * factor;
    }
    g.tau = topk + vocab;
    g.share = topk == 0.f ? 0.f : topk * mass;
    g.tail = tail == 0.f ? 0.f : tail * inside;
    if (vocab != 0.f) g.share += vocab * mass * inside, g.tail += vocab * mass * outside;
    if (tail != 0.f) g.share -= tail * inside;
    const bool is_entry = x.label_log_tau != -INF;
    const float max = is_entry ? x.topk_max : x.tail_max;
    const float sum = is_entry ? x.topk_sum : x.tail_sum;
    const float drop = (softmax.logit - finite(max)) * softmax.scales.z;
    const float share = sum == 0.f ? 0.f : ex2(drop * LOG2E) / sum;
    g.label += (is_entry ? g.share : g.tail) * share;
    if (is_entry) g.label -= g.tau * expf(x.label_log_tau);
  }
  template <class Settle>
  DEVICE static void store(const Params& q, const Node& x, float, const Solved& r,
                           const Settle& settle, const Item& item, bool) {
    const int row = item.row;
    const double scale = item.scale, nothing = r.teacher_mass == r.teacher_mass ? 0.0 : NONE;
    auto put = [&](float* to, double value) {
      if (to) to[row] = settle(value + nothing);
    };
    // A maximum of z, and a sum relative to it, which is moved by the maximum's rounding.
    auto put_sum = [&](float* shift, float* sum, double top, double value) {
      if (!sum) return;
      const double moved = top - (double)(float)top;
      put(shift, top);
      put(sum, moved == 0.0 || moved != moved ? value : value * exp(moved));
    };
    put(q.topk_forward_kl, r.topk_forward_kl);
    put(q.vocab_forward_kl, r.vocab_forward_kl);
    put(q.tail_log_mass, r.log_outside);
    put(q.teacher_mass, r.teacher_mass);
    put_sum(q.topk_shift, q.topk_sum, x.topk_max * scale, x.topk_sum);
    put(q.topk_mass, r.teacher_mass);
    put(q.topk_gap, 0.0);  // of the reverse KL, which nobody wants
    if constexpr (WANTS_TAIL) {
      put_sum(q.rest_shift, q.rest_sum, x.tail_max * scale, x.tail_sum);
    } else {
      put_sum(q.rest_shift, q.rest_sum, r.top, r.whole);
    }
    if constexpr (!HAS_TEACHER) put_sum(nullptr, q.student_sum, r.top, r.whole);
    put(q.rest_mean, 0.0);  // of the tail's entropy, likewise
    put(q.inside, expf(r.log_inside));
    put(q.outside, expf(r.log_outside));
  }
};

// A column's powers and their exponents: of the student, of it beside a teacher, of the teacher.
struct Powers {
  float t, power;
  float z, p, u, q;
};
// Beside a mixture p and q are probabilities but for factors near 1 that a row has, see `RowBases`.
// of_p, of_q: what makes of them their parts of the mixture; by, mean: derivatives, as `Slopes` has
// them.
struct MixtureFactors {
  float of_p, of_q, beside;
  float by, mean;
};
// Sums over columns in the second round. Until they are `ended`, JSD's value and the overlap are
// the teacher's parts alone.
struct Mixed {
  float value, mean, overlap;
};

// The Jensen-Shannon divergence of p and q, or their total variation and overlap: a value, the
// overlap, and the mean that the gradient subtracts, as in `divergence.py`. Sums over columns take
// both probabilities, so that they are those of a second round over the row, in which no column is
// left out.
//
// Beside an overlap the mean is its own, of p * (1/2 - half a sign), which keeps the digits of a
// small one; that of the total variation, of p * half a sign, is 1/2 less that.
struct Mixture : Statistic {
  // The student's and the teacher's share of a mixture m; what log2(p / m) is multiplied by.
  DEVICE static float share_of_p(float beta) { return WANTS_JSD ? 1.f - beta : 1.f; }
  DEVICE static float share_of_q(float beta) { return WANTS_JSD ? beta : 1.f; }
  DEVICE static float of_student(float beta) { return WANTS_JSD ? (1.f - beta) * LN2 : 1.f; }

  // log2 of m, to which so little is added that it is finite.
  DEVICE static float log2_mixture(const Powers& x, const MixtureFactors& f) {
    return lg2(fmaf(f.of_q, x.q, fmaf(f.of_p, x.p, LEAST_NORMAL)));
  }
  DEVICE static float over(float exponent, float log2_m) {
    return fmaxf(exponent, LOWEST_EXPONENT) - log2_m;
  }
  // p - q
  DEVICE static float apart(const Powers& x, const MixtureFactors& f) {
    return fmaf(f.of_p, x.p, -(f.of_q * x.q));
  }
  DEVICE static float half_sign(float x) { return x > 0.f ? 0.5f : x < 0.f ? -0.5f : 0.f; }
  // Of the difference p - q. Overlap: derivative of min(p, q) by p.
  DEVICE static float slope_at(float difference) {
    return WANTS_OVERLAP ? 0.5f - half_sign(difference) : half_sign(difference);
  }
  // What p times that is summed to the mean.
  DEVICE static float slope(const Powers& x, const MixtureFactors& f) {
    return WANTS_JSD ? over(x.z, log2_mixture(x, f)) : slope_at(apart(x, f));
  }

  DEVICE static void add_column(Mixed& sums, const Powers& x, const MixtureFactors& f) {
    if constexpr (WANTS_JSD) {
      const float log2_m = log2_mixture(x, f);
      sums.value = fmaf(x.q, over(x.u, log2_m), sums.value);
      sums.mean = fmaf(x.p, over(x.z, log2_m), sums.mean);
    } else {
      const float difference = apart(x, f), slope = slope_at(difference);
      if constexpr (WANTS_VARIATION) sums.value += 0.5f * fabsf(difference);
      if constexpr (WANTS_OVERLAP) sums.overlap = fmaf(1.f - slope, x.q, sums.overlap);
      sums.mean = fmaf(slope, x.p, sums.mean);
    }
  }
  DEVICE static Mixed ended(const Mixed& sums, const MixtureFactors& f) {
    if constexpr (!WANTS_JSD) {
      const float mean = f.of_p * sums.mean;
      return {sums.value, mean, fmaf(f.of_q, sums.overlap, mean)};
    }
    const float mean = f.of_p * LN2 * sums.mean;
    return {fmaf(f.of_q * LN2, sums.value, mean), mean, 0.f};
  }
  // A row with its sums of the second round. Exponents are logarithms of probabilities but for the
  // same number in all columns of a row, whose part of the sums this adds.
  DEVICE static Node with_sums(Node x, const Mixed& sums, float over_p, float over_q, float beta) {
    const float of_mean = WANTS_JSD ? of_student(beta) * lg2(over_p) : 0.f;
    const float of_value = WANTS_JSD ? fmaf(beta * LN2, lg2(over_q), of_mean) : 0.f;
    x.mixture = sums.value + of_value;
    x.mixture_mean = sums.mean + of_mean;
    x.overlap = sums.overlap;
    return x;
  }

  DEVICE static void solve(Solved& r, const Node& x, float, Scales) {
    r.mixture = x.mixture;
    r.overlap = x.overlap;
  }
  // d loss / d value of the divergence, or of the total variation, and d loss / d overlap
  DEVICE static float by_value(const Params& q, const Row& row, const Node& x) {
    float by = WANTS_JSD ? q.jsd_factor : q.total_variation_factor;
    const float square = WANTS_JSD ? q.jsd_square : q.total_variation_square;
    if (square != 0.f) by += square * x.mixture;
    if constexpr (HAS_ROWS) by += row.by[WANTS_JSD ? 9 : 10];
    return by;
  }
  DEVICE static float by_overlap(const Params& q, const Row& row, const Node& x) {
    float by = q.overlap_factor;
    if (q.overlap_square != 0.f) by += q.overlap_square * x.overlap;
    if constexpr (HAS_ROWS) by += row.by[11];
    return by;
  }
  DEVICE static void differentiate(Slopes& g, const Params& q, const Row& row, const Node& x,
                                   const Softmax& softmax, float factor) {
    float by = WANTS_JSD || WANTS_VARIATION ? by_value(q, row, x) : 0.f;
    if constexpr (WANTS_OVERLAP) by = by_overlap(q, row, x) - by;
    if (by == 0.f) return;
    if (!(x.teacher_sum > 0.f)) g.each = g.label = NONE;  // it has no probabilities
    by *= factor * softmax.scales.beside;
    g.mixture = by * of_student(q.beta);
    g.mixture_mean = by * x.mixture_mean;
  }
  template <class Settle>
  DEVICE static void store(const Params& q, const Node& x, float, const Solved& r,
                           const Settle& settle, const Item& item, bool) {
    const double nothing = x.teacher_sum > 0.f ? 0.0 : NONE;
    const double mean = x.mixture_mean + nothing;
    if constexpr (WANTS_JSD || WANTS_VARIATION) {
      (WANTS_JSD ? q.jsd : q.total_variation)[item.row] = settle(r.mixture + nothing);
      const double of_value = WANTS_OVERLAP ? 0.5 - mean : mean;
      (WANTS_JSD ? q.jsd_mean : q.total_variation_mean)[item.row] = settle(of_value);
    }
    if constexpr (WANTS_OVERLAP) {
      q.overlap[item.row] = settle(r.overlap + nothing);
      q.overlap_mean[item.row] = settle(mean);
    }
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
  DEVICE static void end(Node& x, const Bases& bases) { (S::end(x, bases), ...); }
  DEVICE static void join(Node& x, const Node& a, const Node& b, Drop left, Drop right,
                          Scales scales) {
    (S::join(x, a, b, left, right, scales), ...);
  }
  DEVICE static void copy_lane(Node& x, const Node& from, int d) {
    (S::copy_lane(x, from, d), ...);
  }
  DEVICE static void solve(Solved& r, const Node& x, float logit, Scales scales) {
    (S::solve(r, x, logit, scales), ...);
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
                     If<WANTS_ARGMAX, Argmax>::Type, If<HAS_TEACHER, Divergences>::Type,
                     If<HAS_ENTRIES, TopK>::Type, If<HAS_MIXTURE, Mixture>::Type>;
