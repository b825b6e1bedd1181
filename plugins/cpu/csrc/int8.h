// Format of gemm.h: signed 8-bit weights with one scale per column, activations of 8 bits per token.
//
// A panel: 64 scales (float32), 64 sums of the column's weights (int32), [k / 4][64][4] bytes,
// with k padded to a multiple of 64.
#pragma once

#include "amx.h"
#include "arena.h"
#include "bytes.h"
#include "quantize.h"

namespace ds {

inline int64_t padded8(int64_t k) { return (k + 63) / 64 * 64; }

// Tokens in 8 bits: rows of `ld` >= padded8(k) bytes, zeros after k; `groups` scales per row, and sums of q.
struct Tokens8 {
  const uint8_t* q;
  int64_t ld;
  const float* scale;
  const int32_t* sum;
  int64_t groups;
};

// Buffers of rows in 8 bits.
struct Quantised {
  int64_t k, group, groups, ld;
  uint8_t flip;
  uint8_t* q;
  float* scale;
  int32_t* sum;

  // group 0: one for the whole of k.
  template <class Fmt>
  void buffers(Arena& arena, int64_t rows, int64_t columns, int64_t group_size) {
    k = columns, ld = padded8(k), flip = Fmt::FLIP;
    group = group_size > 0 ? group_size : ld;
    groups = k > 0 ? (k + group - 1) / group : 1;
    q = arena.take<uint8_t>(rows * ld);
    scale = arena.take<float>(rows * groups);
    sum = arena.take<int32_t>(rows * groups);
  }
  template <class X>
  void set(int64_t row, const X* x) const {
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t at = g * group, n = k - at < group ? k - at : group, i = row * groups + g;
      scale[i] = quantize_row(x + at, n, largest(x + at, n), flip, g + 1 < groups ? n : ld - at,
                              q + row * ld + at, sum + i);
    }
  }
  void copy(int64_t from, int64_t to) const {
    std::memcpy(q + to * ld, q + from * ld, size_t(ld));
    std::memcpy(scale + to * groups, scale + from * groups, size_t(groups) * sizeof(float));
    std::memcpy(sum + to * groups, sum + from * groups, size_t(groups) * sizeof(int32_t));
  }
  Tokens8 tokens(int64_t from) const {  // rows from `from` on
    return {q + from * ld, ld, scale + from * groups, sum + from * groups, groups};
  }
};

#if defined(__AVX512F__)
constexpr int TILE8 = 6, ONE_PASS8 = 6;
template <int M>
constexpr int VECTORS8 = 4;
#elif defined(__AVX2__)
constexpr int TILE8 = 6, ONE_PASS8 = 1;
template <int M>
constexpr int VECTORS8 = M == 1 ? 8 : M <= 3 ? 4 : 2;
#else
constexpr int TILE8 = 2, ONE_PASS8 = 1;
template <int M>
constexpr int VECTORS8 = M == 1 ? 4 : 2;
#endif

// acc += dots over k elements, a multiple of 16, of M rows with C vectors of columns; w is
// [k / 4][64][4].
template <bool UNSIGNED, int M, int C>
inline void quads_dots(const uint8_t* w, int64_t k, const uint8_t* const* x, Sums (&acc)[M][C],
                       Ahead& ahead) {
  for (int64_t i = 0; i < k;) {
    ahead.remainder<AHEAD_STEP / 4>();
    for (const int64_t end = i + unknown(AHEAD_STEP); i < end; i += 4, w += 4 * NB) {
      ahead.piece<AHEAD_STEP / 4>();
      Bytes v[C];
      DS_UNROLL
      for (int c = 0; c < C; ++c) v[c] = Bytes::load(w + c * 4 * Sums::W);
      DS_UNROLL
      for (int m = 0; m < M; ++m) {
        const Bytes four = Bytes::all(x[m] + i);
        DS_UNROLL
        for (int c = 0; c < C; ++c)
          acc[m][c] = UNSIGNED ? mac_u(acc[m][c], v[c], four) : mac(acc[m][c], v[c], four);
      }
    }
  }
}

// What amx.h asks of a format, but for the weights: tokens as they lie.
template <class T>
struct TilesOf8 {
#if defined(__AMX_INT8__)
  using Tiles = T;
  static const void* rows(const Tokens8& x, int64_t t, int64_t k0) {
    return x.q + t * x.ld + k0;
  }
  static int64_t row_bytes(const Tokens8& x) { return x.ld; }
#endif
};

#if defined(__AMX_INT8__)
DS_TILES(TilesInt8, int32_t, 1, _tile_dpbusd);  // as mac: flipped tokens are unsigned, weights signed
#else
struct TilesInt8 {};
#endif

struct Int8 : TilesOf8<TilesInt8> {
  static constexpr uint8_t FLIP = X_FLIP;
  using Sum = int32_t;
  static constexpr int TILE = TILE8, ONE_PASS = ONE_PASS8;
  static constexpr int64_t TOKENS = 96;
  static constexpr int64_t HEAD = 8 * NB;  // bytes before the weights
  static constexpr bool UNPACKS = false, FETCHES = false;
  static constexpr bool looks_ahead(int64_t m, int64_t k) {
    return m < INT8_ALONE_FROM && k < INT8_ALONE_LONG;
  }
  struct Panel {
    const uint8_t* data;
    const float* scales() const { return (const float*)data; }
    const int32_t* sums() const { return (const int32_t*)data + NB; }
  };
  using Tokens = Tokens8;
  struct Block {};

  static int64_t bytes(int64_t k) {  // of a panel
    return HEAD + padded8(k) * NB;
  }
  static int64_t block(const Panel&) { return 256; }
  static const char* at(const Panel& p, int64_t k0) {
    return (const char*)p.data + (k0 > 0 ? HEAD + k0 * NB : 0);
  }

  static constexpr int64_t TILES_FROM = 7;
  static bool tiles_fit(const Panel&) { return true; }
  static const void* weights(const Panel& p, int64_t k0) { return p.data + HEAD + k0 * NB; }
  static int64_t folds(const Panel&) { return 0; }
  static void fold(const Panel&, int64_t, const Tokens&, int64_t, const int32_t*, int32_t*, bool) {}

  template <int M>
  DS_NOINLINE static void tile(const Panel& p, int64_t k0, int64_t k1, const Tokens& x, int64_t t,
                               int32_t (*sums)[NB], bool more, Ahead ahead) {
    constexpr int C = VECTORS8<M>;
    const uint8_t* rows[M];
    for (int m = 0; m < M; ++m) rows[m] = x.q + (t + m) * x.ld + k0;
    for (int c0 = 0; c0 < NB; c0 += C * Sums::W) {
      Sums acc[M][C];
      DS_UNROLL
      for (int m = 0; m < M; ++m)
        DS_UNROLL
        for (int c = 0; c < C; ++c)
          acc[m][c] = more ? Sums::load(sums[m] + c0 + c * Sums::W) : Sums::all(0);
      quads_dots<false>(p.data + HEAD + k0 * NB + 4 * c0, (k1 - k0 + 15) / 16 * 16, rows, acc, ahead);
      DS_UNROLL
      for (int m = 0; m < M; ++m)
        DS_UNROLL
        for (int c = 0; c < C; ++c) acc[m][c].store(sums[m] + c0 + c * Sums::W);
      ahead.lines = 0;  // once is enough
    }
  }
  static void finish(const Panel& p, const Tokens& x, int64_t t, int32_t* sums, float* out) {
    const F scale = F::all(x.scale[t]);
    for (int c = 0; c < NB; c += F::W) {
      Sums s = Sums::load(sums + c);
      if (X_FLIP) s = s - Sums::load(p.sums() + c).times128();
      (s.wide() * (F::load(p.scales() + c) * scale)).store(out + c);
    }
  }
};

}  // namespace ds
