// What the roles of a program share beside the slots' logits. Nothing here knows a thread, so that
// a host can tell whether it fits.
#pragma once
#include "node.cuh"

// A node in shared memory, where what has to do with a teacher takes room in such calls alone.
struct KeptNode {
  static constexpr int FIRST = WANTS_TEACHER_ENTROPY ? 13 : HAS_BESIDE ? 12 : HAS_TEACHER ? 9 : 6;
  static constexpr int OF_ENTRIES = HAS_ENTRIES ? 6 : 0;
  u32 words[FIRST + OF_ENTRIES];
  DEVICE void keep(const Node& x) {
    memcpy(words, &x, 4 * FIRST);
    if constexpr (HAS_ENTRIES) memcpy(words + FIRST, &x.topk_max, 4 * OF_ENTRIES);
  }
  DEVICE Node kept() const {
    Node x = nothing();
    memcpy(&x, words, 4 * FIRST);
    if constexpr (HAS_ENTRIES) memcpy(&x.topk_max, words + FIRST, 4 * OF_ENTRIES);
    return x;
  }
  // In the second round.
  DEVICE void keep(const Mixed& x) { memcpy(words, &x, sizeof(x)); }
  DEVICE Mixed kept_mixed() const {
    Mixed x;
    memcpy(&x, words, sizeof(x));
    return x;
  }
};
static_assert(sizeof(Node) == 23 * sizeof(u32));
constexpr int ENTRY_SLOTS = HAS_ENTRIES ? SLOTS : 1;
constexpr int TEACHER_SLOTS = HAS_TEACHER ? SLOTS : 1;
constexpr int MIXTURE_SLOTS = HAS_MIXTURE ? SLOTS : 1;

// What calls with a second round have.
struct SecondRound {
  u64 known[MIXTURE_SLOTS], mixed[MIXTURE_SLOTS];
  MixtureFactors factor[MIXTURE_SLOTS];
};
// No call has both.
union EntriesOrRound {
  EntryFactors entry_factor[ENTRY_SLOTS];
  SecondRound second;
};

struct Shared {
  u64 full[SLOTS], stat[SLOTS], ready[SLOTS], done[SLOTS], free[SLOTS];
  Item item[SLOTS];
  __align__(8) KeptNode node[SLOTS][SUM];
  Factors factor[SLOTS];
  TeacherFactors teacher_factor[TEACHER_SLOTS];
  EntriesOrRound of;
  Bits logit[SLOTS];  // the label's
  TeacherBits teacher_logit[TEACHER_SLOTS];
  bool is_last;
  double counted[GRAD];
};
// The slots take the rest of 227 KiB, see `cuts_of`. A number more in a node costs
// SLOTS * SUM * 4 = 320 bytes.
static_assert(sizeof(Shared) <= (HAS_TEACHER || HAS_ENTRIES ? 6144 : 3072));
