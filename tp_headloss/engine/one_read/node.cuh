// The arithmetic of a row: nodes are joined, a joined row is solved, and the factors of its
// gradient follow. Nothing here knows a thread, so that it compiles for a host, too.
#pragma once
#include "statistics.cuh"

// -- Logits ---------------------------------------------------------------------------------------

// Two logits of 16 bits lie in a word.
DEVICE float low(u32 v) { return IS_HALF ? cvt_f32_f16((u16)v) : __uint_as_float(v << 16); }
DEVICE float high(u32 v) {
  return IS_HALF ? cvt_f32_f16((u16)(v >> 16)) : __uint_as_float(v & 0xffff0000u);
}
DEVICE float logit_of(u16 bits) { return high((u32)bits << 16); }
DEVICE float logit_of(u32 bits) { return __uint_as_float(bits); }

// Logits of a vector, two at a time: of the student's, and of the teacher's beside it.
constexpr int PAIRS = COLUMNS / 2;
struct Pair {
  float even, odd;
};
template <class B> DEVICE Pair pair_in(const uint4& v, int pair) {
  const u32 words[] = {v.x, v.y, v.z, v.w};
  if constexpr (IS_FLOAT32<B>) {
    return {__uint_as_float(words[2 * pair]), __uint_as_float(words[2 * pair + 1])};
  }
  return {low(words[pair]), high(words[pair])};
}
DEVICE Pair pair_of(const uint4& v, int pair) { return pair_in<Bits>(v, pair); }
struct TeacherVector {
  uint4 part[TEACHER_VECTORS];
  DEVICE Pair pair(int pair) const {
    constexpr int EACH = PAIRS / TEACHER_VECTORS;
    return pair_in<TeacherBits>(part[pair / EACH], pair % EACH);
  }
};

// The value of a logit, and its derivative but for `before`. Near 0, where most logits lie, by a
// polynomial that is tanh to 8e-8 of itself; elsewhere tanh to 3e-7, and its slope to that part of
// itself. A logit of -inf is none at all, see `lift`. all_near: the caller has seen that this logit
// and those beside it are near 0. That saves time; the bits are a logit's own.
struct Value {
  float value, slope;
};
constexpr float NEAR_0 = 0.5f;
DEVICE Value value_and_slope(float logit, float before, bool all_near = false) {
  if constexpr (!HAS_SOFTCAP) return {logit, 1.f};
  const float a = logit * before, t = a * a;
  const float p = fmaf(fmaf(fmaf(t, 0.017241491f, -0.053045493f), t, 0.13325879f), t,
                       -0.33333144f);
  const float near = fmaf(a * t, p, a), slope_near = fmaf(-near, near, 1.f);
  if (all_near) return {near, slope_near};
  const float e = ex2(fabsf(a) * (-2.f * LOG2E)), r = reciprocal(1.f + e), w = e * r;
  const float far = logit == -INF ? -INF : copysignf(fmaf(w, -2.f, 1.f), a);
  const bool is_near = fabsf(a) < NEAR_0;
  return {is_near ? near : far, is_near ? slope_near : 4.f * w * r};
}
DEVICE float value_of(float logit, float before) { return value_and_slope(logit, before).value; }

// How logits of a leaf become z, and powers.
struct Reading {
  float before;
  Scales scales;
  Bases bases;
};
// Of a leaf whose maxima are those of the node.
DEVICE Reading reading_of(const Node& x, float before, Scales scales) {
  const Bases bases = {base2(finite(x.max), scales.z), base2(finite(x.teacher_max), scales.u),
                       scales.beside};
  return {before, scales, bases};
}
DEVICE Logit read_logit(float logit, float teacher, const Reading& by, bool all_near) {
  Logit x;
  x.value = value_and_slope(logit, by.before, all_near).value;
  x.exponent = fmaf(x.value, by.bases.z.by, -by.bases.z.at);
  x.power = ex2(x.exponent);
  if constexpr (HAS_TEACHER) {
    x.u = fmaf(teacher, by.bases.u.by, -by.bases.u.at);
    x.q = ex2(x.u);
    x.p = IS_TEMPERED ? ex2(x.exponent * by.scales.beside) : x.power;
    const float z = x.value * by.scales.z;
    x.apart = fmaf(teacher, by.scales.u, -z * by.scales.beside);
  }
  return x;
}

// -- Joins ----------------------------------------------------------------------------------------

// The sums of two parts of a row relative to the larger maximum. Each operation rounds by itself,
// so that both orders of the arguments have the same bits.
DEVICE Node join(Node a, Node b, Scales scales) {
  const float max = fmaxf(a.max, b.max), shift = finite(max);
  Drop left, right;
  left.drop = __fmul_rn(__fsub_rn(a.max, shift), scales.z);
  right.drop = __fmul_rn(__fsub_rn(b.max, shift), scales.z);
  left.factor = ex2(__fmul_rn(left.drop, LOG2E));
  right.factor = ex2(__fmul_rn(right.drop, LOG2E));
  Node x = nothing();
  x.max = max;
  x.sum = __fadd_rn(__fmul_rn(a.sum, left.factor), __fmul_rn(b.sum, right.factor));
  Optional::join(x, a, b, left, right, scales);
  return x;
}

// -- Packets --------------------------------------------------------------------------------------

// An item's node on its way to other ranks: WORDS stores of 16 bytes, each with the launch's tag.
//   first    max     sum    count, or the label's logit << 16   tag << 2, or flags
//   second   moment  index  total                               tag << 2
//   teacher  max     sum    cross                               tag << 2
//   beside   sum     gap    the label's logit of the teacher    tag << 2
//   topk     max     sum    cross                               tag << 2
//   tail     max     sum    mass of the entries                 tag << 2
//   more     the label's logit   moment of the teacher   0      tag << 2
// and in the second round
//   mixture  value   mean   overlap                             tag << 2
// All but the first are there where somebody wants them; `more`, where a logit has 32 bits, too. An
// item has fewer columns than 2^16.
struct Packet {
  uint4 first, second, teacher, beside, topk, tail, more;
  // f(place, store) of each store but the first that there is.
  template <class F> DEVICE void each_store(const F& f) {
    if constexpr (HAS_SECOND) f(1, second);
    if constexpr (HAS_TEACHER) f(1 + HAS_SECOND, teacher);
    if constexpr (HAS_BESIDE) f(2 + HAS_SECOND, beside);
    if constexpr (HAS_ENTRIES) f(FIRST_OF_ENTRIES, topk), f(FIRST_OF_ENTRIES + 1, tail);
    if constexpr (HAS_MORE) f(MORE, more);
  }
  DEVICE bool has_come(u32 tag) {
    bool come = first.w >> 2 == tag;
    each_store([&](int, const uint4& store) { come = come && store.w >> 2 == tag; });
    return come;
  }
  DEVICE int count() const { return first.z & 0xffffu; }
  DEVICE float logit() const {  // the label's
    return IS_FLOAT32<Bits> ? __uint_as_float(more.x) : high(first.z);
  }
  DEVICE bool has(u32 flag) const { return first.w & flag; }
  DEVICE Node node() const {
    auto number = [](u32 bits) { return __uint_as_float(bits); };
    return {number(first.x),   number(first.y),   number(second.x),  number(second.z),
            count(),           (int)second.y,     number(teacher.x), number(teacher.y),
            number(teacher.z), number(beside.x),  number(beside.y),  number(beside.z),
            number(more.y),    number(topk.x),    number(topk.y),    number(tail.z),
            number(topk.z),    number(tail.x),    number(tail.y),    -INF,
            0.f,               0.f,               0.f};
  }
};
// The store of the second round.
DEVICE uint4 store_of(const Mixed& x, u32 tag) {
  return make_uint4(__float_as_uint(x.value), __float_as_uint(x.mean), __float_as_uint(x.overlap),
                    tag << 2);
}
// logit: the label's.
DEVICE Packet packet_of(const Node& x, Bits logit, u32 tag, u32 flags) {
  auto bits = [](float x) { return __float_as_uint(x); };
  const u32 upper = IS_FLOAT32<Bits> ? 0 : (u32)logit << 16;
  return {make_uint4(bits(x.max), bits(x.sum), upper | x.count, tag << 2 | flags),
          make_uint4(bits(x.moment), x.index, bits(x.total), tag << 2),
          make_uint4(bits(x.teacher_max), bits(x.teacher_sum), bits(x.cross), tag << 2),
          make_uint4(bits(x.student_sum), bits(x.gap), bits(x.teacher_logit), tag << 2),
          make_uint4(bits(x.topk_max), bits(x.topk_sum), bits(x.topk_cross), tag << 2),
          make_uint4(bits(x.tail_max), bits(x.tail_sum), bits(x.topk_mass), tag << 2),
          make_uint4(logit, bits(x.teacher_moment), 0, tag << 2)};
}

// -- A row ----------------------------------------------------------------------------------------

// A row's statistics, each rounded once by whoever stores it; as in `softmax_triton`.
DEVICE Solved solve(Node x, float logit, Scales scales) {
  Solved r = {};
  const double m = (double)x.max * scales.z, y = (double)logit * scales.z;
  const bool is_top = y >= m, lonely = logit == -INF;
  r.max = m;
  r.z = y;
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
  Optional::solve(r, x, logit, scales);
  return r;
}

// The row once more, for a `solve` of its own.
DEVICE Node again(Node x) {
  for (float* sum : {&x.max, &x.sum, &x.moment, &x.total, &x.teacher_max, &x.teacher_sum, &x.cross,
                     &x.student_sum, &x.gap, &x.teacher_logit, &x.teacher_moment, &x.topk_max,
                     &x.topk_sum, &x.topk_mass, &x.topk_cross, &x.tail_max, &x.tail_sum}) {
    make_opaque(*sum);
  }
  return x;
}

DEVICE Softmax softmax_of(const Node& x, float logit, Scales scales) {
  const float top = fmaxf(x.max, logit);
  Softmax r = {top, finite(top), 0.f, 0.f, 0.f, logit, scales};
  r.label = ex2(r.drop(logit) * LOG2E);
  r.others = x.sum * ex2(r.drop(x.max) * LOG2E);
  r.whole = r.others + r.label;
  return r;
}

// The gradient of a value: 2^t * (each + slope * t) + flat with t = by * value - at, where it is
// above -inf; that of the label's logit; whether no logit is -inf. A mixture's mean is in `each`,
// if the student's temperature is the same beside it.
struct __align__(16) Factors {
  float by, at, each, slope, flat, label;
  bool is_plain;
};
// Divergences: less 2^(by * logit - at) * each of the teacher's logit, and p * (own + reverse *
// (value * z - logit * u - mean)) with p = 2^(t * beside).
struct TeacherFactors {
  float by, at, each, own, reverse, mean, z, u, beside;
};
// TopK: a row's entries, whose power is relative to the largest value: as in `Factors`, and share
// of the softmax over the entries, less tau.
struct EntryFactors {
  float by, at, each, slope, flat;
  float of_share, at_share, share, tau;
};
struct AllFactors {
  Factors own;
  TeacherFactors teacher;
  EntryFactors entry;
  MixtureFactors mixture;
};

// What makes powers of a row's logits, the student's and a teacher's. Beside a mixture they are
// probabilities but for factors near 1, which are what rounding makes of the exponents.
struct RowBases {
  Base2 z, u;
  float beside;  // IS_TEMPERED: the student's exponent there is t * a - beside
  float over_p, over_q;
};
// That of powers over their sum.
DEVICE Base2 over_sum(Base2 x, float log2_sum) {
  const float at = x.at + log2_sum;
  return {x.by, at, x.rest + (x.at - at)};
}
DEVICE RowBases bases_of(const Node& x, const Softmax& softmax) {
  const Scales& scales = softmax.scales;
  const Base2 z = base2(softmax.shift, scales.z), u = base2(finite(x.teacher_max), scales.u);
  RowBases r = {z, u, 0.f, 1.f, 1.f};
  if constexpr (!HAS_MIXTURE) return r;
  const float whole = Divergences::beside_of(x, softmax).whole;
  if constexpr (IS_TEMPERED) {
    r.beside = scales.beside * z.rest + lg2(whole);
  } else {
    r.z = over_sum(z, lg2(whole));
    r.over_p = ex2(-r.z.rest) / whole;
  }
  r.u = over_sum(u, lg2(x.teacher_sum));
  r.over_q = ex2(-r.u.rest) / x.teacher_sum;
  return r;
}
// As far as sums of a second round need them.
DEVICE AllFactors first_factors(const RowBases& bases, float beside, float beta) {
  AllFactors f = {};
  f.own.by = bases.z.by, f.own.at = bases.z.at;
  f.teacher.by = bases.u.by, f.teacher.at = bases.u.at, f.teacher.beside = beside;
  f.mixture.of_p = Mixture::share_of_p(beta) * bases.over_p;
  f.mixture.of_q = Mixture::share_of_q(beta) * bases.over_q;
  f.mixture.beside = bases.beside;
  return f;
}
DEVICE Powers powers_of(const AllFactors& f, float value, float teacher) {
  Powers x = {};
  x.t = x.z = fmaf(value, f.own.by, -f.own.at);
  x.power = x.p = ex2(x.t);
  if constexpr (IS_TEMPERED) {
    x.z = HAS_MIXTURE ? fmaf(x.t, f.teacher.beside, -f.mixture.beside) : x.t * f.teacher.beside;
    x.p = ex2(x.z);
  }
  if constexpr (HAS_TEACHER) x.u = fmaf(teacher, f.teacher.by, -f.teacher.at), x.q = ex2(x.u);
  return x;
}

// The factors of a row's gradient. owners: of its label, see `owners_of`; upstream: gradient of the
// loss over its divisor; by: derivatives of a row function's terms.
DEVICE AllFactors factors_of(const Params& q, int row, Node x, Value label, Scales scales,
                             int owners, double upstream, const Row& by) {
  const float logit = label.value, scale = scales.z, chain = scale * q.before;
  const Softmax softmax = softmax_of(x, logit, scales);
  const float whole = softmax.whole;
  float by_lse = q.lse_factor, by_log_prob = q.log_prob_factor;
  if (q.lse_square != 0.f || q.log_prob_square != 0.f) {
    const float log_sum = softmax.log_sum();
    if (q.lse_square != 0.f) by_lse += q.lse_square * (softmax.top * scale + log_sum);
    if (q.log_prob_square != 0.f) {
      const bool is_top = logit == softmax.top;
      const float offset = (logit - softmax.top) * scale;
      by_log_prob += q.log_prob_square * (is_top ? -log_sum : offset - log_sum);
    }
  }
  if constexpr (HAS_ROWS) {
    by_lse += by.by[0];
    by_log_prob += by.by[1];
  }
  const float factor = (float)(upstream * (q.weight ? (double)q.weight[row] : 1.0));
  by_lse *= factor;
  by_log_prob *= factor;
  Slopes g = {};
  g.each = (by_lse - by_log_prob) / whole;
  g.label = by_lse * (softmax.label / whole) + by_log_prob * (softmax.others / whole);
  Optional::differentiate(g, q, by, x, softmax, factor);
  const RowBases bases = bases_of(x, softmax);
  AllFactors f = {};
  if constexpr (HAS_MIXTURE) {
    f = first_factors(bases, scales.beside, q.beta);
    const float bias = WANTS_JSD ? lg2(bases.over_p) : 0.f;
    f.mixture.by = g.mixture * bases.over_p;
    f.mixture.mean = (g.mixture_mean - g.mixture * bias) * bases.over_p;
    if (g.mixture != 0.f) {
      const Powers at = powers_of(f, logit, x.teacher_logit);
      g.label += at.p * fmaf(f.mixture.by, Mixture::slope(at, f.mixture), -f.mixture.mean);
    }
    f.mixture.by *= chain, f.mixture.mean *= chain;
  }
  if constexpr (!IS_TEMPERED) g.each += g.beside;  // p is that of `Softmax`
  if (!(whole > 0.f) || owners != 1) g.each = g.label = NONE;
  const Base2 base = bases.z;
  const float moved = ex2(-base.rest) * chain;
  float each = (g.each - g.slope * LN2 * base.rest) * moved;
  if constexpr (HAS_MIXTURE && !IS_TEMPERED) each -= f.mixture.mean;
  const float of_label = g.label * chain * label.slope;
  f.own = {base.by, base.at, each, g.slope * LN2 * moved, g.flat * chain, of_label};
  if constexpr (HAS_ENTRIES) {
    const Base2 topk = base2(finite(x.topk_max), scale), tail = base2(finite(x.tail_max), scale);
    const float share = x.topk_sum == 0.f ? 0.f : g.share / x.topk_sum;
    f.entry = {base.by, base.at, f.own.each, f.own.slope, f.own.flat,
               topk.by, topk.at, share * ex2(-topk.rest) * chain, g.tau * chain};
    // All other columns are the tail, whose power may vanish beside the largest value.
    const float drop = fmaxf(softmax.drop(x.tail_max), LOWEST_DROP);
    const float power = ex2(drop * LOG2E), of_tail = ex2(-tail.rest) * chain;
    const float slope = g.slope * power, over_tail = x.tail_sum == 0.f ? 0.f : g.tail / x.tail_sum;
    f.own.by = tail.by, f.own.at = tail.at;
    const float common = (g.each + g.slope * drop) * power + over_tail;
    f.own.each = (common - slope * LN2 * tail.rest) * of_tail;
    f.own.slope = slope * LN2 * of_tail;
  }
  if constexpr (HAS_TEACHER) {
    const Base2 of_teacher = bases.u;
    const float a = scales.beside;
    const float share = Divergences::moved(g.teacher, ex2(-of_teacher.rest)) * chain;
    const float p = ex2(bases.beside - a * base.rest) * chain;
    f.teacher = {of_teacher.by, of_teacher.at, share, g.beside * p, g.reverse * p, g.mean,
                 a * scale, scales.u, a};
  }
  return f;
}

// Whether a row has neither a logit of -inf, where that matters, nor a divergence without a
// gradient, whose factors are 0 where a teacher's probabilities may be NaN.
DEVICE bool is_usual(const AllFactors& f) {
  if (WANTS_FORWARD_KL && f.teacher.each == 0.f) return false;
  if (HAS_MIXTURE && f.mixture.by == 0.f) return false;
  return !WANTS_TOTAL || f.own.is_plain;
}
// teacher: its logit. is_usual: the row is known to be.
DEVICE float gradient_of(const AllFactors& all, float logit, float teacher, float before,
                         bool is_usual, bool all_near) {
  const Factors& f = all.own;
  const TeacherFactors& other = all.teacher;
  const MixtureFactors& mixture = all.mixture;
  const Value value = value_and_slope(logit, before, all_near);
  const Powers x = powers_of(all, value.value, teacher);
  float each = f.each, flat = f.flat;
  if constexpr (HAS_ENTROPY_TERM) each = fmaf(f.slope, fmaxf(x.t, LOWEST_EXPONENT), each);
  if constexpr (WANTS_TOTAL) {
    if (!is_usual && logit == -INF) flat = 0.f;
  }
  if constexpr (WANTS_FORWARD_KL) {
    if (is_usual || other.each != 0.f) flat = fmaf(x.q, -other.each, flat);
  }
  if constexpr (HAS_MIXTURE) {
    if (is_usual || mixture.by != 0.f) {
      const float slope = Mixture::slope(x, mixture);
      if constexpr (IS_TEMPERED) {
        flat = fmaf(x.p, fmaf(mixture.by, slope, -mixture.mean), flat);
      } else {
        each = fmaf(mixture.by, slope, each);
      }
    }
  }
  if constexpr (IS_TEMPERED) flat = fmaf(x.p, other.own, flat);
  if constexpr (WANTS_REVERSE_KL) {
    const float apart = fmaf(value.value, other.z, -teacher * other.u);
    const float weight = x.p * other.reverse;
    if (weight != 0.f) flat = fmaf(weight, apart - other.mean, flat);  // `apart` may be infinite
  }
  return fmaf(each, x.power, flat) * value.slope;
}

// That of an entry of a top-K teacher.
DEVICE float gradient_of_entry(const EntryFactors& f, float logit, float log_tau, float before) {
  const Value x = value_and_slope(logit, before);
  const float t = fmaf(x.value, f.by, -f.at), share = ex2(fmaf(x.value, f.of_share, -f.at_share));
  float each = f.each;
  if constexpr (HAS_ENTROPY_TERM) each = fmaf(f.slope, fmaxf(t, LOWEST_EXPONENT), each);
  const float flat = logit == -INF ? 0.f : f.flat;
  const float of_teacher = fmaf(f.share, share, -f.tau * expf(log_tau));
  return (fmaf(each, ex2(t), flat) + of_teacher) * x.slope;
}
