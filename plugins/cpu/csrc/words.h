// What attention and the indexer compute with: words of 32 bits that hold one float32, or the two
// bfloat16 that one instruction multiplies and adds.
#pragma once

#include "arena.h"
#include "lanes.h"
#include "widen.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__)
#define DS_AMX 1
#else
#define DS_AMX 0
#endif

namespace ds {

#if defined(__AVX512F__) && defined(__AVX512BW__)
// 24 accumulators of 32 registers: keys by vectors of queries, and rows by vectors of columns.
// Twelve keys by one vector hide the latency of an addition, and their addresses fit registers.
constexpr int QUERY_VECTORS = 4, COLUMN_VECTORS = 4, ROW_TILE = 6;
constexpr int KEY_TILE[] = {0, 12, 12, 8, 6};
#elif defined(__AVX2__)
constexpr int QUERY_VECTORS = 2, COLUMN_VECTORS = 2, ROW_TILE = 6;  // 12 of 16 registers
constexpr int KEY_TILE[] = {0, 10, 6};
#else
constexpr int QUERY_VECTORS = 1, COLUMN_VECTORS = 1, ROW_TILE = 4;
constexpr int KEY_TILE[] = {0, 4};
#endif
constexpr int MOST_KEYS = 12;  // of a tile
#if defined(__AVX2__)
constexpr int SCORE_WORDS = 4;  // of one vector of queries in registers
#define DS_UNROLL_VECTORS DS_UNROLL
#else
constexpr int SCORE_WORDS = 1;
#define DS_UNROLL_VECTORS  // the loops over plain arrays are what becomes vectors
#endif
constexpr int PANEL = COLUMN_VECTORS * F::W;  // columns of a panel of values
// Keys of a block. The more, the seldomer sums are read and written.
constexpr int KEYS = DS_AMX ? 128 : DS_BF16_DOTS ? 192 : 96;

// How words of C are loaded and multiplied.
template <class C>
struct Word;

template <>
struct Word<float> {
  static constexpr int N = 1;  // elements
  using V = F;
  static V load(const float* p) { return F::load(p); }
  static V all(const float* p) { return F::all(*p); }
  static V half(const float* p) { return F::all(*p); }
  static F mac(F sum, V x, V y) { return fma(x, y, sum); }
  static F mac_all(F sum, V x, const float* p) { return mac(sum, x, all(p)); }
};

#if DS_BF16_DOTS
using Bf16Math = bf16;  // what bfloat16 is multiplied as
template <>
struct Word<bf16> {
  static constexpr int N = 2;
  using V = __m512bh;
  static V load(const bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }
  static V all(const bf16* p) {
    int32_t pair;
    std::memcpy(&pair, p, 4);
    return (__m512bh)_mm512_set1_epi32(pair);
  }
  static V half(const bf16* p) { return (__m512bh)_mm512_set1_epi32(p->bits); }  // and a zero
  static F mac(F sum, V x, V y) { return {_mm512_dpbf16_ps(sum.v, x, y)}; }
  // With the word at p in all lanes: no register and no instruction for it.
  static F mac_all(F sum, V x, const bf16* p) {
    struct Pair {
      bf16 both[2];
    };
    asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(sum.v) : "v"(x), "m"(*(const Pair*)p));
    return sum;
  }
  // The words of two rows, for up to 32 of their elements.
  struct Pairs {
    __m512i turns[2];
    __mmask32 some;
    explicit Pairs(int64_t n) : some(n < 32 ? (1u << n) - 1 : ~0u) {
      alignas(64) static constexpr uint16_t order[2][32] = {
          {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
           8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47},
          {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
           24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63}};
      for (int i = 0; i < 2; ++i) turns[i] = _mm512_load_si512(order[i]);
    }
    template <bool WHOLE>
    __m512i row(const bf16* p) const {
      return WHOLE ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi16(some, p);
    }
    V words(__m512i a, __m512i b, int i) const {
      return (V)_mm512_permutex2var_epi16(a, turns[i], b);
    }
  };
};
#else
using Bf16Math = float;
#endif

// The same `n` elements of `count` rows as C: where they lie, or converted into `buffer`.
template <class C, class T>
inline const C* const* rows_as(const T* const* rows, int count, int64_t n, C* buffer,
                               const C** converted) {
  if constexpr (sizeof(T) == sizeof(C)) {
    return (const C* const*)rows;
  } else {
    for (int j = 0; j < count; ++j) {
      widen_row(rows[j], buffer + j * n, n);
      converted[j] = buffer + j * n;
    }
    return converted;
  }
}

}  // namespace ds
