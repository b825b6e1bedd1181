// What packing has in common: which rows of a matrix go to which columns of which panels.
#pragma once

#include "formats.h"

namespace ds {

// What the calls have in common.
struct Source {
  const void* data;
  int64_t sn, sk;
  const float *scales, *zeros;
  int64_t ld_scales, n0, rows, n, k, group;
  int32_t half;
};

// Calls body(panel, first column, end, end with the padding, row of the source) for all panels that
// get rows, on the threads that will read them.
template <class Body>
inline void each_panel(const Source& s, int64_t bytes, Body body) {
  const int64_t width = s.half < 0 ? NB : NB / 2, left = s.half == 1 ? NB / 2 : 0;
  const int64_t panels = (s.n + width - 1) / width;
  parallel(panels, 1, bytes, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      const int64_t n0 = p * width, n1 = n0 + width, last = s.n0 + s.rows;
      const int64_t from = n0 > s.n0 ? n0 : s.n0, to = n1 < last ? n1 : last;
      if (from >= to) continue;
      const int64_t padded = last == s.n && p == panels - 1 ? n1 : to;
      body(p, from - n0 + left, to - n0 + left, padded - n0 + left, from - s.n0);
    }
  });
}

// Of pack_bf12.cpp: the float32 values of panels in 12 bits.
void unpack_bf12(const void* panels, float* out, int64_t n, int64_t k);

}  // namespace ds
