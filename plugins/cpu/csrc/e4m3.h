// Floats to FP8 e4m3: 4 exponent bits of bias 7, 3 of mantissa, no infinity, largest 448.
#pragma once

#include "simd.h"

namespace ds {

struct e4m3 {
  uint8_t bits;
};

// Rounds to nearest, ties to even; what is too large becomes 448, NaN stays NaN.
inline e4m3 to_e4m3(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  const uint32_t sign = u >> 24 & 0x80, magnitude = u & 0x7fffffff;
  // From 2^-6 on: exponent and mantissa move together, so that a carry goes where it should.
  const uint32_t normal = (magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20;
  // Below, in units of 2^-9: the sum has them in its last bits, rounded.
  float small;
  std::memcpy(&small, &magnitude, 4);
  small += 16384.0f;
  uint32_t units;
  std::memcpy(&units, &small, 4);
  uint32_t code = magnitude < 0x3c800000 ? units - 0x46800000 : normal - (120 << 3);
  code = magnitude >= 0x43e00000 ? 0x7e : code;
  code = magnitude > 0x7f800000 ? 0x7f : code;
  return {uint8_t(sign | code)};
}

template <class T>
inline void store_e4m3(const T* x, e4m3* out, int64_t n) {
  constexpr int64_t BLOCK = 64;
  float wide[BLOCK];
  for (int64_t i = 0; i < n; i += BLOCK) {
    const int64_t m = n - i < BLOCK ? n - i : BLOCK;
    for (int64_t j = 0; j < m; ++j) wide[j] = to_float(x[i + j]);
    for (int64_t j = 0; j < m; ++j) out[i + j] = to_e4m3(wide[j]);
  }
}

}  // namespace ds
