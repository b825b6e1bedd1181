// Matmuls over packed weights, plain and per head: they run at the speed of memory.
#include "dot.h"
#include "ds_cpu.h"
#include "parallel.h"

namespace ds {
namespace {

template <class T>
void linear_heads(const void* x, int64_t ldx, int64_t sxh, const void* w, void* y, int64_t ldy,
                  int64_t syh, int64_t heads, int64_t m, int64_t n, int64_t k) {
  int64_t groups = (n + ROWS - 1) / ROWS, group = group_size<T>(k);
  int64_t bytes = heads * n * k * int64_t(sizeof(T)) * (m < 16 ? 1 : m / 8);
  parallel(heads * groups, 1, bytes, [&](int64_t begin, int64_t end) {
    while (begin < end) {  // a piece may cross heads
      int64_t h = begin / groups, g0 = begin - h * groups;
      int64_t g1 = g0 + (end - begin) < groups ? g0 + (end - begin) : groups;
      const T* xh = (const T*)x + h * sxh;
      T* yh = (T*)y + h * syh;
      dots(
          (const T*)w + h * groups * group, g0 * ROWS, g1 * ROWS < n ? g1 * ROWS : n,
          [&](int64_t t) { return xh + t * ldx; }, m, k,
          [&](int64_t t, int64_t r, const float* v, int count) {
            T* to = yh + t * ldy + r;
            int i = 0;
            for (; i + 4 <= count; i += 4) put4(to + i, v + i);
            for (; i < count; ++i) put(to + i, v[i]);
          });
      begin += g1 - g0;
    }
  });
}

}  // namespace
}  // namespace ds

using namespace ds;

void ds_cpu_linear_heads(int32_t dtype, const void* x, int64_t ldx, int64_t sxh, const void* w,
                         void* y, int64_t ldy, int64_t syh, int64_t heads, int64_t m, int64_t n,
                         int64_t k) {
  (dtype == DS_F32 ? linear_heads<float> : linear_heads<bf16>)(x, ldx, sxh, w, y, ldy, syh, heads,
                                                               m, n, k);
}
