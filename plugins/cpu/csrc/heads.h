// Heads as float32: rotation of their last dims, norm, rounding.
#pragma once

#include "fp8_scale.h"
#include "norm.h"
#include "widen.h"

namespace ds {

constexpr int64_t MOST_DIMS = 2048;  // of a head

// The last r dims of y [d] by the angles of one row of a table [.., r], or by minus these.
inline void turn(float* y, int64_t d, const float* table, int64_t r, bool back) {
  for (int64_t i = 0; i < r / 2; ++i) {
    float *a = y + d - r + 2 * i, sin = table[r / 2 + i];
    const float cos = table[i], x = a[0], z = a[1];
    sin = back ? -sin : sin;
    a[0] = x * cos - z * sin;
    a[1] = z * cos + x * sin;
  }
}

// As e4m3 times a power of two for each group of so many.
inline void round_groups(float* y, int64_t n, int64_t group) {
  for (int64_t i = 0; i < n; i += group) {
    const int64_t m = n - i < group ? n - i : group;
    const float scale = group_scale(y + i, m, true);
    e4m3 codes[MOST_DIMS];
    for (int64_t j = 0; j < m; ++j) y[i + j] /= scale;
    store_e4m3(y + i, codes, m);
    widen_row(codes, y + i, m);
    for (int64_t j = 0; j < m; ++j) y[i + j] *= scale;
  }
}

// RMS norm with a weight [d] or null, rotation by one row of a table; if group > 0 the dims that are
// not rotated are rounded.
inline void norm_turn(float* y, int64_t d, const float* weight, double eps, const float* table,
                      int64_t r, int64_t group) {
  const float scale = float(1.0 / std::sqrt(double(mean_square(y, d)) + eps));
  for (int64_t c = 0; c < d; ++c) y[c] *= weight ? scale * weight[c] : scale;
  turn(y, d, table, r, false);
  if (group > 0) round_groups(y, d - r, group);
}

// y [n] as T.
template <class T>
inline void put_all(const float* y, T* to, int64_t n) {
  int64_t c = 0;
  for (; c + F::W <= n; c += F::W) F::load(y + c).store(to + c);
  for (; c < n; ++c) put(to + c, y[c]);
}

}  // namespace ds
