// Dots of tokens with 64 columns of 16-bit weights in pairs along k: [k / 2][64][2].
#pragma once

#include <cstring>

#include "gemm.h"
#include "widen.h"

namespace ds {

#if defined(__AVX512F__) && defined(__AVX512BW__)
constexpr int MAX_TILE = 6, MAX_ONE_PASS = 6;  // 24 accumulators of 32 registers
template <int M>
constexpr int CHUNK_VECTORS = 4;
#elif defined(__AVX2__)
constexpr int MAX_TILE = 6, MAX_ONE_PASS = 1;  // at most 12 accumulators of 16 registers
template <int M>
constexpr int CHUNK_VECTORS = M == 1 ? 8 : M <= 3 ? 4 : 2;
#else
constexpr int MAX_TILE = 2, MAX_ONE_PASS = 1;
template <int M>
constexpr int CHUNK_VECTORS = M == 1 ? 4 : 2;
#endif

constexpr int PAIRS = AHEAD_STEP / 2;  // of k in a step

// Two vectors of floats from one of pairs: the even elements, the odd ones.
#if defined(__AVX512F__) && defined(__AVX512BW__)
inline void split_pairs(__m512i v, F& even, F& odd) {
  even = {_mm512_castsi512_ps(_mm512_slli_epi32(v, 16))};
  odd = {_mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32(int(0xffff0000u))))};
}
inline void load_pairs(const bf16* p, F& even, F& odd) {
  split_pairs(_mm512_loadu_si512(p), even, odd);
}
#elif defined(__AVX2__)
inline void split_pairs(__m256i v, F& even, F& odd) {
  even = {_mm256_castsi256_ps(_mm256_slli_epi32(v, 16))};
  odd = {_mm256_castsi256_ps(_mm256_and_si256(v, _mm256_set1_epi32(int(0xffff0000u))))};
}
inline void load_pairs(const bf16* p, F& even, F& odd) {
  split_pairs(_mm256_loadu_si256((const __m256i*)p), even, odd);
}
#else
inline void load_pairs(const bf16* p, F& even, F& odd) {
  for (int i = 0; i < F::W; ++i) {
    even.v[i] = to_float(p[2 * i]);
    odd.v[i] = to_float(p[2 * i + 1]);
  }
}
#endif

// M rows of tokens as float32, a piece of k at a time, which stays in the first-level cache.
#if defined(__AMX_TILE__)
constexpr int64_t PIECE = 256;
#else
constexpr int64_t PIECE = 128;
#endif
template <int M>
struct WideRows {
  alignas(64) float at[M][PIECE];
  // Elements [k0, k0 + n) of x, and a zero behind an odd number, whose weights are zeros.
  template <class X>
  void take(const X* const* x, int64_t k0, int64_t n) {
    DS_UNROLL
    for (int m = 0; m < M; ++m) {
      widen_row(x[m] + k0, at[m], n);
      if (n % 2) at[m][n] = 0.0f;
    }
  }
  // two(i) for every pair of n elements.
  template <class Two>
  void each_pair(int64_t n, Ahead& ahead, Two two) const {
    int64_t i = 0;
    DS_ROLLED
    while (i + AHEAD_STEP <= n) {
      ahead.remainder<PAIRS>();
      DS_ROLLED
      for (const int64_t end = i + AHEAD_STEP; i < end; i += 2) {
        ahead.piece<PAIRS>();
        two(i);
      }
    }
    DS_ROLLED
    for (; i < n; i += 2) two(i);
  }
};

// two(rows, i) for every pair of k elements of M rows, which are read up to k only.
template <int M, class X, class Two>
inline void each_pair(int64_t k, const X* const* x, Ahead& ahead, Two two) {
  WideRows<M> rows;
  for (int64_t k0 = 0; k0 < k; k0 += PIECE) {
    const int64_t n = k - k0 < PIECE ? k - k0 : PIECE;
    rows.take(x, k0, n);
    rows.each_pair(n, ahead, [&](int64_t i) { two(rows.at, i); });
  }
}

// Vectors of columns of a pair that are multiplied at once: all even elements, then all odd ones, which
// wait for the former. Three rows leave no registers for two.
#if defined(__AVX2__) && !(defined(__AVX512F__) && defined(__AVX512BW__))
template <int M>
constexpr int AT_ONCE = M == 1 ? CHUNK_VECTORS<M> : M == 3 ? 1 : 2;
#else
template <int M>
constexpr int AT_ONCE = CHUNK_VECTORS<M>;
#endif

// acc[m][c, c + V) += the dots of a pair of weights with the rows' elements i and i + 1.
template <int M, int V, int C>
inline void add_pair(const F (&even)[V], const F (&odd)[V], const float (&rows)[M][PIECE], int64_t i,
                     int c, F (&acc)[M][C]) {
  DS_UNROLL
  for (int m = 0; m < M; ++m) {
    const F value = F::all(rows[m][i]);
    DS_UNROLL
    for (int v = 0; v < V; ++v) acc[m][c + v] = fma(even[v], value, acc[m][c + v]);
  }
  DS_UNROLL
  for (int m = 0; m < M; ++m) {
    const F value = F::all(rows[m][i + 1]);
    DS_UNROLL
    for (int v = 0; v < V; ++v) acc[m][c + v] = fma(odd[v], value, acc[m][c + v]);
  }
}

// acc += dots over k elements of M rows with C vectors of columns, weights widened on the way to
// registers. load(even, odd) gives the next pair of k.
template <int M, int C, class X, class Load>
inline void float_dots(int64_t k, const X* const* x, F (&acc)[M][C], Ahead& ahead, Load load) {
  each_pair<M>(k, x, ahead, [&](const auto& rows, int64_t i) {
    F even[C], odd[C];
    load(even, odd);
    add_pair(even, odd, rows, i, 0, acc);
  });
}

// The same for bfloat16 weights as they lie.
template <int M, int C>
inline void add_pairs(const bf16* w, const float (&rows)[M][PIECE], int64_t i, F (&acc)[M][C]) {
  constexpr int V = AT_ONCE<M>;
  DS_UNROLL
  for (int c = 0; c < C; c += V) {
    F even[V], odd[V];
    DS_UNROLL
    for (int v = 0; v < V; ++v) load_pairs(w + 2 * F::W * (c + v), even[v], odd[v]);
    add_pair(even, odd, rows, i, c, acc);
  }
}
template <int M, int C, class X>
inline void pairs_dots(const bf16* w, int64_t k, const X* const* x, F (&acc)[M][C], Ahead& ahead) {
  each_pair<M>(k, x, ahead, [&](const auto& rows, int64_t i) {
    add_pairs(w, rows, i, acc);
    w += 2 * NB;
  });
}

#if defined(__AMX_TILE__)
// What the matrix units do to subnormal numbers: they read and write zeros.
struct NoSubnormals {
  const unsigned before = _mm_getcsr();
  NoSubnormals() {
    _mm_setcsr(before | 0x8040);
    fence();
  }
  ~NoSubnormals() {
    fence();
    _mm_setcsr(before);
  }
  static void fence() { asm volatile("" ::: "memory"); }  // loads and stores stay within
};

// acc += dots over k elements, with the bits of the matrix units' TDPBF16PS (Intel's Software
// Developer's Manual): of every 32 elements the even ones and the odd ones are summed apart, from
// zero, and both sums together are added to acc. load(v) gives the next pair of k for 64 columns.
template <int M, class Load>
inline void dots_as_tiles(int64_t k, const bf16* const* x, F (&acc)[M][4], Load load) {
  constexpr int64_t STEP = 32;
  float sums[M][4][F::W];
  const NoSubnormals guard;
  auto step = [&](const bf16* const* rows) {
    F even[M][4], odd[M][4];
    DS_UNROLL
    for (int m = 0; m < M; ++m)
      DS_UNROLL
      for (int c = 0; c < 4; ++c) even[m][c] = odd[m][c] = F::zero();
    DS_ROLLED
    for (int64_t i = 0; i < STEP; i += 2) {
      __m512i v[4];
      load(v);
      DS_UNROLL
      for (int c = 0; c < 4; ++c) {
        F low, high;
        split_pairs(v[c], low, high);
        DS_UNROLL
        for (int m = 0; m < M; ++m) {
          even[m][c] = fma(low, F::all(to_float(rows[m][i])), even[m][c]);
          odd[m][c] = fma(high, F::all(to_float(rows[m][i + 1])), odd[m][c]);
        }
      }
    }
    DS_UNROLL
    for (int m = 0; m < M; ++m)
      DS_UNROLL
      for (int c = 0; c < 4; ++c) acc[m][c] = acc[m][c] + (even[m][c] + odd[m][c]);
  };
  const bf16* rows[M];
  int64_t at = 0;
  DS_ROLLED
  for (; at + STEP <= k; at += STEP) {
    DS_UNROLL
    for (int m = 0; m < M; ++m) rows[m] = x[m] + at;
    step(rows);
  }
  if (at < k) {
    bf16 last[M][STEP] = {};
    DS_UNROLL
    for (int m = 0; m < M; ++m) {
      std::memcpy(last[m], x[m] + at, size_t(k - at) * sizeof(bf16));
      rows[m] = last[m];
    }
    step(rows);
  }
  DS_UNROLL
  for (int m = 0; m < M; ++m)
    DS_UNROLL
    for (int c = 0; c < 4; ++c) acc[m][c].store(sums[m][c]);
  NoSubnormals::fence();
  DS_UNROLL
  for (int m = 0; m < M; ++m)
    DS_UNROLL
    for (int c = 0; c < 4; ++c) acc[m][c] = F::load(sums[m][c]);
}
#endif

#if DS_BF16_DOTS
// By the instruction for it: load(v) gives the 4 vectors of the next pair of weights.
template <int M, class Load>
inline void bf16_dots(int64_t k, const bf16* const* x, F (&acc)[M][4], Ahead& ahead, Load load) {
  int64_t i = 0;
  auto one = [&](auto pair_of) {
    __m512bh v[4];
    load(v);
    DS_UNROLL
    for (int m = 0; m < M; ++m) {
      const __m512bh pair = (__m512bh)_mm512_set1_epi32(pair_of(m));
      DS_UNROLL
      for (int c = 0; c < 4; ++c) acc[m][c].v = _mm512_dpbf16_ps(acc[m][c].v, v[c], pair);
    }
  };
  auto pair = [&](int m) {
    int32_t two;
    std::memcpy(&two, x[m] + i, 4);
    return two;
  };
  DS_ROLLED
  while (i + AHEAD_STEP <= k) {
    ahead.remainder<PAIRS>();
    DS_ROLLED
    for (const int64_t end = i + AHEAD_STEP; i < end; i += 2) {
      ahead.piece<PAIRS>();
      one(pair);
    }
  }
  DS_ROLLED
  for (; i + 2 <= k; i += 2) one(pair);
  if (i < k) one([&](int m) { return int32_t(x[m][i].bits); });
}

template <int M>
inline void pairs_dots(const bf16* w, int64_t k, const bf16* const* x, F (&acc)[M][4],
                       Ahead& ahead) {
  bf16_dots<M>(k, x, acc, ahead, [&](__m512bh(&v)[4]) {
    DS_UNROLL
    for (int c = 0; c < 4; ++c) v[c] = (__m512bh)_mm512_loadu_si512(w + 32 * c);
    w += 2 * NB;
  });
}
#endif

}  // namespace ds
