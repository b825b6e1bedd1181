// Between the indexer's projections and its scores: norm of the key, rotation, Hadamard, encoding and
// cache write. DeepSeek-V4's keys come normed and rotated.
#include "ds_cpu.h"
#include "e2m1.h"
#include "hadamard.h"
#include "heads.h"
#include "parallel.h"

namespace ds {
namespace {

constexpr int64_t MOST = 1024;  // dimensions of an index vector

struct Call {
  const void* q;
  int64_t q_row, q_head, heads;
  const void* k;
  int64_t k_row, d;
  const float *norm_weight, *norm_bias;
  double eps;
  const int64_t* positions;
  const float* cos_sin;
  int64_t rope;
  bool interleaved;
  void* cache;
  int64_t page_size;
  const int64_t* slots;
  void* queries;
  float* scale;
  int64_t rows;
};

// x = (x - mean) / sqrt(variance + eps) * weight + bias, in float64 where it sums.
void layer_norm(float* x, const Call& call) {
  const int64_t d = call.d;
  double mean = 0.0, variance = 0.0;
  for (int64_t i = 0; i < d; ++i) mean += x[i];
  mean /= double(d);
  for (int64_t i = 0; i < d; ++i) variance += (x[i] - mean) * (x[i] - mean);
  const double scale = 1.0 / std::sqrt(variance / double(d) + call.eps);
  for (int64_t i = 0; i < d; ++i)
    x[i] = float((x[i] - mean) * scale) * call.norm_weight[i] + call.norm_bias[i];
}

void rotate(float* x, const float* angles, int64_t rope, bool interleaved) {
  const int64_t half = rope / 2, step = interleaved ? 2 : 1, other = interleaved ? 1 : half;
  for (int64_t i = 0; i < half; ++i) {
    float &a = x[i * step], &b = x[i * step + other];
    const float c = angles[i], s = angles[half + i], turned = a * c - b * s;
    b = b * c + a * s;
    a = turned;
  }
}

// x, rotated, times the Hadamard matrix; x is overwritten.
void mix(float* x, const float* angles, const Call& call) {
  rotate(x, angles, call.rope, call.interleaved);
  hadamard(x, call.d, float(1.0 / std::sqrt(double(call.d))));
}

template <class T>
void widen(const void* from, int64_t offset, float* to, int64_t n) {
  const T* x = (const T*)from + offset;
  for (int64_t i = 0; i < n; ++i) to[i] = to_float(x[i]);
}

// x [n] to a dtype; returns the scale, by which x is divided before.
template <class K>
float encode(float* x, K* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) put(to + i, x[i]);
  return 1.0f;
}
float encode(float* x, e4m3* to, int64_t n) {
  const float scale = group_scale(x, n, true);
  for (int64_t i = 0; i < n; ++i) x[i] /= scale;
  store_e4m3(x, to, n);
  return scale;
}
// Queries, which stay in their dtype; keys in FP4 have no scale beside them.
template <class T>
float encode_as(e2m1, float* x, void* to, int64_t at, int64_t n) {
  round_e2m1(x, (T*)to + at, n);
  return 1.0f;
}
template <class T, class K>
float encode_as(K, float* x, void* to, int64_t at, int64_t n) {
  return encode(x, (K*)to + at, n);
}

// The key of `slot`; in e4m3 a page has its keys first and then their scales.
template <class K>
void store_key(float* x, const Call& call, int64_t slot) {
  if constexpr (std::is_same_v<K, e2m1>) {
    store_e2m1(x, (uint8_t*)call.cache + slot * e2m1_bytes(call.d), call.d);
  } else if constexpr (sizeof(K) > 1) {
    encode(x, (K*)call.cache + slot * call.d, call.d);
  } else {
    const int64_t page = slot / call.page_size, row = slot % call.page_size;
    char* base = (char*)call.cache + page * call.page_size * (call.d + 4);
    const float scale = encode(x, (K*)base + row * call.d, call.d);
    std::memcpy(base + call.page_size * call.d + row * 4, &scale, 4);
  }
}

template <class T, class K>
void index_prologue(const Call& call) {
  const int64_t d = call.d, bytes = call.rows * (call.heads + 1) * d * 16;
  parallel(call.rows, 1, bytes, [&](int64_t begin, int64_t end) {
    alignas(64) float x[MOST];
    for (int64_t r = begin; r < end; ++r) {
      const float* angles = call.cos_sin + call.positions[r] * call.rope;
      for (int64_t h = 0; h < call.heads; ++h) {
        widen<T>(call.q, r * call.q_row + h * call.q_head, x, d);
        mix(x, angles, call);
        const int64_t at = r * call.heads + h;
        call.scale[at] = encode(x, (K*)call.queries + at * d, d);
      }
      if (call.slots[r] < 0) continue;
      widen<T>(call.k, r * call.k_row, x, d);
      layer_norm(x, call);
      mix(x, angles, call);
      store_key<K>(x, call, call.slots[r]);
    }
  });
}

template <class T, class K>
void index_encode(const Call& call, bool mixed) {
  const int64_t d = call.d, bytes = call.rows * (call.heads + 1) * d * 16;
  const float size = float(1.0 / std::sqrt(double(d)));
  parallel(call.rows, 1, bytes, [&](int64_t begin, int64_t end) {
    alignas(64) float x[MOST];
    for (int64_t r = begin; r < end; ++r) {
      const float* angles = call.cos_sin + call.positions[r] * call.rope;
      for (int64_t h = 0; h < call.heads; ++h) {
        widen<T>(call.q, r * call.q_row + h * call.q_head, x, d);
        turn(x, d, angles, call.rope, false);
        if (mixed) hadamard(x, d, size);
        const int64_t at = r * call.heads + h;
        call.scale[at] = encode_as<T>(K{}, x, call.queries, at * d, d);
      }
      if (call.slots[r] < 0) continue;
      widen<T>(call.k, r * call.k_row, x, d);
      if (mixed) hadamard(x, d, size);
      store_key<K>(x, call, call.slots[r]);
    }
  });
}

}  // namespace
}  // namespace ds

using namespace ds;

void ds_cpu_index_prologue(int32_t dtype, int32_t index_dtype, const void* q, int64_t q_row,
                           int64_t q_head, int64_t heads, const void* k, int64_t k_row, int64_t d,
                           const float* norm_weight, const float* norm_bias, double eps,
                           const int64_t* positions, const float* cos_sin, int64_t rope,
                           int32_t interleaved, void* cache, int64_t page_size,
                           const int64_t* slots, void* queries, float* scale, int64_t rows) {
  const Call call{q,    q_row,     q_head,  heads, k,           k_row, d,         norm_weight,
                  norm_bias, eps,  positions, cos_sin, rope, interleaved != 0, cache, page_size,
                  slots, queries,  scale,   rows};
  if (dtype == DS_F32)
    (index_dtype == DS_E4M3 ? index_prologue<float, e4m3> : index_prologue<float, float>)(call);
  else
    (index_dtype == DS_E4M3 ? index_prologue<bf16, e4m3> : index_prologue<bf16, bf16>)(call);
}

void ds_cpu_index_encode(int32_t dtype, int32_t index_dtype, const void* q, int64_t q_row,
                         int64_t q_head, int64_t heads, const void* k, int64_t k_row, int64_t d,
                         const int64_t* positions, const float* cos_sin, int64_t rope,
                         int32_t mixed, void* cache, int64_t page_size, const int64_t* slots,
                         void* queries, float* scale, int64_t rows) {
  const Call call{q,   q_row,     q_head,  heads, k,    k_row, d,         nullptr, nullptr,
                  0.0, positions, cos_sin, rope,  true, cache, page_size, slots,   queries,
                  scale, rows};
  if (dtype == DS_F32)
    (index_dtype == DS_E4M3   ? index_encode<float, e4m3>
     : index_dtype == DS_E2M1 ? index_encode<float, e2m1>
                              : index_encode<float, float>)(call, mixed != 0);
  else
    (index_dtype == DS_E4M3   ? index_encode<bf16, e4m3>
     : index_dtype == DS_E2M1 ? index_encode<bf16, e2m1>
                              : index_encode<bf16, bf16>)(call, mixed != 0);
}
