// Activations to 8 bits with one scale per row, symmetric: x ~ q * scale, |q| <= 127.
#pragma once

#include <limits>

#include "simd.h"

namespace ds {

inline float from_bits(uint32_t u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
inline uint32_t to_bits(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return u;
}

// The largest |x| as bits: ordered like numbers, and NaN above all.
template <class T>
inline uint32_t largest(const T* x, int64_t n) {
  int32_t top = 0;
  for (int64_t i = 0; i < n; ++i) {
    int32_t u = int32_t(to_bits(to_float(x[i])) & 0x7fffffff);
    top = u > top ? u : top;
  }
  return uint32_t(top);
}

// q [padded] from x [n], whose largest |x| is `top`; the rest holds zeros. Every byte is flipped
// by `flip` (0x80 stores q + 128 as unsigned). Returns the scale, amax / 127, and the sum of q.
// A row with NaN or infinity gets the scale NaN, so that its results are NaN, and the sum 0.
template <class T>
inline float quantize_row(const T* x, int64_t n, uint32_t top, uint8_t flip, int64_t padded,
                          uint8_t* q, int32_t* sum) {
  const float amax = from_bits(top);
  const bool finite = top < 0x7f800000;
  const float up = amax < 0x1p-100f ? 0x1p+100f : 1.0f;  // keeps the inverse finite
  const float inverse = finite && amax > 0 ? 127.0f / (amax * up) : 0.0f;
  constexpr float MAGIC = 12582912.0f;  // 1.5 * 2^23: adding it rounds, to even, into the low bits
  uint32_t total = 0;  // which wraps where a row is not finite
  for (int64_t i = 0; i < n; ++i) {
    int32_t v = int32_t(to_bits(to_float(x[i]) * up * inverse + MAGIC) - 0x4b400000u);
    total += uint32_t(v);
    q[i] = uint8_t(v) ^ flip;
  }
  for (int64_t i = n; i < padded; ++i) q[i] = flip;
  *sum = finite ? int32_t(total) : 0;
  return finite ? amax / 127.0f : std::numeric_limits<float>::quiet_NaN();
}

}  // namespace ds
