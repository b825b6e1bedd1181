// Formats of gemm.h: codes of few bits with a scale per column and group along k. Codes are widened to
// bfloat16 on the way to the registers, exactly; scales meet float32 sums.
//
// A panel is a sequence of groups: 64 scales, then [group / 2] pairs of k for 64 columns. k is padded
// with zeros to a multiple of K_STEP, which a group is a multiple of.
//
// Codes (Fp8Codes in fp8.h, Fp4Codes in fp4.h) have
//   static constexpr int64_t PAIR, HEAD;   // bytes of a pair of k, of the scales of a group
//   static constexpr float LIFT;           // what a widened code lacks
//   static constexpr int DIRECT;           // AVX2: tokens up to which it is faster to widen to registers:
//                                          // Widen has columns<n>(p, c0, body), two of n vectors at a time
//   static F scales(const char* head, int c);   // of columns c and on
//   struct Widen;   // pair(p, out): a pair of k as bfloat16 [64][2], or as four vectors of 16 columns
#pragma once

#include "dense.h"
#include "fp4.h"
#include "fp8.h"

namespace ds {

template <class X, class Codes>
struct Coded : TilesOf<X> {
  using Sum = float;
  static constexpr int TILE = MAX_TILE;
  static constexpr int64_t TOKENS = TOKENS_PAIRS, MAX_BLOCK = BLOCK_PAIRS;
  static constexpr int64_t HEAD = Codes::HEAD;
  static constexpr bool UNPACKS = true, FETCHES = true;
#if defined(__AMX_TILE__)
  // A tile costs the same for one token as for 16; for few, vectors with a tile's bits are faster.
  static constexpr int64_t TILES_FROM = 3;
  static constexpr int ONE_PASS = sizeof(X) == 2 ? TILES_FROM - 1 : 0;
#elif defined(__AVX512BW__)
  static constexpr int ONE_PASS = sizeof(X) != 2 ? 0 : DS_BF16_DOTS ? 4 : 6;
#elif defined(__AVX2__)
  static constexpr int ONE_PASS = Codes::DIRECT;
#else
  static constexpr int ONE_PASS = 0;
#endif
  static constexpr bool looks_ahead(int64_t m, int64_t) { return m > WIDENS_ALONE_TO; }
  struct Panel {
    const uint8_t* data;
    int64_t group;  // a multiple of K_STEP, at most MAX_BLOCK
  };
  using Tokens = Rows<X>;
  struct Block {
    alignas(64) bf16 w[MAX_BLOCK * NB];
  };

  static int64_t bytes(int64_t k, int64_t group) {
    return (k + group - 1) / group * HEAD + padded_k(k) / 2 * Codes::PAIR;
  }
  static int64_t block(const Panel& p) { return MAX_BLOCK / p.group * p.group; }
  static const char* at(const Panel& p, int64_t k0) {
    return (const char*)p.data + bytes(k0, p.group);
  }
  static void unpack(const Panel& p, int64_t k0, int64_t k1, Block& block) {
    const typename Codes::Widen widen;
    bf16* to = block.w;
    for (int64_t k = k0; k < k1; k += p.group) {
      const uint8_t* from = (const uint8_t*)at(p, k) + HEAD;
      const int64_t n = padded_k(k1 - k < p.group ? k1 - k : p.group);
      DS_ROLLED
      for (int64_t i = 0; i < n; i += 2, from += Codes::PAIR, to += 2 * NB) {
        fetch_pair(from + UNPACK_AHEAD);
        widen.pair(from, to);
      }
    }
  }

  static void fetch_pair(const uint8_t* p) {
    for (int64_t i = 0; i < Codes::PAIR; i += 64) prefetch(p + i);
  }
  // to [64] (+)= dots of a group of k times scales, C vectors from column c0 on.
  template <int C>
  static void scaled(const F (&dots)[C], const char* head, int c0, float* to, bool more) {
    DS_UNROLL
    for (int c = 0; c < C; ++c) {
      F dot = dots[c];
      if constexpr (Codes::LIFT != 1) dot = dot * F::all(Codes::LIFT);
      fma(dot, Codes::scales(head, c0 + c * F::W), more ? F::load(to + c * F::W) : F::zero())
          .store(to + c * F::W);
    }
  }

  static const void* weights(const Block& block, int64_t k) { return block.w + k * NB; }
  static int64_t folds(const Panel& p) { return p.group; }
  static void fold(const Panel& p, int64_t k0, const Tokens&, int64_t, const float* part,
                   float* sums, bool more) {
    constexpr int C = NB / F::W;
    F dots[C];
    DS_UNROLL
    for (int c = 0; c < C; ++c) dots[c] = F::load(part + c * F::W);
    scaled(dots, at(p, k0), 0, sums, more);
  }

  // dots(w, n, first column, rows, acc, ahead) adds those of one group, whose codes w are n elements of
  // k long. rows are the tokens' as they lie, or float32 if FLOATS.
  template <int M, bool FLOATS, class Dots>
  DS_NOINLINE static void groups(const Panel& p, int64_t k0, int64_t k1, const Tokens& x, int64_t t,
                                 float (*sums)[NB], bool more, Ahead ahead, Dots dots) {
    constexpr int C = CHUNK_VECTORS<M>;
    const int64_t group = p.group, step = HEAD + group / 2 * Codes::PAIR;
    const char* head = at(p, k0);
    const X* rows[M];
    typename std::conditional<FLOATS, WideRows<M>, char>::type wide;
    for (int64_t k = k0; k < k1; k += group, head += step, more = true) {
      const int64_t n = k1 - k < group ? k1 - k : group;
      DS_UNROLL
      for (int m = 0; m < M; ++m) rows[m] = x.row(t + m) + k;
      if constexpr (FLOATS) wide.take(rows, 0, n);
      Ahead none{nullptr, 0};  // once is enough
      for (int c0 = 0; c0 < NB; c0 += C * F::W) {
        F acc[M][C];
        DS_UNROLL
        for (int m = 0; m < M; ++m)
          DS_UNROLL
          for (int c = 0; c < C; ++c) acc[m][c] = F::zero();
        Ahead& fetch = c0 == 0 ? ahead : none;
        if constexpr (FLOATS)
          dots((const uint8_t*)head + HEAD, n, c0, wide, acc, fetch);
        else
          dots((const uint8_t*)head + HEAD, n, c0, rows, acc, fetch);
        DS_UNROLL
        for (int m = 0; m < M; ++m) scaled(acc[m], head, c0, sums[m] + c0, more);
      }
    }
  }
  template <int M>
  static void tile(const Panel& p, int64_t k0, int64_t k1, const Tokens& x, int64_t t,
                   float (*sums)[NB], bool more, Ahead ahead) {
#if defined(__AVX512BW__)
    if constexpr (M <= ONE_PASS) {
      const typename Codes::Widen widen;
      groups<M, false>(p, k0, k1, x, t, sums, more, ahead,
                       [&](const uint8_t* w, int64_t n, int, auto& rows, auto& acc, Ahead& fetch) {
#if defined(__AMX_TILE__)
                         (void)fetch;
                         dots_as_tiles<M>(n, rows, acc, [&](__m512i(&v)[4]) {
                           fetch_pair(w + WIDEN_AHEAD);
                           widen.pair(w, v);
                           w += Codes::PAIR;
                         });
#elif DS_BF16_DOTS
                         bf16_dots<M>(n, rows, acc, fetch, [&](__m512bh(&v)[4]) {
                           __m512i wide[4];
                           widen.pair(w, wide);
                           DS_UNROLL
                           for (int c = 0; c < 4; ++c) v[c] = (__m512bh)wide[c];
                           w += Codes::PAIR;
                         });
#else
                         float_dots(n, rows, acc, fetch, [&](F(&even)[4], F(&odd)[4]) {
                           __m512i wide[4];
                           widen.pair(w, wide);
                           DS_UNROLL
                           for (int c = 0; c < 4; ++c) split_pairs(wide[c], even[c], odd[c]);
                           w += Codes::PAIR;
                         });
#endif
                       });
    }
#elif defined(__AVX2__)
    if constexpr (M <= ONE_PASS) {
      constexpr int C = CHUNK_VECTORS<M>, V = AT_ONCE<M> == 1 ? 1 : 2;
      const typename Codes::Widen widen;
      groups<M, true>(p, k0, k1, x, t, sums, more, ahead,
                      [&](const uint8_t* w, int64_t n, int c0, auto& rows, auto& acc, Ahead& fetch) {
                        rows.each_pair(n, fetch, [&](int64_t i) {
                          widen.template columns<C>(w, c0, [&](int c, const __m256i(&wide)[2]) {
                            DS_UNROLL
                            for (int j = 0; j < 2; j += V) {
                              F even[V], odd[V];
                              DS_UNROLL
                              for (int v = 0; v < V; ++v) split_pairs(wide[j + v], even[v], odd[v]);
                              add_pair(even, odd, rows.at, i, c + j, acc);
                            }
                          });
                          w += Codes::PAIR;
                        });
                      });
    }
#endif
    (void)p, (void)k0, (void)k1, (void)x, (void)t, (void)sums, (void)more, (void)ahead;
  }
  template <int M>
  static void tile_of(const Panel& p, const Block& block, int64_t k0, int64_t k1, const Tokens& x,
                      int64_t t, float (*sums)[NB], bool more, Ahead ahead) {
    constexpr bool FLOATS = !DS_BF16_DOTS || sizeof(X) == 4;  // else pairs of tokens are multiplied
    const bf16* unpacked = block.w;
    groups<M, FLOATS>(p, k0, k1, x, t, sums, more, ahead,
                      [&](const uint8_t*, int64_t n, int c0, auto& rows, auto& acc, Ahead& fetch) {
                        const bf16* w = unpacked + 2 * c0;
                        if (c0 + CHUNK_VECTORS<M> * F::W >= NB) unpacked += padded_k(n) * NB;
                        if constexpr (FLOATS)
                          rows.each_pair(n, fetch, [&](int64_t i) {
                            add_pairs(w, rows.at, i, acc);
                            w += 2 * NB;
                          });
                        else
                          pairs_dots(w, n, rows, acc, fetch);
                      });
  }
  static void finish(const Panel&, const Tokens&, int64_t, float*, float*) {}
};

template <class X>
using Fp8 = Coded<X, Fp8Codes>;
template <class X>
using Fp4 = Coded<X, Fp4Codes>;

}  // namespace ds
