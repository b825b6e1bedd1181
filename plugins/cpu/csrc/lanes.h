// What the small kernels do with vectors of floats beside arithmetic.
#pragma once

#include "simd.h"

namespace ds {

// An integer that orders floats: equal for both zeros, largest for NaN of either sign.
inline int32_t order(float x) {
  x += 0.0f;  // -0 becomes 0
  int32_t bits;
  std::memcpy(&bits, &x, 4);
  const int32_t key = bits ^ ((bits >> 31) & 0x7fffffff);
  return (bits & 0x7fffffff) > 0x7f800000 ? INT32_MAX : key;
}
constexpr int32_t LEAST = INT32_MIN;  // below the key of every float

constexpr float LEAST_EXP = -87.0f;  // e^x is taken for 0 below: exp (simd.h) goes no further

// only(x, bits): x where the lane's bit is set, else -inf; bits above the lanes' mean nothing.
// Keys is order() of a vector's lanes; WideSums adds vectors up in eight float64 sums.
#if defined(__AVX512F__) && defined(__AVX512BW__)

// (x1, x0, x3, x2, ...)
inline F swap_pairs(F x) { return {_mm512_permute_ps(x.v, 0xb1)}; }
// `value`, but 0 where x < limit.
inline F zero_below(F value, F x, float limit) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, _mm512_set1_ps(limit), _CMP_NLT_UQ), value.v)};
}
inline F only(F x, uint32_t bits) {
  return {_mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), __mmask16(bits), x.v)};
}

struct Keys {
  __m512i v;
  static Keys all(int32_t key) { return {_mm512_set1_epi32(key)}; }
  static Keys of(F x) {
    const __m512 y = _mm512_add_ps(x.v, _mm512_setzero_ps());
    const __m512i bits = _mm512_castps_si512(y);
    const __m512i flip = _mm512_srli_epi32(_mm512_srai_epi32(bits, 31), 1);
    const __mmask16 nan = _mm512_cmp_ps_mask(y, y, _CMP_UNORD_Q);
    return {_mm512_mask_mov_epi32(_mm512_xor_si512(bits, flip), nan, _mm512_set1_epi32(INT32_MAX))};
  }
  void raise(Keys other) { v = _mm512_max_epi32(v, other.v); }
  int32_t largest() const { return _mm512_reduce_max_epi32(v); }
  // Bit i: whether lane i is in [low, high].
  uint32_t between(int32_t low, int32_t high) const {
    return _mm512_mask_cmple_epi32_mask(_mm512_cmpge_epi32_mask(v, _mm512_set1_epi32(low)), v,
                                        _mm512_set1_epi32(high));
  }
  void store(int32_t* p) const { _mm512_storeu_si512(p, v); }
};

struct WideSums {
  __m512d v = _mm512_setzero_pd();
  void add(F x) {
    v = _mm512_add_pd(v, _mm512_cvtps_pd(_mm512_castps512_ps256(x.v)));
    v = _mm512_add_pd(v, _mm512_cvtps_pd(_mm256_castpd_ps(
                             _mm512_extractf64x4_pd(_mm512_castps_pd(x.v), 1))));
  }
  void store(double* p) const { _mm512_storeu_pd(p, v); }
};

#elif defined(__AVX2__)

inline F swap_pairs(F x) { return {_mm256_permute_ps(x.v, 0xb1)}; }
inline F zero_below(F value, F x, float limit) {
  return {_mm256_and_ps(_mm256_cmp_ps(x.v, _mm256_set1_ps(limit), _CMP_NLT_UQ), value.v)};
}
inline F only(F x, uint32_t bits) {
  const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i set = _mm256_and_si256(_mm256_set1_epi32(int32_t(bits)), lane);
  const __m256 kept = _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, lane));
  return {_mm256_blendv_ps(_mm256_set1_ps(-INFINITY), x.v, kept)};
}

struct Keys {
  __m256i v;
  static Keys all(int32_t key) { return {_mm256_set1_epi32(key)}; }
  static Keys of(F x) {
    const __m256 y = _mm256_add_ps(x.v, _mm256_setzero_ps());
    const __m256i bits = _mm256_castps_si256(y);
    const __m256i flip = _mm256_srli_epi32(_mm256_srai_epi32(bits, 31), 1);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(y, y, _CMP_UNORD_Q));
    return {_mm256_blendv_epi8(_mm256_xor_si256(bits, flip), _mm256_set1_epi32(INT32_MAX), nan)};
  }
  void raise(Keys other) { v = _mm256_max_epi32(v, other.v); }
  int32_t largest() const {
    __m128i m = _mm_max_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1)));
  }
  uint32_t between(int32_t low, int32_t high) const {
    const __m256i below = _mm256_cmpgt_epi32(_mm256_set1_epi32(low), v);
    const __m256i above = _mm256_cmpgt_epi32(v, _mm256_set1_epi32(high));
    return ~uint32_t(_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_or_si256(below, above)))) & 0xff;
  }
  void store(int32_t* p) const { _mm256_storeu_si256((__m256i*)p, v); }
};

struct WideSums {
  __m256d low = _mm256_setzero_pd(), high = _mm256_setzero_pd();
  void add(F x) {
    low = _mm256_add_pd(low, _mm256_cvtps_pd(_mm256_castps256_ps128(x.v)));
    high = _mm256_add_pd(high, _mm256_cvtps_pd(_mm256_extractf128_ps(x.v, 1)));
  }
  void store(double* p) const {
    _mm256_storeu_pd(p, low);
    _mm256_storeu_pd(p + 4, high);
  }
};

#else

inline F swap_pairs(F x) {
  F r;
  for (int i = 0; i < F::W; ++i) r.v[i] = x.v[i ^ 1];
  return r;
}
inline F zero_below(F value, F x, float limit) {
  for (int i = 0; i < F::W; ++i)
    if (x.v[i] < limit) value.v[i] = 0.0f;
  return value;
}
inline F only(F x, uint32_t bits) {
  for (int i = 0; i < F::W; ++i) x.v[i] = bits >> i & 1 ? x.v[i] : -INFINITY;
  return x;
}

struct Keys {
  int32_t v[F::W];
  static Keys all(int32_t key) {
    Keys r;
    for (int32_t& e : r.v) e = key;
    return r;
  }
  static Keys of(F x) {
    Keys r;
    for (int i = 0; i < F::W; ++i) r.v[i] = order(x.v[i]);
    return r;
  }
  void raise(Keys other) {
    for (int i = 0; i < F::W; ++i) v[i] = other.v[i] > v[i] ? other.v[i] : v[i];
  }
  int32_t largest() const {
    int32_t most = v[0];
    for (int32_t e : v) most = e > most ? e : most;
    return most;
  }
  uint32_t between(int32_t low, int32_t high) const {
    uint32_t bits = 0;
    for (int i = 0; i < F::W; ++i) bits |= uint32_t(v[i] >= low && v[i] <= high) << i;
    return bits;
  }
  void store(int32_t* p) const { std::memcpy(p, v, sizeof v); }
};

struct WideSums {
  double v[8] = {};
  void add(F x) {
    for (int i = 0; i < F::W; ++i) v[i & 7] += double(x.v[i]);
  }
  void store(double* p) const { std::memcpy(p, v, sizeof v); }
};

#endif

inline double all(const WideSums& sums) {
  double v[8];
  sums.store(v);
  return ((v[0] + v[4]) + (v[1] + v[5])) + ((v[2] + v[6]) + (v[3] + v[7]));
}

// The lowest set bit's number.
inline int lowest(uint32_t bits) {
#if defined(__GNUC__)
  return __builtin_ctz(bits);
#else
  int i = 0;
  for (; !(bits & 1); bits >>= 1) ++i;
  return i;
#endif
}

}  // namespace ds
