// Vectors of floats, as wide as the instruction set of this build, and bfloat16 conversion.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

// Whether instructions multiply pairs of bfloat16 (score.cpp: where it pays) and round to it.
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define DS_BF16_DOTS 1
#else
#define DS_BF16_DOTS 0
#endif

// Loops over registers must be unrolled, or the registers are kept in memory; loops around a full
// set of them must not be.
#if defined(__clang__)
#define DS_UNROLL _Pragma("clang loop unroll(full)")
#define DS_ROLLED _Pragma("clang loop unroll(disable)")
#elif defined(__GNUC__)
#define DS_UNROLL _Pragma("GCC unroll 16")
#define DS_ROLLED _Pragma("GCC unroll 1")
#else
#define DS_UNROLL
#define DS_ROLLED
#endif

// A tile is a function of its own, for it needs all registers.
#if defined(__GNUC__)
#define DS_NOINLINE __attribute__((noinline))
#else
#define DS_NOINLINE
#endif

namespace ds {

struct bf16 {
  uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
  uint32_t u = uint32_t(x.bits) << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
inline void put(float* p, float x) { *p = x; }
inline void put(bf16* p, float x) {  // round to nearest, ties to even; NaN stays NaN
  uint32_t u;
  std::memcpy(&u, &x, 4);
  p->bits = x != x ? 0x7fc0 : uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

#if defined(__AVX512F__) && defined(__AVX512BW__)

struct F {
  static constexpr int W = 16;
  __m512 v;
  static F zero() { return {_mm512_setzero_ps()}; }
  static F all(float x) { return {_mm512_set1_ps(x)}; }
  static F load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static F load(const bf16* p) {
    __m256i h = _mm256_loadu_si256((const __m256i*)p);
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))};
  }
  void store(float* p) const { _mm512_storeu_ps(p, v); }
  void store(bf16* p) const {
    __m512i u = _mm512_castps_si512(v);
    __m512i lsb = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    __m512i r = _mm512_add_epi32(u, _mm512_add_epi32(lsb, _mm512_set1_epi32(0x7fff)));
    r = _mm512_srli_epi32(r, 16);
    __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    r = _mm512_mask_mov_epi32(r, nan, _mm512_set1_epi32(0x7fc0));
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(r));
  }
  float sum() const { return _mm512_reduce_add_ps(v); }
};
inline F operator+(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F operator*(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F operator/(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F clamp(F x, float lo, float hi) {
  // NaN stays: min and max answer with the second operand then
  return {_mm512_min_ps(_mm512_set1_ps(hi), _mm512_max_ps(_mm512_set1_ps(lo), x.v))};
}
inline F round_even(F x) {
  return {_mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline F times_pow2(F x, F n) { return {_mm512_scalef_ps(x.v, n.v)}; }

#elif defined(__AVX2__)

struct F {
  static constexpr int W = 8;
  __m256 v;
  static F zero() { return {_mm256_setzero_ps()}; }
  static F all(float x) { return {_mm256_set1_ps(x)}; }
  static F load(const float* p) { return {_mm256_loadu_ps(p)}; }
  static F load(const bf16* p) {
    __m128i h = _mm_loadu_si128((const __m128i*)p);
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16))};
  }
  void store(float* p) const { _mm256_storeu_ps(p, v); }
  void store(bf16* p) const {
    __m256i u = _mm256_castps_si256(v);
    __m256i lsb = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    __m256i r = _mm256_add_epi32(u, _mm256_add_epi32(lsb, _mm256_set1_epi32(0x7fff)));
    r = _mm256_srli_epi32(r, 16);
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    r = _mm256_blendv_epi8(r, _mm256_set1_epi32(0x7fc0), nan);
    __m128i h = _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1));
    _mm_storeu_si128((__m128i*)p, h);
  }
  float sum() const {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
  }
};
inline F operator+(F a, F b) { return {_mm256_add_ps(a.v, b.v)}; }
inline F operator*(F a, F b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline F operator/(F a, F b) { return {_mm256_div_ps(a.v, b.v)}; }
inline F fma(F a, F b, F c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline F clamp(F x, float lo, float hi) {
  // NaN stays: min and max answer with the second operand then
  return {_mm256_min_ps(_mm256_set1_ps(hi), _mm256_max_ps(_mm256_set1_ps(lo), x.v))};
}
inline F round_even(F x) {
  return {_mm256_round_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline F times_pow2(F x, F n) {
  __m256i e = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127)), 23);
  return {_mm256_mul_ps(x.v, _mm256_castsi256_ps(e))};
}

#else

struct F {  // plain arrays: the compiler vectorises these loops with what the baseline has
  static constexpr int W = 8;
  float v[8];
  static F zero() { return all(0.0f); }
  static F all(float x) {
    F r;
    for (float& e : r.v) e = x;
    return r;
  }
  template <class T>
  static F load(const T* p) {
    F r;
    for (int i = 0; i < W; ++i) r.v[i] = to_float(p[i]);
    return r;
  }
  template <class T>
  void store(T* p) const {
    for (int i = 0; i < W; ++i) put(p + i, v[i]);
  }
  float sum() const {
    return ((v[0] + v[4]) + (v[1] + v[5])) + ((v[2] + v[6]) + (v[3] + v[7]));
  }
};
#define DS_LANES(expr)                     \
  F r;                                     \
  for (int i = 0; i < F::W; ++i) r.v[i] = (expr); \
  return r
inline F operator+(F a, F b) { DS_LANES(a.v[i] + b.v[i]); }
inline F operator*(F a, F b) { DS_LANES(a.v[i] * b.v[i]); }
inline F operator/(F a, F b) { DS_LANES(a.v[i] / b.v[i]); }
inline F fma(F a, F b, F c) { DS_LANES(a.v[i] * b.v[i] + c.v[i]); }
inline F clamp(F x, float lo, float hi) {
  DS_LANES(x.v[i] < lo ? lo : (x.v[i] > hi ? hi : x.v[i]));
}
inline F round_even(F x) { DS_LANES(std::nearbyint(x.v[i])); }
inline F times_pow2(F x, F n) { DS_LANES(n.v[i] == n.v[i] ? std::ldexp(x.v[i], int(n.v[i])) : n.v[i]); }
#undef DS_LANES

#endif

// e^x to about one unit in the last place from -87 to 88; e^-87 below, infinity from 89 on. NaN
// gives NaN.
inline F exp(F x) {
  x = clamp(x, -87.0f, 89.0f);
  F n = round_even(x * F::all(1.44269504f));
  F r = fma(n, F::all(-0.693359375f), x);  // x - n * ln 2, in two parts
  r = fma(n, F::all(2.12194440e-4f), r);
  F p = F::all(1.0f / 5040);
  for (float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
    p = fma(p, r, F::all(c));
  return times_pow2(p, n);
}

template <class T>
inline F load_tail(const T* p, int n) {
  T buffer[F::W] = {};
  std::memcpy(buffer, p, size_t(n) * sizeof(T));
  return F::load(buffer);
}
template <class T>
inline void store_tail(F x, T* p, int n) {
  T buffer[F::W];
  x.store(buffer);
  std::memcpy(p, buffer, size_t(n) * sizeof(T));
}

#if defined(__AVX512F__) && defined(__AVX512BW__)
inline void transpose16(__m512i* r) {  // 16 by 16 words
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; ++j) {
      r[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + 2 + j]);
      r[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + 2 + j]);
    }
  // r[4 g + c]: rows 4 g to 4 g + 3 of columns c, c + 4, c + 8, c + 12
  for (int c = 0; c < 4; ++c) {
    t[c] = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x88);       // columns c and c + 8
    t[4 + c] = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xdd);   // c + 4 and c + 12
    t[8 + c] = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x88);
    t[12 + c] = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xdd);
  }
  for (int c = 0; c < 4; ++c) {
    r[c] = _mm512_shuffle_i32x4(t[c], t[8 + c], 0x88);
    r[8 + c] = _mm512_shuffle_i32x4(t[c], t[8 + c], 0xdd);
    r[4 + c] = _mm512_shuffle_i32x4(t[4 + c], t[12 + c], 0x88);
    r[12 + c] = _mm512_shuffle_i32x4(t[4 + c], t[12 + c], 0xdd);
  }
}
#endif

}  // namespace ds
