// What is stored for a token, and sums over tokens: the count of the valid ones, and the loss.
#pragma once
#include "warps.cuh"

// Of a packet's flags on all lanes: 1 if one rank has the label and none ignores the token.
DEVICE int owners_of(u32 own, u32 ignore) { return __popc(own) + 2 * __popc(ignore); }

// Store the statistics of a row; by: of a row function.
DEVICE void finish(const Params& q, const Item& item, const Node& x, float logit, int owners,
                   const Solved& r, const Row& by) {
  const int row = item.row;
  const bool bad = !(r.whole > 0.0) || owners != 1;
  auto settle = [&](double v) { return item.ignored() ? 0.f : bad ? NONE : (float)v; };
  q.lse[row] = settle(r.lse);
  q.log_prob[row] = settle(r.log_prob);
  q.target_logit[row] = settle(r.z);
  q.owners[row] = owners;
  q.valid[row] = !item.ignored();
  const double moved = r.top - (double)(float)r.top;  // the rounding of `shift`
  q.shift[row] = settle(r.top);
  q.sum[row] = settle(moved == 0.0 ? r.whole : r.whole * exp(moved));
  q.others[row] = settle(r.others / r.whole);
  q.target[row] = settle(r.offset + moved);
  Optional::store(q, x, logit, r, settle, item, bad);
  if constexpr (HAS_ROWS) {
    float* found = q.found + row;
    for (int k = 0; k < TERMS; k++) found[(i64)k * q.rows] = settle(by.value[k]);
    for (int k = 0; k < SLOPES; k++) found[(i64)(TERMS + k) * q.rows] = settle(by.by[k]);
  }
}

// The sum of the valid tokens' weights, or their number, in one order: a part of it by each of the
// grad warps, while they have nothing to do.
DEVICE void count(const Params& q, double* counted, int warp, int lane) {
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

// Add a thread's tokens to its sums of the values and, last, of the weights, in the tokens' order.
DEVICE void add_tokens(const Params& q, double (&total)[VALUES + 1], int warp, int lane) {
  for (int first = 32 * warp + lane; first < q.rows; first += TOKENS_AT_ONCE * LAST * 32) {
    float weight[TOKENS_AT_ONCE];
    auto row = [&](int j) { return min(first + j * LAST * 32, q.rows - 1); };
    auto value_of = [&](int k, int j) {
      if (q.bools >> k & 1) return (float)__ldcg((const unsigned char*)q.values[k] + row(j));
      return __ldcg((const float*)q.values[k] + row(j));
    };
#pragma unroll
    for (int j = 0; j < TOKENS_AT_ONCE; j++) {  // no load waits for another
      weight[j] = q.weight ? q.weight[row(j)] : 1.f;
      if (!__ldcg(q.valid + row(j)) || first + j * LAST * 32 >= q.rows) weight[j] = 0.f;
    }
#pragma unroll
    for (int k = 0; k < VALUES; k++) {
      if (k >= q.n_values) continue;
      float value[TOKENS_AT_ONCE];
#pragma unroll
      for (int j = 0; j < TOKENS_AT_ONCE; j++) value[j] = value_of(k, j);
#pragma unroll
      for (int j = 0; j < TOKENS_AT_ONCE; j++) {
        if (weight[j] == 0.f) continue;
        const double v = value[j], term = q.squares >> k & 1 ? v * v : v;
        total[k] = fma(term, (double)weight[j], total[k]);
      }
    }
#pragma unroll
    for (int j = 0; j < TOKENS_AT_ONCE; j++) total[VALUES] += weight[j];
  }
}
