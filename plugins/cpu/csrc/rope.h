// Rotation of interleaved pairs: (a, b) -> (a cos - b sin, b cos + a sin).
#pragma once

#include "lanes.h"

namespace ds {

// The angles of one position, each twice: (c0, c0, c1, c1, ...) and (-s0, s0, -s1, s1, ...), for
// the pairs that `fill` was given.
struct Angles {
  static constexpr int64_t MOST = 128;  // elements at a time
  alignas(64) float cos[MOST];
  alignas(64) float sin[MOST];

  void fill(const float* c, const float* s, int64_t n) {
    for (int64_t i = 0; i < n / 2; ++i) {
      cos[2 * i] = cos[2 * i + 1] = c[i];
      sin[2 * i] = -s[i];
      sin[2 * i + 1] = s[i];
    }
  }
};

template <class T>
inline void rotate(const T* x, const Angles& at, T* out, int64_t n) {
  auto turn = [](F v, F c, F s) { return fma(v, c, swap_pairs(v) * s); };
  int64_t i = 0;
  for (; i + F::W <= n; i += F::W)
    turn(F::load(x + i), F::load(at.cos + i), F::load(at.sin + i)).store(out + i);
  if (i < n) {
    int m = int(n - i);
    store_tail(turn(load_tail(x + i, m), load_tail(at.cos + i, m), load_tail(at.sin + i, m)),
               out + i, m);
  }
}

// Rotates `heads` vectors of d elements by the angles in one row [d] of the table.
template <class T>
inline void rotate_heads(const T* x, int64_t stride, const float* table, T* out, int64_t heads,
                         int64_t d) {
  Angles at;
  for (int64_t i = 0; i < d; i += Angles::MOST) {
    const int64_t n = d - i < Angles::MOST ? d - i : Angles::MOST;
    at.fill(table + i / 2, table + d / 2 + i / 2, n);
    for (int64_t h = 0; h < heads; ++h) rotate(x + h * stride + i, at, out + h * d + i, n);
  }
}

}  // namespace ds
