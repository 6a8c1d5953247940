// The arithmetic of a row for `tests/engine/test_one_read_source.py`.
#include "ptx.cuh"

#include "node.cuh"

extern "C" {

int size_of_node() { return sizeof(Node); }

void nothings(Node* x, int n) {
  for (int i = 0; i < n; i++) x[i] = nothing();
}

void joins(const Node* a, const Node* b, Node* x, int n, Scales scales) {
  for (int i = 0; i < n; i++) x[i] = join(a[i], b[i], scales);
}

// found: [n, 13] lse, log_prob, entropy, total, mass, whole, forward_kl, reverse_kl,
// topk_forward_kl, vocab_forward_kl, tail_log_mass, teacher_mass, teacher_entropy
void solves(const Node* x, const float* logits, double* found, int n, Scales scales) {
  for (int i = 0; i < n; i++, found += 13) {
    const Solved r = solve(x[i], logits[i], scales);
    found[0] = r.lse, found[1] = r.log_prob, found[2] = r.entropy;
    found[3] = r.total, found[4] = r.mass, found[5] = r.whole;
    found[6] = r.forward_kl, found[7] = r.reverse_kl, found[8] = r.topk_forward_kl;
    found[9] = r.vocab_forward_kl, found[10] = r.log_outside, found[11] = r.teacher_mass;
    found[12] = r.teacher_entropy;
  }
}

Scales scales_of_row(const Params& q) {
  Item item = {};
  item.scale = scale_of(q, 0);
  return scales_of(q, item);
}

// u: the teacher's logits. found: gradients of n logits and, last, that of the label's logit.
void gradients(const Params* q, const Node* x, float logit, double upstream, int owners,
               const float* z, const float* u, float* found, int n) {
  const Value label = value_and_slope(logit, q->before);
  const AllFactors f = factors_of(*q, 0, *x, label, scales_of_row(*q), owners, upstream, Row{});
  for (int i = 0; i < n; i++) found[i] = gradient_of(f, z[i], u[i], q->before, false, false);
  found[n] = f.own.label;
}

// Gradients of n entries of a top-K teacher. The row's node has its label.
void gradients_of_entries(const Params* q, const Node* x, float logit, double upstream,
                          const float* z, const float* log_tau, float* found, int n) {
  const Value label = value_and_slope(logit, q->before);
  const AllFactors f = factors_of(*q, 0, *x, label, scales_of_row(*q), 1, upstream, Row{});
  for (int i = 0; i < n; i++) found[i] = gradient_of_entry(f.entry, z[i], log_tau[i], q->before);
}

// Rows' nodes with their labels, log_tau: -inf for those that are no entry.
void with_labels(const Node* x, const float* values, const float* log_tau, Node* found, int n,
                 Scales scales) {
  for (int i = 0; i < n; i++) found[i] = TopK::with_label(x[i], values[i], log_tau[i], scales);
}

// The sums of n columns, of which the label is the first, in the second round; node: of the row
// without its label, whose teacher's sums have it.
void mixtures(const Node* node, const float* z, const float* u, Mixed* found, int n, Scales scales,
              float beta) {
  const RowBases bases = bases_of(*node, softmax_of(*node, z[0], scales));
  const AllFactors f = first_factors(bases, scales.beside, beta);
  Mixed sums = {};
  for (int i = 0; i < n; i++) Mixture::add_column(sums, powers_of(f, z[i], u[i]), f.mixture);
  const Mixed all = Mixture::ended(sums, f.mixture);
  const Node x = Mixture::with_sums(*node, all, bases.over_p, bases.over_q, beta);
  *found = {x.mixture, x.mixture_mean, x.overlap};
}

// A label's part of a teacher's sums.
void labels(const float* values, const float* u, Node* found, int n, Scales scales) {
  for (int i = 0; i < n; i++) found[i] = Divergences::label(values[i], u[i], scales);
}

// The node of n logits beside a teacher's, n even, as `leaf` finds it, but by one lane; no ids. ->
// the magnitude that tells whether the leaf is plain.
float leaf(const float* z, const float* u, int n, Node* found, Scales scales, int is_plain) {
  Node x = nothing();
  for (int i = 0; i < n; i++) {
    x.max = fmaxf(x.max, z[i]), x.teacher_max = fmaxf(x.teacher_max, u[i]);
  }
  const Reading by = reading_of(x, 1.f, scales);
  LaneSums sums = {};
  for (int i = 0; i < n; i += 2) {
    const Logit a = read_logit(z[i], u[i], by, false), b = read_logit(z[i + 1], u[i + 1], by, false);
    sums.even += a.power, sums.odd += b.power;
    Optional::add(sums, a, b, is_plain);
  }
  x.sum = sums.even + sums.odd;
  Optional::begin(x, sums);
  Optional::end(x, by.bases);
  x.sum *= ex2(-by.bases.z.rest);
  *found = x;
  return Optional::magnitude(sums);
}

// Stores a row's optional statistics where `q` says.
void stores(const Params* q, const Node* x, float logit, int ignored, int bad) {
  Item item = {};
  item.target = ignored ? IGNORED_TOKEN : NOT_HERE;
  item.scale = scale_of(*q, 0);
  auto settle = [](double v) { return (float)v; };
  Optional::store(*q, *x, logit, solve(*x, logit, scales_of_row(*q)), settle, item, bad);
}

// What packets carry, back again; logits: of the labels.
void packets(const Node* x, const Bits* logits, u32 flags, Node* found, float* labels,
             int* owners, int* ignored, int n) {
  for (int i = 0; i < n; i++) {
    const Packet packet = packet_of(x[i], logits[i], TAG, flags);
    found[i] = packet.node(), labels[i] = packet.logit();
    owners[i] = packet.has(OWNER), ignored[i] = packet.has(IGNORED);
  }
}
void no_packets(Node* found, int n) {
  for (int i = 0; i < n; i++) found[i] = packet_of(nothing(), 0, 0, 0).node();
}
// Whether a packet has come whose stores are of this launch, but one that is of another.
int has_come(u32 launch, int other, u32 of_other) {
  Packet packet = packet_of(nothing(), 0, launch, OWNER | IGNORED);
  uint4* stores[] = {&packet.first, &packet.second, &packet.teacher, &packet.beside,
                     &packet.topk,  &packet.tail,   &packet.more};
  if (other >= 0) stores[other]->w = of_other << 2;
  return packet.has_come(launch);
}

// With a softcap: values and slopes. all_near: the logits are said to be near 0.
void values(const float* logits, float* found, int n, float before, int all_near) {
  for (int i = 0; i < n; i++) {
    const Value x = value_and_slope(logits[i], before, all_near);
    found[2 * i] = x.value, found[2 * i + 1] = x.slope;
  }
}

// The numbers that lie in n vectors, pair by pair.
void logits(const uint4* vectors, float* found, int n) {
  for (int i = 0; i < n * PAIRS; i++) {
    const Pair pair = pair_of(vectors[i / PAIRS], i % PAIRS);
    found[2 * i] = pair.even, found[2 * i + 1] = pair.odd;
  }
}

// What is read from the argument.
i64 label(const Params* q, int row) { return label_of(*q, row); }
float scale(const Params* q, int row) { return scale_of(*q, row); }
int leaf_begin(const Params* q, int leaf) { return begin_of_leaf(*q, leaf); }
int upstream(const Params* q, float* value) {
  const Upstream found = foreseen(*q);
  *value = found.value;
  return found.is_written;
}
}
