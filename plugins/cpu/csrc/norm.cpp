// Root-mean-square norm, alone and fused with the residual add.
#include "ds_cpu.h"
#include "parallel.h"
#include "simd.h"

namespace ds {
namespace {

// Calls run(x's type, weight's type) with a value of each.
template <class Run>
void dispatch(int32_t dtype, int32_t weight_dtype, Run run) {
  if (dtype == DS_F32)
    weight_dtype == DS_F32 ? run(float(), float()) : run(float(), bf16());
  else
    weight_dtype == DS_F32 ? run(bf16(), float()) : run(bf16(), bf16());
}

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

template <class T, class U>
void norm_row(const T* x, const U* w, double eps, T* out, int64_t n) {
  F scale = F::all(float(1.0 / std::sqrt(double(mean_square(x, n)) + eps)));
  int64_t i = 0;
  for (; i + F::W <= n; i += F::W) (F::load(x + i) * scale * F::load(w + i)).store(out + i);
  if (i < n) {
    int m = int(n - i);
    store_tail(load_tail(x + i, m) * scale * load_tail(w + i, m), out + i, m);
  }
}

template <class T>
void add_row(const T* x, const T* y, T* out, int64_t n) {
  int64_t i = 0;
  for (; i + F::W <= n; i += F::W) (F::load(x + i) + F::load(y + i)).store(out + i);
  for (; i < n; ++i) put(out + i, to_float(x[i]) + to_float(y[i]));
}

template <class T, class U>
void rms_norm(const void* x, int64_t ldx, const void* w, double eps, void* out, int64_t rows,
              int64_t n) {
  parallel(rows, 1, rows * n * int64_t(sizeof(T)), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      norm_row((const T*)x + r * ldx, (const U*)w, eps, (T*)out + r * n, n);
  });
}

template <class T, class U>
void add_rms_norm(const void* x, int64_t ldx, const void* y, int64_t ldy, const void* w, double eps,
                  void* out, void* summed, int64_t rows, int64_t n) {
  parallel(rows, 1, 2 * rows * n * int64_t(sizeof(T)), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      T* sum = (T*)summed + r * n;
      add_row((const T*)x + r * ldx, (const T*)y + r * ldy, sum, n);
      norm_row(sum, (const U*)w, eps, (T*)out + r * n, n);
    }
  });
}

}  // namespace
}  // namespace ds

using namespace ds;

void ds_cpu_rms_norm(int32_t dtype, int32_t weight_dtype, const void* x, int64_t ldx,
                     const void* weight, double eps, void* out, int64_t rows, int64_t n) {
  dispatch(dtype, weight_dtype, [&](auto t, auto u) {
    rms_norm<decltype(t), decltype(u)>(x, ldx, weight, eps, out, rows, n);
  });
}

void ds_cpu_add_rms_norm(int32_t dtype, int32_t weight_dtype, const void* x, int64_t ldx,
                         const void* residual, int64_t ldr, const void* weight, double eps,
                         void* out, void* summed, int64_t rows, int64_t n) {
  dispatch(dtype, weight_dtype, [&](auto t, auto u) {
    add_rms_norm<decltype(t), decltype(u)>(x, ldx, residual, ldr, weight, eps, out, summed, rows,
                                           n);
  });
}
