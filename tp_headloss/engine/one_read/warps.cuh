// What the lanes of a warp compute together: sums over lanes, joins over lanes, and a leaf's node.
#pragma once
#include "node.cuh"

template <class T> DEVICE T add_lanes(T x) {
  for (int d = 16; d; d /= 2) x += __shfl_xor_sync(~0u, x, d);
  return x;
}

// The join of the first `lanes` lanes' nodes, in a binary tree.
DEVICE Node join_lanes(Node x, int lanes, Scales scales) {
#pragma unroll 1
  for (int d = 1; d < lanes; d *= 2) {
    Node y = nothing();
    y.max = __shfl_xor_sync(~0u, x.max, d);
    y.sum = __shfl_xor_sync(~0u, x.sum, d);
    Optional::copy_lane(y, x, d);
    x = join(x, y, scales);
  }
  return x;
}

// The sums of the first `lanes` lanes in a binary tree.
DEVICE Mixed add_lanes_of(Mixed x, int lanes) {
#pragma unroll 1
  for (int d = 1; d < lanes; d *= 2) {
    x.value = __fadd_rn(x.value, __shfl_xor_sync(~0u, x.value, d));
    x.mean = __fadd_rn(x.mean, __shfl_xor_sync(~0u, x.mean, d));
    if constexpr (WANTS_OVERLAP) {
      x.overlap = __fadd_rn(x.overlap, __shfl_xor_sync(~0u, x.overlap, d));
    }
  }
  return x;
}

// Of two words of logits, the larger ones; of a word, the largest one.
template <class B> DEVICE u32 max_words(u32 a, u32 b) {
  if constexpr (IS_FLOAT32<B>) {
    return __float_as_uint(fmaxf(__uint_as_float(a), __uint_as_float(b)));
  }
  return IS_HALF ? max_f16x2(a, b) : max_bf16x2(a, b);
}
template <class B> DEVICE float larger(u32 v) {
  return IS_FLOAT32<B> ? __uint_as_float(v) : fmaxf(low(v), high(v));
}
template <class B> DEVICE u32 largest(uint4 v) {
  return max_words<B>(max_words<B>(v.x, v.y), max_words<B>(v.z, v.w));
}

// Numbers rounded to logits: two of 16 bits, `a` in the low half; one; a vector of them.
DEVICE u32 rounded(float a, float b) { return IS_HALF ? cvt_f16x2(a, b) : cvt_bf16x2(a, b); }
DEVICE Bits bits_of(float x) {
  return IS_FLOAT32<Bits> ? (Bits)__float_as_uint(x) : (Bits)rounded(x, 0.f);
}
DEVICE uint4 vector_of(const Pair (&x)[PAIRS]) {
  u32 words[4];
#pragma unroll
  for (int k = 0; k < PAIRS; k++) {
    if constexpr (IS_FLOAT32<Bits>) {
      words[2 * k] = __float_as_uint(x[k].even), words[2 * k + 1] = __float_as_uint(x[k].odd);
    } else {
      words[k] = rounded(x[k].even, x[k].odd);
    }
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// The largest of all lanes' numbers: their bits, ordered as integers are.
DEVICE float max_lanes(float x) {
  auto ordered = [](int bits) { return bits ^ (bits >> 31 & 0x7fffffff); };
  return __int_as_float(ordered(__reduce_max_sync(~0u, ordered(__float_as_int(x)))));
}

// The maximum of the vectors from `begin` to `end`, which is not before it.
template <class B> DEVICE float leaf_max(u32 base, int begin, int end, int lane) {
  u32 top = LOWEST<B>;
#pragma unroll 1
  for (int v = begin + lane; v - lane < end; v += 32 * VECTORS_AT_ONCE) {
    uint4 r[VECTORS_AT_ONCE];
#pragma unroll
    for (int k = 0; k < VECTORS_AT_ONCE; k++) {  // no load waits for another
      r[k] = ld_shared_v4(base + min(v + 32 * k, end - 1) * 16);
    }
#pragma unroll
    for (int k = 0; k < VECTORS_AT_ONCE; k++) top = max_words<B>(top, largest<B>(r[k]));
  }
  return max_lanes(larger<B>(top));
}

// A softcap makes a value of a logit of -inf, too. So it becomes the lowest finite logit, which has
// the same value, before -inf stands for what is left out; NaN stays.
DEVICE void lift(u32 base, int begin, int end, int lane) {
  auto lifted = [](u32 v) {
    if constexpr (IS_FLOAT32<Bits>) return v == LOWEST<Bits> ? LOWEST_FINITE : v;
    return IS_HALF ? max_nan_f16x2(v, LOWEST_FINITE) : max_nan_bf16x2(v, LOWEST_FINITE);
  };
  for (int v = begin + lane; v < end; v += 32) {
    const uint4 r = ld_shared_v4(base + v * 16);
    const uint4 x = make_uint4(lifted(r.x), lifted(r.y), lifted(r.z), lifted(r.w));
    if (x.x != r.x || x.y != r.y || x.z != r.z || x.w != r.w) st_shared_v4(base + v * 16, x);
  }
  __syncwarp();  // another lane marks columns that are left out
}

// Whether all logits of a vector are near 0.
DEVICE bool are_near(uint4 v, float before) {
  auto size = [](u32 word) { return word & WITHOUT_SIGN; };
  const uint4 sizes = make_uint4(size(v.x), size(v.y), size(v.z), size(v.w));
  return larger<Bits>(largest<Bits>(sizes)) * before < NEAR_0;  // a NaN is NaN there, too
}

// Call f(vector, its logits, whether all lanes' are near 0) for a lane's part of the vectors from
// `begin` to `end`. All lanes take the same branch, the quick one if all of them can.
template <class F>
DEVICE void each_vector(u32 base, int begin, int end, int lane, float before, const F& f) {
  if constexpr (HAS_SOFTCAP) {
#pragma unroll 1
    for (int v = begin + lane; v - lane < end; v += 32) {
      const uint4 r = ld_shared_v4(base + min(v, end - 1) * 16);
      const bool all_near = __all_sync(~0u, are_near(r, before));
      __syncwarp();  // the lane whose vector is the last one writes what others have read
      if (all_near) {
        if (v < end) f(v, r, true);
      } else {
        if (v < end) f(v, r, false);
      }
    }
  } else {
#pragma unroll 1
    for (int v = begin + lane; v < end; v += 32) f(v, ld_shared_v4(base + v * 16), true);
  }
}

// Where an item lies in shared memory: the student's logits, the teacher's.
struct Place {
  u32 own, teacher;
};

// The teacher's logits beside a vector of the student's.
DEVICE TeacherVector of_teacher(Place at, int v) {
  TeacherVector t = {};
  if constexpr (HAS_TEACHER) {
#pragma unroll
    for (int k = 0; k < TEACHER_VECTORS; k++) {
      t.part[k] = ld_shared_v4(at.teacher + (v * TEACHER_VECTORS + k) * 16);
    }
  }
  return t;
}

// Add a lane's part of the same vectors to its sums. is_plain: no logit is -inf.
DEVICE void add_vectors(LaneSums& x, Place at, int begin, int end, int lane, const Reading& by,
                        bool is_plain) {
  each_vector(at.own, begin, end, lane, by.before, [&](int v, const uint4& r, bool all_near) {
    const TeacherVector t = of_teacher(at, v);
#pragma unroll
    for (int k = 0; k < PAIRS; k++) {
      const Pair own = pair_of(r, k), teacher = t.pair(k);
      const Logit a = read_logit(own.even, teacher.even, by, all_near);
      const Logit b = read_logit(own.odd, teacher.odd, by, all_near);
      x.even += a.power;
      x.odd += b.power;
      Optional::add(x, a, b, is_plain);
    }
  });
}

// A node of logits whose maxima it has, from the lanes' sums.
DEVICE Node with_sums(Node x, const LaneSums& sums, const Bases& bases) {
  x.sum = sums.even + sums.odd;
  Optional::begin(x, sums);
  for (int d = 16; d; d /= 2) {  // together, so that none waits for another
    const float sum = __shfl_xor_sync(~0u, x.sum, d);
    Optional::add_lane(x, d);
    x.sum += sum;
  }
  Optional::end(x, bases);
  x.sum *= ex2(-bases.z.rest);
  return x;
}

// The node of the vectors from `begin` to `end` of an item, by a warp.
DEVICE Node leaf(Place at, int begin, int end, int lane, float before, Scales scales) {
  Node x = nothing();
  x.max = value_of(leaf_max<Bits>(at.own, begin, end, lane), before);
  if constexpr (HAS_TEACHER) {
    constexpr int EACH = TEACHER_VECTORS;
    x.teacher_max = leaf_max<TeacherBits>(at.teacher, EACH * begin, EACH * end, lane);
  }
  const Reading by = reading_of(x, before, scales);
  LaneSums sums = {};
  add_vectors(sums, at, begin, end, lane, by, true);
  // Very low logits, among them -inf. All lanes at once: `each_vector` needs them all.
  if (__any_sync(~0u, !(Optional::magnitude(sums) < INF))) {
    sums = {};
    add_vectors(sums, at, begin, end, lane, by, false);
  }
  return with_sums(x, sums, by.bases);
}

// -- A top-K teacher's entries --------------------------------------------------------------------

// A lane's entries of a row, every 32nd of its list; and those of them that are in some columns of
// an item.
struct Listed {
  int id[LANE_ENTRIES];  // or NO_INDEX
  float log_tau[LANE_ENTRIES];
};
struct LaneEntries {
  int column[LANE_ENTRIES];  // of the item, or NOT_HERE
  Bits logit[LANE_ENTRIES];
  float log_tau[LANE_ENTRIES];
};
// f(k) for each of a lane's entries.
template <class F> DEVICE void each_listed(const F& f) {
#pragma unroll
  for (int k = 0; k < LANE_ENTRIES; k++) f(k);
}

DEVICE Listed listed(const Params& q, int row, int lane) {
  Listed x;
#pragma unroll
  for (int k = 0; k < LANE_ENTRIES; k++) {  // no load waits for another
    const bool is_listed = 32 * k + lane < q.n_entries;
    const i64 place = (i64)row * q.n_entries + 32 * k + lane;
    x.id[k] = is_listed ? q.entries[place] : NO_INDEX;
    x.log_tau[k] = is_listed ? q.entry_log_probs[place] : 0.f;
  }
  return x;
}
// A lane's entries that lie in the vectors from `begin` to `end` of an item and are not its label;
// not yet their logits.
DEVICE LaneEntries entries_in(const Params& q, const Item& item, const Listed& list, int begin,
                              int end) {
  const int first = (int)q.start + COLUMNS * begin_of_leaf(q, item.piece * q.leaves);
  const int from = COLUMNS * begin, count = max(min(COLUMNS * end, item.valid) - from, 0);
  LaneEntries x;
#pragma unroll
  for (int k = 0; k < LANE_ENTRIES; k++) {
    const int column = list.id[k] - first;
    const bool is_here = (u32)(column - from) < (u32)count && column != item.target;
    x.column[k] = is_here ? column : NOT_HERE;
    x.log_tau[k] = list.log_tau[k];
  }
  return x;
}
DEVICE void read_logits(LaneEntries& x, const Bits* columns) {
#pragma unroll
  for (int k = 0; k < LANE_ENTRIES; k++) {
    if (x.column[k] != NOT_HERE) x.logit[k] = columns[x.column[k]];
  }
}

// The node of all lanes' entries, as if there were no other columns.
DEVICE Node node_of_entries(const Params& q, const LaneEntries& entries, Scales scales) {
  Node x = nothing();
  bool is_any = false;
  each_listed([&](int k) {
    if (entries.column[k] == NOT_HERE) return;
    is_any = true;
    x.max = fmaxf(x.max, value_of(logit_of(entries.logit[k]), q.before));
  });
  if (!__any_sync(~0u, is_any)) return x;
  x.max = max_lanes(x.max);
  const Reading by = reading_of(x, q.before, scales);
  const Logit none = read_logit(-INF, 0.f, by, false);
  LaneSums sums = {};
  float mass = 0.f, cross = 0.f;
  each_listed([&](int k) {
    if (entries.column[k] == NOT_HERE) return;
    const Logit one = read_logit(logit_of(entries.logit[k]), 0.f, by, false);
    const float log_tau = entries.log_tau[k], tau = expf(log_tau);
    sums.even += one.power;
    Optional::add(sums, one, none, false);
    mass += tau;
    cross += TopK::cross_of(tau, log_tau, (one.value - finite(x.max)) * scales.z);
  });
  x = with_sums(x, sums, by.bases);
  x.topk_max = x.max, x.topk_sum = x.sum;
  for (int d = 16; d; d /= 2) {  // together, so that none waits for another
    const float more = __shfl_xor_sync(~0u, mass, d), across = __shfl_xor_sync(~0u, cross, d);
    mass += more, cross += across;
  }
  x.topk_mass = mass, x.topk_cross = cross;
  return x;
}

// log tau of a row's label, -inf where it is no entry, on all lanes.
DEVICE float log_tau_of_label(const Listed& list, i64 label) {
  float found = -INF;
#pragma unroll
  for (int k = 0; k < LANE_ENTRIES; k++) {
    const u32 has = __ballot_sync(~0u, list.id[k] == label);
    if (has) found = __shfl_sync(~0u, list.log_tau[k], __ffs(has) - 1);
  }
  return found;
}
