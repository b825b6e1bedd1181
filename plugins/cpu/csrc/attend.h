// The core of attention: a tile of query rows over blocks of keys, with a running softmax.
//
// The lanes of a vector are query rows. Scores are q . k with keys broadcast from where they lie,
// so that keys are never transposed and nothing is summed across lanes: a maximum or a sum over
// keys is one vector operation per key. Queries are packed once per tile and values once per
// block, in words of 32 bits that hold one float32, or the two bfloat16 that one instruction
// multiplies and adds:
//
//   queries  [words of d][rows]          two neighbours of a query to a word
//   scores   [keys][rows] float32; then, in place, weights [words of keys][rows]
//   values   [words of keys][PANEL]      of one panel of columns after the other
//   sums     [rows][columns] float32
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

// 2^r for 0 <= r <= 1, to 8e-5 (far below what bfloat16 keeps) or to 1.5e-7, and 2^0 = 1.
template <class C>
inline F exp2_fraction(F r) {
  if (Word<C>::N == 2) {
    F p = F::all(0.07802452f);
    for (float c : {0.22606717f, 0.6958335f, 0.9999252f}) p = fma(p, r, F::all(c));
    return p;
  }
  F p = F::all(0.0018671303f);
  for (float c : {0.00901703f, 0.055799913f, 0.24016444f, 0.6931513f, 1.0f})
    p = fma(p, r, F::all(c));
  return p;
}

#if defined(__AVX512F__) && defined(__AVX512BW__)
inline F larger(F x, F high) { return {_mm512_max_ps(x.v, high.v)}; }  // passes over a NaN in x
inline bool any_above(F x, F y) { return _mm512_cmp_ps_mask(x.v, y.v, _CMP_GT_OQ) != 0; }
inline F hide(F x, const int32_t* seen, int32_t key) {  // -inf where seen[lane] <= key
  const __mmask16 m = _mm512_cmple_epi32_mask(_mm512_loadu_si512(seen), _mm512_set1_epi32(key));
  return {_mm512_mask_mov_ps(x.v, m, _mm512_set1_ps(-INFINITY))};
}
// 2^x for x < 128; 0 where a float is too small for it; NaN gives NaN.
template <class C>
inline F exp2(F x) {
  const F r{_mm512_reduce_ps(x.v, 0x09)};  // x - floor(x)
  return {_mm512_scalef_ps(exp2_fraction<C>(r).v, x.v)};
}
#else
inline F larger(F x, F high) {
  float a[F::W], b[F::W];
  x.store(a), high.store(b);
  for (int i = 0; i < F::W; ++i) b[i] = a[i] > b[i] ? a[i] : b[i];
  return F::load(b);
}
inline bool any_above(F x, F y) {
  float a[F::W], b[F::W];
  x.store(a), y.store(b);
  bool any = false;
  for (int i = 0; i < F::W; ++i) any |= a[i] > b[i];
  return any;
}
inline F hide(F x, const int32_t* seen, int32_t key) {
  float a[F::W];
  x.store(a);
  for (int i = 0; i < F::W; ++i) a[i] = seen[i] <= key ? -INFINITY : a[i];
  return F::load(a);
}
template <class C>
inline F exp2(F x) {
  const F low = clamp(x, -126.0f, 128.0f), n = round_even(low + F::all(-0.5f));
  return zero_below(times_pow2(exp2_fraction<C>(low + n * F::all(-1.0f)), n), x, -126.0f);
}
#endif

// The matrix registers, eight tiles of 16 rows by 64 bytes, while it lives.
struct MatrixUnit {
#if DS_AMX
  MatrixUnit() {
    struct alignas(64) {
      uint8_t palette = 1, start = 0, none[14] = {};
      uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } shape;
    written();
    _tile_loadconfig(&shape);
  }
  ~MatrixUnit() { _tile_release(); }
  // The compiler does not see that tiles are loaded from memory: what they read is written before.
  static void written() { asm volatile("" ::: "memory"); }
#else
  MatrixUnit() {}
  ~MatrixUnit() {}
#endif
  MatrixUnit(const MatrixUnit&) = delete;
};

#if defined(__AVX512F__) && defined(__AVX512BW__)
inline void transpose16(__m512i* r) {  // 16 by 16 words
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; ++j) {
      r[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + 2 + j]);
      r[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + 2 + j]);
    }
  // r[4 g + c]: rows 4 g to 4 g + 3 of columns c, c + 4, c + 8, c + 12
  for (int c = 0; c < 4; ++c) {
    t[c] = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x88);       // columns c and c + 8
    t[4 + c] = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xdd);   // c + 4 and c + 12
    t[8 + c] = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x88);
    t[12 + c] = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xdd);
  }
  for (int c = 0; c < 4; ++c) {
    r[c] = _mm512_shuffle_i32x4(t[c], t[8 + c], 0x88);
    r[8 + c] = _mm512_shuffle_i32x4(t[c], t[8 + c], 0xdd);
    r[4 + c] = _mm512_shuffle_i32x4(t[4 + c], t[12 + c], 0x88);
    r[12 + c] = _mm512_shuffle_i32x4(t[4 + c], t[12 + c], 0xdd);
  }
}
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

// to[0, n) = from[0, n) * by.
template <class T>
inline void store_scaled(const float* from, float by, T* to, int64_t n) {
  const F scale = F::all(by);
  int64_t i = 0;
  for (; i + F::W <= n; i += F::W) (F::load(from + i) * scale).store(to + i);
  if (i < n) store_tail(load_tail(from + i, int(n - i)) * scale, to + i, int(n - i));
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

// Rows that the next block reads, fetched into the second cache while this one is computed. Spread
// evenly over its time: a burst of fetches would hold up every load behind it.
class Ahead {
 public:
  Ahead() = default;
  template <class K, class V>
  Ahead(const K* const* keys, int64_t key_elements, const V* const* values, int64_t value_elements,
        int count)
      : lists_{{(const char* const*)keys, count, key_elements * int64_t(sizeof(K))},
               {(const char* const*)values, count, value_elements * int64_t(sizeof(V))}} {
    if (count <= 0) return;
    for (const List& list : lists_) lines_ += count * ((list.bytes + 63) / 64);
    open();
  }
  // How many units of work the block has in all.
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
    if (lists_[0].count <= 0 || lists_[0].bytes <= 0) {
      lists_[0] = lists_[1];
      lists_[1].count = 0;
      if (lists_[0].count <= 0 || lists_[0].bytes <= 0) {
        lines_ = owed_ = 0;
        return;
      }
    }
    at_ = *lists_[0].rows++;
    end_ = at_ + lists_[0].bytes;
    --lists_[0].count;
  }
  List lists_[2] = {};
  const char *at_ = nullptr, *end_ = nullptr;
  int64_t lines_ = 0, units_ = 1, owed_ = 0;
};

// One tile of query rows. Made from an arena, which it takes its memory from; `begin` for each
// tile, `block` for each block of its keys in order, then the results.
template <class C>
class Tile {
  using W = Word<C>;
  static constexpr int N = W::N, L = F::W;
  static constexpr bool AMX = DS_AMX && N == 2;
  static constexpr float MUCH = 4.0f;
  static constexpr int64_t NO_TAIL = INT64_MAX;

 public:
  Tile(Arena& arena, int64_t most_rows, int64_t d, int64_t dv)
      : d_(d), dv_(dv), words_(words_of(d)),
        columns_(up_to(dv, L)), stride_(columns_ + (AMX ? 16 : 0)) {
    const int64_t rows = up_to(most_rows, L);
    queries_ = arena.take<C>(words_ * N * rows);
    scores_ = arena.take<float>(KEYS * rows);
    for (C*& panel : values_) panel = arena.take<C>(PANEL * KEYS);
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
    pack_queries<T>(query);
  }

  // After `begin`: of the keys from `tail` on, row m sees but those tail + b whose bit is set in
  // bits(m). Others must be finite.
  template <class Bits>
  void tree(int64_t tail, Bits bits) {
    tail_ = tail;
    for (int64_t m = 0; m < padded_; ++m) bits_[m] = bits(m < rows_ ? m : rows_ - 1);
  }

  // Keys first, first + 1, ..., count <= KEYS of them, and their values. Meanwhile `ahead`.
  void block(const C* const* key, const C* const* value, int64_t first, int count,
             const Ahead& ahead = {}) {
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
    // A panel is packed before the one in front of it is used, so that it need not be waited for.
    pack_values(value, 0, values_[0]);
    for (int64_t p = 0; p < panels; ++p) {
      if (p + 1 < panels) pack_values(value, (p + 1) * PANEL, values_[(p + 1) % 2]);
      if constexpr (AMX)
        matrix_accumulate(p * PANEL, values_[p % 2]);
      else
        accumulate(p * PANEL, values_[p % 2]);
    }
    fresh_ = false;
  }

 private:
  // About how much a block works, in units of packing two rows of one panel.
  static constexpr int MATRIX_STEP = 8, TILE_STEP = 8;  // four tiles; 8 words of 24 sums
  int64_t work(int64_t panels) const {
    const int64_t words = words_of(d_), vectors = padded_ / L;
    if (AMX) {
      const int64_t tiles = up_to(count_, 16) / 16 * (vectors * (words / 16) + panels * 2);
      return panels * count_ / 2 + tiles / 4 * MATRIX_STEP;
    }
    const int64_t sums = count_ * words * vectors + rows_ * count_ / N * panels * COLUMN_VECTORS;
    return panels * count_ / N + sums / (ROW_TILE * COLUMN_VECTORS);
  }
  static int64_t words_of(int64_t d) { return up_to((d + N - 1) / N, 16); }

  // How many keys of this block row m sees.
  int sees(int64_t m) const {
    const int64_t n = seen_[m] - first_;
    return n <= 0 ? 0 : n < count_ ? int(n) : count_;
  }

  template <class T, class Query>
  void pack_queries(Query query) {
    for (int64_t m0 = 0; m0 < padded_; m0 += L) {
      const T* q[L];
      for (int64_t i = 0; i < L; ++i) q[i] = m0 + i < rows_ ? query(m0 + i) : nullptr;
#if defined(__AVX512F__) && defined(__AVX512BW__)
      if constexpr (sizeof(T) == sizeof(C)) {
        for (int64_t w = 0; w < words_; w += 16) {
          const int64_t left = d_ - w * N;
          const __mmask32 some = left >= 16 * N ? ~0u : left > 0 ? (1u << left) - 1 : 0u;
          __m512i r[16];
          for (int64_t i = 0; i < 16; ++i) {
            const T* from = q[i] ? q[i] + w * N : nullptr;
            if constexpr (N == 1)
              r[i] = _mm512_maskz_loadu_epi32(__mmask16(from ? some : 0), from);
            else
              r[i] = _mm512_maskz_loadu_epi16(from ? some : 0, from);
          }
          transpose16(r);
          for (int64_t i = 0; i < 16; ++i)
            _mm512_storeu_si512(queries_ + ((w + i) * padded_ + m0) * N, r[i]);
        }
        continue;
      }
#endif
      for (int64_t m = 0; m < L; ++m)
        for (int64_t i = 0; i < words_ * N; ++i)
          put_converted(queries_ + (i / N * padded_ + m0 + m) * N + i % N,
                        q[m] && i < d_ ? q[m] + i : nullptr);
    }
  }
  template <class T>
  static void put_converted(C* to, const T* from) {
    if (from)
      widen_row(from, to, 1);
    else
      put(to, 0.0f);
  }

  // Scores of all keys that a row of a vector sees.
  void score(const C* const* key) {
    const int64_t vectors = padded_ / L;
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

  template <int NV>
  void score_some(int vectors, const C* const* key, int from, int to, int64_t m0) {
    if (vectors == NV) {
      constexpr int K = KEY_TILE[NV];
      for (int j = from; j < to; j += K) score_tile<K, NV>(key + j, to - j < K ? to - j : K, j, m0);
    } else if constexpr (NV > 1) {
      score_some<NV - 1>(vectors, key, from, to, m0);
    }
  }

  template <int K, int NV>
  void score_tile(const C* const* key, int count, int j0, int64_t m0) {
    const C* k[K];
    F acc[K][NV];
    for (int j = 0; j < K; ++j) {
      k[j] = key[j < count ? j : count - 1];  // scores of the excess are dropped
      for (int v = 0; v < NV; ++v) acc[j][v] = F::zero();
    }
    const C* q = queries_ + m0 * N;
    const int64_t step = padded_ * N;
    int64_t i = 0;
    auto one = [&](auto word) {
      typename W::V x[NV];
      for (int v = 0; v < NV; ++v) x[v] = W::load(q + v * L * N);
      for (int j = 0; j < K; ++j) {
        const typename W::V y = word(k[j] + i);
        for (int v = 0; v < NV; ++v) acc[j][v] = W::mac(acc[j][v], x[v], y);
      }
    };
    for (; i + N <= d_;) {
      const int64_t end = i + TILE_STEP * N <= d_ ? i + TILE_STEP * N : d_ - d_ % N;
      ahead_.step(TILE_STEP);
      for (; i < end; i += N, q += step) one([](const C* p) { return W::all(p); });
    }
    if (i < d_) one([](const C* p) { return W::half(p); });  // what follows a row may be NaN
    for (int j = 0; j < count; ++j)
      for (int v = 0; v < NV; ++v) acc[j][v].store(scores_ + (j0 + j) * padded_ + m0 + v * L);
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
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
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
  void pack_values(const C* const* value, int64_t c, C* to) {
    const int64_t n = dv_ - c < PANEL ? dv_ - c : PANEL;
    int j = 0;
    if (n == PANEL)
      for (; j + N <= count_; j += N, to += PANEL * N) {
        ahead_.step(1);
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
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
  template <bool WHOLE>
  static void pack_word(const bf16* a, const bf16* b, int64_t n, bf16* to) {
    alignas(64) static constexpr uint16_t turns[2][32] = {
        {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
         8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47},
        {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
         24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63}};
    const __m512i low = _mm512_load_si512(turns[0]), high = _mm512_load_si512(turns[1]);
    for (int64_t c = 0; c < (WHOLE ? PANEL : n); c += 32) {
      const __mmask32 some = WHOLE || n - c >= 32 ? ~0u : (1u << (n - c)) - 1;
      const __m512i x = _mm512_maskz_loadu_epi16(some, a + c);
      const __m512i y = _mm512_maskz_loadu_epi16(b ? some : 0, b + c);
      _mm512_storeu_si512(to + 2 * c, _mm512_permutex2var_epi16(x, low, y));
      _mm512_storeu_si512(to + 2 * c + 32, _mm512_permutex2var_epi16(x, high, y));
    }
  }
#endif

  // sums += weights . values for the panel at column c; rows in equal tiles, each with the keys that it sees.
  void accumulate(int64_t c, const C* panel) {
    const int64_t left = (columns_ - c) / L;
    const int vectors = int(left < COLUMN_VECTORS ? left : COLUMN_VECTORS);
    const int64_t tiles = (rows_ + ROW_TILE - 1) / ROW_TILE;
    for (int64_t i = 0; i < tiles; ++i) {
      const int64_t m = rows_ * i / tiles, end = rows_ * (i + 1) / tiles;
      sum_some<ROW_TILE, COLUMN_VECTORS>(int(end - m), vectors, m, c, panel,
                                         (sees(end - 1) + N - 1) / N);
    }
  }

  template <int M, int NV>
  void sum_some(int rows, int vectors, int64_t m, int64_t c, const C* panel, int words) {
    if constexpr (M > 1)
      if (rows < M) return sum_some<M - 1, NV>(rows, vectors, m, c, panel, words);
    if constexpr (NV > 1)
      if (vectors < NV) return sum_some<M, NV - 1>(rows, vectors, m, c, panel, words);
    sum_tile<M, NV>(m, c, panel, words);
  }

  template <int M, int NV>
  void sum_tile(int64_t m, int64_t c, const C* panel, int words) {
    const C *v = panel, *p = (const C*)scores_ + m * N;
    float* o = sums_ + m * stride_ + c;
    F acc[M][NV];
    for (int i = 0; i < M; ++i)
      for (int x = 0; x < NV; ++x)
        acc[i][x] = fresh_ ? F::zero() : F::load(o + i * stride_ + x * L);
    for (int w = 0; w < words;) {
      const int end = w + TILE_STEP < words ? w + TILE_STEP : words;
      ahead_.step(TILE_STEP);
      for (; w < end; ++w, v += PANEL * N, p += padded_ * N) {
        typename W::V y[NV];
        for (int x = 0; x < NV; ++x) y[x] = W::load(v + x * L * N);
        for (int i = 0; i < M; ++i) {
          const typename W::V weight = W::all(p + i * N);
          for (int x = 0; x < NV; ++x) acc[i][x] = W::mac(acc[i][x], y[x], weight);
        }
      }
    }
    for (int i = 0; i < M; ++i)
      for (int x = 0; x < NV; ++x) acc[i][x].store(o + i * stride_ + x * L);
  }

#if DS_AMX
  // As score(), 16 keys by 16 queries to a tile: keys are read as they lie, or from a copy where
  // they are not evenly spaced, not whole tiles long, or fewer than sixteen.
  void matrix_score(const C* const* key) {
    constexpr int GROUPS = KEYS / 16;
    const C* at[GROUPS];
    int64_t stride[GROUPS];  // in bytes
    const int last = sees(padded_ - 1), groups = (last + 15) / 16;
    for (int g = 0; g < groups; ++g) {
      const C* const* k = key + 16 * g;
      const int count = last - 16 * g < 16 ? last - 16 * g : 16;
      const int64_t step = count < 16 ? 0 : k[1] - k[0];
      bool even = count == 16 && d_ % 32 == 0;
      for (int j = 2; even && j < 16; ++j) even = k[j] - k[j - 1] == step;
      at[g] = even ? k[0] : stage(k, count, g);
      stride[g] = (even ? step : words_ * N) * int64_t(sizeof(C));
    }
    MatrixUnit::written();
    const int64_t vectors = padded_ / L;
    for (int64_t v = 0; v < vectors;) {
      const int two = v + 1 < vectors;
      const int need = (sees((v + 1 + two) * L - 1) + 15) / 16;
      if (two)
        for (int g = 0; g < need; g += 2) score_2x2(at + g, stride + g, need - g > 1, g, v);
      else
        for (int g = 0; g < need; g += 4) score_4x1(at + g, stride + g, need - g, g, v);
      v += 1 + two;
    }
  }

  const C* stage(const C* const* key, int count, int group) {
    C* to = staged_ + group * 16 * words_ * N;
    std::memset((void*)to, 0, size_t(16 * words_ * N) * sizeof(C));
    for (int j = 0; j < count; ++j) widen_row(key[j], to + j * words_ * N, d_);
    return to;
  }

  void score_2x2(const C* const* at, const int64_t* stride, bool both, int group, int64_t v) {
    const C *k0 = at[0], *k1 = at[both];
    const int64_t s0 = stride[0], s1 = stride[both], row = padded_ * 4;
    const char* q = (const char*)(queries_ + v * L * N);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t w = 0; w < words_; w += 16) {
      ahead_.step(MATRIX_STEP);
      _tile_loadd(4, k0 + w * N, s0);
      _tile_loadd(6, q + w * row, row);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, q + w * row + 64, row);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, k1 + w * N, s1);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    float* s = scores_ + group * 16 * padded_ + v * L;
    _tile_stored(0, s, row);
    _tile_stored(1, s + L, row);
    if (!both) return;
    _tile_stored(2, s + 16 * padded_, row);
    _tile_stored(3, s + 16 * padded_ + L, row);
  }

  void score_4x1(const C* const* at, const int64_t* stride, int count, int group, int64_t v) {
    const int i1 = count > 1, i2 = count > 2 ? 2 : 0, i3 = count > 3 ? 3 : 0;
    const int64_t row = padded_ * 4;
    const char* q = (const char*)(queries_ + v * L * N);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t w = 0; w < words_; w += 16) {
      ahead_.step(MATRIX_STEP);
      _tile_loadd(6, q + w * row, row);
      _tile_loadd(4, at[0] + w * N, stride[0]);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(5, at[i1] + w * N, stride[i1]);
      _tile_dpbf16ps(1, 5, 6);
      _tile_loadd(4, at[i2] + w * N, stride[i2]);
      _tile_dpbf16ps(2, 4, 6);
      _tile_loadd(5, at[i3] + w * N, stride[i3]);
      _tile_dpbf16ps(3, 5, 6);
    }
    float* s = scores_ + group * 16 * padded_ + v * L;
    _tile_stored(0, s, row);
    if (i1) _tile_stored(1, s + 16 * padded_, row);
    if (i2) _tile_stored(2, s + 32 * padded_, row);
    if (i3) _tile_stored(3, s + 48 * padded_, row);
  }

  void matrix_accumulate(int64_t c, const C* panel) {
    MatrixUnit::written();
    const int64_t vectors = padded_ / L, tiles = (columns_ - c < PANEL ? columns_ - c : PANEL) / L;
    for (int64_t v = 0; v < vectors;) {
      const int two = v + 1 < vectors;
      const int words = int(up_to(sees((v + 1 + two) * L - 1), 32)) / N;
      if (two)
        for (int64_t t = 0; t < tiles; t += 2) sum_2x2(v, c + t * L, panel + t * L * N, tiles - t > 1, words);
      else
        sum_1x4(v, c, panel, int(tiles), words);
      v += 1 + two;
    }
  }

  void sum_2x2(int64_t v, int64_t c, const C* panel, bool both, int words) {
    const int64_t row = stride_ * 4, b = both ? 64 : 0;
    float *o0 = sums_ + v * L * stride_ + c, *o1 = o0 + 16 * stride_;
    const C *p0 = turned_ + v * L * KEYS, *p1 = p0 + 16 * KEYS;
    const char* y = (const char*)panel;
    if (fresh_) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    } else {
      _tile_loadd(0, o0, row);
      _tile_loadd(1, (char*)o0 + b, row);
      _tile_loadd(2, o1, row);
      _tile_loadd(3, (char*)o1 + b, row);
    }
    for (int w = 0; w < words; w += 16) {
      ahead_.step(MATRIX_STEP);
      _tile_loadd(4, p0 + w * N, KEYS * 2);
      _tile_loadd(6, y + w * PANEL * 4, PANEL * 4);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, y + w * PANEL * 4 + b, PANEL * 4);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, p1 + w * N, KEYS * 2);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, o0, row);
    _tile_stored(2, o1, row);
    if (!both) return;
    _tile_stored(1, o0 + L, row);
    _tile_stored(3, o1 + L, row);
  }

  void sum_1x4(int64_t v, int64_t c, const C* panel, int tiles, int words) {
    const int64_t row = stride_ * 4, b1 = tiles > 1 ? 64 : 0, b2 = tiles > 2 ? 128 : 0,
                  b3 = tiles > 3 ? 192 : 0;
    float* o = sums_ + v * L * stride_ + c;
    const C* p = turned_ + v * L * KEYS;
    const char* y = (const char*)panel;
    if (fresh_) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    } else {
      _tile_loadd(0, o, row);
      _tile_loadd(1, (char*)o + b1, row);
      _tile_loadd(2, (char*)o + b2, row);
      _tile_loadd(3, (char*)o + b3, row);
    }
    for (int w = 0; w < words; w += 16, y += 16 * PANEL * 4) {
      ahead_.step(MATRIX_STEP);
      _tile_loadd(4, p + w * N, KEYS * 2);
      _tile_loadd(5, y, PANEL * 4);
      _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(6, y + b1, PANEL * 4);
      _tile_dpbf16ps(1, 4, 6);
      _tile_loadd(7, y + b2, PANEL * 4);
      _tile_dpbf16ps(2, 4, 7);
      _tile_loadd(5, y + b3, PANEL * 4);
      _tile_dpbf16ps(3, 4, 5);
    }
    _tile_stored(0, o, row);
    if (b1) _tile_stored(1, o + L, row);
    if (b2) _tile_stored(2, o + 2 * L, row);
    if (b3) _tile_stored(3, o + 3 * L, row);
  }
#else
  void matrix_score(const C* const*) {}
  void matrix_accumulate(int64_t, const C*) {}
#endif

  int64_t d_, dv_, words_, columns_, stride_;
  int64_t rows_ = 0, padded_ = 0, first_ = 0;
  Ahead ahead_;
  int count_ = 0;
  float scale_ = 0.0f;
  bool fresh_ = true;
  C *queries_, *values_[2], *turned_ = nullptr, *staged_ = nullptr;
  float *scores_, *sums_ = nullptr, *top_, *base_, *total_;
  int32_t* seen_;
  int64_t* bits_;
  int64_t tail_ = NO_TAIL;
};

}  // namespace ds
