// Format of gemm.h: 4-bit weights with a scale, and perhaps a zero point, per column and group
// along k; activations of 8 bits per token and group.
//
// A panel is a sequence of groups: 64 scales (float32), 64 zero points (float32) if there are any,
// [ceil(group / 8)][64][4] bytes; the low halves of 4 bytes belong to k .. k + 3, the high ones to
// k + 4 .. k + 7. Weights are 0 .. 15; without zero points, 8 stands for zero.
#pragma once

#include "int8.h"

namespace ds {

#if defined(__AMX_INT8__)
DS_TILES(TilesInt4, int32_t, 1, _tile_dpbsud);  // as mac_u: tokens are signed, weights unsigned
#else
struct TilesInt4 {};
#endif

struct Int4 : TilesOf8<TilesInt4> {
  static constexpr uint8_t FLIP = 0;
  using Sum = float;
  static constexpr int TILE = TILE8, ONE_PASS = ONE_PASS8;
  static constexpr int64_t TOKENS = 96, MAX_BLOCK = 256;
  static constexpr bool UNPACKS = true, FETCHES = false;
  static constexpr bool looks_ahead(int64_t m, int64_t) { return m > WIDENS_ALONE_TO; }
  struct Panel {
    const uint8_t* data;
    int64_t group;  // a multiple of 32, at most MAX_BLOCK
    bool zeros;
    int64_t head() const { return (zeros ? 8 : 4) * NB; }
  };
  using Tokens = Tokens8;  // groups as those of the weight
  struct Block {
    alignas(64) uint8_t bytes[MAX_BLOCK * NB];
  };

  static int64_t bytes(const Panel& p, int64_t k) {  // of a panel
    return (k + p.group - 1) / p.group * p.head() + padded8(k) / 2 * NB;
  }
  static int64_t block(const Panel& p) { return MAX_BLOCK / p.group * p.group; }
  static const char* at(const Panel& p, int64_t k0) {
    return (const char*)p.data + (k0 + p.group - 1) / p.group * p.head() + k0 * NB / 2;
  }
  static const uint8_t* weights(const Panel& p, int64_t k0) {
    return (const uint8_t*)at(p, k0) + p.head();
  }

  // acc += dots over k elements, a multiple of 16, with 4-bit weights w [k / 8][64][4].
  template <int M, int C>
  static void octets_dots(const uint8_t* w, int64_t k, const uint8_t* const* x, Sums (&acc)[M][C],
                          Ahead& ahead) {
    for (int64_t i = 0; i < k;) {
      ahead.remainder<AHEAD_STEP / 8>();
      for (const int64_t end = i + unknown(AHEAD_STEP); i < end; i += 8, w += 4 * NB) {
        ahead.piece<AHEAD_STEP / 8>();
        DS_UNROLL
        for (int c = 0; c < C; ++c) {
          const Bytes both = Bytes::load(w + c * 4 * Sums::W), low = both.low(), high = both.high();
          DS_UNROLL
          for (int m = 0; m < M; ++m) {
            acc[m][c] = mac_u(acc[m][c], low, x[m] + i);
            acc[m][c] = mac_u(acc[m][c], high, x[m] + i + 4);
          }
        }
      }
    }
  }

  // Both kinds of tile: dots(k, count, first column, rows, acc, ahead) adds those of one group.
  template <bool ZEROS, int M, class Dots>
  DS_NOINLINE static void groups(const Panel& p, int64_t k0, int64_t k1, const Tokens& x, int64_t t,
                     float (*sums)[NB], Ahead ahead, Dots dots) {
    constexpr int C = VECTORS8<M>;
    const uint8_t* x_row[M];
    int64_t first[M];
    DS_UNROLL
    for (int m = 0; m < M; ++m) {
      const int64_t row = t + m;
      x_row[m] = x.q + row * x.ld;
      first[m] = row * x.groups;
    }
    for (int c0 = 0; c0 < NB; c0 += C * Sums::W) {
      int64_t g = k0 / p.group;
      for (int64_t k = k0; k < k1; k += p.group, ++g) {
        const float* scales = (const float*)at(p, k) + c0;
        const uint8_t* rows[M];
        Sums acc[M][C];
        DS_UNROLL
        for (int m = 0; m < M; ++m) {
          rows[m] = x_row[m] + k;
          const Sums start = Sums::all(ZEROS ? 0 : -8 * x.sum[first[m] + g]);
          DS_UNROLL
          for (int c = 0; c < C; ++c) acc[m][c] = start;
        }
        dots(k, (k1 - k < p.group ? k1 - k + 15 : p.group) / 16 * 16, c0, rows, acc, ahead);
        DS_UNROLL
        for (int m = 0; m < M; ++m) {
          const F scale = F::all(x.scale[first[m] + g]);
          const F sum = F::all(ZEROS ? float(-x.sum[first[m] + g]) : 0.0f);
          DS_UNROLL
          for (int c = 0; c < C; ++c) {
            float* to = sums[m] + c0 + c * F::W;
            F dot = acc[m][c].wide();
            if (ZEROS) dot = fma(F::load(scales + NB + c * F::W), sum, dot);
            fma(dot, F::load(scales + c * F::W) * scale, F::load(to)).store(to);
          }
        }
      }
      ahead.lines = 0;  // once is enough
    }
  }
  template <int M, class Dots>
  static void run(const Panel& p, int64_t k0, int64_t k1, const Tokens& x, int64_t t,
                  float (*sums)[NB], bool more, Ahead ahead, Dots dots) {
    if (!more) std::memset(sums, 0, M * sizeof *sums);
    if (p.zeros)
      groups<true, M>(p, k0, k1, x, t, sums, ahead, dots);
    else
      groups<false, M>(p, k0, k1, x, t, sums, ahead, dots);
  }

  template <int M>
  static void tile(const Panel& p, int64_t k0, int64_t k1, const Tokens& x, int64_t t,
                   float (*sums)[NB], bool more, Ahead ahead) {
    run<M>(p, k0, k1, x, t, sums, more, ahead,
           [&](int64_t k, int64_t n, int c0, auto& rows, auto& acc, Ahead& fetch) {
                const uint8_t* w = weights(p, k);
                octets_dots(w + 4 * c0, n, rows, acc, fetch);
              });
  }
  static constexpr int64_t TILES_FROM = 9;
  static bool tiles_fit(const Panel& p) { return p.group % 64 == 0; }
  static const void* weights(const Block& block, int64_t k) { return block.bytes + k * NB; }
  static int64_t folds(const Panel& p) { return p.group; }
  static void fold(const Panel& p, int64_t k0, const Tokens& x, int64_t t, const int32_t* part,
                   float* sums, bool more) {
    const float* scales = (const float*)at(p, k0);
    const int64_t i = t * x.groups + k0 / p.group;
    const F scale = F::all(x.scale[i]), sum = F::all(float(-x.sum[i]));
    const Sums eight = Sums::all(p.zeros ? 0 : 8 * x.sum[i]);
    DS_UNROLL
    for (int c = 0; c < NB; c += F::W) {
      F dot = (Sums::load(part + c) - eight).wide();
      if (p.zeros) dot = fma(F::load(scales + NB + c), sum, dot);
      const F both = F::load(scales + c) * scale;
      (more ? fma(dot, both, F::load(sums + c)) : dot * both).store(sums + c);
    }
  }

  static void unpack(const Panel& p, int64_t k0, int64_t k1, Block& block) {
    uint8_t* to = block.bytes;
    for (int64_t k = k0; k < k1; k += p.group) {
      const uint8_t* w = weights(p, k);
      // As far as the dots read: rows after k meet zeros, but are not to be unset memory.
      const int64_t n = k1 - k < p.group ? (k1 - k + 15) / 16 * 16 : p.group;
      for (int64_t i = 0; i < n; i += 8, w += 4 * NB, to += 8 * NB)
        for (int c = 0; c < 4 * NB; c += 4 * Sums::W) {
          const Bytes both = Bytes::load(w + c);
          both.low().store(to + c);
          both.high().store(to + 4 * NB + c);
        }
    }
  }
  template <int M>
  static void tile_of(const Panel& p, const Block& block, int64_t k0, int64_t k1, const Tokens& x,
                      int64_t t, float (*sums)[NB], bool more, Ahead ahead) {
    run<M>(p, k0, k1, x, t, sums, more, ahead,
           [&](int64_t k, int64_t n, int c0, auto& rows, auto& acc, Ahead& fetch) {
                const uint8_t* w = block.bytes + (k - k0) * NB + 4 * c0;
                quads_dots<true>(w, n, rows, acc, fetch);
              });
  }
  static void finish(const Panel&, const Tokens&, int64_t, float*, float*) {}
};

}  // namespace ds
