// Index keys in FP4: of every 32 numbers e2m1 codes and a power of two. A row of d numbers is d / 2
// bytes of codes, the first of two in the low bits, then d / 32 exponent bytes.
#pragma once

#include "fp4.h"

namespace ds {

struct e2m1 {
  uint8_t bits;
};

inline int64_t e2m1_bytes(int64_t d) { return d / 2 + d / FP4_GROUP; }

// The exponent byte of the least power of two that is no less than amax / 6 and 2^-126; 255 where
// there is NaN or infinity.
inline uint8_t e2m1_exponent(const float* x) {
  int32_t most = 0;  // the bits of magnitudes order as they do, NaN on top
  for (int64_t i = 0; i < FP4_GROUP; ++i) {
    int32_t bits;
    std::memcpy(&bits, x + i, 4);
    bits &= 0x7fffffff;
    most = bits > most ? bits : most;
  }
  float amax;
  std::memcpy(&amax, &most, 4);
  const float scale = amax / 6.0f;
  uint32_t u;
  std::memcpy(&u, &scale, 4);
  if (u >= 0x7f800000) return 255;
  return u <= 0x00800000 ? 1 : uint8_t((u + 0x7fffff) >> 23);
}

// To the nearest code, ties to the even one.
inline uint8_t to_e2m1(float x) {
  const float a = std::fabs(x);
  const int code = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) +
                   (a >= 3.5f) + (a > 5.0f);
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return uint8_t(code | int(u >> 31) << 3);
}

inline float e2m1_value(uint8_t code, float scale) {
  bf16 b{FP4_TABLE.words[code & 15]};
  return to_float(b) * scale;
}

// body(first of a group's numbers, its scale, its codes)
template <class Body>
inline void e2m1_groups(const float* x, int64_t d, Body body) {
  for (int64_t i = 0; i < d; i += FP4_GROUP) {
    const uint8_t exponent = e2m1_exponent(x + i);
    const float scale = fp4_scale(exponent);
    uint8_t codes[FP4_GROUP];
    for (int64_t j = 0; j < FP4_GROUP; ++j) codes[j] = to_e2m1(x[i + j] / scale);
    body(i, exponent, codes);
  }
}

// x [d] as a row.
inline void store_e2m1(const float* x, uint8_t* row, int64_t d) {
  e2m1_groups(x, d, [&](int64_t i, uint8_t exponent, const uint8_t* codes) {
    for (int64_t j = 0; j < FP4_GROUP; j += 2)
      row[(i + j) / 2] = uint8_t(codes[j] | codes[j + 1] << 4);
    row[d / 2 + i / FP4_GROUP] = exponent;
  });
}

// x [d] as what its row stands for, in T.
template <class T>
inline void round_e2m1(const float* x, T* to, int64_t d) {
  e2m1_groups(x, d, [&](int64_t i, uint8_t exponent, const uint8_t* codes) {
    const float scale = fp4_scale(exponent);
    for (int64_t j = 0; j < FP4_GROUP; ++j) put(to + i + j, e2m1_value(codes[j], scale));
  });
}

// What a row stands for.
template <class T>
inline void widen_row(const e2m1* row, T* to, int64_t d) {
  const uint8_t* bytes = &row->bits;
  for (int64_t i = 0; i < d; i += FP4_GROUP) {
    const float scale = fp4_scale(bytes[d / 2 + i / FP4_GROUP]);
    T values[16];
    for (int c = 0; c < 16; ++c) put(values + c, e2m1_value(uint8_t(c), scale));
    for (int64_t j = i; j < i + FP4_GROUP; j += 2) {
      const uint8_t pair = bytes[j / 2];
      to[j] = values[pair & 15];
      to[j + 1] = values[pair >> 4];
    }
  }
}

}  // namespace ds
