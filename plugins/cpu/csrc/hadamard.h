// Products with Sylvester's Hadamard matrix of size 2^n, in place.
#pragma once

#include "simd.h"

namespace ds {

template <int WIDTH>
inline void butterflies(float* x, int64_t d) {  // of elements WIDTH apart
  for (int64_t i = 0; i < d; i += 2 * WIDTH)
    for (int j = 0; j < WIDTH; ++j) {
      const float a = x[i + j], b = x[i + j + WIDTH];
      x[i + j] = a + b;
      x[i + j + WIDTH] = a - b;
    }
}

// x [d] becomes `scale` times its product; d a power of two.
inline void hadamard(float* x, int64_t d, float scale) {
  if (d > 1) butterflies<1>(x, d);
  if (d > 2) butterflies<2>(x, d);
  if (d > 4) butterflies<4>(x, d);
  if (d > 8) butterflies<8>(x, d);
  for (int64_t width = 16; width < d; width *= 2)
    for (int64_t i = 0; i < d; i += 2 * width)
      for (int64_t j = i; j < i + width; j += F::W) {
        const F a = F::load(x + j), b = F::load(x + j + width);
        (a + b).store(x + j);
        fma(b, F::all(-1.0f), a).store(x + j + width);
      }
  for (int64_t i = 0; i < d; ++i) x[i] *= scale;
}

}  // namespace ds
