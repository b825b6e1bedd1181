// Copies and sums of strided rows: what torch does between kernels, for steps that are recorded.
#include "ds_cpu.h"
#include "parallel.h"
#include "simd.h"

#include <type_traits>

namespace ds {
namespace {

constexpr int64_t CUT = 8192;  // elements of a row that one thread copies in a go

template <class S, class T>
void copy_row(const S* from, T* to, int64_t n) {
  if constexpr (std::is_same_v<S, T>) {
    std::memcpy((void*)to, from, size_t(n) * sizeof(T));
  } else {
    int64_t i = 0;
    for (; i + F::W <= n; i += F::W) F::load(from + i).store(to + i);
    if (i < n) store_tail(load_tail(from + i, int(n - i)), to + i, int(n - i));
  }
}

template <class S, class T>
void copy(const void* from, int64_t f0, int64_t f1, void* to, int64_t t0, int64_t t1, int64_t n0,
          int64_t n1, int64_t n) {
  const int64_t cuts = (n + CUT - 1) / CUT, cost = n0 * n1 * n * int64_t(sizeof(S) + sizeof(T));
  parallel(n0 * n1 * cuts, 1, cost, [&](int64_t begin, int64_t end) {
    for (int64_t u = begin; u < end; ++u) {
      const int64_t row = u / cuts, c = u % cuts * CUT, i = row / n1, j = row % n1;
      copy_row((const S*)from + i * f0 + j * f1 + c, (T*)to + i * t0 + j * t1 + c,
               n - c < CUT ? n - c : CUT);
    }
  });
}

template <class T>
void add(T* y, int64_t ldy, const T* x, int64_t ldx, int64_t rows, int64_t n) {
  parallel(rows, 1, 3 * rows * n * int64_t(sizeof(T)), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      T* to = y + r * ldy;
      const T* more = x + r * ldx;
      int64_t i = 0;
      for (; i + F::W <= n; i += F::W) (F::load(to + i) + F::load(more + i)).store(to + i);
      if (i < n) {
        const int m = int(n - i);
        store_tail(load_tail(to + i, m) + load_tail(more + i, m), to + i, m);
      }
    }
  });
}

}  // namespace
}  // namespace ds

using namespace ds;

void ds_cpu_copy(int32_t from_dtype, int32_t to_dtype, const void* from, int64_t f0, int64_t f1,
                 void* to, int64_t t0, int64_t t1, int64_t n0, int64_t n1, int64_t n) {
  const bool wide = from_dtype == DS_F32;
  auto run = wide ? copy<float, float> : copy<bf16, bf16>;
  if (from_dtype != to_dtype) run = wide ? copy<float, bf16> : copy<bf16, float>;
  run(from, f0, f1, to, t0, t1, n0, n1, n);
}

void ds_cpu_add(int32_t dtype, void* y, int64_t ldy, const void* x, int64_t ldx, int64_t rows,
                int64_t n) {
  if (dtype == DS_F32)
    add((float*)y, ldy, (const float*)x, ldx, rows, n);
  else
    add((bf16*)y, ldy, (const bf16*)x, ldx, rows, n);
}
