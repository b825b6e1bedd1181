// Vectors of int32 sums of 8-bit products, as wide as the instruction set of this build.
//
// One lane belongs to one column of the weight and takes 4 products along k at a time: the order
// [k / 4][columns][4] of packed 8-bit weights. Sums are exact as long as they fit in int32.
#pragma once

#include "gemm.h"

namespace ds {

// x, but the compiler cannot know: it leaves a loop of so many turns rolled, where unrolling would
// need more registers than there are.
inline int64_t unknown(int64_t x) {
#if defined(__GNUC__)
  asm("" : "+r"(x));
#endif
  return x;
}

inline int32_t load32(const void* p) {
  int32_t v;
  std::memcpy(&v, p, 4);
  return v;
}

#if defined(__AVX512VNNI__)

// The product takes one unsigned operand: with signed weights x is stored as q + 128, and 128
// times the column's sum of weights is taken off in the end.
constexpr uint8_t X_FLIP = 0x80;

struct Bytes {
  __m512i v;
  static Bytes load(const void* p) { return {_mm512_loadu_si512(p)}; }
  static Bytes all(const void* p) { return {_mm512_set1_epi32(load32(p))}; }
  void store(void* p) const { _mm512_storeu_si512(p, v); }
  Bytes low() const { return {_mm512_and_si512(v, _mm512_set1_epi8(15))}; }
  Bytes high() const {
    return {_mm512_and_si512(_mm512_srli_epi16(v, 4), _mm512_set1_epi8(15))};
  }
};
struct Sums {
  static constexpr int W = 16;
  __m512i v;
  static Sums all(int32_t x) { return {_mm512_set1_epi32(x)}; }
  static Sums load(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
  void store(int32_t* p) const { _mm512_storeu_si512(p, v); }
  Sums times128() const { return {_mm512_slli_epi32(v, 7)}; }
  F wide() const { return {_mm512_cvtepi32_ps(v)}; }
};
inline Sums operator-(Sums a, Sums b) { return {_mm512_sub_epi32(a.v, b.v)}; }
// Signed weights, x flipped. (Assembly, because with the intrinsic GCC copies accumulators about.)
inline Sums mac(Sums a, Bytes w, Bytes x) {
  asm("vpdpbusd %2, %1, %0" : "+v"(a.v) : "v"(x.v), "v"(w.v));
  return a;
}
// Unsigned weights, x signed.
inline Sums mac_u(Sums a, Bytes w, Bytes x) {
  asm("vpdpbusd %2, %1, %0" : "+v"(a.v) : "v"(w.v), "v"(x.v));
  return a;
}
inline Sums mac_u(Sums a, Bytes w, const uint8_t* x) {  // without a register for x
  struct Four {
    uint8_t bytes[4];
  };
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(a.v) : "v"(w.v), "m"(*(const Four*)x));
  return a;
}

#elif defined(__AVX2__)

constexpr uint8_t X_FLIP = 0;

struct Bytes {
  __m256i v;
  static Bytes load(const void* p) { return {_mm256_loadu_si256((const __m256i*)p)}; }
  static Bytes all(const void* p) { return {_mm256_set1_epi32(load32(p))}; }
  void store(void* p) const { _mm256_storeu_si256((__m256i*)p, v); }
  Bytes low() const { return {_mm256_and_si256(v, _mm256_set1_epi8(15))}; }
  Bytes high() const {
    return {_mm256_and_si256(_mm256_srli_epi16(v, 4), _mm256_set1_epi8(15))};
  }
};
struct Sums {
  static constexpr int W = 8;
  __m256i v;
  static Sums all(int32_t x) { return {_mm256_set1_epi32(x)}; }
  static Sums load(const int32_t* p) { return {_mm256_loadu_si256((const __m256i*)p)}; }
  void store(int32_t* p) const { _mm256_storeu_si256((__m256i*)p, v); }
  Sums times128() const { return {_mm256_slli_epi32(v, 7)}; }
  F wide() const { return {_mm256_cvtepi32_ps(v)}; }
};
inline Sums operator-(Sums a, Sums b) { return {_mm256_sub_epi32(a.v, b.v)}; }
// Two products of |q| <= 127 with bytes up to 128 fit in 16 bits, so maddubs never saturates.
inline Sums mac_u(Sums a, Bytes w, Bytes x) {
  __m256i pairs = _mm256_maddubs_epi16(w.v, x.v);
  return {_mm256_add_epi32(a.v, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))};
}
inline Sums mac(Sums a, Bytes w, Bytes x) {
  return mac_u(a, {_mm256_abs_epi8(w.v)}, {_mm256_sign_epi8(x.v, w.v)});
}

#else

constexpr uint8_t X_FLIP = 0;

struct Bytes {
  uint8_t v[32];
  static Bytes load(const void* p) {
    Bytes r;
    std::memcpy(r.v, p, sizeof v);
    return r;
  }
  static Bytes all(const void* p) {
    Bytes r;
    for (int i = 0; i < 32; i += 4) std::memcpy(r.v + i, p, 4);
    return r;
  }
  void store(void* p) const { std::memcpy(p, v, sizeof v); }
  Bytes low() const {
    Bytes r;
    for (int i = 0; i < 32; ++i) r.v[i] = v[i] & 15;
    return r;
  }
  Bytes high() const {
    Bytes r;
    for (int i = 0; i < 32; ++i) r.v[i] = uint8_t(v[i] >> 4);
    return r;
  }
};
struct Sums {
  static constexpr int W = 8;
  int32_t v[8];
  static Sums all(int32_t x) {
    Sums r;
    for (int32_t& e : r.v) e = x;
    return r;
  }
  static Sums load(const int32_t* p) {
    Sums r;
    std::memcpy(r.v, p, sizeof v);
    return r;
  }
  void store(int32_t* p) const { std::memcpy(p, v, sizeof v); }
  Sums times128() const {
    Sums r;
    for (int i = 0; i < W; ++i) r.v[i] = v[i] * 128;
    return r;
  }
  F wide() const {
    F r;
    for (int i = 0; i < W; ++i) r.v[i] = float(v[i]);
    return r;
  }
};
inline Sums operator-(Sums a, Sums b) {
  for (int i = 0; i < Sums::W; ++i) a.v[i] -= b.v[i];
  return a;
}
template <class W>
inline Sums mac_as(Sums a, Bytes w, Bytes x) {
  for (int i = 0; i < Sums::W; ++i)
    for (int j = 0; j < 4; ++j) a.v[i] += int32_t(W(w.v[4 * i + j])) * int8_t(x.v[4 * i + j]);
  return a;
}
inline Sums mac(Sums a, Bytes w, Bytes x) { return mac_as<int8_t>(a, w, x); }
inline Sums mac_u(Sums a, Bytes w, Bytes x) { return mac_as<uint8_t>(a, w, x); }

#endif

#if !defined(__AVX512VNNI__)
inline Sums mac_u(Sums a, Bytes w, const uint8_t* x) { return mac_u(a, w, Bytes::all(x)); }
#endif

}  // namespace ds
