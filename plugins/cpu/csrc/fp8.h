// Format of gemm.h: 8-bit floats (e4m3fn) with a float32 scale per column and group along k. They
// are widened to bfloat16, which is exact, on the way to the registers; scales meet float32 sums.
//
// A panel is a sequence of groups: 64 scales, then [group / 2] pairs of k for 64 columns in two lines
// of 64 bytes: 16 bytes hold the pairs of columns 4l .. 4l + 3 and of 16 + 4l .. 16 + 4l + 3, so
// that interleaving a register with another gives whole registers of columns in order. k is padded
// with zeros to a multiple of K_STEP, which a group is a multiple of.
#pragma once

#include "dense.h"

namespace ds {

// Where the code of column c (0 .. 31) of a line, element j (0, 1) of the pair, lies in it.
inline int fp8_place(int c, int j) { return c % 16 / 4 * 16 + c / 16 * 8 + c % 4 * 2 + j; }

// bfloat16 bits of a code: normal numbers, subnormal numbers (m * 2^-9), NaN.
constexpr uint16_t fp8_bits(unsigned code) {
  const unsigned sign = (code & 0x80) << 8, e = code >> 3 & 15, m = code & 7;
  if ((code & 0x7f) == 0x7f) return uint16_t(sign | 0x7fc0);
  if (e > 0) return uint16_t(sign | (e + 120) << 7 | m << 4);
  if (m == 0) return uint16_t(sign);
  const unsigned top = m >= 4 ? 2 : m >= 2 ? 1 : 0;  // m = 2^top * (1 + rest)
  return uint16_t(sign | (118 + top) << 7 | (m << (7 - top) & 0x7f));
}

template <int N, int SHIFT>
struct Fp8Bytes {  // one byte of the bfloat16 of every code below N
  alignas(64) uint8_t byte[N];
  constexpr Fp8Bytes() : byte() {
    for (int i = 0; i < N; ++i) byte[i] = uint8_t(fp8_bits(unsigned(i)) >> SHIFT);
  }
};

#if defined(__AVX512VBMI__)

struct Fp8Widen {  // tables in registers
  __m512i high[2], low[2], sign;
  Fp8Widen() {
    static constexpr Fp8Bytes<128, 8> HIGH;
    static constexpr Fp8Bytes<128, 0> LOW;
    for (int i = 0; i < 2; ++i) {
      high[i] = _mm512_load_si512(HIGH.byte + 64 * i);
      low[i] = _mm512_load_si512(LOW.byte + 64 * i);
    }
    sign = _mm512_set1_epi8(char(0x80));
  }
  // 64 codes to the pairs of columns 0 .. 15 and of 16 .. 31.
  void line(const uint8_t* p, __m512i& first, __m512i& second) const {
    const __m512i code = _mm512_loadu_si512(p);
    const __m512i lo = _mm512_permutex2var_epi8(low[0], code, low[1]);
    __m512i hi = _mm512_permutex2var_epi8(high[0], code, high[1]);
    hi = _mm512_ternarylogic_epi32(hi, code, sign, 0xf8);  // hi | (code & sign)
    first = _mm512_unpacklo_epi8(lo, hi);
    second = _mm512_unpackhi_epi8(lo, hi);
  }
  void line(const uint8_t* p, bf16* out) const {
    __m512i first, second;
    line(p, first, second);
    _mm512_storeu_si512(out, first);
    _mm512_storeu_si512(out + 32, second);
  }
};

#elif defined(__AVX2__)

struct Fp8Widen {
  // Normal codes by arithmetic (high byte from the upper nibble, low byte from the lower one),
  // subnormal ones from tables of 8, and NaN.
  static __m256i table(const uint8_t* t) {
    return _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)t));
  }
  void line(const uint8_t* p, bf16* out) const {
    static constexpr Fp8Bytes<16, 8> SMALL_HIGH;
    static constexpr Fp8Bytes<16, 0> SMALL_LOW;
    alignas(16) static constexpr uint8_t HIGH[16] = {
        0x3c, 0x3d, 0x3e, 0x3f, 0x40, 0x41, 0x42, 0x43,   // (e + 120) / 2 by e / 2
        0xbc, 0xbd, 0xbe, 0xbf, 0xc0, 0xc1, 0xc2, 0xc3};  // and the sign
    for (int half = 0; half < 2; ++half) {
      const __m256i code = _mm256_loadu_si256((const __m256i*)(p + 32 * half));
      const __m256i size = _mm256_and_si256(code, _mm256_set1_epi8(0x7f));
      const __m256i upper =
          _mm256_and_si256(_mm256_srli_epi16(code, 4), _mm256_set1_epi8(0x0f));
      __m256i hi = _mm256_shuffle_epi8(table(HIGH), upper);
      __m256i lo = _mm256_and_si256(_mm256_slli_epi16(code, 4), _mm256_set1_epi8(char(0xf0)));
      const __m256i small = _mm256_cmpgt_epi8(_mm256_set1_epi8(8), size);
      const __m256i sign = _mm256_and_si256(code, _mm256_set1_epi8(char(0x80)));
      const __m256i small_hi =
          _mm256_or_si256(_mm256_shuffle_epi8(table(SMALL_HIGH.byte), size), sign);
      hi = _mm256_blendv_epi8(hi, small_hi, small);
      lo = _mm256_blendv_epi8(lo, _mm256_shuffle_epi8(table(SMALL_LOW.byte), size), small);
      const __m256i nan = _mm256_cmpeq_epi8(size, _mm256_set1_epi8(0x7f));
      hi = _mm256_or_si256(hi, _mm256_and_si256(nan, _mm256_set1_epi8(0x7f)));
      // lanes 2 * half and 2 * half + 1 of the line
      _mm256_storeu_si256((__m256i*)(out + 16 * half), _mm256_unpacklo_epi8(lo, hi));
      _mm256_storeu_si256((__m256i*)(out + 32 + 16 * half), _mm256_unpackhi_epi8(lo, hi));
    }
  }
};

#else

struct Fp8Widen {
  void line(const uint8_t* p, bf16* out) const {
    static constexpr Fp8Bytes<256, 8> HIGH;
    static constexpr Fp8Bytes<256, 0> LOW;
    for (int c = 0; c < 32; ++c)
      for (int j = 0; j < 2; ++j) {
        const uint8_t code = p[fp8_place(c, j)];
        out[2 * c + j].bits = uint16_t(HIGH.byte[code] << 8 | LOW.byte[code]);
      }
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
#elif defined(__AVX512VBMI__) && defined(__AVX512BF16__)
  static constexpr int ONE_PASS = sizeof(X) == 2 ? 4 : 0;  // 5 tables take registers
#else
  static constexpr int ONE_PASS = 0;
#endif
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
      fma(F::load(part + c), F::load(scales + c), more ? F::load(sums + c) : F::zero())
          .store(sums + c);
  }

  // dots(k, n, first column, rows, acc, ahead) adds those of one group.
  template <int M, class Dots>
  static void groups(const Panel& p, int64_t k0, int64_t k1, const Tokens& x, int64_t t,
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
            fma(acc[m][c], F::load(scales + c * F::W), add ? F::load(to) : F::zero()).store(to);
          }
      }
      ahead.lines = 0;  // once is enough
    }
  }
  template <int M>
  static void tile(const Panel& p, int64_t k0, int64_t k1, const Tokens& x, int64_t t,
                   float (*sums)[NB], bool more, Ahead ahead) {
#if defined(__AMX_TILE__)
    if constexpr (M <= ONE_PASS) {
      const Fp8Widen widen;
      groups<M>(p, k0, k1, x, t, sums, more, ahead,
                [&](int64_t k, int64_t n, int, auto& rows, auto& acc, Ahead& fetch) {
                  const uint8_t* w = (const uint8_t*)at(p, k) + HEAD;
                  dots_as_tiles<M>(n, rows, acc, fetch, [&](__m512i(&v)[4]) {
                    widen.line(w, v[0], v[1]);
                    widen.line(w + 64, v[2], v[3]);
                    w += 128;
                  });
                });
    }
#elif defined(__AVX512VBMI__) && defined(__AVX512BF16__)
    if constexpr (M <= ONE_PASS) {
      const Fp8Widen widen;
      groups<M>(p, k0, k1, x, t, sums, more, ahead,
                [&](int64_t k, int64_t n, int, auto& rows, auto& acc, Ahead& fetch) {
                  const uint8_t* w = (const uint8_t*)at(p, k) + HEAD;
                  bf16_dots<M>(n, rows, acc, fetch, [&](__m512bh(&v)[4]) {
                    DS_UNROLL
                    for (int c = 0; c < 4; c += 2, w += 64) {
                      __m512i first, second;
                      widen.line(w, first, second);
                      v[c] = (__m512bh)first;
                      v[c + 1] = (__m512bh)second;
                    }
                  });
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
