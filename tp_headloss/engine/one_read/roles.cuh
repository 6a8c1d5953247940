// The warps' roles, and what they share: who may write what, when, and what makes others see it.
//
// A program per multiprocessor stays and takes items, pieces of rows, in order. Each item lies in a
// slot of a ring in shared memory, while the roles follow each other; a slot has five barriers, and
// two more beside a mixture:
//   role   what it does                                                           what it ends
//   load   claims the next item once a slot is free, and copies the logits in     full
//   sum    maximum and sum of exponentials of leaves, the label left out, and     stat
//          of a top-K teacher's entries, which it puts back
//   post   joins the nodes, looks for the argmax, sends a packet to every rank    ready, with merge
//   merge  waits for all packets of the row, joins them, stores statistics        ready
//   grad   writes gradients over the logits                                       done
//   store  copies them out                                                        free
// Beside a mixture there is a second round. Post, and merge once it has the first packets and knows
// what makes probabilities of the row's logits, end `known` before they go on; then
//   mix    sums leaves with these, the label among them                           mixed
//   tell   joins the sums, and sends a second packet to every rank                ready, with merge
// and merge waits for these packets of the row.
//
// Invariants. The code names by its number what a barrier, a fence or a __syncwarp() keeps, and
// `tests/helpers/one_read_model.py` and `one_read_ring.py` assert what can be seen without a GPU.
//   I1  Start. Barriers are initialised, and every thread has the launch's number, before any role
//       begins.
//   I2  Claims. A program claims items in order, one when a slot is free for it: an item that is
//       waited for is claimed by a program that runs.
//   I3  Items. Only load writes item[slot], from free to full. Others read it after full, or after
//       a barrier that follows full.
//   I4  Logits. A slot's bytes belong to the copy in from free to full; to the sum warps, each in
//       its own leaf, from full to stat; to nobody who writes from stat to ready; to the grad
//       warps, each in its own columns, from ready to done; to the copy out from done to free.
//   I5  Nodes. The sum warps write node[slot], logit[slot] and teacher_logit[slot] before stat;
//       post and merge read them after it, and before they end ready. With a second round, post
//       does so before it ends known; from known to mixed the mix warps write to the same place,
//       which tell reads after it, and before it ends ready.
//   I6  Turns. Phases of stat end in the order of the items. A thread that waits knows a phase by
//       its parity alone, and so is never two phases behind.
//   I7  Packets. A packet is whole and needs no fence: each of its 16-byte stores carries the
//       launch's number. It orders no shared memory: that merge has it does not tell that post has
//       read the slot, which post says by its part of ready.
//   I8  Halves. Launches of one memory write its halves in turn. A rank that writes a half again
//       has ended the launch between, so its peers have begun that one, and have ended the launch
//       whose packets are overwritten.
//   I9  Factors. Merge writes factor[slot] before ready, after it has waited for stat itself: a
//       packet orders no shared memory, and the grad warps write over what the sum warps read.
//       With a second round, it writes there before known, and again, over what the mix warps
//       read, after mixed.
//   I10 Gradients. Every thread that writes gradients fences them for the copy out before done.
//   I11 Free. A slot is free when the copy out has read it.
//   I12 Ends. Load puts MERGE ends after the last item, one for each merge warp. Nobody frees them,
//       so that there are at least MERGE slots.
//   I13 Count. The grad warps write counted[] before the merge warps read it.
//   I14 The last program. A program's statistics are in global memory before it counts itself as
//       done. Who is last sees them all, writes the loss, and alone prepares the next launch;
//       `node` holds sums over tokens then.
//   I15 Failure. After a timeout all programs of the rank stop waiting, and store NaN: a packet
//       without the launch's number has no label.
#pragma once
#include "shared.cuh"
#include "tokens.cuh"

constexpr u64 STUCK = 4000000000000;  // ns, longer than any timeout: a bug ends, too

// What every role of a program knows.
struct Program {
  Shared& s;
  unsigned char* ring;
  int items;      // of the launch
  int all;        // packets of a row
  u32 tag;        // of this launch's packets
  i64 half;       // where these begin
  bool by_count;  // the loss is divided by the number of valid tokens, or their weights
  int warp, lane;
  int slot;   // where the role is in the ring
  u32 phase;  // the parity of its lap

  DEVICE void advance(const Params& q) {
    if (++slot == q.slots) slot = 0, phase ^= 1;
  }
  DEVICE Bits* columns(const Params& q) const { return (Bits*)(ring + slot * q.slot_bytes); }
  // The teacher's logits lie in a slot after the student's.
  DEVICE TeacherBits* teacher_columns(const Params& q) const {
    const int bytes_of_own = q.slot_bytes / (1 + TEACHER_VECTORS);
    return (TeacherBits*)(ring + slot * q.slot_bytes + bytes_of_own);
  }
  DEVICE Place place(const Params& q) const {
    return {shared_address(columns(q)), shared_address(teacher_columns(q))};
  }
  DEVICE volatile u32* failure(const Params& q) const { return (volatile u32*)q.control + 3; }
  DEVICE i64 packet_of(int row) const { return half + (i64)row * all * WORDS; }
};

DEVICE void wait(u64* barrier, u32 phase) {
  u64 since = 0;
  for (u32 i = 1;; i++) {
    if (mbarrier_try_wait_parity(barrier, phase)) return;
    if (i % 65536) continue;
    if (!since) {
      since = globaltimer();
    } else if (globaltimer() - since > STUCK) {
      __trap();
    }
  }
}
DEVICE void arrive(u64* barrier) { mbarrier_arrive(barrier); }
DEVICE void counted_arrive() { bar_arrive<1, MERGE + GRAD>(); }
DEVICE void counted_wait() { bar_sync<1, MERGE + GRAD>(); }
DEVICE void meet() { bar_sync<2, LAST>(); }

// -- load -----------------------------------------------------------------------------------------

DEVICE void load(const Params& q, Program& p) {
  Shared& s = p.s;
  const u64 policy = createpolicy_evict_last();  // 1 % faster
  if (p.lane) return;
  for (int ends = 0; ends < MERGE; p.advance(q)) {
    wait(&s.free[p.slot], p.phase ^ 1);  // I2, I3, I4
    const u32 claimed = ends ? p.items : atomicAdd(q.control + 2, 1u);
    if (claimed >= p.items) {
      s.item[p.slot].row = -1;
      ends++;
      arrive(&s.full[p.slot]);  // I3, I12
      continue;
    }
    const int row = claimed / q.pieces, piece = claimed - row * q.pieces;
    const int whole = q.width / COLUMNS;
    const int first = min(begin_of_leaf(q, piece * q.leaves), whole);
    const int vectors = min(begin_of_leaf(q, (piece + 1) * q.leaves), whole) - first;
    const int valid = min(max(q.valid_width - COLUMNS * first, 0), COLUMNS * vectors);
    // of a row whose item may be the next
    const i64 soon = min(row + (int)gridDim.x / q.pieces, q.rows - 1);
    prefetch_l1((const char*)q.labels + (soon << (q.wide_labels ? 3 : 2)));
    if (q.temperatures) prefetch_l1(q.temperatures + soon);
    if constexpr (HAS_ENTRIES) {  // of this one, before its logits are here
      for (int k = 0; k < q.n_entries; k += 32) {
        prefetch_l1(q.entries + (i64)row * q.n_entries + k);
        prefetch_l1(q.entry_log_probs + (i64)row * q.n_entries + k);
      }
    }
    const i64 first_column = (i64)COLUMNS * first;
    const i64 label = label_of(q, row), place = label - q.start - first_column;
    const bool ignored = label == q.ignore_index, is_here = place >= 0 && place < valid;
    const int target = ignored ? IGNORED_TOKEN : is_here ? (int)place : NOT_HERE;
    s.item[p.slot] = {row, piece, vectors, valid, target, scale_of(q, row)};
    if (ignored || vectors == 0) {
      arrive(&s.full[p.slot]);  // I3
      continue;
    }
    const int bytes = vectors * 16, bytes_of_teacher = HAS_TEACHER ? TEACHER_VECTORS * bytes : 0;
    mbarrier_arrive_expect_tx(&s.full[p.slot], bytes + bytes_of_teacher);  // I3, I4
    const Place to = p.place(q);
    const Bits* from = q.logits + (i64)row * q.stride + first_column;
    cp_async_bulk_load(to.own, from, bytes, &s.full[p.slot], policy);
    if constexpr (HAS_TEACHER) {
      const TeacherBits* teacher = q.teacher + (i64)row * q.teacher_stride + first_column;
      cp_async_bulk_load(to.teacher, teacher, bytes_of_teacher, &s.full[p.slot], policy);
    }
  }
}

// -- sum ------------------------------------------------------------------------------------------

// A top-K teacher's entries in a leaf: make them -inf before the leaf is summed, and what they were
// after it, because the grad warps and the argmax read them. Lane 0 puts all of them back: it is
// the one that arrives at stat, and nothing else orders what another lane writes.
DEVICE void leave_out(const LaneEntries& x, Bits* columns) {
  each_listed([&](int k) {
    if (x.column[k] != NOT_HERE) columns[x.column[k]] = (Bits)LOWEST<Bits>;
  });
}
DEVICE void put_back(const LaneEntries& x, Bits* columns, int lane) {
  each_listed([&](int k) {
    u32 left = __ballot_sync(~0u, x.column[k] != NOT_HERE);
    for (; left; left &= left - 1) {
      const int lane_of = __ffs(left) - 1;
      const int column = __shfl_sync(~0u, x.column[k], lane_of);
      const u32 logit = __shfl_sync(~0u, (u32)x.logit[k], lane_of);
      if (lane == 0) columns[column] = (Bits)logit;
    }
  });
}

// The vectors of an item from `begin` to `end`.
struct Span {
  int begin, end;
  DEVICE bool has(int column) const { return column >= COLUMNS * begin && column < COLUMNS * end; }
};
DEVICE Span span_of_leaf(const Params& q, const Item& item, int leaf_of_item) {
  const int first = item.piece * q.leaves, from = begin_of_leaf(q, first);
  const int begin = begin_of_leaf(q, first + leaf_of_item) - from;
  const int end = begin_of_leaf(q, first + leaf_of_item + 1) - from;
  return {min(begin, item.vectors), min(end, item.vectors)};
}

// The node of one of an item's leaves. Its label and gaps are made -inf before, and so are a top-K
// teacher's entries, whose node joins it after; a teacher's sums have the label again after.
DEVICE Node sum_leaf(const Params& q, const Program& p, const Item& item, int leaf_of_item) {
  const Span span = span_of_leaf(q, item, leaf_of_item);
  const int begin = span.begin, end = span.end;
  const bool has_label = span.has(item.target);
  const Scales scales = scales_of(q, item);
  Bits* columns = p.columns(q);
  TeacherBits* teacher = p.teacher_columns(q);
  if constexpr (HAS_SOFTCAP) lift(shared_address(columns), begin, end, p.lane);
  LaneEntries entries;
  if constexpr (HAS_ENTRIES) {
    entries = entries_in(q, item, listed(q, item.row, p.lane), begin, end);
    read_logits(entries, columns);
    leave_out(entries, columns);
  }
  if (p.lane == 0 && has_label) {
    p.s.logit[p.slot] = columns[item.target];
    columns[item.target] = (Bits)LOWEST<Bits>;
    if constexpr (HAS_TEACHER) {
      p.s.teacher_logit[p.slot] = teacher[item.target];
      teacher[item.target] = (TeacherBits)LOWEST<TeacherBits>;
    }
  }
  for (int c = max(item.valid, COLUMNS * begin) + p.lane; c < COLUMNS * end; c += 32) {
    columns[c] = (Bits)LOWEST<Bits>;
    if constexpr (HAS_TEACHER) teacher[c] = (TeacherBits)LOWEST<TeacherBits>;
  }
  __syncwarp();  // I4: other lanes read these columns
  Node x = leaf(p.place(q), begin, end, p.lane, q.before, scales);
  if constexpr (HAS_TEACHER) {
    if (has_label) {
      const float value = value_of(logit_of(p.s.logit[p.slot]), q.before);
      x = join(x, Divergences::label(value, logit_of(p.s.teacher_logit[p.slot]), scales), scales);
    }
  }
  if constexpr (HAS_ENTRIES) {
    x.tail_max = x.max, x.tail_sum = x.sum;
    x = join(x, node_of_entries(q, entries, scales), scales);
    __syncwarp();  // I4: other lanes have read the leaf
    put_back(entries, columns, p.lane);
  }
  return x;
}

DEVICE void sum(const Params& q, Program& p) {
  Shared& s = p.s;
  const int w = (p.warp - FIRST_SUM) % SUM, team = (p.warp - FIRST_SUM) / SUM;
  for (int n = 0, ends = 0; ends < MERGE / TEAMS; p.advance(q), n++) {
    if (n % TEAMS != team) continue;
    wait(&s.full[p.slot], p.phase);  // I3, I4
    const Item item = s.item[p.slot];
    Node x = nothing();
    if (w < q.leaves && item.row >= 0 && !item.ignored()) {
      x = sum_leaf(q, p, item, w);
      x.index = w;
    }
    ends += item.row < 0;
    __syncwarp();  // I4: all lanes have read their columns
    if (p.lane == 0) {
      if (item.row >= 0) s.node[p.slot][w].keep(x);  // nobody reads an end's
      if (n) wait(&s.stat[(p.slot ? p.slot : q.slots) - 1], p.slot ? p.phase : p.phase ^ 1);  // I6
      arrive(&s.stat[p.slot]);  // I4, I5, I6
    }
  }
}

// -- post -----------------------------------------------------------------------------------------

// The first id of the maximum in the first leaf that has it.
DEVICE int first_index(const Params& q, const Program& p, const Item& item, const Node& x) {
  const uint4* vectors = (const uint4*)p.columns(q);
  const int from = begin_of_leaf(q, item.piece * q.leaves);
  const int leaf = item.piece * q.leaves + x.index;
  const int end = min(begin_of_leaf(q, leaf + 1) - from, item.vectors);
  int v = end;
  for (int k = end - 1 - p.lane; k >= begin_of_leaf(q, leaf) - from; k -= 32) {
    if (value_of(larger<Bits>(largest<Bits>(vectors[k])), q.before) == x.max) v = k;
  }
  v = __reduce_min_sync(~0u, v);
  const Bits* columns = (const Bits*)(vectors + v);
  const float value = value_of(logit_of(columns[p.lane % COLUMNS]), q.before);
  const u32 found = __ballot_sync(~0u, v < end && value == x.max);
  return found ? (int)q.start + COLUMNS * (from + v) + __ffs(found) - 1 : NO_INDEX;
}

// Where a rank's packet of an item begins, in the memory of the rank that a lane writes to.
DEVICE uint4* own_packet(const Params& q, const Program& p, const Item& item) {
  uint4* to = (uint4*)q.packets[p.lane % RANKS] + p.packet_of(item.row);
  return to + q.rank * q.pieces + item.piece;
}
DEVICE void posted(Shared& s, int slot) {
  if constexpr (HAS_MIXTURE) {
    arrive(&s.of.second.known[slot]);  // I4, I5, I7, I12
  } else {
    arrive(&s.ready[slot]);  // I4, I5, I7, I12
  }
}
DEVICE void post(const Params& q, Program& p) {
  Shared& s = p.s;
  for (int n = 0;; p.advance(q), n++) {
    if (n % POST != p.warp - FIRST_POST) continue;
    wait(&s.stat[p.slot], p.phase);  // I3, I5
    const Item item = s.item[p.slot];
    if (item.row < 0) {
      if (p.lane == 0) posted(s, p.slot);  // I12
      break;
    }
    Node x = join_lanes(s.node[p.slot][p.lane % SUM].kept(), SUM, scales_of(q, item));
    if (WANTS_ARGMAX && !item.ignored()) {
      wait(&s.full[p.slot], p.phase);  // I4: what the copy in wrote
      x.index = first_index(q, p, item, x);
    }
    Bits logit = 0;
    u32 flags = item.ignored() ? IGNORED : 0;
    if (item.target >= 0) logit = s.logit[p.slot], flags = OWNER;
    uint4* to = own_packet(q, p, item);
    Packet packet = packet_of(x, logit, p.tag, flags);
    if (p.lane < q.ranks) {
      st_relaxed_sys_b128(to, packet.first);
      packet.each_store([&](int k, uint4& store) { st_relaxed_sys_b128(to + k * p.all, store); });
    }
    __syncwarp();  // I5, I7: all lanes have read the slot
    if (p.lane == 0) posted(s, p.slot);  // I4, I5, I7
  }
}

// -- merge ----------------------------------------------------------------------------------------

// Look until look() is true on all lanes; false after a timeout.
template <class Look> DEVICE bool receive(const Params& q, Program& p, const Look& look) {
  u64 since = 0;
  for (int i = 1;; i++) {
    if (__all_sync(~0u, look())) return true;  // I7, I8
    __nanosleep(1000);  // each look costs the copies bandwidth, 1 to 2 % on an H200
    if (i % 256) continue;
    const u64 time = globaltimer();
    if (!since) since = time;
    if (__any_sync(~0u, time - since > q.timeout || *p.failure(q))) {  // I15
      if (p.lane == 0) *p.failure(q) = 1, *(volatile u32*)q.failed = 1;
      return false;
    }
  }
}
// A lane's packet of a row.
DEVICE const uint4* packet_at(const Params& q, const Program& p, int row) {
  return (const uint4*)q.packets[q.rank] + p.packet_of(row) + p.lane;
}
DEVICE Packet receive_first(const Params& q, Program& p, int row) {
  const uint4* from = packet_at(q, p, row);
  Packet packet = packet_of(nothing(), 0, 0, 0);
  const bool come = receive(q, p, [&] {
    if (p.lane >= p.all) return true;
    packet.first = ld_relaxed_sys_b128(from);
    packet.each_store([&](int k, uint4& store) { store = ld_relaxed_sys_b128(from + k * p.all); });
    return packet.has_come(p.tag);
  });
  if (!come) packet.first.w = 0;
  return packet;
}
// The second round's sums of a row, on all lanes; false after a timeout.
DEVICE bool receive_second(const Params& q, Program& p, int row, Mixed& sums) {
  const uint4* from = packet_at(q, p, row) + OF_MIXTURE * p.all;
  uint4 store = {};
  const bool come = receive(q, p, [&] {
    if (p.lane >= p.all) return true;
    store = ld_relaxed_sys_b128(from);
    return store.w >> 2 == p.tag;
  });
  auto number = [](u32 bits) { return __uint_as_float(bits); };
  sums = add_lanes_of({number(store.x), number(store.y), number(store.z)}, p.all);
  return come;
}

// A row as all its packets tell it, on all lanes.
struct Joined {
  Node node;
  Value label;
  u32 own, ignore;  // lanes whose packet has the label, and whose token is ignored
  int count;        // logits above -inf of the item
};
DEVICE Joined joined_of(const Params& q, const Program& p, const Item& item, const Packet& packet,
                        Scales scales) {
  const int own_place = (int)q.rank * q.pieces + item.piece;
  const int count = __shfl_sync(~0u, packet.count(), own_place);
  const Node x = join_lanes(packet.node(), p.all, scales);
  const u32 own = __ballot_sync(~0u, p.lane < p.all && packet.has(OWNER));
  const u32 ignore = __ballot_sync(~0u, p.lane < p.all && packet.has(IGNORED));
  const float raw = __shfl_sync(~0u, packet.logit(), own ? __ffs(own) - 1 : 0);
  return {x, value_and_slope(raw, q.before), own, ignore, count};
}

// A row function's inputs of a row.
struct Given {
  float x[GIVENS];
};
// given: one of them on each lane.
DEVICE Given spread(float given) {
  Given all = {};
  for (int k = 0; k < GIVEN; k++) all.x[k] = __shfl_sync(~0u, given, k);
  return all;
}
// A row function's result for a row.
DEVICE Row row_of(const Params& q, const Solved& r, const Given& given) {
  float known[KNOWN + GIVEN + TERMS] = {(float)r.lse, (float)r.log_prob, (float)r.entropy,
                                        (float)r.total, (float)r.forward_kl, (float)r.reverse_kl,
                                        r.topk_forward_kl, r.vocab_forward_kl,
                                        r.log_outside, r.mixture, r.mixture, r.overlap,
                                        (float)r.mass, r.teacher_mass,
                                        (float)r.teacher_entropy};
  for (int k = 0; k < GIVEN; k++) known[KNOWN + k] = given.x[k];
  for (int k = 0; k < TERMS; k++) known[KNOWN + GIVEN + k] = q.coefficients[k];
  return row_function(known);
}

// The divisor of the loss, for the gradient.
DEVICE double divisor_of(const Params& q, Program& p) {
  double divisor = q.denominator ? *q.denominator : q.number;
  if (p.by_count) {
    counted_wait();  // I13
    for (int k = 0; k < GRAD; k++) divisor += p.s.counted[k];
  }
  return divisor;
}

// Whether the merge of this item stores its row's statistics, which takes longer than all else that
// it does: one of the row's pieces, not always the same, so that each program has its share.
DEVICE bool is_finished_by(const Params& q, const Item& item) {
  return item.piece == (int)((item.row * 0x9e3779b1u >> 16) % q.pieces);
}

// A row's factors in shared memory.
DEVICE AllFactors factors_in(const Shared& s, int slot) {
  AllFactors f = {s.factor[slot]};
  if constexpr (HAS_TEACHER) f.teacher = s.teacher_factor[slot];
  if constexpr (HAS_MIXTURE) f.mixture = s.of.second.factor[slot];
  return f;
}
DEVICE void put_factors(Shared& s, int slot, const AllFactors& f) {
  s.factor[slot] = f.own;
  if constexpr (HAS_TEACHER) s.teacher_factor[slot] = f.teacher;
  if constexpr (HAS_ENTRIES) s.of.entry_factor[slot] = f.entry;
  if constexpr (HAS_MIXTURE) s.of.second.factor[slot] = f.mixture;
}

DEVICE void merge(const Params& q, Program& p) {
  Shared& s = p.s;
  const Upstream upstream = foreseen(q);
  const double divisor = divisor_of(q, p);
  const double over_divisor = divisor == 0.0 ? 0.0 : upstream.value * (1.0 / divisor);
  if (blockIdx.x == 0 && p.warp == FIRST_MERGE && p.lane == 0) {
    q.inverse[1] = upstream.is_written ? upstream.value : NONE;
  }
  for (int n = 0;; p.advance(q), n++) {
    if (n % MERGE != p.warp - FIRST_MERGE) continue;
    wait(&s.full[p.slot], p.phase);  // I3
    const Item item = s.item[p.slot];
    if (item.row < 0) {
      if (p.lane == 0) {
        if constexpr (HAS_MIXTURE) arrive(&s.of.second.known[p.slot]);  // I12
        arrive(&s.ready[p.slot]);                                       // I12
      }
      break;
    }
    // while packets are under way
    const float given = p.lane < GIVEN ? q.given[min(p.lane, GIVENS - 1)][item.row] : 0.f;
    float log_tau = -INF;
    if constexpr (HAS_ENTRIES) {
      log_tau = log_tau_of_label(listed(q, item.row, p.lane), label_of(q, item.row));
    }
    const Packet packet = receive_first(q, p, item.row);
    if constexpr (!HAS_MIXTURE) wait(&s.stat[p.slot], p.phase);  // I9
    const Scales scales = scales_of(q, item);
    Joined joined = joined_of(q, p, item, packet, scales);
    Node& x = joined.node;
    const Value label = joined.label;
    const float logit = label.value;
    if constexpr (HAS_MIXTURE) {
      const RowBases bases = bases_of(x, softmax_of(x, logit, scales));
      if (p.lane == 0) {
        put_factors(s, p.slot, first_factors(bases, scales.beside, q.beta));
        arrive(&s.of.second.known[p.slot]);  // I4, I9
      }
      Mixed sums;
      if (!receive_second(q, p, item.row, sums)) joined.own = 0;
      wait(&s.of.second.mixed[p.slot], p.phase);  // I9
      x = Mixture::with_sums(x, sums, bases.over_p, bases.over_q, q.beta);
    }
    if (HAS_TEACHER && item.target >= 0) x.teacher_logit = logit_of(s.teacher_logit[p.slot]);
    if constexpr (HAS_ENTRIES) x = TopK::with_label(x, logit, log_tau, scales);
    const Given inputs = spread(given);
    Row row = {};
    if constexpr (HAS_ROWS) row = row_of(q, solve(x, logit, scales), inputs);
    __syncwarp();  // I3, I5: all lanes have read the slot
    if (p.lane == 0) {
      const int owners = owners_of(joined.own, joined.ignore);
      AllFactors f = factors_of(q, item.row, x, label, scales, owners, over_divisor, row);
      f.own.is_plain = joined.count == item.valid - (item.target >= 0);
      put_factors(s, p.slot, f);
      arrive(&s.ready[p.slot]);  // I4, I9
      if (is_finished_by(q, item)) {
        // A row function has solved it, of which the compiler keeps what derivatives need: the rest
        // waits until here, and the gradient does not wait for it.
        const Solved solved = solve(HAS_ROWS ? again(x) : x, logit, scales);
        if constexpr (HAS_ROWS) {
          const Row values = row_of(q, solved, inputs);
          memcpy(row.value, values.value, sizeof(row.value));
        }
        finish(q, item, x, logit, owners, solved, row);
      }
    }
    __syncwarp();  // none: the lanes converge
  }
}

// -- mix ------------------------------------------------------------------------------------------

// The sums of one of an item's leaves, whose label is added last.
DEVICE Mixed mix_leaf(const Params& q, const Program& p, const Item& item, int leaf_of_item) {
  const Span span = span_of_leaf(q, item, leaf_of_item);
  const Place at = p.place(q);
  const AllFactors f = factors_in(p.s, p.slot);
  Mixed even = {}, odd = {};
  auto add = [&](Mixed& sums, float logit, float teacher, bool all_near) {
    const float value = value_and_slope(logit, q.before, all_near).value;
    Mixture::add_column(sums, powers_of(f, value, teacher), f.mixture);
  };
  each_vector(at.own, span.begin, span.end, p.lane, q.before,
              [&](int v, const uint4& r, bool all_near) {
    const TeacherVector t = of_teacher(at, v);
#pragma unroll
    for (int k = 0; k < PAIRS; k++) {
      const Pair own = pair_of(r, k), teacher = t.pair(k);
      add(even, own.even, teacher.even, all_near);
      add(odd, own.odd, teacher.odd, all_near);
    }
  });
  if (p.lane == 0 && span.has(item.target)) {
    add(even, logit_of(p.s.logit[p.slot]), logit_of(p.s.teacher_logit[p.slot]), false);
  }
  Mixed sums = {add_lanes(even.value + odd.value), add_lanes(even.mean + odd.mean)};
  if constexpr (WANTS_OVERLAP) sums.overlap = add_lanes(even.overlap + odd.overlap);
  return Mixture::ended(sums, f.mixture);
}

DEVICE void mix(const Params& q, Program& p) {
  Shared& s = p.s;
  const int w = p.warp - FIRST_MIX;
  for (;; p.advance(q)) {
    wait(&s.of.second.known[p.slot], p.phase);  // I3, I4, I5, I9
    const Item item = s.item[p.slot];
    Mixed x = {};
    if (w < q.leaves && item.row >= 0 && !item.ignored()) x = mix_leaf(q, p, item, w);
    __syncwarp();  // I4, I9: all lanes have read the slot
    if (p.lane == 0) {
      if (item.row >= 0) s.node[p.slot][w].keep(x);  // nobody reads an end's
      arrive(&s.of.second.mixed[p.slot]);  // I4, I5, I9
    }
    if (item.row < 0) break;
  }
}

// -- tell -----------------------------------------------------------------------------------------

DEVICE void tell(const Params& q, Program& p) {
  Shared& s = p.s;
  for (;; p.advance(q)) {
    wait(&s.of.second.mixed[p.slot], p.phase);  // I3, I5
    const Item item = s.item[p.slot];
    if (item.row < 0) {
      if (p.lane == 0) arrive(&s.ready[p.slot]);  // I12
      break;
    }
    const Mixed sums = add_lanes_of(s.node[p.slot][p.lane % SUM].kept_mixed(), SUM);
    if (p.lane < q.ranks) {
      uint4* to = own_packet(q, p, item) + OF_MIXTURE * p.all;
      st_relaxed_sys_b128(to, store_of(sums, p.tag));
    }
    __syncwarp();  // I5, I7: all lanes have read the slot
    if (p.lane == 0) arrive(&s.ready[p.slot]);  // I4, I5, I7
  }
}

// -- grad -----------------------------------------------------------------------------------------

DEVICE void write_entries(const Params& q, const EntryFactors& f, const LaneEntries& x,
                          Bits* columns) {
  each_listed([&](int k) {
    if (x.column[k] == NOT_HERE) return;
    const float gradient = gradient_of_entry(f, logit_of(x.logit[k]), x.log_tau[k], q.before);
    columns[x.column[k]] = bits_of(gradient);
  });
}

// A grad warp's part of an item.
DEVICE Span part_of(const Item& item, int w) {
  return {item.vectors * w / GRAD, item.vectors * (w + 1) / GRAD};
}
// Write the gradient over a part of an item, in which these entries of a top-K teacher are.
DEVICE void write_gradient(const Params& q, const Program& p, const Item& item, Span part,
                           LaneEntries entries) {
  const int begin = part.begin, end = part.end;
  Bits* columns = p.columns(q);
  const Place at = p.place(q);
  const AllFactors f = factors_in(p.s, p.slot);
  const bool usual = is_usual(f);
  auto gradient = [&](const uint4& r, const TeacherVector& t, bool is_usual, bool all_near) {
    Pair found[PAIRS];
#pragma unroll
    for (int k = 0; k < PAIRS; k++) {
      const Pair x = pair_of(r, k), u = t.pair(k);
      found[k] = {gradient_of(f, x.even, u.even, q.before, is_usual, all_near),
                  gradient_of(f, x.odd, u.odd, q.before, is_usual, all_near)};
    }
    return vector_of(found);
  };
  if (!item.ignored()) {
    if constexpr (HAS_ENTRIES) {
      read_logits(entries, columns);
      __syncwarp();  // I4: before other lanes write there
    }
    each_vector(at.own, begin, end, p.lane, q.before, [&](int v, const uint4& r, bool all_near) {
      const TeacherVector t = of_teacher(at, v);
      const uint4 x =
          usual ? gradient(r, t, true, all_near) : gradient(r, t, false, all_near);
      st_shared_v4(at.own + v * 16, x);
    });
  } else {
    for (int v = begin + p.lane; v < end; v += 32) {
      st_shared_v4(at.own + v * 16, make_uint4(0, 0, 0, 0));
    }
  }
  __syncwarp();  // I4: other lanes wrote these columns
  for (int c = max(item.valid, COLUMNS * begin) + p.lane; c < COLUMNS * end; c += 32) {
    columns[c] = 0;
  }
  if constexpr (HAS_ENTRIES) {
    if (!item.ignored()) write_entries(q, p.s.of.entry_factor[p.slot], entries, columns);
  }
  if (p.lane == 0 && part.has(item.target)) columns[item.target] = bits_of(f.own.label);
}

// Write the gradient of a row's columns after those that are read, by all grad warps.
DEVICE void write_padding(const Params& q, int row, int thread) {
  uint4* to = (uint4*)(q.gradient + (i64)row * q.gradient_stride + q.width);
  for (int v = thread; v < q.padding; v += GRAD * 32) to[v] = make_uint4(0, 0, 0, 0);
}

DEVICE void grad(const Params& q, Program& p) {
  Shared& s = p.s;
  const int w = p.warp - FIRST_GRAD;
  const bool is_written = foreseen(q).is_written;
  if (p.by_count) {
    count(q, s.counted, w, p.lane);
    __threadfence_block();  // I13
    counted_arrive();       // I13
  }
  for (;; p.advance(q)) {
    LaneEntries entries;
    if constexpr (HAS_ENTRIES) {  // while others make the factors
      wait(&s.full[p.slot], p.phase);  // I3
      const Item next = s.item[p.slot];
      const Span part = part_of(next, w);
      const Listed list = listed(q, max(next.row, 0), p.lane);
      entries = entries_in(q, next, list, part.begin, part.end);
    }
    wait(&s.ready[p.slot], p.phase);  // I3, I4, I9
    const Item item = s.item[p.slot];
    if (item.row < 0) {
      if (p.lane == 0) arrive(&s.done[p.slot]);  // I12
      break;
    }
    if (is_written) {
      write_gradient(q, p, item, part_of(item, w), entries);
      if (item.piece == q.pieces - 1) write_padding(q, item.row, w * 32 + p.lane);
    }
    fence_proxy_async();  // I4, I10: of what the sum warps wrote, too, for the next copy in
    __syncwarp();         // I3, I10: of all lanes
    if (p.lane == 0) arrive(&s.done[p.slot]);  // I4, I10
  }
}

// -- store ----------------------------------------------------------------------------------------

DEVICE void store(const Params& q, Program& p) {
  Shared& s = p.s;
  const bool is_written = foreseen(q).is_written;
  if (p.lane) return;
  for (;; p.advance(q)) {
    wait(&s.done[p.slot], p.phase);  // I3, I4
    const Item item = s.item[p.slot];
    if (item.row < 0) break;  // I12
    Bits* to = q.gradient + (i64)item.row * q.gradient_stride;
    to += (i64)COLUMNS * begin_of_leaf(q, item.piece * q.leaves);
    if (item.vectors && is_written) cp_async_bulk_store(to, p.columns(q), item.vectors * 16);
    cp_async_bulk_wait_read();  // I11
    arrive(&s.free[p.slot]);      // I2, I11
  }
}

// -- the last program -----------------------------------------------------------------------------

// Whether this program is the last one of the launch, by LAST warps of each.
DEVICE bool is_last_program(const Params& q, Program& p, u32 epoch) {
  meet();  // I14: this program's statistics are stored
  const bool is_first = p.warp == 1 && p.lane == 0;
  if (is_first) {
    __threadfence();  // I14
    p.s.is_last = atomicAdd(q.control + 1, 1u) == gridDim.x - 1;
  }
  meet();  // I14
  if (!p.s.is_last) return false;
  __threadfence();  // I14: sees other programs' statistics
  if (is_first) {
    q.control[1] = q.control[2] = 0, *(volatile u32*)q.control = epoch;  // I14
  }
  return true;
}

// Write the loss and its sums over tokens, added up in one order, by LAST warps; as in
// `sums_triton`.
DEVICE void reduce(const Params& q, Program& p) {
  const int warp = p.warp - 1, lane = p.lane;
  double(*part)[VALUES + 1] = (double(*)[VALUES + 1]) p.s.node;
  static_assert(sizeof(p.s.node) >= LAST * sizeof(*part));
  double total[VALUES + 1] = {}, loss = 0.0;
  add_tokens(q, total, warp, lane);
#pragma unroll
  for (int k = 0; k <= VALUES; k++) {
    if (k < q.n_values || k == VALUES) {
      total[k] = add_lanes(total[k]);
      if (lane == 0) part[warp][k] = total[k];
    }
  }
  meet();  // I14
  meet();  // I14: with one of them alone, racecheck reports the loads below
  if (warp) return;
#pragma unroll
  for (int k = 0; k <= VALUES; k++) {
    if (k < q.n_values || k == VALUES) {
      total[k] = add_lanes(lane < LAST ? part[lane][k] : 0.0);
      if (k < VALUES && q.negatives >> k & 1) total[k] = -total[k];
      if (lane == 0) q.sums[min(k, q.n_values)] = total[k];
      if (k < VALUES) loss += q.coefficients[k] * total[k];
    }
  }
  const double given =
      p.by_count ? total[VALUES] : q.denominator ? *q.denominator : q.number;
  const double divisor = given == 0.0 ? INF : given;
  if (lane == 0) {
    *q.inverse = 1.0 / divisor;
    *q.loss = loss / divisor;
  }
}
