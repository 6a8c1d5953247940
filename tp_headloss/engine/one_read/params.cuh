// The kernel's argument, and what is read from it. `params.py` has the same fields for the caller.
#pragma once
#include "numbers.cuh"

struct Params {
  const Bits* logits;   // [rows, width] bf16, fp16 or fp32
  Bits* gradient;       // [rows, width] of that dtype, or the logits themselves
  const void* labels;   // [rows] int64 or int32, see wide_labels
  const float* weight;  // [rows] or null
  const float* temperatures;  // [rows] or null
  const TeacherBits* teacher;  // [rows, width] of that dtype or fp32, or null
  const float* scales;        // [2, rows] in the place of teacher_scale and student_scale, or null
  // [rows, n_entries] ids of a top-K teacher, ascending, the largest: none; log tau; or null
  const int* entries;
  const float* entry_log_probs;
  // [] upstream gradient of the loss, a record of `kernel.Memory` that foresees it, or neither: 1.
  const float* upstream;
  const int* forecast;
  const double* denominator;  // [] or null

  float* loss;      // []
  float* sums;      // [n_values + 1]
  double* inverse;  // [2]: 1 / divisor; the upstream gradient that `gradient` is for, or NaN
  float *lse, *log_prob, *target_logit, *owners;  // [rows] each
  unsigned char* valid;                           // [rows]
  float *entropy, *mean, *total, *mass;           // [rows] each, or null
  i64* argmax;                                    // [rows] or null
  unsigned char* hits;                            // [rows] or null
  float *forward_kl, *reverse_kl, *teacher_entropy;  // [rows] each, or null
  float *student_sum, *teacher_shift, *teacher_sum, *gap;  // [rows] each, or null: merged rows
  // [rows] each, or null: of a top-K teacher; then its merged rows
  float *topk_forward_kl, *vocab_forward_kl, *tail_log_mass, *teacher_mass;
  float *topk_shift, *topk_sum, *topk_mass, *topk_gap;
  float *rest_shift, *rest_sum, *rest_mean, *inside, *outside;
  float *jsd, *jsd_mean, *total_variation, *total_variation_mean;  // [rows] each, or null
  float *overlap, *overlap_mean;                                   // likewise
  float *shift, *sum, *others, *target;           // [rows] each: merged rows
  const void* values[VALUES];  // [rows] each: what is summed over tokens, fp32 or bool
  float* found;                // [TERMS + SLOPES, rows]: values and derivatives of a row function
  const float* given[GIVENS];  // [rows] each: its inputs

  u32* control;        // [4]: launches, programs that are done, items claimed, failure
  u32* failed;         // the host's word for a failure
  u64 packets[RANKS];  // [2, half] in the memory of every rank
  i64 half;            // packets of a half
  u64 timeout;         // ns
  i64 rank, start;     // of this rank; the vocabulary's id of its first column
  i64 ignore_index;
  // Of rows, in elements; multiples of COLUMNS.
  i64 stride, gradient_stride, teacher_stride;
  double number;  // the divisor of the loss; 0: the number of valid tokens, or their weights

  // d loss / d statistic = factor + square * statistic
  float lse_factor, lse_square;
  float log_prob_factor, log_prob_square;
  float entropy_factor, entropy_square;
  float total_factor, total_square;
  float forward_kl_factor, forward_kl_square;
  float reverse_kl_factor, reverse_kl_square;
  float topk_forward_kl_factor, topk_forward_kl_square;
  float vocab_forward_kl_factor, vocab_forward_kl_square;
  float tail_log_mass_factor, tail_log_mass_square;
  float jsd_factor, jsd_square;
  float total_variation_factor, total_variation_square;
  float overlap_factor, overlap_square;
  float coefficients[VALUES];  // of the values' sums in the loss
  // Before and after the tanh of a softcap, or the logits' scale; the latter is divided by the
  // temperature, if that is one number.
  float before, scale;
  float teacher_scale, student_scale;  // see `Scales`
  float beta;                          // the teacher's share of a mixture

  int n_values;
  int squares, negatives, bools;  // bits: values that are squared, subtracted, bool
  int rows, width, valid_width;   // width: columns that are read, a multiple of COLUMNS
  int padding;                    // vectors of columns after them, whose gradient is 0
  int wide_labels;
  int n_entries;
  int chunk, cuts;     // of a chunk: vectors, and log2 of its leaves
  int leaves, pieces;  // of an item; of a row
  int slots, slot_bytes;
  int ranks;
};

constexpr int NOT_HERE = -1, IGNORED_TOKEN = -2;
// A piece of a row that lies in a slot; row < 0: there are no more.
struct Item {
  int row, piece;
  int vectors;  // of COLUMNS columns
  int valid;    // columns of the vocabulary
  int target;   // the label's column; NOT_HERE; or IGNORED_TOKEN
  float scale;  // z = scale * value
  DEVICE bool ignored() const { return target == IGNORED_TOKEN; }
};

// What makes z of the student's values, and u of the teacher's logits. beside: what makes of z the
// student's logits beside the teacher, z', whose temperature may be another.
struct Scales {
  float z, u, beside;
};

DEVICE i64 label_of(const Params& q, int row) {
  return q.wide_labels ? ((const i64*)q.labels)[row] : ((const int*)q.labels)[row];
}

// Above 0 where the temperature is infinite, too: of -inf times 0 there would be NaN.
DEVICE float scale_of(const Params& q, int row) {
  if (!q.temperatures) return q.scale;
  const float scale = q.scale * (1.f / q.temperatures[row]);
  return scale < LEAST_NORMAL ? LEAST_NORMAL : scale;
}

DEVICE Scales scales_of(const Params& q, const Item& item) {
  const bool is_each = HAS_TEACHER && q.scales;
  const float teacher = is_each ? q.scales[item.row] : q.teacher_scale;
  const float beside = is_each ? q.scales[q.rows + item.row] : q.student_scale;
  return {item.scale, teacher, IS_TEMPERED ? beside : 1.f};
}

// The row's first vector of a leaf, where leaves are numbered over the row.
DEVICE int begin_of_leaf(const Params& q, int leaf) {
  return (leaf >> q.cuts) * q.chunk + (q.chunk * (leaf & ((1 << q.cuts) - 1)) >> q.cuts);
}

// The upstream gradient that this launch writes the gradient for, and whether it writes it at all.
struct Upstream {
  float value;
  bool is_written;
};
DEVICE Upstream foreseen(const Params& q) {
  if (q.upstream) return {*q.upstream, true};
  if (!q.forecast) return {1.f, true};
  const float value = __int_as_float(q.forecast[0] ^ 0x3f800000);
  // not for infinity, which times a factor of 0 is NaN
  return {value, q.forecast[1] >= q.forecast[2] && fabsf(value) < INF};
}
