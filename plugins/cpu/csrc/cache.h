// Writing rows of the paged latent cache.
#pragma once

#include "e4m3.h"

namespace ds {

template <class T>
inline void store_cached(const T* x, T* out, int64_t n) {
  std::memcpy(out, x, size_t(n) * sizeof(T));
}
template <class T>
inline void store_cached(const T* x, e4m3* out, int64_t n) {
  store_e4m3(x, out, n);
}

}  // namespace ds
