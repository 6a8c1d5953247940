// The loss and its gradient in one launch that reads each bf16 logit once and writes its gradient once, on one GPU and
// on several, which exchange their packets inside of it. See one_read.py for what it serves.
//
// A program per multiprocessor stays and takes items, pieces of rows, in order; each lies in a slot of a ring in shared
// memory while the warps' roles follow each other:
//   load   claims the next item once a slot is free, and copies the logits       full:  they are there
//   sum    maximum and sum of exponentials of leaves, the label left out         stat:  each leaf's node is there
//   post   joins the nodes, looks for the argmax, and writes one packet to every rank's memory
//   merge  waits for all packets of the row, joins them, stores statistics       ready: the row's factors are there
//   grad   writes gradients over the logits                                      done:  they are there
//   store  copies them out                                                       free:  the slot can be used again
// Nodes are joined in a binary tree over leaves that depends on the vocabulary alone: equal bits on 1, 2, 4, 8 ranks.
// A packet is one 16-byte store that carries its own flag, the number of the launch, so that no fence is needed.
// Launches of one memory alternate between two halves of it: a rank that writes a half again has ended the launch
// between, so its peers have begun that one, and ended the launch whose packets are overwritten.
// No program waits for one that is not there: items are claimed in order, each when a slot is free for it.
// Compiled with ENTROPY, ARGMAX or TOTAL for calls that want these, and TERM if a term of the loss is an entropy. Before this
// source may stand a `row_function`, with the terms of a loss and their derivatives: see row_function.py.
typedef unsigned int u32; typedef unsigned long long u64; typedef unsigned short u16; typedef long long i64;

constexpr int SUM = 8, TEAMS = 2, GRAD = 8, POST = 2, MERGE = 4, OTHERS = 1 + POST + MERGE;
constexpr int STORE = OTHERS + TEAMS * SUM + GRAD, WARPS = STORE + 1;
constexpr int LAST = POST + MERGE + TEAMS * SUM;  // warps that have nothing to do while the last gradients are written
constexpr int SLOTS = 10, RANKS = 8, VALUES = 6, GIVENS = 8, TOKENS_AT_ONCE = 6, VECTORS_AT_ONCE = 4;
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;
constexpr u64 STUCK = 4000000000000;  // ns, longer than any timeout: a bug ends, too
constexpr u32 OWNER = 1, IGNORED = 2, LOWEST = 0xff80ff80u;  // flags of a packet; two logits of -inf
constexpr float LOWEST_DROP = -1e30f;  // of a logit below the maximum, so that 0 times it is 0
#define INF __int_as_float(0x7f800000)
#define NONE __int_as_float(0x7fc00000)  // NaN
#ifndef ROWS
constexpr int TERMS = 0, GIVEN = 0;  // terms and inputs of a row function
struct Row { float by[4]; };         // values of its terms, and derivatives by lse, log_prob, entropy and total
#endif

struct Params {  // in the order of `launch.Params`
  const u16* logits; u16* gradient; const void* labels; const float *weight, *upstream; const int* forecast; const double* denominator;
  float *loss, *sums; double* inverse;  // [], [values + 1], [2]: 1 / divisor, and the upstream gradient of `foreseen`, or NaN
  float *lse, *log_prob, *target_logit, *owners; unsigned char* valid;   // [N] each
  float *entropy, *mean, *total, *mass; i64* argmax; unsigned char* hits;  // [N] or null
  float *shift, *sum, *others, *target;                                  // [N] each, merged rows
  const void* values[VALUES];  // [N] each, which are summed, fp32 or bool
  float* found; const float* given[GIVENS];  // results [TERMS + 4, N] of a row function, and its inputs [N]
  u32 *control, *failed;  // launches, programs that are done, items claimed, failure; the host's word for that
  u64 packets[RANKS];     // [2, half] of every rank
  i64 half; u64 timeout;  // ns
  i64 rank, start, ignore_index;
  double number;          // to divide by; 0: the valid tokens or their weights
  // d loss / d value: factor + square * value
  float lse_factor, lse_square, log_prob_factor, log_prob_square, entropy_factor, entropy_square;
  float total_factor, total_square, coefficients[VALUES];
  int n_values, squares, negatives, bools, rows, width, valid_width, wide_labels;  // width % 8 == 0
  int chunk, cuts, leaves, pieces, slots, slot_bytes, ranks;  // vectors and log2 of leaves of a chunk; leaves of an item
};
#if defined(ENTROPY) || defined(ARGMAX) || defined(TOTAL)
constexpr int WORDS = 2;  // stores of a packet
#else
constexpr int WORDS = 1;
#endif
struct Item { int row, piece, vectors, valid, target; bool ignored; };  // of 8 columns; valid columns; the label's or -1
// Of some columns without the label's: sum of exp(z - max), and of that times z - max; sum and number of the logits above
// -inf; the lowest id of the maximum, or, before `post` has looked, the first leaf of the item that has it.
struct Node { float max, sum, moment, total; int count, index; };
// d loss / d logit over 2^t, t = by * logit - at, its slope by t, and d loss / d logit besides, where the logit is above
// -inf; that of the label; whether no logit is -inf
struct __align__(16) Factors { float by, at, each, slope, flat, label; bool is_plain; };
struct Shared {
  u64 full[SLOTS], stat[SLOTS], ready[SLOTS], done[SLOTS], free[SLOTS];
  Item item[SLOTS];
  __align__(8) Node node[SLOTS][SUM];
  Factors factor[SLOTS];
  u16 logit[SLOTS];
  double counted[GRAD];
  bool is_last;
};
static_assert(sizeof(Shared) <= 3072);  // the slots take the rest

__device__ __forceinline__ u32 at(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ float ex2(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ __forceinline__ void init(u64* b, int n) { asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at(b)), "r"(n)); }
__device__ __forceinline__ void arrive(u64* b) { asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(at(b)) : "memory"); }
__device__ __forceinline__ u64 now() { u64 t; asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t)); return t; }
__device__ __forceinline__ void meet() { asm volatile("bar.sync 2, %0;" ::"n"(LAST * 32) : "memory"); }
__device__ __forceinline__ void wait(u64* b, u32 phase) {
  u64 since = 0;
  for (u32 i = 1;; i++) {
    u32 done;
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done) : "r"(at(b)), "r"(phase) : "memory");
    if (done) return;
    if (i % 65536 == 0) { if (!since) since = now(); else if (now() - since > STUCK) __trap(); }
  }
}
__device__ __forceinline__ uint4 load(u32 a) {
  uint4 v; asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a)); return v;
}
__device__ __forceinline__ void store(u32 a, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(a), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ __forceinline__ float low(u32 v) { return __uint_as_float(v << 16); }
__device__ __forceinline__ float high(u32 v) { return __uint_as_float(v & 0xffff0000u); }
__device__ __forceinline__ u32 max2(u32 a, u32 b) { u32 c; asm("max.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b)); return c; }
__device__ __forceinline__ u32 largest(uint4 v) { return max2(max2(v.x, v.y), max2(v.z, v.w)); }
__device__ __forceinline__ float larger(u32 v) { return fmaxf(low(v), high(v)); }
__device__ __forceinline__ u32 pack(float a, float b) { u32 c; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(c) : "f"(b), "f"(a)); return c; }
// One access of 16 bytes: the memory model takes a scalar of 128 bits as a whole.
__device__ __forceinline__ void post(uint4* p, uint4 v) {
  u64 a = v.x | (u64)v.y << 32, b = v.z | (u64)v.w << 32;
  asm volatile("{ .reg .b128 q; mov.b128 q, {%1, %2}; st.relaxed.sys.global.b128 [%0], q; }" ::"l"(p), "l"(a), "l"(b) : "memory");
}
__device__ __forceinline__ uint4 look(const uint4* p) {
  u64 a, b;
  asm volatile("{ .reg .b128 q; ld.relaxed.sys.global.b128 q, [%2]; mov.b128 {%0, %1}, q; }" : "=l"(a), "=l"(b) : "l"(p) : "memory");
  return make_uint4((u32)a, (u32)(a >> 32), (u32)b, (u32)(b >> 32));
}
__device__ __forceinline__ Node nothing() { return {-INF, 0.f, 0.f, 0.f, 0, 0x7fffffff}; }
__device__ __forceinline__ float finite(float max) { return max == -INF ? 0.f : max; }
__device__ __forceinline__ i64 label_of(const Params& q, int row) {
  return q.wide_labels ? ((const i64*)q.labels)[row] : ((const int*)q.labels)[row];
}
// The upstream gradient of the loss that the gradient is written for, and whether it is written at all: one that is given, or
// what a record of `kernel.Memory` foresees, or 1.
struct Upstream { float value; bool is_written; };
__device__ __forceinline__ Upstream foreseen(const Params& q) {
  if (q.upstream) return {*q.upstream, true};
  if (!q.forecast) return {1.f, true};
  const float value = __int_as_float(q.forecast[0] ^ 0x3f800000);
  return {value, q.forecast[1] >= q.forecast[2] && fabsf(value) < INF};  // infinity times a factor of 0 is NaN
}
template <class T> __device__ __forceinline__ T add_lanes(T x) {
  for (int d = 16; d; d /= 2) x += __shfl_xor_sync(~0u, x, d);
  return x;
}

// The sums of two parts of a row relative to the larger maximum. Each operation rounds by itself, so that both orders
// of the arguments have the same bits.
__device__ __forceinline__ Node join(Node a, Node b) {
  const float max = fmaxf(a.max, b.max), shift = finite(max), left = __fsub_rn(a.max, shift), right = __fsub_rn(b.max, shift);
  const float p = ex2(__fmul_rn(left, LOG2E)), q = ex2(__fmul_rn(right, LOG2E));
  Node x = nothing();
  x.max = max, x.sum = __fadd_rn(__fmul_rn(a.sum, p), __fmul_rn(b.sum, q));
#ifdef ENTROPY
  auto moved = [](Node n, float drop, float f) {
    return __fmul_rn(f, __fadd_rn(n.moment, __fmul_rn(fmaxf(drop, LOWEST_DROP), n.sum)));
  };
  x.moment = __fadd_rn(moved(a, left, p), moved(b, right, q));
#endif
#ifdef TOTAL
  x.total = __fadd_rn(a.total, b.total), x.count = a.count + b.count;
#endif
#ifdef ARGMAX
  x.index = a.max > b.max ? a.index : b.max > a.max ? b.index : min(a.index, b.index);
#endif
  return x;
}
__device__ __forceinline__ Node join_lanes(Node x, int lanes) {
#pragma unroll 1
  for (int d = 1; d < lanes; d *= 2) {
    Node y = nothing();
    y.max = __shfl_xor_sync(~0u, x.max, d), y.sum = __shfl_xor_sync(~0u, x.sum, d);
#ifdef ENTROPY
    y.moment = __shfl_xor_sync(~0u, x.moment, d);
#endif
#ifdef TOTAL
    y.total = __shfl_xor_sync(~0u, x.total, d), y.count = __shfl_xor_sync(~0u, x.count, d);
#endif
#ifdef ARGMAX
    y.index = __shfl_xor_sync(~0u, x.index, d);
#endif
    x = join(x, y);
  }
  return x;
}
// exp(z - shift) = 2^(z * by - at - rest), of which `rest` is the same for all z: one rounding. z and shift are logits in
// bf16, which beyond a million are equal or thousands apart, whatever the base; `rest` would be large there.
struct Base2 { float by, at, rest; };
__device__ __forceinline__ Base2 base2(float shift) {
  const float by = fabsf(shift) > 1e6f ? 1.f : LOG2E, at = shift * by;
  return {by, at, fmaf(shift, by, -at)};
}

// The node of vectors a to b by a warp.
__device__ __forceinline__ Node leaf(u32 base, int a, int b, int lane) {
  u32 top = LOWEST;
#pragma unroll 1
  for (int v = a + lane; v - lane < b; v += 32 * VECTORS_AT_ONCE) {
    uint4 r[VECTORS_AT_ONCE];
#pragma unroll
    for (int k = 0; k < VECTORS_AT_ONCE; k++) r[k] = load(base + min(v + 32 * k, b - 1) * 16);  // no load waits for another
#pragma unroll
    for (int k = 0; k < VECTORS_AT_ONCE; k++) top = max2(top, largest(r[k]));
  }
  auto ordered = [](int bits) { return bits ^ (bits >> 31 & 0x7fffffff); };  // as integers are
  const float max = __int_as_float(ordered(__reduce_max_sync(~0u, ordered(__float_as_int(larger(top))))));
  const Base2 e = base2(finite(max));
  float even = 0.f, odd = 0.f, other = 0.f;
  Node x = nothing();
  auto add = [&](bool is_plain) {
#pragma unroll 1
    for (int v = a + lane; v < b; v += 32) {
      auto add_two = [&](u32 u) {
        const float s = fmaf(low(u), e.by, -e.at), t = fmaf(high(u), e.by, -e.at), p = ex2(s), q = ex2(t);
        even += p, odd += q;
#ifdef ENTROPY
        x.moment = fmaf(p, is_plain ? s : fmaxf(s, LOWEST_DROP), x.moment);
        other = fmaf(q, is_plain ? t : fmaxf(t, LOWEST_DROP), other);
#endif
#ifdef TOTAL
        if (is_plain || low(u) != -INF) x.total += low(u), x.count++;
        if (is_plain || high(u) != -INF) x.total += high(u), x.count++;
#endif
      };
      const uint4 r = load(base + v * 16);
      add_two(r.x), add_two(r.y), add_two(r.z), add_two(r.w);
    }
  };
  add(true);
#if defined(ENTROPY) || defined(TOTAL)
  if (!(fabsf(x.moment + other) + fabsf(x.total) < INF)) even = odd = other = 0.f, x = nothing(), add(false);  // very low ones
#endif
  x.max = max, x.sum = even + odd, x.moment += other;
  for (int d = 16; d; d /= 2) {  // together, so that none waits for another
    const float sum = __shfl_xor_sync(~0u, x.sum, d);
#ifdef ENTROPY
    x.moment += __shfl_xor_sync(~0u, x.moment, d);
#endif
#ifdef TOTAL
    x.total += __shfl_xor_sync(~0u, x.total, d);
#endif
    x.sum += sum;
  }
#ifdef ENTROPY
  x.moment = LN2 * (x.moment - e.rest * x.sum) * ex2(-e.rest);
#endif
  x.sum *= ex2(-e.rest);
#ifdef TOTAL
  x.count = __reduce_add_sync(~0u, x.count);
#endif
  return x;
}

// The sum of the valid tokens' weights, or their number, in one order: the grad warps, while they have nothing to do.
__device__ __forceinline__ void count(const Params& q, double* counted, int warp, int lane) {
  double own = 0;
  for (int first = warp * 32 + lane; first < q.rows; first += TOKENS_AT_ONCE * GRAD * 32) {
    float weight[TOKENS_AT_ONCE];
#pragma unroll
    for (int k = 0; k < TOKENS_AT_ONCE; k++) {  // no load waits for another
      const int i = first + k * GRAD * 32, row = min(i, q.rows - 1);
      weight[k] = q.weight ? q.weight[row] : 1.f;
      if (label_of(q, row) == q.ignore_index || i >= q.rows) weight[k] = 0.f;
    }
#pragma unroll
    for (int k = 0; k < TOKENS_AT_ONCE; k++) own += weight[k];
  }
  own = add_lanes(own);
  if (lane == 0) counted[warp] = own;
}

// A row's statistics from its sums without the label and the label's logit, each rounded once; as in `softmax_triton`.
struct Solved { double top, whole, others, offset, lse, log_prob, mean, entropy, total, mass; };
__device__ __forceinline__ Solved solve(Node x, float t) {
  Solved r = {};
  const double m = x.max, y = t;
  const bool is_top = y >= m, lonely = t == -INF;
  const double e = lonely || x.max == -INF ? 0.0 : exp(-fabs(m - y));  // of the smaller, relative to the larger
  r.top = is_top ? y : m, r.offset = lonely ? y : y - r.top, r.others = is_top ? x.sum * e : x.sum;
  const double p = lonely ? 0.0 : is_top ? 1.0 + r.offset : e;  // NaN for infinity
  r.whole = r.others + p;
  const double log_sum = log1p(is_top ? r.others : r.others - 1.0 + p);
  r.lse = r.top + log_sum, r.log_prob = 0.0 - (is_top ? log_sum : log_sum - r.offset);
#ifdef ENTROPY
  const double drop = x.max == -INF ? 0.0 : m - r.top;
  r.mean = ((is_top ? e : 1.0) * (x.moment + drop * x.sum) + (p == 0.0 ? 0.0 : p * r.offset)) / r.whole;
  r.entropy = log_sum - r.mean;
#endif
#ifdef TOTAL
  r.total = x.total + (lonely ? 0.0 : y), r.mass = x.count + !lonely;
#endif
  return r;
}

// The factors of a row's gradient; by: derivatives of a row function's terms.
__device__ __forceinline__ Factors factors(const Params& q, const Item& item, Node x, float t, int owners, double scale, const Row& row) {
  const float top = fmaxf(x.max, t), shift = finite(top), p = ex2((t - shift) * LOG2E);
  const float others = x.sum * ex2((x.max - shift) * LOG2E), whole = others + p;
  float by_lse = q.lse_factor, by_log_prob = q.log_prob_factor;
  if (q.lse_square != 0.f || q.log_prob_square != 0.f) {
    const float log_sum = t == top ? log1pf(others) : logf(whole);
    if (q.lse_square != 0.f) by_lse += q.lse_square * (top + log_sum);
    if (q.log_prob_square != 0.f) by_log_prob += q.log_prob_square * (t == top ? -log_sum : t - top - log_sum);
  }
#ifdef ROWS
  by_lse += row.by[0], by_log_prob += row.by[1];
#endif
  const float factor = (float)(scale * (q.weight ? (double)q.weight[item.row] : 1.0));
  by_lse *= factor, by_log_prob *= factor;
  float each = (by_lse - by_log_prob) / whole, label = by_lse * (p / whole) + by_log_prob * (others / whole), slope = 0.f, flat = 0.f;
#ifdef TERM
  const float offset = fmaxf(t - shift, LOWEST_DROP), drop = fmaxf(x.max - shift, LOWEST_DROP), f = ex2(drop * LOG2E);
  const float mean = (f * (x.moment + drop * x.sum) + p * offset) / whole;
  float by_entropy = q.entropy_factor;
  if (q.entropy_square != 0.f) by_entropy += q.entropy_square * ((t == top ? log1pf(others) : logf(whole)) - mean);
#ifdef ROWS
  by_entropy += row.by[2];
#endif
  by_entropy *= factor;
  slope = -by_entropy / whole, each += by_entropy * mean / whole, label -= by_entropy * (p / whole) * (offset - mean);
#endif
#ifdef TOTAL
  flat = q.total_factor;
  if (q.total_square != 0.f) flat += q.total_square * (x.total + (t == -INF ? 0.f : t));
#ifdef ROWS
  flat += row.by[3];
#endif
  flat *= factor, label += t == -INF ? 0.f : flat;
#endif
  if (!(whole > 0.f) || owners != 1) each = label = NONE;
  const Base2 e = base2(shift);
  const float moved = ex2(-e.rest);
  return {e.by, e.at, (each - slope * LN2 * e.rest) * moved, slope * LN2 * moved, flat, label};
}

// Store the statistics of a row.
__device__ __forceinline__ void finish(const Params& q, const Item& item, Node x, float t, int owners, const Solved& r, const Row& by) {
  const int row = item.row;
  const bool bad = !(r.whole > 0.0) || owners != 1;
  auto settle = [&](double v) { return item.ignored ? 0.f : bad ? NONE : (float)v; };
  q.lse[row] = settle(r.lse), q.log_prob[row] = settle(r.log_prob), q.target_logit[row] = settle(t);
  q.owners[row] = owners, q.valid[row] = !item.ignored;
  q.shift[row] = settle(r.top), q.sum[row] = settle(r.whole), q.others[row] = settle(r.others / r.whole), q.target[row] = settle(r.offset);
#ifdef ENTROPY
  q.mean[row] = settle(r.mean), q.entropy[row] = settle(r.entropy);
#endif
#ifdef TOTAL
  q.total[row] = settle(r.total), q.mass[row] = settle(r.mass);
#endif
#ifdef ARGMAX
  const i64 id = label_of(q, row), best = t > x.max || (t == x.max && id < x.index) ? id : x.index;
  q.argmax[row] = bad || item.ignored ? -1 : best, q.hits[row] = best == id && !bad && !item.ignored;
#endif
#ifdef ROWS
  for (int k = 0; k < TERMS; k++) q.found[(i64)k * q.rows + row] = settle(by.value[k]);
  for (int k = 0; k < 4; k++) q.found[(i64)(TERMS + k) * q.rows + row] = settle(by.by[k]);
#endif
}

// The loss and its sums over tokens, in one order, by LAST warps of the last program; as in `sums_triton`.
__device__ __forceinline__ void reduce(const Params& q, double (*part)[VALUES + 1], bool by_count, int warp, int lane) {
  double total[VALUES + 1] = {}, loss = 0.0;
  for (int first = 32 * warp + lane; first < q.rows; first += TOKENS_AT_ONCE * LAST * 32) {
    float weight[TOKENS_AT_ONCE];
    auto row = [&](int j) { return min(first + j * LAST * 32, q.rows - 1); };
#pragma unroll
    for (int j = 0; j < TOKENS_AT_ONCE; j++) {  // no load waits for another
      weight[j] = q.weight ? q.weight[row(j)] : 1.f;
      if (!__ldcg(q.valid + row(j)) || first + j * LAST * 32 >= q.rows) weight[j] = 0.f;
    }
#pragma unroll
    for (int k = 0; k < VALUES; k++) if (k < q.n_values) {
      float value[TOKENS_AT_ONCE];
#pragma unroll
      for (int j = 0; j < TOKENS_AT_ONCE; j++)
        value[j] = q.bools >> k & 1 ? (float)__ldcg((const unsigned char*)q.values[k] + row(j)) : __ldcg((const float*)q.values[k] + row(j));
#pragma unroll
      for (int j = 0; j < TOKENS_AT_ONCE; j++) if (weight[j] != 0.f) {
        const double v = value[j];
        total[k] = fma(q.squares >> k & 1 ? v * v : v, (double)weight[j], total[k]);
      }
    }
#pragma unroll
    for (int j = 0; j < TOKENS_AT_ONCE; j++) total[VALUES] += weight[j];
  }
#pragma unroll
  for (int k = 0; k <= VALUES; k++) if (k < q.n_values || k == VALUES) {
    total[k] = add_lanes(total[k]);
    if (lane == 0) part[warp][k] = total[k];
  }
  meet();
  meet();  // with one of them alone, racecheck reports the loads below
  if (warp) return;
#pragma unroll
  for (int k = 0; k <= VALUES; k++) if (k < q.n_values || k == VALUES) {
    total[k] = add_lanes(lane < LAST ? part[lane][k] : 0.0);
    if (k < VALUES && q.negatives >> k & 1) total[k] = -total[k];
    if (lane == 0) q.sums[min(k, q.n_values)] = total[k];
    if (k < VALUES) loss += q.coefficients[k] * total[k];
  }
  const double given = by_count ? total[VALUES] : q.denominator ? *q.denominator : q.number, divisor = given == 0.0 ? INF : given;
  if (lane == 0) *q.inverse = 1.0 / divisor, *q.loss = loss / divisor;
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) one_read(const __grid_constant__ Params q) {
  extern __shared__ __align__(128) unsigned char ring[];
  __shared__ Shared s;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, items = q.rows * q.pieces, all = q.pieces * q.ranks;
  if (threadIdx.x == 0) {
    for (int i = 0; i < q.slots; i++) init(&s.full[i], 1), init(&s.stat[i], SUM), init(&s.ready[i], 1), init(&s.done[i], GRAD), init(&s.free[i], 1);
    asm volatile("fence.mbarrier_init.release.cluster;");
  }
  const u32 epoch = *(volatile u32*)q.control + 1, tag = epoch & 0x3fffffffu;
  const i64 half = (epoch & 1) * q.half;
  const bool by_count = !q.denominator && q.number == 0.0;
  __syncthreads();
  int slot = 0; u32 phase = 0;
  auto next = [&]() { if (++slot == q.slots) slot = 0, phase ^= 1; };
  auto begin = [&](int l) { return (l >> q.cuts) * q.chunk + (q.chunk * (l & (1 << q.cuts) - 1) >> q.cuts); };

  if (warp == 0) {  // load
    u64 policy;  // kept longest in the L2 cache, which is 1 % faster
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    if (lane == 0) for (int ends = 0; ends < MERGE; next()) {
      wait(&s.free[slot], phase ^ 1);
      const u32 claimed = ends ? items : atomicAdd(q.control + 2, 1u);
      if (claimed >= items) { s.item[slot].row = -1, ends++; arrive(&s.full[slot]); continue; }  // an end for each merge warp
      const int row = claimed / q.pieces, piece = claimed - row * q.pieces, whole = q.width / 8;
      const int first = min(begin(piece * q.leaves), whole), vectors = min(begin((piece + 1) * q.leaves), whole) - first;
      const int valid = min(max(q.valid_width - 8 * first, 0), 8 * vectors);
      const i64 soon = min(row + (int)gridDim.x / q.pieces, q.rows - 1);  // a row whose item may be the next
      asm volatile("prefetch.global.L1 [%0];" ::"l"((const char*)q.labels + (soon << (q.wide_labels ? 3 : 2))));
      const i64 y = label_of(q, row), place = y - q.start - 8LL * first;
      s.item[slot] = {row, piece, vectors, valid, place >= 0 && place < valid ? (int)place : -1, y == q.ignore_index};
      if (y == q.ignore_index || vectors == 0) { arrive(&s.full[slot]); continue; }
      asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(at(&s.full[slot])), "r"(vectors * 16) : "memory");
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
                   ::"r"(at(ring + slot * q.slot_bytes)), "l"(q.logits + (i64)row * q.width + 8LL * first),
                     "r"(vectors * 16), "r"(at(&s.full[slot])), "l"(policy) : "memory");
    }
  } else if (warp <= POST) {  // post, in turns
    for (int n = 0;; next(), n++) if (n % POST == warp - 1) {
      wait(&s.stat[slot], phase);
      const Item item = s.item[slot];
      if (item.row < 0) break;
      Node x = join_lanes(s.node[slot][lane % SUM], SUM);
#ifdef ARGMAX
      if (!item.ignored) {  // of the first leaf with the maximum, the first id
        wait(&s.full[slot], phase);
        const uint4* vectors = (const uint4*)(ring + slot * q.slot_bytes);
        const int from = begin(item.piece * q.leaves), leaf = item.piece * q.leaves + x.index;
        const int end = min(begin(leaf + 1) - from, item.vectors);
        int v = end;  // the first vector with the maximum
        for (int k = end - 1 - lane; k >= begin(leaf) - from; k -= 32) if (larger(largest(vectors[k])) == x.max) v = k;
        v = __reduce_min_sync(~0u, v);
        const u32 found = __ballot_sync(~0u, v < end && low(((const u16*)(vectors + v))[lane % 8]) == x.max);
        x.index = found ? (int)q.start + 8 * (from + v) + __ffs(found) - 1 : 0x7fffffff;
      }
#endif
      u32 logit = 0, flags = item.ignored ? IGNORED : 0;
      if (item.target >= 0 && !item.ignored) logit = s.logit[slot] << 16, flags = OWNER;
      __syncwarp();  // all lanes have read what is the slot's, which may be another item's once a packet is out
      uint4* to = (uint4*)q.packets[lane % RANKS] + half + (i64)item.row * all * WORDS + q.rank * q.pieces + item.piece;
      // an item has fewer columns than 2^16, and a logit no more bits
      if (lane < q.ranks) post(to, make_uint4(__float_as_uint(x.max), __float_as_uint(x.sum), logit | x.count, tag << 2 | flags));
      if (WORDS > 1 && lane < q.ranks) post(to + all, make_uint4(__float_as_uint(x.moment), x.index, __float_as_uint(x.total), tag << 2));
    }
  } else if (warp < OTHERS) {  // merge, in turns
    const Upstream upstream = foreseen(q);
    double divisor = q.denominator ? *q.denominator : q.number;
    if (by_count) {
      asm volatile("bar.sync 1, %0;" ::"n"((MERGE + GRAD) * 32) : "memory");
      for (int k = 0; k < GRAD; k++) divisor += s.counted[k];
    }
    const double scale = divisor == 0.0 ? 0.0 : upstream.value * (1.0 / divisor);
    if (blockIdx.x == 0 && warp == 1 + POST && lane == 0) q.inverse[1] = upstream.is_written ? upstream.value : NONE;
    for (int n = 0;; next(), n++) if (n % MERGE == warp - 1 - POST) {
      wait(&s.full[slot], phase);
      const Item item = s.item[slot];
      if (item.row < 0) { if (lane == 0) arrive(&s.ready[slot]); break; }
      const float given = lane < GIVEN ? q.given[min(lane, GIVENS - 1)][item.row] : 0.f;  // while packets are under way
      const uint4* from = (const uint4*)q.packets[q.rank] + half + (i64)item.row * all * WORDS + lane;
      uint4 p = make_uint4(__float_as_uint(-INF), 0, 0, 0), more = make_uint4(0, 0x7fffffff, 0, 0);
      u64 since = 0;
      for (int i = 1;; i++) {
        if (lane < all) p = look(from);
        if (WORDS > 1 && lane < all) more = look(from + all);
        if (__all_sync(~0u, lane >= all || (p.w >> 2 == tag && (WORDS == 1 || more.w >> 2 == tag)))) break;
        __nanosleep(1000);  // each look costs the bulk copies bandwidth, 1 to 2 % on an H200
        if (i % 256) continue;
        const u64 time = now();
        if (!since) since = time;
        if (__any_sync(~0u, time - since > q.timeout || ((volatile u32*)q.control)[3])) {  // NaN, and the host's error
          if (lane == 0) ((volatile u32*)q.control)[3] = 1, *(volatile u32*)q.failed = 1;
          p.w = 0;
          break;
        }
      }
      wait(&s.stat[slot], phase);  // nothing new, but the packet orders no shared memory for the grad warps
      const int count = __shfl_sync(~0u, p.z & 0xffffu, (int)q.rank * q.pieces + item.piece);  // this item's
      const Node x = join_lanes({__uint_as_float(p.x), __uint_as_float(p.y), __uint_as_float(more.x), __uint_as_float(more.z),
                                 (int)(p.z & 0xffffu), (int)more.y}, all);
      const u32 own = __ballot_sync(~0u, lane < all && p.w & OWNER), ignore = __ballot_sync(~0u, lane < all && p.w & IGNORED);
      const float logit = __shfl_sync(~0u, high(p.z), own ? __ffs(own) - 1 : 0);
      Row row = {};
#ifdef ROWS
      const Solved solved = solve(x, logit);
      float known[5 + GIVEN + TERMS] = {(float)solved.lse, (float)solved.log_prob, (float)solved.entropy, (float)solved.total, (float)solved.mass};
      for (int k = 0; k < GIVEN; k++) known[5 + k] = __shfl_sync(~0u, given, k);
      for (int k = 0; k < TERMS; k++) known[5 + GIVEN + k] = q.coefficients[k];
      row = row_function(known);
#endif
      if (lane == 0) {
        const int owners = __popc(own) + 2 * __popc(ignore);
        s.factor[slot] = factors(q, item, x, logit, owners, scale, row);
        s.factor[slot].is_plain = count == item.valid - (item.target >= 0);
        arrive(&s.ready[slot]);
#ifndef ROWS
        const Solved solved = item.piece == 0 ? solve(x, logit) : Solved{};
#endif
        if (item.piece == 0) finish(q, item, x, logit, owners, solved, row);
      }
      __syncwarp();
    }
  } else if (warp < OTHERS + TEAMS * SUM) {  // sum, in turns
    const int w = (warp - OTHERS) % SUM;
    for (int n = 0, ends = 0; ends < MERGE / TEAMS; next(), n++) if (n % TEAMS == (warp - OTHERS) / SUM) {
      wait(&s.full[slot], phase);
      const Item item = s.item[slot];
      Node x = nothing();
      if (item.row >= 0 && w < q.leaves && !item.ignored) {
        const int first = item.piece * q.leaves, from = begin(first);
        const int a = min(begin(first + w) - from, item.vectors), b = min(begin(first + w + 1) - from, item.vectors);
        u16* columns = (u16*)(ring + slot * q.slot_bytes);
        if (lane == 0 && item.target >= 8 * a && item.target < 8 * b)
          s.logit[slot] = columns[item.target], columns[item.target] = (u16)LOWEST;
        for (int c = max(item.valid, 8 * a) + lane; c < 8 * b; c += 32) columns[c] = (u16)LOWEST;
        __syncwarp();
        x = leaf(at(columns), a, b, lane), x.index = w;
      }
      ends += item.row < 0;
      __syncwarp();
      if (lane == 0) {  // after the item before, another team's: else a role may take the barrier's phase for the last turn's
        s.node[slot][w] = x;
        wait(&s.stat[(slot ? slot : q.slots) - 1], slot ? phase : phase ^ 1);
        arrive(&s.stat[slot]);
      }
    }
  } else if (warp < STORE) {  // grad
    const int w = warp - OTHERS - TEAMS * SUM;
    const bool is_written = foreseen(q).is_written;
    if (by_count) {
      count(q, s.counted, w, lane);
      __threadfence_block();
      asm volatile("bar.arrive 1, %0;" ::"n"((MERGE + GRAD) * 32) : "memory");
    }
    for (;; next()) {
      wait(&s.ready[slot], phase);
      const Item item = s.item[slot];
      if (item.row < 0) { if (lane == 0) arrive(&s.done[slot]); break; }
      if (!is_written) { if (lane == 0) arrive(&s.done[slot]); continue; }
      const int a = item.vectors * w / GRAD, b = item.vectors * (w + 1) / GRAD;
      u16* columns = (u16*)(ring + slot * q.slot_bytes);
      const u32 base = at(columns);
      const Factors f = s.factor[slot];
      auto one = [&](float z, bool is_plain) {
        float each = f.each;
        const float t = fmaf(z, f.by, -f.at);
#ifdef TERM  // where 2^t underflows the factor stays finite, so that their product is 0
        each = fmaf(f.slope, fmaxf(t, -300.f), each);
#endif
#ifdef TOTAL
        if (!is_plain && z == -INF) return each * ex2(t);
#endif
        return fmaf(each, ex2(t), f.flat);
      };
      auto grad = [&](u32 u, bool is_plain) { return pack(one(low(u), is_plain), one(high(u), is_plain)); };
      auto all_of = [&](const uint4& r, bool is_plain) {
        return make_uint4(grad(r.x, is_plain), grad(r.y, is_plain), grad(r.z, is_plain), grad(r.w, is_plain));
      };
#pragma unroll 1
      for (int v = a + lane; v < b && !item.ignored; v += 32) {
        const uint4 r = load(base + v * 16);
        store(base + v * 16, f.is_plain ? all_of(r, true) : all_of(r, false));
      }
      if (item.ignored) for (int v = a + lane; v < b; v += 32) store(base + v * 16, make_uint4(0, 0, 0, 0));
      __syncwarp();
      for (int c = max(item.valid, 8 * a) + lane; c < 8 * b; c += 32) columns[c] = 0;
      __syncwarp();
      if (lane == 0 && item.target >= 8 * a && item.target < 8 * b && !item.ignored)
        columns[item.target] = (u16)pack(f.label, 0.f);
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      __syncwarp();
      if (lane == 0) arrive(&s.done[slot]);
    }
  } else {  // store
    const bool is_written = foreseen(q).is_written;
    if (lane == 0) for (;; next()) {
      wait(&s.done[slot], phase);
      const Item item = s.item[slot];
      if (item.row < 0) break;
      u16* out = q.gradient + (i64)item.row * q.width + 8LL * begin(item.piece * q.leaves);
      if (item.vectors && is_written) asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(out), "r"(at(ring + slot * q.slot_bytes)), "r"(item.vectors * 16) : "memory");
      asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
      arrive(&s.free[slot]);
    }
  }
  if (warp == 0 || warp > LAST) return;
  meet();
  const bool is_first = warp == 1 && lane == 0;
  if (is_first) __threadfence(), s.is_last = atomicAdd(q.control + 1, 1u) == gridDim.x - 1;
  meet();
  if (!s.is_last) return;
  __threadfence();
  if (is_first) q.control[1] = q.control[2] = 0, *(volatile u32*)q.control = epoch;  // for the next launch
  reduce(q, (double (*)[VALUES + 1])s.node, by_count, warp - 1, lane);
}
