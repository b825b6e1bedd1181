// Tiles of dot products, the heart of small-batch matmuls.
//
// Packed weights: groups of ROWS rows; inside a group, 64-byte chunks along k take turns between
// the rows, so a group is one sequential stream: [n / ROWS, k / chunk, ROWS, chunk], zero-padded.
// Tokens are read as they lie. All accumulators of a tile stay in registers.
#pragma once

#include "simd.h"

namespace ds {

template <class T>
struct Dot {  // float32 anywhere, and bfloat16 by widening
  using V = F;
  static constexpr int step = F::W;
  static V load(const T* p) { return F::load(p); }
  static V tail(const T* p, int n) { return load_tail(p, n); }
  static F mac(F a, V w, V x) { return fma(w, x, a); }
};

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
template <>
struct Dot<bf16> {  // pairs of products per instruction
  using V = __m512bh;
  static constexpr int step = 32;
  static V load(const bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }
  static V tail(const bf16* p, int n) {
    return (__m512bh)_mm512_maskz_loadu_epi16(__mmask32((1ull << n) - 1), p);
  }
  static F mac(F a, V w, V x) { return {_mm512_dpbf16_ps(a.v, w, x)}; }
};
#endif

// Largest number of tokens in a tile, bounded by registers.
#if defined(__AVX512F__)
constexpr int MAX_M = 6;
#else
constexpr int MAX_M = 2;
#endif
constexpr int ROWS = 4;
template <class T>
constexpr int CHUNK = 64 / int(sizeof(T));
template <class T>
inline int64_t group_size(int64_t k) {  // elements of one packed group of rows
  return (k + CHUNK<T> - 1) / CHUNK<T> * CHUNK<T> * ROWS;
}

#if defined(__AVX512F__)
inline void sums4(const F* a, float* out) {  // four horizontal sums at once
  __m512 t0 = _mm512_add_ps(_mm512_unpacklo_ps(a[0].v, a[1].v), _mm512_unpackhi_ps(a[0].v, a[1].v));
  __m512 t1 = _mm512_add_ps(_mm512_unpacklo_ps(a[2].v, a[3].v), _mm512_unpackhi_ps(a[2].v, a[3].v));
  __m512d u0 = _mm512_castps_pd(t0), u1 = _mm512_castps_pd(t1);
  __m512 s = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(u0, u1)),
                           _mm512_castpd_ps(_mm512_unpackhi_pd(u0, u1)));
  __m256 h = _mm256_add_ps(_mm512_castps512_ps256(s),
                           _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(s), 1)));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1)));
}
#else
inline void sums4(const F* a, float* out) {
  for (int r = 0; r < 4; ++r) out[r] = a[r].sum();
}
#endif

// acc[m][g * ROWS + r] += rows r of the groups at w + g * group, times x[m], over k elements.
template <class T, int G, int M>
inline void dot_tile(const T* w, int64_t group, const T* const* x, int64_t k,
                     float out[][G * ROWS]) {
  using D = Dot<T>;
  constexpr int R = G * ROWS, STEPS = CHUNK<T> / D::step;
  F acc[M][R];
  for (int m = 0; m < M; ++m)
    for (int r = 0; r < R; ++r) acc[m][r] = F::zero();
  int64_t i = 0;
  for (; i + CHUNK<T> <= k; i += CHUNK<T>, w += ROWS * CHUNK<T>) {
    for (int s = 0; s < STEPS; ++s) {
      typename D::V rows[R];
      for (int g = 0; g < G; ++g)
        for (int r = 0; r < ROWS; ++r)
          rows[g * ROWS + r] = D::load(w + g * group + r * CHUNK<T> + s * D::step);
#if defined(__GNUC__)
      if (G == 1)  // a later tile of tokens computes while the next group arrives
        for (int r = 0; r < ROWS; ++r) __builtin_prefetch(w + group + (s * ROWS + r) * D::step, 0, 3);
#endif
      for (int m = 0; m < M; ++m) {
        typename D::V v = D::load(x[m] + i + s * D::step);
        for (int r = 0; r < R; ++r) acc[m][r] = D::mac(acc[m][r], rows[r], v);
      }
    }
  }
  for (int s = 0; i < k; ++s, i += D::step) {  // the last chunk: w is padded, x is not
    int n = int(k - i < D::step ? k - i : D::step);
    for (int m = 0; m < M; ++m) {
      typename D::V v = D::tail(x[m] + i, n);
      for (int g = 0; g < G; ++g)
        for (int r = 0; r < ROWS; ++r) {
          F& a = acc[m][g * ROWS + r];
          a = D::mac(a, D::load(w + g * group + r * CHUNK<T> + s * D::step), v);
        }
    }
  }
  for (int m = 0; m < M; ++m)
    for (int r = 0; r < R; r += ROWS) sums4(acc[m] + r, out[m] + r);
}

// Adds the dots of one group and `m` <= M tokens over k elements to sums[token][row].
template <class T, int M>
inline void dot_group(const T* w, int64_t ahead, const T* const* x, int m, int64_t k,
                      float sums[][ROWS]) {
  if (m == M) {
    float out[M][ROWS];
    dot_tile<T, 1, M>(w, ahead, x, k, out);
    for (int i = 0; i < M; ++i)
      for (int r = 0; r < ROWS; ++r) sums[i][r] += out[i][r];
  } else if constexpr (M > 1) {
    dot_group<T, M - 1>(w, ahead, x, m, k, sums);
  }
}

// For packed rows [r0, r1) (r0 a multiple of ROWS) and `m` tokens: emit(token, row, values,
// count), where values are `count` dots of that token with rows row, row + 1, ...
template <class T, class X, class Emit>
inline void dots(const T* w, int64_t r0, int64_t r1, X x_row, int64_t m, int64_t k, Emit emit) {
  const int64_t group = group_size<T>(k);
  const T* x[MAX_M];
  int64_t r = r0;
  if (m == 1) {  // two streams hide more latency
    x[0] = x_row(0);
    for (; r + 2 * ROWS <= r1; r += 2 * ROWS) {
      float out[1][2 * ROWS];
      dot_tile<T, 2, 1>(w + r / ROWS * group, group, x, k, out);
      emit(0, r, out[0], 2 * ROWS);
    }
    // As above over the whole of k: where a thread's rows end must not change how a row is summed.
    for (; r < r1; r += ROWS) {
      float out[1][ROWS];
      dot_tile<T, 1, 1>(w + r / ROWS * group, group, x, k, out);
      emit(0, r, out[0], int(r1 - r < ROWS ? r1 - r : ROWS));
    }
    return;
  }
  // Weights and tokens of one block along k stay in the first-level cache.
  constexpr int64_t BLOCK_M = 8 * MAX_M, BLOCK_K = 3072 / int64_t(sizeof(T));
  const int64_t cuts = (k + BLOCK_K - 1) / BLOCK_K;  // of equal length, whole chunks
  const int64_t step = ((k + cuts - 1) / cuts + CHUNK<T> - 1) / CHUNK<T> * CHUNK<T>;
  for (; r < r1; r += ROWS) {
    const int count = int(r1 - r < ROWS ? r1 - r : ROWS);
    for (int64_t m0 = 0; m0 < m; m0 += BLOCK_M) {
      const int64_t mb = m - m0 < BLOCK_M ? m - m0 : BLOCK_M;
      const int64_t tiles = (mb + MAX_M - 1) / MAX_M;
      float sums[BLOCK_M][ROWS] = {};
      for (int64_t k0 = 0; k0 < k; k0 += step) {
        const int64_t kb = k - k0 < step ? k - k0 : step;
        for (int64_t i = 0; i < tiles; ++i) {  // equal tiles, so that none is a lone token
          const int64_t t = mb * i / tiles, n = mb * (i + 1) / tiles - t;
          for (int64_t j = 0; j < n; ++j) x[j] = x_row(m0 + t + j) + k0;
          dot_group<T, MAX_M>(w + r / ROWS * group + k0 * ROWS, group_size<T>(kb), x, int(n), kb,
                              sums + t);
        }
      }
      for (int64_t t = 0; t < mb; ++t) emit(m0 + t, r, sums[t], count);
    }
  }
}

}  // namespace ds
