// Rows of stored values (e4m3, bfloat16, float32) as what a kernel computes with.
#pragma once

#include "e4m3.h"

namespace ds {

inline float to_float(e4m3 x) {
  const int e = x.bits >> 3 & 15, m = x.bits & 7;
  float f = e ? std::ldexp(float(8 + m), e - 10) : float(m) * (1.0f / 512);
  if ((x.bits & 0x7f) == 0x7f) f = NAN;
  return x.bits & 0x80 ? -f : f;
}

// to[0, n) = from[0, n), exactly: every bfloat16 is a float32, every e4m3 a bfloat16.
template <class T>
inline void widen_row(const T* from, T* to, int64_t n) {
  std::memcpy(to, from, size_t(n) * sizeof(T));
}

inline void widen_row(const bf16* from, float* to, int64_t n) {
  int64_t i = 0;
  for (; i + F::W <= n; i += F::W) F::load(from + i).store(to + i);
  for (; i < n; ++i) to[i] = to_float(from[i]);
}

#if defined(__AVX512F__) && defined(__AVX512BW__)
inline F load_e4m3(__m128i bytes) {
  const __m512i x = _mm512_cvtepu8_epi32(bytes), low = _mm512_and_si512(x, _mm512_set1_epi32(0x7f));
  const __m512i sign = _mm512_slli_epi32(_mm512_and_si512(x, _mm512_set1_epi32(0x80)), 24);
  const __m512i normal =
      _mm512_add_epi32(_mm512_slli_epi32(low, 20), _mm512_set1_epi32(120 << 23));
  const __m512 small = _mm512_mul_ps(_mm512_cvtepi32_ps(low), _mm512_set1_ps(1.0f / 512));
  const __mmask16 subnormal = _mm512_cmplt_epi32_mask(low, _mm512_set1_epi32(8));
  const __mmask16 nan = _mm512_cmpeq_epi32_mask(low, _mm512_set1_epi32(0x7f));
  __m512i r = _mm512_mask_mov_epi32(normal, subnormal, _mm512_castps_si512(small));
  r = _mm512_mask_mov_epi32(r, nan, _mm512_set1_epi32(0x7fc00000));
  return {_mm512_castsi512_ps(_mm512_or_si512(r, sign))};
}
#elif defined(__AVX2__)
inline F load_e4m3(__m128i bytes) {
  const __m256i x = _mm256_cvtepu8_epi32(bytes), low = _mm256_and_si256(x, _mm256_set1_epi32(0x7f));
  const __m256i sign = _mm256_slli_epi32(_mm256_and_si256(x, _mm256_set1_epi32(0x80)), 24);
  const __m256i normal =
      _mm256_add_epi32(_mm256_slli_epi32(low, 20), _mm256_set1_epi32(120 << 23));
  const __m256 small = _mm256_mul_ps(_mm256_cvtepi32_ps(low), _mm256_set1_ps(1.0f / 512));
  const __m256i subnormal = _mm256_cmpgt_epi32(_mm256_set1_epi32(8), low);
  const __m256i nan = _mm256_cmpeq_epi32(low, _mm256_set1_epi32(0x7f));
  __m256i r = _mm256_blendv_epi8(normal, _mm256_castps_si256(small), subnormal);
  r = _mm256_blendv_epi8(r, _mm256_set1_epi32(0x7fc00000), nan);
  return {_mm256_castsi256_ps(_mm256_or_si256(r, sign))};
}
#endif

inline void widen_row(const e4m3* from, float* to, int64_t n) {
  int64_t i = 0;
#if defined(__AVX512F__) && defined(__AVX512BW__)
  for (; i + 16 <= n; i += 16) load_e4m3(_mm_loadu_si128((const __m128i*)(from + i))).store(to + i);
#elif defined(__AVX2__)
  for (; i + 8 <= n; i += 8) load_e4m3(_mm_loadl_epi64((const __m128i*)(from + i))).store(to + i);
#endif
  for (; i < n; ++i) to[i] = to_float(from[i]);
}

#if defined(__AVX512VBMI__) && defined(__AVX512BW__)
// The bytes of all 128 positive codes as bfloat16, for lookups by seven bits.
struct E4m3Table {
  __m512i low[2], high[2];
  E4m3Table() {
    alignas(64) uint8_t bytes[2][128];
    for (int i = 0; i < 128; ++i) {
      bf16 b;
      put(&b, to_float(e4m3{uint8_t(i)}));
      bytes[0][i] = uint8_t(b.bits);
      bytes[1][i] = uint8_t(b.bits >> 8);
    }
    for (int i = 0; i < 2; ++i) {
      low[i] = _mm512_load_si512(bytes[0] + 64 * i);
      high[i] = _mm512_load_si512(bytes[1] + 64 * i);
    }
  }
};

inline void widen_row(const e4m3* from, bf16* to, int64_t n) {
  static const E4m3Table table;
  const __m512i low0 = table.low[0], low1 = table.low[1], high0 = table.high[0],
                high1 = table.high[1];
  // So that the unpacks below, which work within 128 bits, leave the elements in order.
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  for (int64_t i = 0; i < n; i += 64) {
    const int m = int(n - i < 64 ? n - i : 64);
    const __mmask64 some = m == 64 ? ~0ull : (1ull << m) - 1;
    const __m512i x = _mm512_permutexvar_epi64(order, _mm512_maskz_loadu_epi8(some, from + i));
    const __m512i low = _mm512_permutex2var_epi8(low0, x, low1);
    // 0xf8: high byte or (code and sign bit)
    const __m512i high = _mm512_ternarylogic_epi64(_mm512_permutex2var_epi8(high0, x, high1), x,
                                                   _mm512_set1_epi8(int8_t(0x80)), 0xf8);
    const __m512i a = _mm512_unpacklo_epi8(low, high), b = _mm512_unpackhi_epi8(low, high);
    if (m == 64) {
      _mm512_storeu_si512(to + i, a);
      _mm512_storeu_si512(to + i + 32, b);
    } else {
      _mm512_mask_storeu_epi16(to + i, __mmask32(some), a);
      _mm512_mask_storeu_epi16(to + i + 32, __mmask32(some >> 32), b);
    }
  }
}
#else
inline void widen_row(const e4m3* from, bf16* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) put(to + i, to_float(from[i]));
}
#endif

}  // namespace ds
