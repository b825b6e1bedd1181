// The scale of values that become e4m3.
#pragma once

#include "e4m3.h"

namespace ds {

// Largest magnitude (1e-4 at least) over 448, as a power of two from above if `ue8m0`. NaN among the
// values makes it NaN.
template <class T>
inline float group_scale(const T* x, int64_t n, bool ue8m0) {
  int32_t most = 0;  // the bits of magnitudes order as they do, NaN on top
  for (int64_t i = 0; i < n; ++i) {
    const float value = to_float(x[i]);
    int32_t bits;
    std::memcpy(&bits, &value, 4);
    bits &= 0x7fffffff;
    most = bits > most ? bits : most;
  }
  float amax;
  std::memcpy(&amax, &most, 4);
  const float scale = (amax < 1e-4f ? 1e-4f : amax) / 448.0f;
  uint32_t u;
  std::memcpy(&u, &scale, 4);
  if (!ue8m0 || u >= 0x7f800000) return scale;
  u = (u + 0x7fffff) & 0xff800000;
  float power;
  std::memcpy(&power, &u, 4);
  return power;
}

}  // namespace ds
