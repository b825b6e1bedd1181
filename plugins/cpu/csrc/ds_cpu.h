// The C interface of the CPU plugin's native kernels. Loaded with ctypes; no Python, no torch.
//
// Pointers are to row-major data, `ld*` are distances between rows in elements, the last
// dimension is contiguous. dtype: 0 = float32, 1 = bfloat16 (16 raw bits). Nothing is allocated:
// the caller brings every buffer. Work is divided with OpenMP where it was found at build time;
// every output element is summed by one thread in a fixed order, so results do not depend on
// the number of threads.
#pragma once

#include <cstdint>

#define DS_CPU_ABI 1

#if defined(_WIN32)
#define DS_EXPORT extern "C" __declspec(dllexport)
#else
#define DS_EXPORT extern "C" __attribute__((visibility("default")))
#endif

enum DsType : int32_t { DS_F32 = 0, DS_BF16 = 1 };

DS_EXPORT int32_t ds_cpu_abi_version();
// 0: this library's instructions are not all available here; else higher is better.
DS_EXPORT int32_t ds_cpu_score();
DS_EXPORT int32_t ds_cpu_threads();
// Ask the operating system for large pages under a buffer that is about to be filled.
DS_EXPORT void ds_cpu_large_pages(void* data, int64_t bytes);

// out = x / sqrt(mean(x^2) + eps) * weight; out [rows, n] contiguous.
DS_EXPORT void ds_cpu_rms_norm(int32_t dtype, int32_t weight_dtype, const void* x, int64_t ldx,
                               const void* weight, double eps, void* out, int64_t rows, int64_t n);
// summed = x + residual, rounded to dtype; out = rms_norm(summed). Both contiguous.
DS_EXPORT void ds_cpu_add_rms_norm(int32_t dtype, int32_t weight_dtype, const void* x,
                                   int64_t ldx, const void* residual, int64_t ldr,
                                   const void* weight, double eps, void* out, void* summed,
                                   int64_t rows, int64_t n);
// out [rows, n] = silu(x[:, :n]) * x[:, n:2n].
DS_EXPORT void ds_cpu_silu_mul(int32_t dtype, const void* x, int64_t ldx, void* out, int64_t rows,
                               int64_t n);
// Rotates interleaved pairs. x [rows, heads, d] with strides in elements; out contiguous.
DS_EXPORT void ds_cpu_rope(int32_t dtype, const void* x, int64_t stride_row, int64_t stride_head,
                           const int64_t* positions, const float* cos_sin, void* out, int64_t rows,
                           int64_t heads, int64_t d);
// Stores [latent | k_rope] rows at slots >= 0 of a cache of `width` elements per slot.
DS_EXPORT void ds_cpu_cache_write(int32_t dtype, void* cache, int64_t width, const void* latent,
                                  int64_t ld_latent, int64_t lora, const void* k_rope,
                                  int64_t ld_rope, const int64_t* slots, int64_t rows);
// Packed weights, below: rows in groups of 4; inside a group the rows take turns in chunks of 64
// bytes along k: [n / 4, k / chunk, 4, chunk], padded with zeros.
//
// For every head h: y [m, n] = x [m, k] * w [n, k]^T, accumulated in float32, at x + h * sxh and
// y + h * syh; w packed, one head after the other.
DS_EXPORT void ds_cpu_linear_heads(int32_t dtype, const void* x, int64_t ldx, int64_t sxh,
                                   const void* w, void* y, int64_t ldy, int64_t syh, int64_t heads,
                                   int64_t m, int64_t n, int64_t k);
// Routed SwiGLU experts. w13: per expert gate then up, each [inter, hidden] packed; w2 [experts,
// hidden, inter] packed; ids and weights [tokens, top_k]. scratch: tokens * top_k * inter elements of dtype; sums: float
// [tokens, hidden]; order: int32 [tokens * top_k + experts + 1]. out [tokens, hidden].
DS_EXPORT void ds_cpu_experts(int32_t dtype, const void* x, int64_t ldx, const float* weights,
                              const int32_t* ids, const void* w13, const void* w2, void* out,
                              void* scratch, float* sums, int32_t* order, int64_t tokens,
                              int64_t top_k, int64_t experts, int64_t hidden, int64_t inter);
// Absorbed attention: q [rows, heads, width] with strides, cache [pages, page_size, width], row i
// sees its first lens[i] tokens through pages + i * max_pages. out [rows, heads, lora], lora <=
// 1024. Rows after lens[i] are never read.
DS_EXPORT void ds_cpu_mla_decode(int32_t dtype, const void* q, int64_t stride_row,
                                 int64_t stride_head, const void* cache, int64_t page_size,
                                 int64_t width, int64_t lora, const int32_t* pages,
                                 int64_t max_pages, const int32_t* lens, double scale, void* out,
                                 int64_t rows, int64_t heads);
