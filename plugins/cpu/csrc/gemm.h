// The driver of all matmuls with packed weights: y = x W^T for few tokens and for many.
//
// Panels. A weight [n, k] is packed once as panels of NB = 64 columns (of y), padded with zeros; in
// a panel k goes in steps of `step` elements, so that a panel is one sequential stream:
//   [ceil(n / 64)][ceil(k / step)][64][step],   step 1 for float32, 2 for 16 bits, 4 for int8.
// Everything below works on one panel and some tokens; matrices, heads, experts and parts of a
// weight (gate | up) are just more panels.
//
// Work is cut into units (panel, block of tokens). Within a unit k goes in blocks that stay in the
// first-level cache while all tiles of tokens pass over them, and the next block is fetched
// meanwhile. Every sum runs along k in one order, whatever the tile, the block or the thread.
//
// A weight format is a struct with static members (DenseF32 and DenseBf16 in dense.h are the
// examples):
//
//   using Sum = float;                 // or int32_t: 4 bytes, accumulates over blocks of k
//   static constexpr int TILE;         // most tokens of a tile
//   static constexpr int ONE_PASS;     // up to so many tokens a tile may take the whole of k at
//                                      // once, for it reads every byte of the panel once
//   static constexpr bool looks_ahead(int64_t m, int64_t k);  // whether such a tile of m tokens
//                                      // fetches ahead
//   static constexpr int64_t TOKENS;   // tokens of a unit: sums of TOKENS x 64 stay in a cache
//   struct Panel;                      // one panel: pointers to its bytes, scales, column sums
//   struct Tokens;                     // prepared activations of all tokens of this call: Rows<T>
//                                      // as they lie, or quantised, or in another order
//   static int64_t block(const Panel&);   // elements of a block of k: a multiple of the step and of
//                                      // the scale group, 16 to 32 KB of (unpacked) weights; more
//                                      // where many tiles stream them (LONG_BLOCKS)
//   static const char* at(const Panel&, int64_t k0);  // where block k0 of the panel begins
//   template <int M> static void tile(const Panel&, int64_t k0, int64_t k1, const Tokens&,
//                                     int64_t t, Sum (*sums)[NB], bool more, Ahead);
//       // sums[0, M) (+)= dots of tokens [t, t + M) with the 64 columns over [k0, k1); added to
//       // what is there if `more`, else replacing it. k1 may be no multiple of anything when it
//       // is the end of k: then activations beyond it must not be read (weights are padded).
//   static void finish(const Panel&, const Tokens&, int64_t t, Sum* sums, float* out);
//       // the 64 values of token t, from its sums; out may be sums
//   // Formats that convert a block before the tiles of more than ONE_PASS tokens read it:
//   struct Block;                      // a buffer for one converted block; `struct Block {}` if not
//   static constexpr bool UNPACKS;
//   static void unpack(const Panel&, int64_t k0, int64_t k1, Block&);
//   template <int M> static void tile_of(const Panel&, const Block&, ... as tile);
//   // and, for matrix units, what amx.h asks.
//
// To run it: `matmul` below, or `panel_sums` for a caller that combines panels itself (gate and up);
// k > 0, for without a block of k no sum is written.
#pragma once

#include "share.h"
#include "simd.h"

namespace ds {

constexpr int NB = 64;  // columns of a panel

inline int64_t panels_of(int64_t n) { return (n + NB - 1) / NB; }

// Activations as they lie: row t at data + t * ld.
template <class T>
struct Rows {
  const T* data;
  int64_t ld;
  const T* row(int64_t t) const { return data + t * ld; }
};

inline void prefetch(const void* p) {
#if defined(__GNUC__)
  __builtin_prefetch(p, 0, 2);  // to the second level: the first is full of what is in use
#else
  (void)p;
#endif
}

// What a tile fetches while it computes: `lines` cache lines in every step of its loop along k, in
// small pieces between its loads. In one go they would hold up the loads behind them: on one core of
// an AMD EPYC (Zen 4) bfloat16 streams at 20 GB/s so, at 31 in pieces, and plain reading at 30; on a
// Xeon its matrix units at 29, at 31.5 in pieces, of 34 (benchmarks/results/cpu_kernels.md).
struct Ahead {
  const char* at;
  int lines;
  // `bytes` from `from`, spread over `steps` steps.
  static Ahead over(const char* from, int64_t bytes, int64_t steps) {
    return {from, steps > 0 ? int((bytes / 64 + steps - 1) / steps) : 0};
  }
  // A step of PARTS equal pieces, and before them what division leaves.
  template <int PARTS>
  void remainder() {
    some(lines % PARTS);
  }
  template <int PARTS>
  void piece() {
    some(lines / PARTS);
  }
  void quarter() { some((lines + 3) / 4); }  // of a step
  void some(int count) {
    for (int i = 0; i < count; ++i, at += 64) prefetch(at);
  }
};
constexpr int64_t AHEAD_STEP = 16;  // elements of k of a step
// Bytes that a tile which streams a whole panel fetches ahead: as it lies, and of one that it widens,
// where more is computed between two loads. Processors with matrix units want others, and so do
// Intel's without (avx512 runs there: score.cpp).
#if defined(__AMX_TILE__)
constexpr int64_t STREAM_AHEAD = 4096, WIDEN_AHEAD = 2048;
#elif defined(__AVX512BW__) && !DS_BF16_DOTS
constexpr int64_t STREAM_AHEAD = 8192, WIDEN_AHEAD = 8192;
#else
constexpr int64_t STREAM_AHEAD = 512, WIDEN_AHEAD = 8192;
#endif
// Whether the processor fetches better by itself what such a tile of some tokens reads: an AMD EPYC
// (Zen 4) does for one or two whose weights are widened, for more than one of int8, and for one of
// long panels. (Zen 5 was not asked. Matrix units and FP8 by vectors beside them do not ask: FETCHES in
// amx.h, WIDEN_AHEAD.)
#if DS_BF16_DOTS && !defined(__AMX_TILE__)
constexpr int64_t WIDENS_ALONE_TO = 2, INT8_ALONE_FROM = 2, INT8_ALONE_LONG = 4096;
#else
constexpr int64_t WIDENS_ALONE_TO = 0, INT8_ALONE_FROM = INT64_MAX, INT8_ALONE_LONG = INT64_MAX;
#endif
constexpr int64_t UNPACK_AHEAD = 16384;  // and unpacking, between whose turns nothing is fetched

// From so many tiles on, blocks that are not unpacked are so many times as long and pass through the
// second-level cache: reading them from there is hidden, and sums go to memory and back less often
// (32 to 96 tokens on Zen 4: 2 to 4 % faster; equal or slower below).
constexpr int64_t LONG_BLOCKS_FROM = 5, LONG_BLOCKS = 4;

namespace detail {

template <class Fmt, int M>
inline void tile(const typename Fmt::Panel& p, const typename Fmt::Block* block, int64_t k0,
                 int64_t k1, const typename Fmt::Tokens& x, int64_t t, int m,
                 typename Fmt::Sum (*sums)[NB], bool more, Ahead ahead) {
  if (m == M) {
    if constexpr (Fmt::UNPACKS) {
      if (block) {
        Fmt::template tile_of<M>(p, *block, k0, k1, x, t, sums, more, ahead);
        return;
      }
    }
    Fmt::template tile<M>(p, k0, k1, x, t, sums, more, ahead);
  } else if constexpr (M > 1) {
    tile<Fmt, M - 1>(p, block, k0, k1, x, t, m, sums, more, ahead);
  }
}

}  // namespace detail

// Formats with a kernel on matrix units: amx.h.
template <class Fmt, class = void>
struct HasTiles {
  static constexpr bool value = false;
};
template <class Fmt>
struct HasTiles<Fmt, typename Fmt::Tiles::Here> {
  static constexpr bool value = true;
};
template <class Fmt>
inline void tiles_sums(const typename Fmt::Panel& p, const typename Fmt::Tokens& x, int64_t t0,
                       int64_t m, int64_t k, typename Fmt::Sum (*sums)[NB]);

// Gives the matrix units back when a thread is done with them.
#if defined(__AMX_TILE__)
inline thread_local int tile_rows = 0;  // that the units are configured for, 0: they are not
#endif
struct TileSession {
#if defined(__AMX_TILE__)
  ~TileSession() {
    if (tile_rows) _tile_release();
    tile_rows = 0;
  }
#endif
};

// sums[0, m) = dots of tokens [t0, t0 + m), m <= Fmt::TOKENS, with the 64 columns of one panel.
template <class Fmt>
inline void panel_sums(const typename Fmt::Panel& p, const typename Fmt::Tokens& x, int64_t t0,
                       int64_t m, int64_t k, typename Fmt::Sum (*sums)[NB]) {
  if constexpr (HasTiles<Fmt>::value) {
    if (m >= Fmt::TILES_FROM && Fmt::tiles_fit(p)) {
      tiles_sums<Fmt>(p, x, t0, m, k, sums);
      return;
    }
  }
  if (m <= Fmt::ONE_PASS) {
    const int64_t bytes = Fmt::at(p, k) - Fmt::at(p, 0);
    const int64_t early = Fmt::UNPACKS ? WIDEN_AHEAD : STREAM_AHEAD;
    Ahead ahead = Ahead::over(Fmt::at(p, 0) + early, bytes, (k + AHEAD_STEP - 1) / AHEAD_STEP);
    if (!Fmt::looks_ahead(m, k)) ahead.lines = 0;
    detail::tile<Fmt, Fmt::TILE>(p, nullptr, 0, k, x, t0, int(m), sums, false, ahead);
    return;
  }
  typename Fmt::Block block;
  const int64_t tiles = (m + Fmt::TILE - 1) / Fmt::TILE;
  const bool in_long = !Fmt::UNPACKS && tiles >= LONG_BLOCKS_FROM;
  const int64_t step = Fmt::block(p) * (in_long ? LONG_BLOCKS : 1);
  for (int64_t k0 = 0; k0 < k; k0 += step) {
    const int64_t k1 = k - k0 < step ? k : k0 + step;
    const char* next = Fmt::at(p, k1);  // of this panel, or the beginning of the one after it
    const int64_t bytes = next - Fmt::at(p, k0), steps = (k1 - k0 + AHEAD_STEP - 1) / AHEAD_STEP;
    if constexpr (Fmt::UNPACKS) Fmt::unpack(p, k0, k1, block);
    for (int64_t i = 0; i < tiles; ++i) {  // equal tiles, so that none is a lone token
      const int64_t t = m * i / tiles, n = m * (i + 1) / tiles - t;
      Ahead ahead = Ahead::over(next + bytes * i / tiles, bytes / tiles, steps);
      detail::tile<Fmt, Fmt::TILE>(p, &block, k0, k1, x, t0 + t, int(n), sums + t, k0 > 0, ahead);
    }
  }
}

// For every panel index in [0, panels) and tokens [0, m): of(index) gives its Panel and Tokens as a
// pair-like struct {panel, tokens}; emit(index, token, values) gets 64 floats. `cost` as in
// parallel(): bytes streamed, or their equal in arithmetic.
template <class Fmt, class Of, class Emit>
inline void matmul(int64_t panels, int64_t m, int64_t k, int64_t cost, Of of, Emit emit) {
  if (m <= 0) return;
  const int64_t cuts = (m + Fmt::TOKENS - 1) / Fmt::TOKENS;
  const int64_t units = panels * cuts;
  auto first = [&](int64_t i, int64_t pieces) { return units * i / pieces; };  // as in parallel()
  share(units, cost, first, [&](auto next, int64_t) {
    alignas(64) typename Fmt::Sum sums[Fmt::TOKENS][NB];
    TileSession session;
    (void)session;
    for (int64_t u = next(); u >= 0; u = next()) {
      const int64_t cut = u / panels, index = u % panels;  // tokens stay in the second-level cache
      const int64_t t0 = m * cut / cuts, count = m * (cut + 1) / cuts - t0;
      const auto job = of(index);
      panel_sums<Fmt>(job.panel, job.tokens, t0, count, k, sums);
      for (int64_t t = 0; t < count; ++t) {
        float* values = (float*)sums[t];
        Fmt::finish(job.panel, job.tokens, t0 + t, sums[t], values);
        emit(index, t0 + t, (const float*)values);
      }
    }
  });
}

// The accumulators of a tile and its sums, for columns c0 and on.
template <int M, int C>
inline void load_sums(const float (*sums)[NB], int c0, bool more, F (&acc)[M][C]) {
  DS_UNROLL
  for (int m = 0; m < M; ++m)
    DS_UNROLL
    for (int c = 0; c < C; ++c) acc[m][c] = more ? F::load(sums[m] + c0 + c * F::W) : F::zero();
}
template <int M, int C>
inline void store_sums(const F (&acc)[M][C], float (*sums)[NB], int c0) {
  DS_UNROLL
  for (int m = 0; m < M; ++m)
    DS_UNROLL
    for (int c = 0; c < C; ++c) acc[m][c].store(sums[m] + c0 + c * F::W);
}

// Writes `count` values of a token and reads no others: what most emits do.
template <class T>
inline void put_row(T* to, const float* v, int64_t count) {
  int64_t i = 0;
  for (; i + F::W <= count; i += F::W) F::load(v + i).store(to + i);
  if (i < count) {
    const int n = int(count - i);
    store_tail(load_tail(v + i, n), to + i, n);
  }
}
#if DS_BF16_DOTS
inline void put_row(bf16* to, const float* v, int64_t count) {
  for (int64_t i = 0; i < count; i += 16) {
    const __mmask16 some = __mmask16(count - i < 16 ? (1u << (count - i)) - 1 : 0xffff);
    const __m512 x = _mm512_maskz_loadu_ps(some, v + i);
    _mm256_mask_storeu_epi16(to + i, some, (__m256i)_mm512_cvtneps_pbh(x));
  }
}
#endif

}  // namespace ds
