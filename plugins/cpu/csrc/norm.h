// Root-mean-square norm of one row, alone and behind an add.
#pragma once

#include "simd.h"

namespace ds {

template <class T>
float mean_square(const T* x, int64_t n) {
  F a = F::zero(), b = F::zero();
  int64_t i = 0;
  for (; i + 2 * F::W <= n; i += 2 * F::W) {
    F u = F::load(x + i), v = F::load(x + i + F::W);
    a = fma(u, u, a);
    b = fma(v, v, b);
  }
  for (; i + F::W <= n; i += F::W) {
    F u = F::load(x + i);
    a = fma(u, u, a);
  }
  if (i < n) {
    F u = load_tail(x + i, int(n - i));
    b = fma(u, u, b);
  }
  return (a + b).sum() / float(n);
}

// out = x + y, rounded to T; answers as mean_square(out) does.
template <class T>
float add_mean_square(const T* x, const T* y, T* out, int64_t n) {
  F a = F::zero(), b = F::zero();
  int64_t i = 0;
  for (; i + 2 * F::W <= n; i += 2 * F::W) {
    (F::load(x + i) + F::load(y + i)).store(out + i);
    (F::load(x + i + F::W) + F::load(y + i + F::W)).store(out + i + F::W);
    F u = F::load(out + i), v = F::load(out + i + F::W);
    a = fma(u, u, a);
    b = fma(v, v, b);
  }
  for (; i + F::W <= n; i += F::W) {
    (F::load(x + i) + F::load(y + i)).store(out + i);
    F u = F::load(out + i);
    a = fma(u, u, a);
  }
  if (i < n) {
    const int64_t rest = i;
    for (; i < n; ++i) put(out + i, to_float(x[i]) + to_float(y[i]));
    F u = load_tail(out + rest, int(n - rest));
    b = fma(u, u, b);
  }
  return (a + b).sum() / float(n);
}

// out = x * weight / sqrt(mean + eps).
template <class T, class U>
void scale_row(const T* x, float mean, const U* weight, double eps, T* out, int64_t n) {
  F scale = F::all(float(1.0 / std::sqrt(double(mean) + eps)));
  int64_t i = 0;
  for (; i + F::W <= n; i += F::W) (F::load(x + i) * scale * F::load(weight + i)).store(out + i);
  if (i < n) {
    int m = int(n - i);
    store_tail(load_tail(x + i, m) * scale * load_tail(weight + i, m), out + i, m);
  }
}

template <class T, class U>
void norm_row(const T* x, const U* weight, double eps, T* out, int64_t n) {
  scale_row(x, mean_square(x, n), weight, eps, out, n);
}

// Calls run(value of x's type, value of the weight's type).
template <class Run>
void dispatch(int32_t dtype, int32_t weight_dtype, Run run) {
  if (dtype == 0)
    weight_dtype == 0 ? run(float(), float()) : run(float(), bf16());
  else
    weight_dtype == 0 ? run(bf16(), float()) : run(bf16(), bf16());
}

}  // namespace ds
