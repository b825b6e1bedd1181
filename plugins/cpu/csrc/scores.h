// Queries in the lanes of vectors, and their products with keys that are broadcast from where they
// lie: keys are never transposed, and nothing is summed across lanes.
#pragma once

#include <type_traits>

#include "words.h"

namespace ds {

// Rows that the next block reads, fetched into the second cache while this one is computed. Spread
// evenly over its time: a burst of fetches would hold up every load behind it.
class RowsAhead {
 public:
  // `count` rows more, behind those that are there, which are a list until all is fetched.
  template <class T>
  RowsAhead& add(const T* const* rows, int64_t elements, int64_t count) {
    const int64_t bytes = elements * int64_t(sizeof(T));
    if (count <= 0 || bytes <= 0) return *this;
    lists_[known_++] = {(const char* const*)rows, count, bytes};
    lines_ += count * ((bytes + 63) / 64);
    if (!at_) open();
    return *this;
  }
  // How many units of work the block has in all, products of vectors say.
  void pace(int64_t units) { units_ = units > 0 ? units : 1; }
  // `units` of them are about to be done.
  void step(int64_t units) {
#if defined(__GNUC__)
    for (owed_ += units * lines_; owed_ >= units_; owed_ -= units_) {
      __builtin_prefetch(at_, 0, 2);
      if ((at_ += 64) >= end_) open();
    }
#else
    (void)units;
#endif
  }

 private:
  struct List {
    const char* const* rows;
    int64_t count, bytes;
  };
  void open() {  // the next row; after all rows, nothing is owed any more
    if (open_ < known_ && lists_[open_].count == 0) ++open_;
    if (open_ == known_) {
      lines_ = owed_ = 0;
      return;
    }
    List& list = lists_[open_];
    at_ = *list.rows++;
    end_ = at_ + list.bytes;
    --list.count;
  }
  static constexpr int LISTS = 3;
  List lists_[LISTS];
  int known_ = 0, open_ = 0;
  const char *at_ = nullptr, *end_ = nullptr;
  int64_t lines_ = 0, units_ = 1, owed_ = 0;
};

template <class C, class T>
inline void put_converted(C* to, const T* from) {
  if (from)
    widen_row(from, to, 1);
  else
    put(to, 0.0f);
}

// to [words][padded]: query(m) for m < rows, two neighbours of a bfloat16 query to a word, zeros in
// what is padding.
template <class C, class T, class Query>
inline void pack_queries(Query query, int64_t rows, int64_t padded, int64_t d, int64_t words,
                         C* queries) {
  constexpr int N = Word<C>::N, L = F::W;
  for (int64_t m0 = 0; m0 < padded; m0 += L) {
    const T* q[L];
    for (int64_t i = 0; i < L; ++i) q[i] = m0 + i < rows ? query(m0 + i) : nullptr;
#if defined(__AVX512F__) && defined(__AVX512BW__)
    if constexpr (sizeof(T) <= sizeof(C)) {
      for (int64_t w = 0; w < words; w += 16) {
        const int64_t left = d - w * N;
        const __mmask32 some = left >= 16 * N ? ~0u : left > 0 ? (1u << left) - 1 : 0u;
        __m512i r[16];
        for (int64_t i = 0; i < 16; ++i) {
          const T* from = q[i] ? q[i] + w * N : nullptr;
          if constexpr (N == 1 && sizeof(T) == 2)
            r[i] = _mm512_slli_epi32(
                _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(__mmask16(from ? some : 0), from)),
                16);
          else if constexpr (N == 1)
            r[i] = _mm512_maskz_loadu_epi32(__mmask16(from ? some : 0), from);
          else
            r[i] = _mm512_maskz_loadu_epi16(from ? some : 0, from);
        }
        transpose16(r);
        for (int64_t i = 0; i < 16; ++i)
          _mm512_storeu_si512(queries + ((w + i) * padded + m0) * N, r[i]);
      }
      continue;
    }
#endif
    for (int64_t m = 0; m < L; ++m)
      for (int64_t i = 0; i < words * N; ++i)
        put_converted(queries + (i / N * padded + m0 + m) * N + i % N,
                      q[m] && i < d ? q[m] + i : nullptr);
  }
}

constexpr int SCORE_STEP = 8;  // words between two looks at what is to be fetched

constexpr int64_t SUMMED = 256;  // float32 products that are added up one by one

// Dot products of `count` <= K keys with NV vectors of packed queries: to [count][padded]. Sums of
// float32 products are made of shorter ones: over a thousand, rounding would grow beyond 1e-5.
template <int K, int NV, class C>
DS_NOINLINE inline void score_tile(const C* queries, int64_t d, int64_t padded,
                                   const C* const* key, int count, RowsAhead& ahead, float* to) {
  using W = Word<C>;
  constexpr int N = W::N, L = F::W;
  const C* k[K];
  F acc[K][NV], whole[N == 1 ? K : 1][NV];
  DS_UNROLL_VECTORS
  for (int j = 0; j < K; ++j) {
    k[j] = key[j < count ? j : count - 1];  // scores of the excess are dropped
    for (int v = 0; v < NV; ++v) acc[j][v] = F::zero();
  }
  const C* q = queries;
  const int64_t step = padded * N;
  int64_t i = 0;
  auto some = [&](auto words) {  // key after key, so that their addresses need no registers
    constexpr int S = decltype(words)::value;
    typename W::V x[S][NV];
    for (int w = 0; w < S; ++w, q += step)
      for (int v = 0; v < NV; ++v) x[w][v] = W::load(q + v * L * N);
    DS_UNROLL_VECTORS
    for (int j = 0; j < K; ++j)
      DS_UNROLL_VECTORS
      for (int w = 0; w < S; ++w) {
        const C* p = k[j] + i + w * N;
        if constexpr (NV == 1) {
          acc[j][0] = W::mac_all(acc[j][0], x[w][0], p);
        } else {
          const typename W::V y = W::all(p);
          for (int v = 0; v < NV; ++v) acc[j][v] = W::mac(acc[j][v], x[w][v], y);
        }
      }
    i += S * N;
  };
  constexpr std::integral_constant<int, NV == 1 ? SCORE_WORDS : 1> several;
  constexpr std::integral_constant<int, 1> single;
  while (i + N <= d) {
    const int64_t end = i + SCORE_STEP * N <= d ? i + SCORE_STEP * N : d - d % N;
    ahead.step(SCORE_STEP * K * NV);
    while (i + several() * N <= end) some(several);
    while (i < end) some(single);
    if constexpr (N == 1)
      if (i % SUMMED == 0)
        for (int j = 0; j < K; ++j)
          for (int v = 0; v < NV; ++v) {
            whole[j][v] = i == SUMMED ? acc[j][v] : whole[j][v] + acc[j][v];
            acc[j][v] = F::zero();
          }
  }
  if constexpr (N == 1)
    if (i >= SUMMED)
      for (int j = 0; j < K; ++j)
        for (int v = 0; v < NV; ++v) acc[j][v] = acc[j][v] + whole[j][v];
  if (i < d)  // what follows a row may be NaN
    for (int v = 0; v < NV; ++v) {
      const typename W::V x = W::load(q + v * L * N);
      DS_UNROLL_VECTORS
      for (int j = 0; j < K; ++j) acc[j][v] = W::mac(acc[j][v], x, W::half(k[j] + i));
    }
  DS_UNROLL_VECTORS
  for (int j = 0; j < K; ++j)
    if (j < count)
      for (int v = 0; v < NV; ++v) acc[j][v].store(to + j * padded + v * L);
}

}  // namespace ds
