// The core of attention: a tile of query rows over blocks of keys, with a running softmax.
//
// The lanes of a vector are query rows. Scores are q . k with keys broadcast from where they lie,
// so that keys are never transposed and nothing is summed across lanes: a maximum or a sum over
// keys is one vector operation per key. Queries are packed once per tile and values once per
// block, in words of 32 bits that hold one float32, or the two bfloat16 that one instruction
// multiplies and adds. Where vectors multiply pairs, values are not packed but made pairs of on the
// way to registers:
//
//   queries  [words of d][rows]          two neighbours of a query to a word
//   scores   [keys][rows] float32; then, in place, weights [words of keys][rows]
//   values   [words of keys][PANEL]      of one panel of columns after the other
//   sums     [rows][columns] float32
#pragma once

#include <type_traits>

#include "exponents.h"
#include "scores_amx.h"

namespace ds {

// One tile of query rows. Made from an arena, which it takes its memory from; `begin` for each
// tile, `block` for each block of its keys in order, then the results.
template <class C>
class Tile {
  using W = Word<C>;
  static constexpr int N = W::N, L = F::W;
  static constexpr bool AMX = MATRIX<C>, PACKED = AMX || N == 1;
  static constexpr int MOST_ROWS = PACKED ? ROW_TILE : 12, VECTORS = PACKED ? COLUMN_VECTORS : 2;
  static constexpr float MUCH = 4.0f;
  static constexpr int64_t NO_TAIL = INT64_MAX;

 public:
  Tile(Arena& arena, int64_t most_rows, int64_t d, int64_t dv)
      : d_(d), dv_(dv), words_(words_of(d)),
        columns_(up_to(dv, PACKED ? L : VECTORS * L)), stride_(columns_ + (AMX ? 16 : 0)) {
    const int64_t rows = up_to(most_rows, L);
    queries_ = arena.take<C>(words_ * N * rows);
    scores_ = arena.take<float>(KEYS * rows);
    if (PACKED)
      for (C*& panel : values_) panel = arena.take<C>(PANEL * KEYS);
    if (std::is_same_v<C, float>)
      widened_ = arena.take<C>((rows > QUERY_VECTORS * L ? KEYS : MOST_KEYS) * d);
    for (float** p : {&top_, &base_, &total_}) *p = arena.take<float>(rows);
    seen_ = arena.take<int32_t>(rows);
    bits_ = arena.take<int64_t>(rows);
    if (AMX) {
      turned_ = arena.take<C>(rows * KEYS);
      staged_ = arena.take<C>(words_ * N * KEYS);
    }
  }

  // Floats between two rows of sums.
  int64_t stride() const { return stride_; }
  // The largest exponent (of 2) and the sum of weights of each row, relative to base().
  const float* top() const { return top_; }
  const float* total() const { return total_; }
  float* sums() const { return sums_; }

  // Row m is query(m) and sees the first seen(m) keys, of which a later row sees no fewer than an
  // earlier one. `sums` takes up_to(rows, F::W) rows.
  template <class T, class Query, class Seen>
  void begin(int64_t rows, float scale, float* sums, Query query, Seen seen) {
    rows_ = rows;
    padded_ = up_to(rows, L);
    scale_ = scale * 1.44269504f;  // exponents are of 2
    sums_ = sums;
    fresh_ = true;
    tail_ = NO_TAIL;
    for (int64_t m = 0; m < padded_; ++m) {
      seen_[m] = seen(m < rows ? m : rows - 1);
      top_[m] = -INFINITY;
      base_[m] = total_[m] = 0.0f;
    }
    pack_queries<C, T>(query, rows_, padded_, d_, words_, queries_);
  }

  // After `begin`: of the keys from `tail` on, row m sees but those tail + b whose bit is set in
  // bits(m). Others must be finite.
  template <class Bits>
  void tree(int64_t tail, Bits bits) {
    tail_ = tail;
    for (int64_t m = 0; m < padded_; ++m) bits_[m] = bits(m < rows_ ? m : rows_ - 1);
  }

  // Keys first, first + 1, ..., count <= KEYS of them, and their values. Meanwhile `ahead`. S: C, or
  // bfloat16 that is multiplied as float32: keys are widened a few at a time, which stay in the
  // first cache, and values where they are packed.
  template <class S>
  void block(const S* const* key, const S* const* value, int64_t first, int count,
             const RowsAhead& ahead = {}) {
    const int64_t panels = (columns_ + PANEL - 1) / PANEL;
    first_ = first;
    count_ = count;
    ahead_ = ahead;
    ahead_.pace(work(panels));
    if constexpr (AMX)
      matrix_score(key);
    else
      score(key);
    for (int64_t v = 0; v < padded_ / L; ++v) weigh(v);
    if constexpr (PACKED) {
      // A panel is packed before the one in front of it is used, so that it need not be waited for.
      pack_values(value, 0, values_[0]);
      for (int64_t p = 0; p < panels; ++p) {
        if (p + 1 < panels) pack_values(value, (p + 1) * PANEL, values_[(p + 1) % 2]);
        if constexpr (AMX)
          matrix_accumulate(p * PANEL, values_[p % 2]);
        else
          accumulate<true>(p * PANEL, values_[p % 2]);
      }
    } else {
      int64_t c = 0;
      for (; c + VECTORS * L <= dv_; c += VECTORS * L) accumulate<true>(c, value);
      if (c < dv_) accumulate<false>(c, value);
    }
    fresh_ = false;
  }

 private:
  // About how much a block works, in products of vectors. PACK_STEP: packing two rows of a panel.
  static constexpr int TILE_STEP = SCORE_STEP, PACK_STEP = 24;
  int64_t work(int64_t panels) const {
    const int64_t words = words_of(d_), vectors = padded_ / L;
    if (AMX) {
      const int64_t tiles = up_to(count_, 16) / 16 * (vectors * (words / 16) + panels * 2);
      return panels * count_ / 2 * PACK_STEP + tiles / 4 * MATRIX_STEP;
    }
    return count_ * words * vectors + rows_ * count_ / N * (columns_ / L) +
           (PACKED ? panels * count_ / N * PACK_STEP : 0);
  }
  static int64_t words_of(int64_t d) { return up_to((d + N - 1) / N, 16); }

  // How many keys of this block row m sees.
  int sees(int64_t m) const {
    const int64_t n = seen_[m] - first_;
    return n <= 0 ? 0 : n < count_ ? int(n) : count_;
  }

  // Scores of all keys that a row of a vector sees.
  template <class S>
  void score(const S* const* key) {
    const int64_t vectors = padded_ / L;
    if constexpr (!std::is_same_v<S, C>)
      if (vectors > QUERY_VECTORS) {  // else each of them would widen the keys anew
        const C* wide[KEYS];
        return score(rows_as<C>(key, count_, d_, widened_, wide));
      }
    for (int64_t v0 = 0; v0 < vectors; v0 += QUERY_VECTORS) {
      const int64_t end = v0 + QUERY_VECTORS < vectors ? v0 + QUERY_VECTORS : vectors;
      int from = 0;
      for (int64_t v = v0; v < end; ++v) {  // a vector needs no keys after those of its last row
        const int to = sees((v + 1) * L - 1);
        if (from < to) score_some<QUERY_VECTORS>(int(end - v), key, from, to, v * L);
        from = to > from ? to : from;
      }
    }
  }

  template <int NV, class S>
  void score_some(int vectors, const S* const* key, int from, int to, int64_t m0) {
    if (vectors == NV) {
      constexpr int K = KEY_TILE[NV];
      for (int j = from; j < to; j += K) {
        const int some = to - j < K ? to - j : K;
        const C* wide[K];
        score_tile<K, NV>(queries_ + m0 * N, d_, padded_,
                          rows_as<C>(key + j, some, d_, widened_, wide), some, ahead_,
                          scores_ + j * padded_ + m0);
      }
    } else if constexpr (NV > 1) {
      score_some<NV - 1>(vectors, key, from, to, m0);
    }
  }

  // Scores of one vector of rows become weights 2^(score - base). The base stays while no score
  // exceeds it by much, so that sums are seldom rescaled; it cancels out in the end.
  void weigh(int64_t v) {
    float* s = scores_ + v * L;
    const int32_t* seen = seen_ + v * L;
    const int all = sees(v * L), count = sees((v + 1) * L - 1);
    const F scale = F::all(scale_), low = F::all(-INFINITY);
    for (int64_t k = tail_ > first_ ? tail_ - first_ : 0; k < count; ++k)
      for (int64_t i = 0; i < L; ++i)
        if (!(bits_[v * L + i] >> (first_ + k - tail_) & 1)) s[k * padded_ + i] = -INFINITY;
    F high[4] = {low, low, low, low};
    int j = 0;
    for (; j + 4 <= all; j += 4)
      for (int i = 0; i < 4; ++i) {
        const F x = F::load(s + (j + i) * padded_) * scale;
        x.store(s + (j + i) * padded_);
        high[i] = larger(x, high[i]);
      }
    for (; j < count; ++j) {
      const F x = hide(F::load(s + j * padded_) * scale, seen, int32_t(first_) + j);
      x.store(s + j * padded_);
      high[0] = larger(x, high[0]);
    }
    high[0] = larger(larger(high[0], high[1]), larger(high[2], high[3]));
    if (any_above(high[0], F::load(top_ + v * L) + F::all(MUCH))) rebase(v, high[0]);

    const F base = F::load(base_ + v * L) * F::all(-1.0f);
    F total = F::load(total_ + v * L);
    const int words = (count + N - 1) / N, whole = count / N;
    if constexpr (N == 1) {
      for (int w = 0; w < words; ++w) {
        const F p = exp2<C>(F::load(s + w * padded_) + base);
        p.store(s + w * padded_);
        total = total + p;
      }
    }
#if DS_BF16_DOTS
    if constexpr (N == 2) {
      alignas(64) static constexpr uint16_t turns[32] = {
          0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23,
          8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
      const __m512i turn = _mm512_load_si512(turns);
      const __m512bh ones = (__m512bh)_mm512_set1_epi32(0x3f803f80);
      for (int w = 0; w < words; ++w) {
        const F a = exp2<C>(F::load(s + 2 * w * padded_) + base);
        const F b = w < whole ? exp2<C>(F::load(s + (2 * w + 1) * padded_) + base) : F::zero();
        const __m512i p =
            _mm512_permutexvar_epi16(turn, (__m512i)_mm512_cvtne2ps_pbh(b.v, a.v));
        _mm512_storeu_si512(s + w * padded_, p);
        total = W::mac(total, (__m512bh)p, ones);  // of the rounded weights: their errors cancel
      }
    }
#else
    (void)whole;
#endif
    total.store(total_ + v * L);
    const int all_words = AMX ? int(up_to(count_, 32)) / N : (count_ + N - 1) / N;
    for (int w = words; w < all_words; ++w) F::zero().store(s + w * padded_);
#if DS_AMX
    if constexpr (AMX)
      for (int w = 0; w < all_words; w += 16) {
        __m512i r[16];
        for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(s + (w + i) * padded_);
        transpose16(r);
        for (int i = 0; i < 16; ++i)
          _mm512_storeu_si512(turned_ + (v * L + i) * KEYS + w * N, r[i]);
      }
#endif
  }

  void rebase(int64_t v, F high) {
    float highs[L];
    high.store(highs);
    for (int i = 0; i < L; ++i) {
      const int64_t m = v * L + i;
      if (!(highs[i] > top_[m] + MUCH)) continue;
      const float keep = std::exp2(top_[m] - highs[i]);  // 0 at first
      top_[m] = base_[m] = highs[i];
      total_[m] *= keep;
      if (fresh_ || m >= rows_) continue;
      float* sums = sums_ + m * stride_;
      for (int64_t c = 0; c < columns_; c += L) (F::load(sums + c) * F::all(keep)).store(sums + c);
    }
  }

  // The block's values of the columns from c on, as words.
  template <class S>
  void pack_values(const S* const* value, int64_t c, C* to) {
    const int64_t n = dv_ - c < PANEL ? dv_ - c : PANEL;
    int j = 0;
    if (n == PANEL)
      for (; j + N <= count_; j += N, to += PANEL * N) {
        ahead_.step(PACK_STEP);
        pack_word<true>(value[j] + c, value[j + N - 1] + c, n, to);
      }
    for (; j < count_; j += N, to += PANEL * N)
      pack_word<false>(value[j] + c, j + N <= count_ ? value[j + N - 1] + c : nullptr, n, to);
    if (AMX)  // tiles are whole
      std::memset((void*)to, 0, size_t(up_to(count_, 32) - j) / N * PANEL * 4);
  }
  template <bool WHOLE>
  static void pack_word(const float* a, const float*, int64_t n, float* to) {
    std::memcpy(to, a, size_t(n) * sizeof(float));
    for (; n % L; ++n) to[n] = 0.0f;
  }
  template <bool WHOLE>
  static void pack_word(const bf16* a, const bf16*, int64_t n, float* to) {
    widen_row(a, to, WHOLE ? PANEL : n);
    for (; n % L; ++n) to[n] = 0.0f;
  }
#if DS_BF16_DOTS
  template <bool WHOLE>
  static void pack_word(const bf16* a, const bf16* b, int64_t n, bf16* to) {
    for (int64_t c = 0; c < (WHOLE ? PANEL : n); c += 32) {
      const typename W::Pairs pairs(n - c);
      const __m512i x = pairs.template row<WHOLE>(a + c);
      const __m512i y = b ? pairs.template row<WHOLE>(b + c) : _mm512_setzero_si512();
      for (int i = 0; i < 2; ++i)
        _mm512_storeu_si512(to + 2 * c + 32 * i, (__m512i)pairs.words(x, y, i));
    }
  }
#endif

  // sums += weights . values for the columns from c on; rows in equal tiles, each with the keys that
  // it sees. V: a panel, or where values lie, WHOLE if each has all of these columns.
  template <bool WHOLE, class V>
  void accumulate(int64_t c, V values) {
    const int64_t left = (columns_ - c) / L;
    const int vectors = int(left < VECTORS ? left : VECTORS);
    const int64_t tiles = (rows_ + MOST_ROWS - 1) / MOST_ROWS;
    for (int64_t i = 0; i < tiles; ++i) {
      const int64_t m = rows_ * i / tiles, end = rows_ * (i + 1) / tiles;
      sum_some<WHOLE, MOST_ROWS, VECTORS>(int(end - m), vectors, m, c, values, sees(end - 1));
    }
  }

  template <bool WHOLE, int M, int NV, class V>
  void sum_some(int rows, int vectors, int64_t m, int64_t c, V values, int keys) {
    if constexpr (M > 1)
      if (rows < M) return sum_some<WHOLE, M - 1, NV>(rows, vectors, m, c, values, keys);
    if constexpr (PACKED && NV > 1)
      if (vectors < NV) return sum_some<WHOLE, M, NV - 1>(rows, vectors, m, c, values, keys);
    sum_tile<WHOLE, M, NV>(m, c, values, keys);
  }

  template <bool WHOLE, int M, int NV, class V>
  DS_NOINLINE void sum_tile(int64_t m, int64_t c, V values, int keys) {
    const C* p = (const C*)scores_ + m * N;
    float* o = sums_ + m * stride_ + c;
    F acc[M][NV];
    DS_UNROLL_VECTORS
    for (int i = 0; i < M; ++i)
      DS_UNROLL_VECTORS
      for (int x = 0; x < NV; ++x)
        acc[i][x] = fresh_ ? F::zero() : F::load(o + i * stride_ + x * L);
    const int words = (keys + N - 1) / N;
    for (int w = 0; w < words;) {
      const int end = w + TILE_STEP < words ? w + TILE_STEP : words;
      ahead_.step(TILE_STEP * M * NV);
      for (; w < end; ++w, p += padded_ * N) {
        if constexpr (PACKED) {
          typename W::V y[NV];
          for (int x = 0; x < NV; ++x) y[x] = W::load(values + (w * PANEL + x * L) * N);
          for (int i = 0; i < M; ++i) {
            const typename W::V weight = W::all(p + i * N);
            for (int x = 0; x < NV; ++x) acc[i][x] = W::mac(acc[i][x], y[x], weight);
          }
        }
#if DS_BF16_DOTS
        else {
          static constexpr bf16 NOTHING[VECTORS * L] = {};  // beside the last of an odd number
          const typename W::Pairs pairs(dv_ - c);
          const __m512i a = pairs.template row<WHOLE>(values[2 * w] + c);
          const __m512i b =
              pairs.template row<WHOLE>(2 * w + 1 < keys ? values[2 * w + 1] + c : NOTHING);
          const typename W::V y[2] = {pairs.words(a, b, 0), pairs.words(a, b, 1)};
          DS_UNROLL_VECTORS
          for (int i = 0; i < M; ++i)
            DS_UNROLL_VECTORS
            for (int x = 0; x < NV; ++x) acc[i][x] = W::mac_all(acc[i][x], y[x], p + i * N);
        }
#endif
      }
    }
    DS_UNROLL_VECTORS
    for (int i = 0; i < M; ++i)
      DS_UNROLL_VECTORS
      for (int x = 0; x < NV; ++x) acc[i][x].store(o + i * stride_ + x * L);
  }

  // On the matrix registers (attend_amx.h).
  void matrix_score(const C* const* key);
  void matrix_accumulate(int64_t c, const C* panel);
  void sum_2x2(int64_t v, int64_t c, const C* panel, bool both, int words);
  void sum_1x4(int64_t v, int64_t c, const C* panel, int tiles, int words);

  int64_t d_, dv_, words_, columns_, stride_;
  int64_t rows_ = 0, padded_ = 0, first_ = 0;
  RowsAhead ahead_;
  int count_ = 0;
  float scale_ = 0.0f;
  bool fresh_ = true;
  C *queries_, *values_[2], *widened_ = nullptr, *turned_ = nullptr, *staged_ = nullptr;
  float *scores_, *sums_ = nullptr, *top_, *base_, *total_;
  int32_t* seen_;
  int64_t* bits_;
  int64_t tail_ = NO_TAIL;
};

}  // namespace ds

#include "attend_amx.h"
