// silu(gate) * up over one row.
#pragma once

#include "simd.h"

namespace ds {

// -inf gives NaN, as -inf / infinity does.
inline F silu(F g) { return g / (F::all(1.0f) + exp(g * F::all(-1.0f))); }

// gate is cut at `limit`, up at both signs of it; infinity leaves them as they are. NaN stays.
template <class T, class U>
inline void silu_mul_row(const U* gate, const U* up, T* out, int64_t n, float limit) {
  auto one = [&](F g, F u) { return silu(clamp(g, -INFINITY, limit)) * clamp(u, -limit, limit); };
  int64_t i = 0;
  for (; i + F::W <= n; i += F::W) one(F::load(gate + i), F::load(up + i)).store(out + i);
  if (i < n) {
    int m = int(n - i);
    store_tail(one(load_tail(gate + i, m), load_tail(up + i, m)), out + i, m);
  }
}

}  // namespace ds
