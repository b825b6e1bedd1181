// Codes of coded.h: 4-bit floats (e2m1) with a power of two (e8m0, a byte) per column and 32 elements
// of k.
//
// A pair of k for 64 columns is one line of 64 bytes, in an order that suits the
// instructions, so that every library has its own: with
// 16-bit lookups, every word has an element of four columns that are 16 apart, so that a shift and a
// lookup make a register of 16 columns in order. With lookups of bytes, a half of the line has 32
// columns: 16 in the low halves of its bytes, 16 in the high ones.
#pragma once

#include "simd.h"

namespace ds {

constexpr int64_t FP4_GROUP = 32;

// Where the code of column c (0 .. 63), element j (0, 1) of the pair, lies in a line: which half of
// which byte.
struct Fp4Place {
  int byte, shift;
};
constexpr Fp4Place fp4_place(int c, int j) {
#if defined(__AVX512BW__)
  return {4 * (c % 16) + 2 * j + c / 32, c / 16 % 2 * 4};
#else
  return {c / 32 * 32 + c % 8 / 4 * 16 + c % 16 / 8 * 8 + c % 4 * 2 + j, c / 16 % 2 * 4};
#endif
}

constexpr uint16_t fp4_bits(unsigned code) {  // of bfloat16
  constexpr uint16_t BITS[] = {0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0};
  return uint16_t(BITS[code & 7] | (code & 8) << 12);
}

// 2^(byte - 127), exactly: of byte 0 a subnormal number.
inline float fp4_scale(uint8_t byte) {
  const uint32_t bits = byte ? uint32_t(byte) << 23 : 1u << 22;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
// The byte of a scale that is one of these powers of two.
inline uint8_t fp4_scale_byte(float scale) {
  uint32_t bits;
  std::memcpy(&bits, &scale, 4);
  return uint8_t(bits >> 23);
}

struct Fp4Table {
  alignas(64) uint16_t words[32];
  alignas(16) uint8_t low[16], high[16];
  constexpr Fp4Table() : words(), low(), high() {
    for (unsigned i = 0; i < 32; ++i) words[i] = fp4_bits(i & 15);
    for (unsigned i = 0; i < 16; ++i)
      low[i] = uint8_t(fp4_bits(i)), high[i] = uint8_t(fp4_bits(i) >> 8);
  }
};
constexpr Fp4Table FP4_TABLE;

#if defined(__AVX512BW__)

struct Fp4Widen {
  const __m512i table = _mm512_load_si512(FP4_TABLE.words);
  void pair(const uint8_t* p, __m512i (&out)[4]) const {
    const __m512i line = _mm512_loadu_si512(p);  // a lookup heeds the lowest five bits of a word
    out[0] = _mm512_permutexvar_epi16(line, table);
    out[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(line, 4), table);
    out[2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(line, 8), table);
    out[3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(line, 12), table);
  }
  void pair(const uint8_t* p, bf16* out) const {
    __m512i wide[4];
    pair(p, wide);
    for (int i = 0; i < 4; ++i) _mm512_storeu_si512(out + 32 * i, wide[i]);
  }
};

#elif defined(__AVX2__)

struct Fp4Widen {
  const __m256i low = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)FP4_TABLE.low));
  const __m256i high = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)FP4_TABLE.high));
  // body(i, those of columns c0 + 8 i and on), two of `vectors` at a time
  template <int vectors, class Body>
  void columns(const uint8_t* p, int c0, Body body) const {
    DS_UNROLL
    for (int i = 0; i < vectors; i += 2) {
      const int c = c0 + 8 * i;
      const __m256i line = _mm256_loadu_si256((const __m256i*)(p + c / 32 * 32));
      two(c % 32 ? _mm256_srli_epi16(line, 4) : line, i, body);
    }
  }
  void pair(const uint8_t* p, bf16* out) const {
    columns<8>(p, 0, [&](int i, const __m256i(&v)[2]) {
      _mm256_storeu_si256((__m256i*)(out + 16 * i), v[0]);
      _mm256_storeu_si256((__m256i*)(out + 16 * i + 16), v[1]);
    });
  }

 private:
  template <class Body>
  void two(__m256i codes, int i, Body body) const {
    const __m256i at = _mm256_and_si256(codes, _mm256_set1_epi8(15));
    const __m256i a = _mm256_shuffle_epi8(low, at), b = _mm256_shuffle_epi8(high, at);
    body(i, {_mm256_unpacklo_epi8(a, b), _mm256_unpackhi_epi8(a, b)});
  }
};

#else

struct Fp4Widen {
  void pair(const uint8_t* p, bf16* out) const {
    for (int c = 0; c < 64; ++c)
      for (int j = 0; j < 2; ++j) {
        const Fp4Place at = fp4_place(c, j);
        out[2 * c + j].bits = FP4_TABLE.words[p[at.byte] >> at.shift & 15];
      }
  }
};

#endif

// What coded.h asks of codes.
struct Fp4Codes {
  static constexpr int64_t PAIR = 64, HEAD = 64;
  static constexpr float LIFT = 1;
  static constexpr int DIRECT = 3;
  static F scales(const char* head, int c) {
#if defined(__AVX512BW__)
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(head + c)));
    const __m512i bits = _mm512_slli_epi32(bytes, 23);
    return {_mm512_castsi512_ps(_mm512_max_epu32(bits, _mm512_set1_epi32(1 << 22)))};
#elif defined(__AVX2__)
    const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(head + c)));
    const __m256i bits = _mm256_slli_epi32(bytes, 23);
    return {_mm256_castsi256_ps(_mm256_max_epu32(bits, _mm256_set1_epi32(1 << 22)))};
#else
    F r;
    for (int i = 0; i < F::W; ++i) r.v[i] = fp4_scale(uint8_t(head[c + i]));
    return r;
#endif
  }
  using Widen = Fp4Widen;
};

}  // namespace ds
