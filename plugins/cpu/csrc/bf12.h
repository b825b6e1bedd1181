// Format of gemm.h: bfloat16 weights in 12 bits each, without loss, for bfloat16 tokens.
//
// The high byte of a weight (its sign and all but the last bit of its exponent) takes few values in a
// trained matrix: 15 of them and zero cover a panel but for a few weights in 10,000. So low bytes lie
// as they are and high bytes as 4-bit places in a table of the panel; weights whose high byte is not in
// it are stored as 0, listed, and added at the end in float32. (Coding exponents alone, for they hold
// little information: ZipNN, Hershcovitch et al. 2024; in memory, by the kernels: DFloat11, Zhang et
// al. 2025, arXiv:2504.11651. A fixed length is what vectors decode as fast as memory reads.)
//
// A panel:
//   head   64 bytes: Bf12Head
//   data   [k / 2] pairs of k for 64 columns, in three lines of 64 bytes: low bytes of columns 0 to 31,
//          of 32 to 63, and places in the table, those of the first line in the low halves of bytes.
//          Within a line bytes lie so that interleaving low and high ones, which works on 128 bits at
//          a time, leaves columns in order: bf12_element.
//   rest   room for one exception in 512 weights: Bf12Rest, by k
// k is padded with zeros to a multiple of K_STEP, panels to one of 64 bytes.
#pragma once

#include "dense.h"

namespace ds {

struct Bf12Head {
  uint8_t high[16];  // high[0] is 0
  int32_t count;     // of exceptions
  uint8_t none[44];
};
struct Bf12Rest {
  uint32_t place;  // k * 64 + column
  float value;
};

// Which of the 64 elements of a line, in the order of DenseBf16, lies where in it.
constexpr int bf12_element(int place) { return place % 16 / 8 * 32 + place / 16 * 8 + place % 8; }

#if defined(__AVX512BW__)
struct Bf12Widen {
  __m512i table;
  explicit Bf12Widen(const uint8_t* high)
      : table(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)high))) {}
  // Three lines, a pair of k for 64 columns, to four vectors of 16 columns.
  void pair(const uint8_t* p, __m512i (&out)[4]) const {
    const __m512i half = _mm512_set1_epi8(15), places = _mm512_loadu_si512(p + 128);
    both(_mm512_loadu_si512(p), _mm512_and_si512(places, half), out);
    both(_mm512_loadu_si512(p + 64), _mm512_and_si512(_mm512_srli_epi16(places, 4), half), out + 2);
  }
  void pair(const uint8_t* p, bf16* out) const {
    __m512i wide[4];
    pair(p, wide);
    for (int i = 0; i < 4; ++i) _mm512_storeu_si512(out + 32 * i, wide[i]);
  }

 private:
  void both(__m512i low, __m512i places, __m512i* out) const {
    const __m512i high = _mm512_shuffle_epi8(table, places);
    out[0] = _mm512_unpacklo_epi8(low, high);
    out[1] = _mm512_unpackhi_epi8(low, high);
  }
};

#elif defined(__AVX2__)

struct Bf12Widen {
  __m256i table;
  explicit Bf12Widen(const uint8_t* high)
      : table(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)high))) {}
  void pair(const uint8_t* p, bf16* out) const {
    for (int i = 0; i < 64; i += 32) {
      const __m256i half = _mm256_set1_epi8(15);
      const __m256i places = _mm256_loadu_si256((const __m256i*)(p + 128 + i));
      both(p + i, _mm256_and_si256(places, half), out + i / 2);
      both(p + 64 + i, _mm256_and_si256(_mm256_srli_epi16(places, 4), half), out + 64 + i / 2);
    }
  }

 private:
  void both(const uint8_t* p, __m256i places, bf16* out) const {
    const __m256i low = _mm256_loadu_si256((const __m256i*)p);
    const __m256i high = _mm256_shuffle_epi8(table, places);
    _mm256_storeu_si256((__m256i*)out, _mm256_unpacklo_epi8(low, high));
    _mm256_storeu_si256((__m256i*)(out + 32), _mm256_unpackhi_epi8(low, high));
  }
};

#else

struct Bf12Widen {
  const uint8_t* table;
  explicit Bf12Widen(const uint8_t* high) : table(high) {}
  void pair(const uint8_t* p, bf16* out) const {
    for (int i = 0; i < 64; ++i) {
      const int to = bf12_element(i), both = p[128 + i];
      out[to].bits = uint16_t(p[i] | table[both & 15] << 8);
      out[64 + to].bits = uint16_t(p[64 + i] | table[both >> 4] << 8);
    }
  }
};

#endif

struct Bf12 : TilesOf<bf16> {
  using Sum = float;
  static constexpr int TILE = MAX_TILE;
  static constexpr int64_t TOKENS = TOKENS_PAIRS;
  static constexpr int64_t HEAD = sizeof(Bf12Head), LINES = 192;  // bytes of a pair of k
  static constexpr bool FETCHES = true;
#if defined(__AMX_TILE__)
  static constexpr int64_t TILES_FROM = 3;  // as Fp8
  static constexpr int ONE_PASS = TILES_FROM - 1;
  static constexpr bool UNPACKS = true;
#elif defined(__AVX512BW__)
  // Between dots widening costs less than a block's way to the cache and back, for any number of tokens.
  static constexpr int ONE_PASS = MAX_ONE_PASS;
  static constexpr bool UNPACKS = false;
#else
  static constexpr int ONE_PASS = 0;
  static constexpr bool UNPACKS = true;
#endif
  static constexpr int64_t BLOCK = UNPACKS ? BLOCK_PAIRS : 256;
  static constexpr bool looks_ahead(int64_t, int64_t) { return false; }  // the processor does, at least Zen 4
  struct Panel {
    const uint8_t* data;
    int64_t k;

    const Bf12Head& head() const { return *(const Bf12Head*)data; }
    const Bf12Rest* rest() const { return (const Bf12Rest*)(data + HEAD + lines(k)); }
  };
  using Tokens = Rows<bf16>;
  struct Block {
    alignas(64) bf16 w[(UNPACKS ? BLOCK : 1) * NB];
  };

  static int64_t lines(int64_t k) { return padded_k(k) / 2 * LINES; }
  static int64_t room(int64_t k) { return padded_k(k) * NB / 512; }  // for exceptions
  static int64_t bytes(int64_t k) {
    return HEAD + lines(k) + (room(k) * int64_t(sizeof(Bf12Rest)) + 63) / 64 * 64;
  }
  static int64_t block(const Panel&) { return BLOCK; }
  static const char* at(const Panel& p, int64_t k0) {
    return (const char*)p.data + HEAD + lines(k0);
  }
  static void unpack(const Panel& p, int64_t k0, int64_t k1, Block& block) {
    const Bf12Widen widen(p.head().high);
    const uint8_t* from = (const uint8_t*)at(p, k0);
    bf16* to = block.w;
    const int64_t n = padded_k(k1 - k0);
    DS_ROLLED
    for (int64_t k = 0; k < n; k += 2, from += LINES, to += 2 * NB) {
      for (int i = 0; i < LINES; i += 64) prefetch(from + UNPACK_AHEAD + i);
      widen.pair(from, to);
    }
  }

  static const void* weights(const Block& block, int64_t k) { return block.w + k * NB; }
  static int64_t folds(const Panel&) { return 0; }
  static void fold(const Panel&, int64_t, const Tokens&, int64_t, const float*, float*, bool) {}

  // dots(first column, rows, acc, ahead)
  template <int M, class Dots>
  DS_NOINLINE static void columns(int64_t k0, const Tokens& x, int64_t t, float (*sums)[NB],
                                  bool more, Ahead ahead, Dots dots) {
    constexpr int C = CHUNK_VECTORS<M>;
    const bf16* rows[M];
    for (int m = 0; m < M; ++m) rows[m] = x.row(t + m) + k0;
    for (int c0 = 0; c0 < NB; c0 += C * F::W) {
      F acc[M][C];
      load_sums<M, C>(sums, c0, more, acc);
      dots(c0, rows, acc, ahead);
      store_sums<M, C>(acc, sums, c0);
      ahead.lines = 0;  // once is enough
    }
  }
  template <int M>
  static void tile(const Panel& p, int64_t k0, int64_t k1, const Tokens& x, int64_t t,
                   float (*sums)[NB], bool more, Ahead ahead) {
#if defined(__AVX512BW__)
    if constexpr (M <= ONE_PASS) {
      const Bf12Widen widen(p.head().high);
      columns<M>(k0, x, t, sums, more, ahead, [&](int, auto& rows, auto& acc, Ahead& fetch) {
        const uint8_t* w = (const uint8_t*)at(p, k0);
#if defined(__AMX_TILE__)
        (void)fetch;
        dots_as_tiles<M>(k1 - k0, rows, acc, [&](__m512i(&v)[4]) {
          for (int i = 0; i < LINES; i += 64) prefetch(w + WIDEN_AHEAD + i);
          widen.pair(w, v);
          w += LINES;
        });
#elif DS_BF16_DOTS
        bf16_dots<M>(k1 - k0, rows, acc, fetch, [&](__m512bh(&v)[4]) {
          __m512i wide[4];
          widen.pair(w, wide);
          DS_UNROLL
          for (int c = 0; c < 4; ++c) v[c] = (__m512bh)wide[c];
          w += LINES;
        });
#else
        float_dots(k1 - k0, rows, acc, fetch, [&](F(&even)[4], F(&odd)[4]) {
          __m512i wide[4];
          widen.pair(w, wide);
          DS_UNROLL
          for (int c = 0; c < 4; ++c) split_pairs(wide[c], even[c], odd[c]);
          w += LINES;
        });
#endif
      });
    }
#endif
    (void)p, (void)k0, (void)k1, (void)x, (void)t, (void)sums, (void)more, (void)ahead;
  }
  template <int M>
  static void tile_of(const Panel&, const Block& block, int64_t k0, int64_t k1, const Tokens& x,
                      int64_t t, float (*sums)[NB], bool more, Ahead ahead) {
    columns<M>(k0, x, t, sums, more, ahead, [&](int c0, auto& rows, auto& acc, Ahead& fetch) {
      pairs_dots(block.w + 2 * c0, k1 - k0, rows, acc, fetch);
    });
  }
  // One function for all callers, so that their sums have the same bits. (Where an activation is
  // infinite an exception makes NaN: its column has met a 0, too.)
  DS_NOINLINE static void finish(const Panel& p, const Tokens& x, int64_t t, float*, float* out) {
    const bf16* row = x.row(t);
    const Bf12Rest *rest = p.rest(), *end = rest + p.head().count;
    for (; rest < end; ++rest)
      out[rest->place % NB] += to_float(row[rest->place / NB]) * rest->value;
  }
};

}  // namespace ds
