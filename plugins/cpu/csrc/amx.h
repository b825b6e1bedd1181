// Matmuls on tile registers (AMX): 16 tokens with the 64 columns of a panel at a time.
//
// Four tiles of sums, one of tokens, three of weights in turn. A panel's steps of 64 bytes along k
// (32 bfloat16, 64 int8) are tiles of weights as they lie, so k must be padded to whole steps there.
// Rows of tokens are loaded as they lie too, but for the last partial step; they must be equally far
// apart. A format takes part by
//   using Tiles = TilesBf16;           // or another DS_TILES: element size and instruction
//   static constexpr int64_t TILES_FROM;   // tokens from which it is faster
//   static const void* rows(const Tokens&, int64_t t, int64_t k0);   // token t's activations
//   static int64_t row_bytes(const Tokens&);                         // between tokens
//   static const void* weights(const Panel&, int64_t k0);            // rows of 256 bytes
//   // of Block instead, if UNPACKS: static const void* weights(const Block&, int64_t k);
//   static constexpr bool FETCHES;     // unpacking fetches what comes, enough for few tokens
//   static int64_t folds(const Panel&);   // elements whose sums are folded at a time; 0: none
//   static void fold(const Panel&, int64_t k0, const Tokens&, int64_t t, const Tiles::Sum* part,
//                    Sum* sums, bool more);   // one token's 64 sums of the group at k0
#pragma once

#if defined(__AMX_TILE__)

#include "gemm.h"

namespace ds {

// Registers are named by literals only, hence a macro: what one instruction multiplies.
#define DS_TILES(name, sum, bytes, dot)      \
  struct name {                              \
    using Here = void;                       \
    using Sum = sum;                         \
    static constexpr int64_t BYTES = bytes;  \
    static void dot0() { dot(0, 4, 5); }     \
    static void dot1() { dot(1, 4, 6); }     \
    static void dot2() { dot(2, 4, 7); }     \
    static void dot3() { dot(3, 4, 5); }     \
  }
DS_TILES(TilesBf16, float, 2, _tile_dpbf16ps);

namespace detail {

// The compiler must not move stores across loads of tiles, which it does not see as loads.
inline void stored() { asm volatile("" ::: "memory"); }

// The caller holds a TileSession.
inline void configure(int rows) {
  if (tile_rows == rows) return;
  tile_rows = rows;
  struct {
    uint8_t palette, start, zero[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  } config = {};
  config.palette = 1;
  for (int i = 0; i < 8; ++i) {
    config.row_bytes[i] = 64;
    config.rows[i] = uint8_t(i < 5 ? rows : 16);
  }
  stored();
  _tile_loadconfig(&config);
}

// Adds one step: A from a with rows `lda` bytes apart, B from rows of 256 bytes.
template <class T>
inline void tile_step(const void* a, int64_t lda, const char* b, Ahead& ahead) {
  _tile_loadd(4, a, lda);
  _tile_loadd(5, b, 256);
  ahead.quarter();
  T::dot0();
  _tile_loadd(6, b + 64, 256);
  ahead.quarter();
  T::dot1();
  _tile_loadd(7, b + 128, 256);
  ahead.quarter();
  T::dot2();
  _tile_loadd(5, b + 192, 256);
  ahead.quarter();
  T::dot3();
}

template <class S>
inline void tiles_load(const S (*sums)[NB]) {
  _tile_loadd(0, sums[0], 256);
  _tile_loadd(1, sums[0] + 16, 256);
  _tile_loadd(2, sums[0] + 32, 256);
  _tile_loadd(3, sums[0] + 48, 256);
}
inline void tiles_zero() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}
template <class S>
inline void tiles_store(S (*sums)[NB]) {
  _tile_stored(0, sums[0], 256);
  _tile_stored(1, sums[0] + 16, 256);
  _tile_stored(2, sums[0] + 32, 256);
  _tile_stored(3, sums[0] + 48, 256);
}

}  // namespace detail

// panel_sums of gemm.h. Groups of tokens are of one size; the last may begin early, and what it
// computes again is not stored again.
template <class Fmt>
inline void tiles_sums(const typename Fmt::Panel& p, const typename Fmt::Tokens& x, int64_t t0,
                       int64_t m, int64_t k, typename Fmt::Sum (*sums)[NB]) {
  using T = typename Fmt::Tiles;
  constexpr int64_t STEP = 64 / T::BYTES;
  const int64_t groups = (m + 15) / 16, rows = (m + groups - 1) / groups;
  const int64_t fold = Fmt::folds(p), lda = Fmt::row_bytes(x);
  detail::configure(int(rows));
  const int64_t whole = k / STEP * STEP;  // steps that rows of tokens fill
  const bool stream = !Fmt::UNPACKS && groups == 1;
  const int64_t block_k = stream ? (k > 0 ? k : 1) : Fmt::block(p);
  alignas(64) typename T::Sum part[16][NB];
  alignas(64) char last[16][64];
  typename Fmt::Block block;
  for (int64_t k0 = 0; k0 < k; k0 += block_k) {
    const int64_t k1 = k - k0 < block_k ? k : k0 + block_k;
    const char* next = Fmt::at(p, k1);
    const int64_t bytes = next - Fmt::at(p, k0), steps = (k1 - k0 + STEP - 1) / STEP;
    if constexpr (Fmt::UNPACKS) Fmt::unpack(p, k0, k1, block);
    for (int64_t i = 0; i < groups; ++i) {
      const int64_t t = i * rows < m - rows ? i * rows : m - rows, skip = i * rows - t;
      Ahead ahead = stream ? Ahead::over(Fmt::at(p, 0) + STREAM_AHEAD, bytes, steps)
                           : Ahead::over(next + bytes * i / groups, bytes / groups, steps);
      if (Fmt::FETCHES && groups == 1) ahead.lines = 0;
      for (int64_t g0 = k0; g0 < k1;) {  // what is folded at a time, or the block
        const int64_t g1 = fold && k1 - g0 > fold ? g0 + fold : k1;
        if (fold || k0 == 0)
          detail::tiles_zero();
        else
          detail::tiles_load(sums + t);
        const char* b;
        if constexpr (Fmt::UNPACKS)
          b = (const char*)Fmt::weights(block, g0 - k0);
        else
          b = (const char*)Fmt::weights(p, g0);
        detail::stored();
        int64_t at = g0;
        DS_ROLLED
        for (; at + STEP <= g1; at += STEP, b += 16 * 256) {
          detail::tile_step<T>(Fmt::rows(x, t0 + t, at), lda, b, ahead);
        }
        if (at < g1) {
          std::memset(last, 0, sizeof last);
          for (int64_t r = 0; r < rows; ++r)
            std::memcpy(last[r], Fmt::rows(x, t0 + t + r, whole), size_t((k - whole) * T::BYTES));
          detail::stored();
          Ahead none{nullptr, 0};
          detail::tile_step<T>(last, 64, b, none);
        }
        if (fold) {
          detail::tiles_store(part);
          for (int64_t r = skip; r < rows; ++r)
            Fmt::fold(p, g0, x, t0 + t + r, part[r], sums[t + r], g0 > 0);
        } else if (skip == 0) {
          detail::tiles_store(sums + t);
        } else {
          detail::tiles_store(part);
          std::memcpy(sums[t + skip], part[skip], size_t(rows - skip) * sizeof part[0]);
        }
        g0 = g1;
      }
    }
  }
}

}  // namespace ds

#endif
