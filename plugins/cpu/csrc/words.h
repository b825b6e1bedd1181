// What attention and the indexer compute with: words of 32 bits that hold one float32, or the two
// bfloat16 that one instruction multiplies and adds; and the parts of a caller's buffer.
#pragma once

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
constexpr int PANEL = COLUMN_VECTORS * F::W;  // columns of a panel of values
constexpr int KEYS = DS_AMX ? 128 : 96;       // keys of a block

inline int64_t up_to(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

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
};

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
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

// Hands out the parts of a caller's buffer, each at a cache line; counts only if there is none.
class Arena {
 public:
  explicit Arena(void* memory) : base_((char*)memory), at_(base_ ? -(uintptr_t)base_ & 63 : 0) {}
  template <class T>
  T* take(int64_t count) {
    T* found = base_ ? (T*)(base_ + at_) : nullptr;
    at_ += up_to(count * int64_t(sizeof(T)), 64);
    return found;
  }
  int64_t used() const { return int64_t(at_); }

 private:
  char* base_;
  uintptr_t at_;
};

}  // namespace ds
