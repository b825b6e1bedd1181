// Small operations over rows: activation, embedding, FP8 quantisation; and housekeeping.
#include "ds_cpu.h"
#include "fp8_scale.h"
#include "parallel.h"
#include "silu.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace ds {
namespace {

template <class T>
void silu_mul(const void* x, int64_t ldx, float limit, void* out, int64_t rows, int64_t n) {
  parallel(rows, 1, 3 * rows * n * int64_t(sizeof(T)), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const T* gate = (const T*)x + r * ldx;
      silu_mul_row(gate, gate + n, (T*)out + r * n, n, limit);
    }
  });
}

template <class T>
void quantize_group(const void* x, int64_t ldx, int64_t group, bool ue8m0, uint8_t* q, float* scale,
                    int64_t rows, int64_t n) {
  parallel(rows, 1, rows * n * int64_t(2 * sizeof(T) + 1), [&](int64_t begin, int64_t end) {
    constexpr int64_t BLOCK = 64;
    float wide[BLOCK];
    for (int64_t r = begin; r < end; ++r)
      for (int64_t g = 0; g < n; g += group) {
        const T* in = (const T*)x + r * ldx + g;
        e4m3* out = (e4m3*)q + r * n + g;
        const float s = group_scale(in, group, ue8m0);
        scale[(r * n + g) / group] = s;
        for (int64_t i = 0; i < group; i += BLOCK) {
          const int64_t m = group - i < BLOCK ? group - i : BLOCK;
          for (int64_t j = 0; j < m; ++j) wide[j] = to_float(in[i + j]) / s;
          store_e4m3(wide, out + i, m);
        }
      }
  });
}

}  // namespace
}  // namespace ds

using namespace ds;

void ds_cpu_large_pages(void* data, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const uintptr_t page = 2u << 20;
  uintptr_t begin = ((uintptr_t)data + page - 1) & ~(page - 1);
  uintptr_t end = ((uintptr_t)data + uintptr_t(bytes)) & ~(page - 1);
  if (begin < end) madvise((void*)begin, end - begin, MADV_HUGEPAGE);  // a wish: failure is fine
#else
  (void)data;
  (void)bytes;
#endif
}

void ds_cpu_silu_mul(int32_t dtype, const void* x, int64_t ldx, double limit, void* out,
                     int64_t rows, int64_t n) {
  (dtype == DS_F32 ? silu_mul<float> : silu_mul<bf16>)(x, ldx, float(limit), out, rows, n);
}

void ds_cpu_embed(const int64_t* ids, const void* table, int64_t stride_bytes, int64_t start,
                  int64_t held, void* out, int64_t row_bytes, int64_t rows) {
  parallel(rows, 1, 2 * rows * row_bytes, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      char* to = (char*)out + r * row_bytes;
      if (ids[r] >= start && ids[r] - start < held)
        std::memcpy(to, (const char*)table + (ids[r] - start) * stride_bytes, size_t(row_bytes));
      else
        std::memset(to, 0, size_t(row_bytes));
    }
  });
}

void ds_cpu_quantize_group(int32_t dtype, const void* x, int64_t ldx, int64_t group, int32_t ue8m0,
                           void* q, float* scale, int64_t rows, int64_t n) {
  (dtype == DS_F32 ? quantize_group<float> : quantize_group<bf16>)(
      x, ldx, group, ue8m0 != 0, (uint8_t*)q, scale, rows, n);
}
