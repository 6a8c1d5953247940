// The arithmetic of a row for `tests/engine/test_one_read_source.py`.
#include "ptx.cuh"

#include "node.cuh"

extern "C" {

int size_of_node() { return sizeof(Node); }

void nothings(Node* x, int n) {
  for (int i = 0; i < n; i++) x[i] = nothing();
}

void joins(const Node* a, const Node* b, Node* x, int n, float scale) {
  for (int i = 0; i < n; i++) x[i] = join(a[i], b[i], scale);
}

// found: [n, 5] lse, log_prob, entropy, total, mass
void solves(const Node* x, const float* logits, double* found, int n, float scale) {
  for (int i = 0; i < n; i++, found += 5) {
    const Solved r = solve(x[i], logits[i], scale);
    found[0] = r.lse, found[1] = r.log_prob, found[2] = r.entropy;
    found[3] = r.total, found[4] = r.mass;
  }
}

// The gradient of by[0] lse + by[1] log_prob + by[2] entropy + by[3] total by a row's logits, and, last, by
// the label's.
void gradients(const Node* x, float logit, const float* by, const float* z, float* found, int n,
               float scale) {
  Params q = {};
  q.lse_factor = by[0], q.log_prob_factor = by[1], q.entropy_factor = by[2];
  q.total_factor = by[3];
  q.before = 1.f;
  const Factors f = factors_of(q, 0, *x, {logit, 1.f}, scale, 1, 1.0, Row{});
  for (int i = 0; i < n; i++) found[i] = gradient_of(f, z[i], 1.f, false, true);
  found[n] = f.label;
}

// What a packet carries, back again.
void packets(const Node* x, Node* found, int n) {
  for (int i = 0; i < n; i++) {
    found[i] = Packet{first_store(x[i], 0, 1, 0), second_store(x[i], 1)}.node();
  }
}

// With a softcap: values and slopes. all_near: the logits are said to be near 0.
void values(const float* logits, float* found, int n, float before, int all_near) {
  for (int i = 0; i < n; i++) {
    const Value x = value_and_slope(logits[i], before, all_near);
    found[2 * i] = x.value, found[2 * i + 1] = x.slope;
  }
}

// The numbers whose bits are the upper half of 32 bits.
void highs(const unsigned* bits, float* found, int n) {
  for (int i = 0; i < n; i++) found[i] = high(bits[i]);
}
}
