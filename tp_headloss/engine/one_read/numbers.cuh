// Types, numbers and flags that every part of the kernel uses.
#pragma once
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define DEVICE __device__ __forceinline__

// What the kernel is compiled with: statistics that a call wants besides lse and log_prob, whether
// a term of its loss is an entropy, whether its logits are fp16 or fp32 instead of bf16 and have a
// softcap, whether the student has another temperature beside a teacher, LISTED=n for a top-K
// teacher of at most 32 n entries, and whether a `row_function` stands before the source.
#ifdef ENTROPY
constexpr bool WANTS_ENTROPY = true;
#else
constexpr bool WANTS_ENTROPY = false;
#endif
#ifdef ARGMAX
constexpr bool WANTS_ARGMAX = true;
#else
constexpr bool WANTS_ARGMAX = false;
#endif
#ifdef TOTAL
constexpr bool WANTS_TOTAL = true;
#else
constexpr bool WANTS_TOTAL = false;
#endif
#ifdef FORWARD_KL
constexpr bool WANTS_FORWARD_KL = true;
#else
constexpr bool WANTS_FORWARD_KL = false;
#endif
#ifdef REVERSE_KL
constexpr bool WANTS_REVERSE_KL = true;
#else
constexpr bool WANTS_REVERSE_KL = false;
#endif
#ifdef TEACHER_ENTROPY
constexpr bool WANTS_TEACHER_ENTROPY = true;
#else
constexpr bool WANTS_TEACHER_ENTROPY = false;
#endif
#ifdef JSD
constexpr bool WANTS_JSD = true;
#else
constexpr bool WANTS_JSD = false;
#endif
#ifdef TOTAL_VARIATION
constexpr bool WANTS_VARIATION = true;
#else
constexpr bool WANTS_VARIATION = false;
#endif
#ifdef OVERLAP
constexpr bool WANTS_OVERLAP = true;
#else
constexpr bool WANTS_OVERLAP = false;
#endif
#ifdef TOPK_FORWARD_KL
constexpr bool WANTS_TOPK_KL = true;
#else
constexpr bool WANTS_TOPK_KL = false;
#endif
#ifdef VOCAB_FORWARD_KL
constexpr bool WANTS_VOCAB_KL = true;
#else
constexpr bool WANTS_VOCAB_KL = false;
#endif
#ifdef TAIL_LOG_MASS
constexpr bool WANTS_TAIL = true;
#else
constexpr bool WANTS_TAIL = false;
#endif
#ifdef TEMPERED
constexpr bool IS_TEMPERED = true;
#else
constexpr bool IS_TEMPERED = false;
#endif
#ifdef ENTROPY_TERM
constexpr bool HAS_ENTROPY_TERM = true;
#else
constexpr bool HAS_ENTROPY_TERM = false;
#endif
#ifdef SOFTCAP
constexpr bool HAS_SOFTCAP = true;
#else
constexpr bool HAS_SOFTCAP = false;
#endif
// Bits: those of a logit, and of a teacher's, which may be fp32 beside 16 bits.
#ifdef FLOAT32
typedef u32 Bits;
#else
typedef u16 Bits;
#endif
#ifdef TEACHER_FLOAT32
typedef u32 TeacherBits;
#else
typedef Bits TeacherBits;
#endif
#ifdef HALF
constexpr bool IS_HALF = true;
#else
constexpr bool IS_HALF = false;
#endif
template <class B> constexpr bool IS_FLOAT32 = sizeof(B) == 4;
// A word of 32 bits holds one logit or two. LOWEST: of -inf each; LOWEST_FINITE, WITHOUT_SIGN: of
// the student's.
template <class B>
constexpr u32 LOWEST = IS_FLOAT32<B> ? 0xff800000u : IS_HALF ? 0xfc00fc00u : 0xff80ff80u;
constexpr u32 LOWEST_FINITE = LOWEST<Bits> - (IS_FLOAT32<Bits> ? 1 : 0x10001);
constexpr u32 WITHOUT_SIGN = IS_FLOAT32<Bits> ? 0x7fffffffu : 0x7fff7fffu;
constexpr int COLUMNS = 16 / sizeof(Bits);  // of a vector of 16 bytes
constexpr int TEACHER_VECTORS = sizeof(TeacherBits) / sizeof(Bits);  // beside each of the student's
// Statistics that a row function has derivatives by, and those that it is given; see `params.py`.
constexpr int SLOPES = 12, KNOWN = 15;
#ifdef ROWS
constexpr bool HAS_ROWS = true;
#else
constexpr bool HAS_ROWS = false;
// A row function's terms and inputs, and its result: values of the terms, and derivatives by lse,
// statistics in the order of `TERMS` in `params.py`. See `rows.py`.
constexpr int TERMS = 0, GIVEN = 0;
struct Row {
  float value[1], by[SLOPES];
};
DEVICE Row row_function(const float*) { return {}; }
#endif

// Whether some of these statistics compare with a teacher, whether some with a top-K teacher, and
// whether one needs a row's probabilities, and so a second round of packets, see `Mixture`.
constexpr bool HAS_MIXTURE = WANTS_JSD || WANTS_VARIATION || WANTS_OVERLAP;
constexpr bool HAS_TEACHER =
    WANTS_FORWARD_KL || WANTS_REVERSE_KL || WANTS_TEACHER_ENTROPY || HAS_MIXTURE;
constexpr bool HAS_BESIDE = WANTS_REVERSE_KL || IS_TEMPERED;
constexpr bool HAS_ENTRIES = WANTS_TOPK_KL || WANTS_VOCAB_KL || WANTS_TAIL;
static_assert(!(WANTS_JSD && (WANTS_VARIATION || WANTS_OVERLAP)));
static_assert(!(HAS_MIXTURE && HAS_ENTRIES));

// Warps of each role, in the order of the roles; the two teams of sum warps take turns. Beside a
// mixture one team is the mix warps, and one post warp is tell.
constexpr int SUM = 8, GRAD = 8, MERGE = 4;
constexpr int TEAMS = HAS_MIXTURE ? 1 : 2;
constexpr int MIX = HAS_MIXTURE ? SUM : 0;
constexpr int POST = HAS_MIXTURE ? 1 : 2;
constexpr int TELL = HAS_MIXTURE ? 1 : 0;
constexpr int FIRST_POST = 1, FIRST_TELL = FIRST_POST + POST, FIRST_MERGE = FIRST_TELL + TELL;
constexpr int FIRST_SUM = FIRST_MERGE + MERGE;
constexpr int FIRST_MIX = FIRST_SUM + TEAMS * SUM, FIRST_GRAD = FIRST_MIX + MIX;
constexpr int STORE = FIRST_GRAD + GRAD, WARPS = STORE + 1;
// Warps that have nothing to do while the last gradients are written: all between load and grad.
constexpr int LAST = FIRST_GRAD - FIRST_POST;

// At most: slots of the ring, ranks, sums over tokens, inputs of a row function, entries of a top-K
// teacher.
constexpr int SLOTS = 10, RANKS = 8, VALUES = 6, GIVENS = 8, ENTRIES = 128;
// Entries that a lane has, of a row's list.
#ifdef LISTED
constexpr int LANE_ENTRIES = LISTED;
#else
constexpr int LANE_ENTRIES = HAS_ENTRIES ? ENTRIES / 32 : 1;
#endif
// Loads that a thread has under way at once.
constexpr int TOKENS_AT_ONCE = 6, VECTORS_AT_ONCE = 4;
// 16-byte stores of a packet: the first, one for what else the student has, one of a teacher, one
// for what the student is beside a teacher, two for a top-K teacher's entries and the tail, one for
// a label's logit of 32 bits and for the teacher's entropy, and that of the second round.
constexpr bool HAS_SECOND = WANTS_ENTROPY || WANTS_ARGMAX || WANTS_TOTAL;
constexpr int FIRST_OF_ENTRIES = 1 + HAS_SECOND + HAS_TEACHER + HAS_BESIDE;
constexpr bool HAS_MORE = IS_FLOAT32<Bits> || WANTS_TEACHER_ENTROPY;
constexpr int MORE = FIRST_OF_ENTRIES + 2 * HAS_ENTRIES;
constexpr int OF_MIXTURE = MORE + HAS_MORE;
constexpr int WORDS = OF_MIXTURE + HAS_MIXTURE;
// Flags of a packet: its rank has the label; the token is ignored.
constexpr u32 OWNER = 1, IGNORED = 2;
// Bits of a launch's number that its packets carry.
constexpr u32 TAG = 0x3fffffffu;

constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;
// A logit below the maximum counts as at most this far below, so that 0 times that is 0.
constexpr float LOWEST_DROP = -1e30f;
constexpr float LEAST_NORMAL = 1.17549435e-38f;
// At least that is an exponent of a power that may vanish, so that 0 times it is 0.
constexpr float LOWEST_EXPONENT = -300.f;
constexpr int NO_INDEX = 0x7fffffff;
#define INF __int_as_float(0x7f800000)
#define NONE __int_as_float(0x7fc00000)  // NaN
