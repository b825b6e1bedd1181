// Format of gemm.h: 8-bit floats (e4m3fn) with a float32 scale per column and group along k. They
// are widened to bfloat16 times 2^-8, which is exact, on the way to the registers; scales meet
// float32 sums, times FP8_LIFT.
//
// A panel is a sequence of groups: 64 scales, then [group / 2] pairs of k for 64 columns in two lines
// of 64 bytes: in the low bytes of 16 bits each the pairs of 16 columns, in the high bytes those of
// the next 16, so that two shifts and a mask make registers of columns in order. k is padded with
// zeros to a multiple of K_STEP, which a group is a multiple of.
//
// Normal numbers are most of them: their exponent's bits 112 .. 127 differ from e in bits that e has
// not. Others are told by those bits being zero, for -0 is stored as 0 and NaN in its place.
#pragma once

#include "dense.h"

namespace ds {

constexpr float FP8_LIFT = 256;

// Where the code of column c (0 .. 31) of a line, element j (0, 1) of the pair, lies in it.
inline int fp8_place(int c, int j) { return 4 * (c % 16) + 2 * j + c / 16; }

constexpr uint8_t fp8_stored(uint8_t code) {
  return (code & 0x7f) == 0x7f ? 0x80 : code == 0x80 ? 0 : code;
}

// bfloat16 bits of a stored code times 2^-8: NaN, normal numbers, subnormal ones (m * 2^-17).
constexpr uint16_t fp8_bits(unsigned code) {
  const unsigned sign = (code & 0x80) << 8, e = code >> 3 & 15, m = code & 7;
  if (code == 0x80) return 0x7fc0;
  if (e > 0) return uint16_t(sign | (e + 112) << 7 | m << 4);
  if (m == 0) return 0;
  const unsigned top = m >= 4 ? 2 : m >= 2 ? 1 : 0;  // m = 2^top * (1 + rest)
  return uint16_t(sign | (110 + top) << 7 | (m << (7 - top) & 0x7f));
}

// By code: what is stored, and its bits.
struct Fp8Codes {
  uint8_t stored[256];
  uint16_t bits[256];
  constexpr Fp8Codes() : stored(), bits() {
    for (unsigned i = 0; i < 256; ++i) stored[i] = fp8_stored(uint8_t(i)), bits[i] = fp8_bits(i);
  }
};
constexpr Fp8Codes FP8_CODES;

// Those without an exponent, by sign and m.
struct Fp8Small {
  alignas(64) uint16_t bits[32];
  constexpr Fp8Small() : bits() {
    for (unsigned i = 0; i < 32; ++i) bits[i] = fp8_bits((i & 8) << 4 | (i & 7));
  }
};

#if defined(__AVX512BW__)

struct Fp8Widen {
  __m512i keep, lift, exponent;
  Fp8Widen()
      : keep(_mm512_set1_epi16(short(0x87f0))),
        lift(_mm512_set1_epi16(112 << 7)),
        exponent(_mm512_set1_epi8(0x78)) {}
  // Two lines, a pair of k for 64 columns, to four vectors of 16 columns.
  void pair(const uint8_t* p, __m512i (&out)[4]) const {
    const __m512i low = _mm512_loadu_si512(p), high = _mm512_loadu_si512(p + 64);
    out[0] = normal(_mm512_slli_epi16(low, 8));
    out[1] = normal(low);
    out[2] = normal(_mm512_slli_epi16(high, 8));
    out[3] = normal(high);
    const __mmask64 small[] = {_mm512_testn_epi8_mask(low, exponent),
                               _mm512_testn_epi8_mask(high, exponent)};
    if (__builtin_expect(!_kortestz_mask64_u8(small[0], small[1]), 0)) {
      mend(low, out);
      mend(high, out + 2);
    }
  }
  void line(const uint8_t* p, bf16* out) const {
    const __m512i code = _mm512_loadu_si512(p);
    __m512i wide[] = {normal(_mm512_slli_epi16(code, 8)), normal(code)};
    if (__builtin_expect(_mm512_testn_epi8_mask(code, exponent) != 0, 0)) mend(code, wide);
    _mm512_storeu_si512(out, wide[0]);
    _mm512_storeu_si512(out + 32, wide[1]);
  }

 private:
  // Codes in the upper bytes.
  __m512i normal(__m512i high) const {  // high >> 4 & keep | lift
    return _mm512_ternarylogic_epi32(_mm512_srai_epi16(high, 4), keep, lift, 0xea);
  }
  static void mend(__m512i code, __m512i* wide) {
    wide[0] = mended(wide[0], _mm512_and_si512(code, _mm512_set1_epi16(0xff)));
    wide[1] = mended(wide[1], _mm512_srli_epi16(code, 8));
  }
  static __m512i mended(__m512i wide, __m512i code) {
    static constexpr Fp8Small SMALL;
    const __m512i at = _mm512_or_si512(
        _mm512_and_si512(code, _mm512_set1_epi16(7)),
        _mm512_and_si512(_mm512_srli_epi16(code, 4), _mm512_set1_epi16(8)));
    const __m512i small = _mm512_permutexvar_epi16(at, _mm512_load_si512(SMALL.bits));
    return _mm512_mask_blend_epi16(_mm512_testn_epi16_mask(code, _mm512_set1_epi16(0x78)), wide,
                                   small);
  }
};

#elif defined(__AVX2__)

struct Fp8Widen {
  void line(const uint8_t* p, bf16* out) const {
    for (int half = 0; half < 2; ++half, p += 32, out += 16) {
      const __m256i code = _mm256_loadu_si256((const __m256i*)p);
      _mm256_storeu_si256((__m256i*)out, normal(_mm256_slli_epi16(code, 8)));
      _mm256_storeu_si256((__m256i*)(out + 32), normal(code));
      const __m256i exponent = _mm256_and_si256(code, _mm256_set1_epi8(0x78));
      const __m256i none = _mm256_cmpeq_epi8(exponent, _mm256_setzero_si256());
      for (unsigned some = unsigned(_mm256_movemask_epi8(none)); some; some &= some - 1) {
        const int i = __builtin_ctz(some);
        out[i % 2 * 32 + i / 2].bits = FP8_CODES.bits[p[i]];
      }
    }
  }

 private:
  static __m256i normal(__m256i high) {  // codes in the upper bytes
    const __m256i kept =
        _mm256_and_si256(_mm256_srai_epi16(high, 4), _mm256_set1_epi16(short(0x87f0)));
    return _mm256_or_si256(kept, _mm256_set1_epi16(112 << 7));
  }
};

#else

struct Fp8Widen {
  void line(const uint8_t* p, bf16* out) const {
    for (int c = 0; c < 32; ++c)
      for (int j = 0; j < 2; ++j) out[2 * c + j].bits = FP8_CODES.bits[p[fp8_place(c, j)]];
  }
};

#endif

template <class X>
struct Fp8 : TilesOf<X> {
  using Sum = float;
  static constexpr int TILE = MAX_TILE;
  static constexpr int64_t TOKENS = TOKENS_PAIRS, MAX_BLOCK = BLOCK_PAIRS;
  static constexpr int64_t HEAD = NB * int64_t(sizeof(float));  // bytes of the scales of a group
  static constexpr bool UNPACKS = true, FETCHES = true;
#if defined(__AMX_TILE__)
  // A tile costs the same for one token as for 16; for few, vectors with a tile's bits are faster.
  static constexpr int64_t TILES_FROM = 3;
  static constexpr int ONE_PASS = sizeof(X) == 2 ? TILES_FROM - 1 : 0;
#elif defined(__AVX512BW__)
  static constexpr int ONE_PASS = sizeof(X) != 2 ? 0 : DS_BF16_DOTS ? 4 : 6;
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
    return (k + group - 1) / group * HEAD + padded_k(k) * NB;
  }
  static int64_t block(const Panel& p) { return MAX_BLOCK / p.group * p.group; }
  static const char* at(const Panel& p, int64_t k0) {
    return (const char*)p.data + bytes(k0, p.group);
  }
  static void unpack(const Panel& p, int64_t k0, int64_t k1, Block& block) {
    const Fp8Widen widen;
    bf16* to = block.w;
    for (int64_t k = k0; k < k1; k += p.group) {
      const uint8_t* from = (const uint8_t*)at(p, k) + HEAD;
      const int64_t n = padded_k(k1 - k < p.group ? k1 - k : p.group);
      DS_ROLLED
      for (int64_t i = 0; i < n; ++i, from += 64, to += 64) {
        prefetch(from + UNPACK_AHEAD);
        widen.line(from, to);
      }
    }
  }

  static const void* weights(const Block& block, int64_t k) { return block.w + k * NB; }
  static int64_t folds(const Panel& p) { return p.group; }
  static void fold(const Panel& p, int64_t k0, const Tokens&, int64_t, const float* part,
                   float* sums, bool more) {
    const float* scales = (const float*)at(p, k0);
    DS_UNROLL
    for (int c = 0; c < NB; c += F::W)
      fma(F::load(part + c) * F::all(FP8_LIFT), F::load(scales + c),
          more ? F::load(sums + c) : F::zero())
          .store(sums + c);
  }

  // dots(k, n, first column, rows, acc, ahead) adds those of one group.
  template <int M, class Dots>
  DS_NOINLINE static void groups(const Panel& p, int64_t k0, int64_t k1, const Tokens& x, int64_t t,
                                 float (*sums)[NB], bool more, Ahead ahead, Dots dots) {
    constexpr int C = CHUNK_VECTORS<M>;
    for (int c0 = 0; c0 < NB; c0 += C * F::W) {
      bool add = more;
      for (int64_t k = k0; k < k1; k += p.group, add = true) {
        const X* rows[M];
        F acc[M][C];
        DS_UNROLL
        for (int m = 0; m < M; ++m) {
          rows[m] = x.row(t + m) + k;
          DS_UNROLL
          for (int c = 0; c < C; ++c) acc[m][c] = F::zero();
        }
        dots(k, k1 - k < p.group ? k1 - k : p.group, c0, rows, acc, ahead);
        const float* scales = (const float*)at(p, k) + c0;
        DS_UNROLL
        for (int m = 0; m < M; ++m)
          DS_UNROLL
          for (int c = 0; c < C; ++c) {
            float* to = sums[m] + c0 + c * F::W;
            fma(acc[m][c] * F::all(FP8_LIFT), F::load(scales + c * F::W),
                add ? F::load(to) : F::zero())
                .store(to);
          }
      }
      ahead.lines = 0;  // once is enough
    }
  }
  template <int M>
  static void tile(const Panel& p, int64_t k0, int64_t k1, const Tokens& x, int64_t t,
                   float (*sums)[NB], bool more, Ahead ahead) {
#if defined(__AVX512BW__)
    if constexpr (M <= ONE_PASS) {
      const Fp8Widen widen;
      groups<M>(p, k0, k1, x, t, sums, more, ahead,
                [&](int64_t k, int64_t n, int, auto& rows, auto& acc, Ahead& fetch) {
                  const uint8_t* w = (const uint8_t*)at(p, k) + HEAD;
#if defined(__AMX_TILE__)
                  (void)fetch;
                  dots_as_tiles<M>(n, rows, acc, [&](__m512i(&v)[4]) {
                    prefetch(w + WIDEN_AHEAD);
                    prefetch(w + WIDEN_AHEAD + 64);
                    widen.pair(w, v);
                    w += 128;
                  });
#elif DS_BF16_DOTS
                  bf16_dots<M>(n, rows, acc, fetch, [&](__m512bh(&v)[4]) {
                    __m512i wide[4];
                    widen.pair(w, wide);
                    DS_UNROLL
                    for (int c = 0; c < 4; ++c) v[c] = (__m512bh)wide[c];
                    w += 128;
                  });
#else
                  float_dots(n, rows, acc, fetch, [&](F(&even)[4], F(&odd)[4]) {
                    __m512i wide[4];
                    widen.pair(w, wide);
                    DS_UNROLL
                    for (int c = 0; c < 4; ++c) split_pairs(wide[c], even[c], odd[c]);
                    w += 128;
                  });
#endif
                });
    }
#endif
    (void)p, (void)k0, (void)k1, (void)x, (void)t, (void)sums, (void)more, (void)ahead;
  }
  template <int M>
  static void tile_of(const Panel& p, const Block& block, int64_t k0, int64_t k1, const Tokens& x,
                      int64_t t, float (*sums)[NB], bool more, Ahead ahead) {
    groups<M>(p, k0, k1, x, t, sums, more, ahead,
              [&](int64_t k, int64_t n, int c0, auto& rows, auto& acc, Ahead& fetch) {
                pairs_dots(block.w + (k - k0) * NB + 2 * c0, n, rows, acc, fetch);
              });
  }
  static void finish(const Panel&, const Tokens&, int64_t, float*, float*) {}
};

}  // namespace ds
