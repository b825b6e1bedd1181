// Formats of gemm.h for plain weights, float32 and bfloat16, with activations of the same type.
#pragma once

#include "amx.h"
#include "pairs.h"

namespace ds {

// Panels of 16 and 8 bits hold whole steps of the matrix units: k is padded with zeros to this.
constexpr int64_t K_STEP = 32;
inline int64_t padded_k(int64_t k) { return (k + K_STEP - 1) / K_STEP * K_STEP; }

#if defined(__AMX_TILE__)
constexpr int64_t TOKENS_PAIRS = 256;
#else
constexpr int64_t TOKENS_PAIRS = 96;
#endif
constexpr int64_t BLOCK_PAIRS = PIECE;

// What amx.h asks of formats of pairs, with bfloat16 activations.
template <class X>
struct TilesOf {};
#if defined(__AMX_TILE__)
template <>
struct TilesOf<bf16> {
  using Tiles = TilesBf16;
  static constexpr int64_t TILES_FROM = 1;
  template <class P>
  static bool tiles_fit(const P&) {
    return true;
  }
  static const void* rows(const Rows<bf16>& x, int64_t t, int64_t k0) { return x.row(t) + k0; }
  static int64_t row_bytes(const Rows<bf16>& x) { return x.ld * int64_t(sizeof(bf16)); }
};
#endif

// bfloat16 weights, bfloat16 tokens: [n / 64][k / 2][64][2].
struct DenseBf16 : TilesOf<bf16> {
  using Sum = float;
  static constexpr int TILE = MAX_TILE, ONE_PASS = MAX_ONE_PASS;
  static constexpr int64_t TOKENS = TOKENS_PAIRS;
  static constexpr bool UNPACKS = false, FETCHES = false;
  static constexpr bool looks_ahead(int64_t, int64_t) { return true; }
  struct Panel {
    const bf16* w;
  };
  using Tokens = Rows<bf16>;
  struct Block {};

  static int64_t bytes(int64_t k) { return padded_k(k) * NB * int64_t(sizeof(bf16)); }
  static int64_t block(const Panel&) { return BLOCK_PAIRS; }
  static const char* at(const Panel& p, int64_t k0) { return (const char*)p.w + bytes(k0); }
  static const void* weights(const Panel& p, int64_t k0) { return at(p, k0); }
  static int64_t folds(const Panel&) { return 0; }
  static void fold(const Panel&, int64_t, const Tokens&, int64_t, const float*, float*, bool) {}

  template <int M>
  DS_NOINLINE static void tile(const Panel& p, int64_t k0, int64_t k1, const Tokens& x, int64_t t,
                               float (*sums)[NB], bool more, Ahead ahead) {
    constexpr int C = CHUNK_VECTORS<M>;
    const bf16* rows[M];
    for (int m = 0; m < M; ++m) rows[m] = x.row(t + m) + k0;
    const bf16* w = (const bf16*)at(p, k0);
    for (int c0 = 0; c0 < NB; c0 += C * F::W) {
      F acc[M][C];
      load_sums<M, C>(sums, c0, more, acc);
      pairs_dots(w + 2 * c0, k1 - k0, rows, acc, ahead);
      store_sums<M, C>(acc, sums, c0);
      ahead.lines = 0;  // once is enough
    }
  }
  static void finish(const Panel&, const Tokens&, int64_t, float*, float*) {}
};

// float32 weights: [n / 64][k][64].
struct DenseF32 {
  using Sum = float;
  static constexpr int TILE = MAX_TILE, ONE_PASS = MAX_ONE_PASS;
  static constexpr int64_t TOKENS = 96;
  static constexpr bool UNPACKS = false;
  static constexpr bool looks_ahead(int64_t, int64_t) { return true; }
  struct Panel {
    const float* w;
  };
  using Tokens = Rows<float>;
  struct Block {};

  static int64_t bytes(int64_t k) { return k * NB * int64_t(sizeof(float)); }
  static int64_t block(const Panel&) { return 64; }
  static const char* at(const Panel& p, int64_t k0) { return (const char*)p.w + bytes(k0); }

  template <int M>
  DS_NOINLINE static void tile(const Panel& p, int64_t k0, int64_t k1, const Tokens& x, int64_t t,
                               float (*sums)[NB], bool more, Ahead ahead) {
    constexpr int C = CHUNK_VECTORS<M>;
    const int64_t k = k1 - k0;
    const float* rows[M];
    for (int m = 0; m < M; ++m) rows[m] = x.row(t + m) + k0;
    for (int c0 = 0; c0 < NB; c0 += C * F::W) {
      const float* w = p.w + k0 * NB + c0;
      F acc[M][C];
      load_sums<M, C>(sums, c0, more, acc);
      auto one = [&](int64_t i) {
        F v[C];
        DS_UNROLL
        for (int c = 0; c < C; ++c) v[c] = F::load(w + c * F::W);
        DS_UNROLL
        for (int m = 0; m < M; ++m) {
          const F value = F::all(rows[m][i]);
          DS_UNROLL
          for (int c = 0; c < C; ++c) acc[m][c] = fma(v[c], value, acc[m][c]);
        }
      };
      int64_t i = 0;
      DS_ROLLED
      while (i + AHEAD_STEP <= k) {
        ahead.remainder<AHEAD_STEP>();
        DS_ROLLED
        for (const int64_t end = i + AHEAD_STEP; i < end; ++i, w += NB) {
          ahead.piece<AHEAD_STEP>();
          one(i);
        }
      }
      DS_ROLLED
      for (; i < k; ++i, w += NB) one(i);
      store_sums<M, C>(acc, sums, c0);
      ahead.lines = 0;  // once is enough
    }
  }
  static void finish(const Panel&, const Tokens&, int64_t, float*, float*) {}
};

}  // namespace ds
