// Rows of the paged latent cache: a token's latent and its rotated key.
#pragma once

#include <type_traits>

#include "fp8_scale.h"
#include "widen.h"

namespace ds {

// A byte of a token of latent_fp8_groups: the latent in e4m3, a float32 scale per GROUP of it (amax /
// 448), the key in bfloat16. Nothing in it is aligned.
struct grouped {
  uint8_t bits;
};
constexpr int64_t GROUP = 128;

// Elements of C from token to token.
template <class C>
inline int64_t token_size(int64_t lora, int64_t rope) {
  if constexpr (std::is_same_v<C, grouped>)
    return lora + (lora + GROUP - 1) / GROUP * int64_t(sizeof(float)) + 2 * rope;
  else
    return lora + rope;
}

template <class T>
inline void store_cached(const T* x, T* out, int64_t n) {
  std::memcpy(out, x, size_t(n) * sizeof(T));
}
template <class T>
inline void store_cached(const T* x, e4m3* out, int64_t n) {
  store_e4m3(x, out, n);
}

// latent [lora] and key [rope] to a token of the cache.
template <class T, class C>
inline void store_token(const T* latent, const T* key, C* to, int64_t lora, int64_t rope) {
  if constexpr (std::is_same_v<C, grouped>) {
    grouped* scales = to + lora;
    for (int64_t i = 0; i < lora; i += GROUP, scales += sizeof(float)) {
      const int64_t n = lora - i < GROUP ? lora - i : GROUP;
      const float scale = group_scale(latent + i, n, false);
      float x[GROUP];
      for (int64_t j = 0; j < n; ++j) x[j] = to_float(latent[i + j]) / scale;
      store_e4m3(x, (e4m3*)to + i, n);
      std::memcpy(scales, &scale, sizeof(scale));
    }
    for (int64_t i = 0; i < rope; ++i) {
      bf16 x;
      put(&x, to_float(key[i]));
      std::memcpy(scales + 2 * i, &x, sizeof(x));
    }
  } else {
    store_cached(latent, to, lora);
    store_cached(key, to + lora, rope);
  }
}

// A token [lora + rope] as what a kernel computes with.
template <class C>
inline void widen_token(const grouped* from, C* to, int64_t lora, int64_t rope) {
  const grouped* scales = from + lora;
  for (int64_t i = 0; i < lora; i += GROUP, scales += sizeof(float)) {
    const int64_t n = lora - i < GROUP ? lora - i : GROUP;
    float scale, x[GROUP];
    std::memcpy(&scale, scales, sizeof(scale));
    widen_row((const e4m3*)from + i, x, n);
    int64_t j = 0;
    for (; j + F::W <= n; j += F::W) (F::load(x + j) * F::all(scale)).store(to + i + j);
    for (; j < n; ++j) put(to + i + j, x[j] * scale);
  }
  bf16 x[GROUP];
  for (int64_t i = 0; i < rope; i += GROUP) {
    const int64_t n = rope - i < GROUP ? rope - i : GROUP;
    std::memcpy(x, scales + 2 * i, size_t(n) * sizeof(bf16));
    widen_row(x, to + lora + i, n);
  }
}

}  // namespace ds
