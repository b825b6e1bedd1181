// Root-mean-square norm, alone and fused with the residual add.
#include "norm.h"

#include "ds_cpu.h"
#include "parallel.h"

namespace ds {
namespace {

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
      float mean = add_mean_square((const T*)x + r * ldx, (const T*)y + r * ldy, sum, n);
      scale_row(sum, mean, (const U*)w, eps, (T*)out + r * n, n);
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
