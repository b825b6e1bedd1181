// Codes of coded.h: 8-bit floats (e4m3fn) with a float32 scale per column and group along k. They
// are widened to bfloat16 times 2^-8, which is exact; sums are multiplied by FP8_LIFT.
//
// A pair of k for 64 columns lies in two lines of 64 bytes: in the low bytes of 16 bits each the pairs
// of 16 columns, in the high bytes those of the next 16, so that two shifts and a mask make registers
// of columns in order.
//
// Normal numbers are most of them: their exponent's bits 112 .. 127 differ from e in bits that e has
// not. Others are told by those bits being zero, for -0 is stored as 0 and NaN in its place.
#pragma once

#include "simd.h"

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
struct Fp8Table {
  uint8_t stored[256];
  uint16_t bits[256];
  constexpr Fp8Table() : stored(), bits() {
    for (unsigned i = 0; i < 256; ++i) stored[i] = fp8_stored(uint8_t(i)), bits[i] = fp8_bits(i);
  }
};
constexpr Fp8Table FP8_CODES;

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
      for (unsigned some = unsigned(_mm256_movemask_epi8(small(code))); some; some &= some - 1) {
        const int i = __builtin_ctz(some);
        out[i % 2 * 32 + i / 2].bits = FP8_CODES.bits[p[i]];
      }
    }
  }
  // body(i, those of columns c0 + 8 i and on), two of `vectors` at a time
  template <int vectors, class Body>
  void columns(const uint8_t* p, int c0, Body body) const {
    constexpr int line_vectors = vectors < 4 ? vectors : 4;
    DS_UNROLL
    for (int i = 0; i < vectors; i += line_vectors) {
      const int c = c0 + 8 * i;
      const uint8_t* at = p + c / 32 * 64;
      const __m256i a = _mm256_loadu_si256((const __m256i*)at);
      const __m256i b = _mm256_loadu_si256((const __m256i*)(at + 32));
      const bool some = _mm256_movemask_epi8(_mm256_or_si256(small(a), small(b)));
      DS_UNROLL
      for (int j = 0; j < line_vectors; j += 2) {
        const bool upper = line_vectors == 4 ? j == 2 : c % 32;
        __m256i v[] = {normal(upper ? a : _mm256_slli_epi16(a, 8)),
                       normal(upper ? b : _mm256_slli_epi16(b, 8))};
        if (__builtin_expect(some, 0)) mended(at, upper, v);
        body(i + j, v);
      }
    }
  }

 private:
  DS_NOINLINE void mended(const uint8_t* p, bool upper, __m256i (&v)[2]) const {
    alignas(32) bf16 wide[64];
    line(p, wide);
    std::memcpy(v, wide + 32 * upper, sizeof v);
  }
  static __m256i small(__m256i code) {  // which of them have no exponent
    const __m256i exponent = _mm256_and_si256(code, _mm256_set1_epi8(0x78));
    return _mm256_cmpeq_epi8(exponent, _mm256_setzero_si256());
  }
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

// What coded.h asks of codes.
struct Fp8Codes {
  static constexpr int64_t PAIR = 128;  // bytes of a pair of k for 64 columns
  static constexpr int64_t HEAD = 64 * int64_t(sizeof(float));  // and of the scales of a group
  static constexpr float LIFT = FP8_LIFT;
  static constexpr int DIRECT = 6;
  static F scales(const char* head, int c) { return F::load((const float*)head + c); }
  struct Widen : Fp8Widen {
#if defined(__AVX512BW__)
    using Fp8Widen::pair;
#endif
    void pair(const uint8_t* p, bf16* out) const {
      line(p, out);
      line(p + 64, out + 64);
    }
  };
};

}  // namespace ds
