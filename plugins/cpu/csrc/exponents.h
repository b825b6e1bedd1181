// What a running softmax does with vectors beside arithmetic.
#pragma once

#include "words.h"

namespace ds {

// 2^r for 0 <= r <= 1, to 8e-5 (far below what bfloat16 keeps) or to 1.5e-7, and 2^0 = 1.
template <class C>
inline F exp2_fraction(F r) {
  if (Word<C>::N == 2) {
    F p = F::all(0.07802452f);
    for (float c : {0.22606717f, 0.6958335f, 0.9999252f}) p = fma(p, r, F::all(c));
    return p;
  }
  F p = F::all(0.0018671303f);
  for (float c : {0.00901703f, 0.055799913f, 0.24016444f, 0.6931513f, 1.0f})
    p = fma(p, r, F::all(c));
  return p;
}

#if defined(__AVX512F__) && defined(__AVX512BW__)
inline F larger(F x, F high) { return {_mm512_max_ps(x.v, high.v)}; }  // passes over a NaN in x
inline bool any_above(F x, F y) { return _mm512_cmp_ps_mask(x.v, y.v, _CMP_GT_OQ) != 0; }
inline F hide(F x, const int32_t* seen, int32_t key) {  // -inf where seen[lane] <= key
  const __mmask16 m = _mm512_cmple_epi32_mask(_mm512_loadu_si512(seen), _mm512_set1_epi32(key));
  return {_mm512_mask_mov_ps(x.v, m, _mm512_set1_ps(-INFINITY))};
}
// 2^x for x < 128; 0 where a float is too small for it; NaN gives NaN.
template <class C>
inline F exp2(F x) {
  const F r{_mm512_reduce_ps(x.v, 0x09)};  // x - floor(x)
  return {_mm512_scalef_ps(exp2_fraction<C>(r).v, x.v)};
}
#else
inline F larger(F x, F high) {
  float a[F::W], b[F::W];
  x.store(a), high.store(b);
  for (int i = 0; i < F::W; ++i) b[i] = a[i] > b[i] ? a[i] : b[i];
  return F::load(b);
}
inline bool any_above(F x, F y) {
  float a[F::W], b[F::W];
  x.store(a), y.store(b);
  bool any = false;
  for (int i = 0; i < F::W; ++i) any |= a[i] > b[i];
  return any;
}
inline F hide(F x, const int32_t* seen, int32_t key) {
  float a[F::W];
  x.store(a);
  for (int i = 0; i < F::W; ++i) a[i] = seen[i] <= key ? -INFINITY : a[i];
  return F::load(a);
}
template <class C>
inline F exp2(F x) {
  const F low = clamp(x, -126.0f, 128.0f), n = round_even(low + F::all(-0.5f));
  return zero_below(times_pow2(exp2_fraction<C>(low + n * F::all(-1.0f)), n), x, -126.0f);
}
#endif

// to[0, n) = from[0, n) * by.
template <class T>
inline void store_scaled(const float* from, float by, T* to, int64_t n) {
  const F scale = F::all(by);
  int64_t i = 0;
  for (; i + F::W <= n; i += F::W) (F::load(from + i) * scale).store(to + i);
  if (i < n) store_tail(load_tail(from + i, int(n - i)) * scale, to + i, int(n - i));
}

}  // namespace ds
