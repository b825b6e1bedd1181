// The small operations between matmuls: activation, rotation, cache write; and housekeeping.
#include "ds_cpu.h"
#include "parallel.h"
#include "silu.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace ds {
namespace {

template <class T>
void silu_mul(const void* x, int64_t ldx, void* out, int64_t rows, int64_t n) {
  parallel(rows, 1, 3 * rows * n * int64_t(sizeof(T)), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const T* gate = (const T*)x + r * ldx;
      silu_mul_row(gate, gate + n, (T*)out + r * n, n);
    }
  });
}

template <class T>
void rope(const void* x, int64_t stride_row, int64_t stride_head, const int64_t* positions,
          const float* cos_sin, void* out, int64_t rows, int64_t heads, int64_t d) {
  parallel(rows, 1, 2 * rows * heads * d * int64_t(sizeof(T)), [&](int64_t begin, int64_t end) {
    int64_t half = d / 2;
    for (int64_t r = begin; r < end; ++r) {
      const float* c = cos_sin + positions[r] * d;
      const float* s = c + half;
      for (int64_t h = 0; h < heads; ++h) {
        const T* in = (const T*)x + r * stride_row + h * stride_head;
        T* y = (T*)out + (r * heads + h) * d;
        for (int64_t i = 0; i < half; ++i) {
          float a = to_float(in[2 * i]), b = to_float(in[2 * i + 1]);
          put(y + 2 * i, a * c[i] - b * s[i]);
          put(y + 2 * i + 1, b * c[i] + a * s[i]);
        }
      }
    }
  });
}

template <class T>
void cache_write(void* cache, int64_t width, const void* latent, int64_t ld_latent, int64_t lora,
                 const void* k_rope, int64_t ld_rope, const int64_t* slots, int64_t rows) {
  for (int64_t r = 0; r < rows; ++r) {
    if (slots[r] < 0) continue;
    T* to = (T*)cache + slots[r] * width;
    std::memcpy(to, (const T*)latent + r * ld_latent, size_t(lora) * sizeof(T));
    std::memcpy(to + lora, (const T*)k_rope + r * ld_rope, size_t(width - lora) * sizeof(T));
  }
}

}  // namespace
}  // namespace ds

using namespace ds;

int32_t ds_cpu_threads() { return max_threads(); }

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

void ds_cpu_silu_mul(int32_t dtype, const void* x, int64_t ldx, void* out, int64_t rows,
                     int64_t n) {
  (dtype == DS_F32 ? silu_mul<float> : silu_mul<bf16>)(x, ldx, out, rows, n);
}

void ds_cpu_rope(int32_t dtype, const void* x, int64_t stride_row, int64_t stride_head,
                 const int64_t* positions, const float* cos_sin, void* out, int64_t rows,
                 int64_t heads, int64_t d) {
  (dtype == DS_F32 ? rope<float> : rope<bf16>)(x, stride_row, stride_head, positions, cos_sin, out,
                                               rows, heads, d);
}

void ds_cpu_cache_write(int32_t dtype, void* cache, int64_t width, const void* latent,
                        int64_t ld_latent, int64_t lora, const void* k_rope, int64_t ld_rope,
                        const int64_t* slots, int64_t rows) {
  (dtype == DS_F32 ? cache_write<float> : cache_write<bf16>)(cache, width, latent, ld_latent, lora,
                                                             k_rope, ld_rope, slots, rows);
}
