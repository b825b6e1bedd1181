// What attention does between its projections: latent norm, rotation, cache write; in one call, and
// each alone.
#include "cache.h"
#include "ds_cpu.h"
#include "norm.h"
#include "parallel.h"
#include "rope.h"

namespace ds {
namespace {

template <class T>
void rope(const void* x, int64_t stride_row, int64_t stride_head, const int64_t* positions,
          const float* cos_sin, void* out, int64_t rows, int64_t heads, int64_t d) {
  parallel(rows, 1, 2 * rows * heads * d * int64_t(sizeof(T)), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      rotate_heads((const T*)x + r * stride_row, stride_head, cos_sin + positions[r] * d,
                   (T*)out + r * heads * d, heads, d);
  });
}

template <class T, class C>
void cache_write(void* cache, int64_t width, const void* latent, int64_t ld_latent, int64_t lora,
                 const void* k_rope, int64_t ld_rope, const int64_t* slots, int64_t rows) {
  const int64_t rope = width - lora, size = token_size<C>(lora, rope);
  parallel(rows, 1, 2 * rows * width * int64_t(sizeof(T)), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      if (slots[r] >= 0)
        store_token((const T*)latent + r * ld_latent, (const T*)k_rope + r * ld_rope,
                    (C*)cache + slots[r] * size, lora, rope);
  });
}

struct Prologue {
  const void* q;
  int64_t stride_row, stride_head, heads;
  const void* kv;
  int64_t ldkv, lora, rope;
  const void* weight;
  double eps;
  const int64_t* positions;
  const float* cos_sin;
  void* cache;
  const int64_t* slots;
  void *q_rope, *latent, *k_rope;
  int64_t rows;

  template <class T, class U, class C>
  void run() const {
    const int64_t width = lora + rope, size = token_size<C>(lora, rope);
    const int64_t bytes = rows * (heads * rope + width) * 2 * int64_t(sizeof(T));
    parallel(rows, 1, bytes, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const T* in = (const T*)kv + r * ldkv;
        const float* angles = cos_sin + positions[r] * rope;
        T* low = (T*)latent + r * lora;
        T* key = (T*)k_rope + r * rope;
        norm_row(in, (const U*)weight, eps, low, lora);
        rotate_heads(in + lora, 0, angles, key, 1, rope);
        rotate_heads((const T*)q + r * stride_row, stride_head, angles,
                     (T*)q_rope + r * heads * rope, heads, rope);
        if (slots[r] >= 0) store_token(low, key, (C*)cache + slots[r] * size, lora, rope);
      }
    });
  }
};

}  // namespace
}  // namespace ds

using namespace ds;

void ds_cpu_rope(int32_t dtype, const void* x, int64_t stride_row, int64_t stride_head,
                 const int64_t* positions, const float* cos_sin, void* out, int64_t rows,
                 int64_t heads, int64_t d) {
  (dtype == DS_F32 ? rope<float> : rope<bf16>)(x, stride_row, stride_head, positions, cos_sin, out,
                                               rows, heads, d);
}

void ds_cpu_cache_write(int32_t dtype, int32_t cache_dtype, void* cache, int64_t width,
                        const void* latent, int64_t ld_latent, int64_t lora, const void* k_rope,
                        int64_t ld_rope, const int64_t* slots, int64_t rows) {
  auto write = dtype == DS_F32 ? cache_write<float, float> : cache_write<bf16, bf16>;
  if (cache_dtype == DS_E4M3)
    write = dtype == DS_F32 ? cache_write<float, e4m3> : cache_write<bf16, e4m3>;
  if (cache_dtype == DS_GROUPED)
    write = dtype == DS_F32 ? cache_write<float, grouped> : cache_write<bf16, grouped>;
  write(cache, width, latent, ld_latent, lora, k_rope, ld_rope, slots, rows);
}

void ds_cpu_mla_prologue(int32_t dtype, int32_t weight_dtype, int32_t cache_dtype, const void* q,
                         int64_t stride_row, int64_t stride_head, int64_t heads, const void* kv,
                         int64_t ldkv, int64_t lora, int64_t rope_dim, const void* weight,
                         double eps, const int64_t* positions, const float* cos_sin, void* cache,
                         const int64_t* slots, void* q_rope, void* latent, void* k_rope,
                         int64_t rows) {
  const Prologue all{q,   stride_row, stride_head, heads,     kv,      ldkv,  lora,
                     rope_dim, weight, eps,        positions, cos_sin, cache, slots,
                     q_rope, latent,  k_rope,      rows};
  dispatch(dtype, weight_dtype, [&](auto t, auto u) {
    using T = decltype(t);
    using U = decltype(u);
    cache_dtype == DS_E4M3      ? all.template run<T, U, e4m3>()
    : cache_dtype == DS_GROUPED ? all.template run<T, U, grouped>()
                                : all.template run<T, U, T>();
  });
}
