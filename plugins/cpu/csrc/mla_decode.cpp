// Absorbed attention of one new token per sequence over the paged latent cache.
//
// A work unit is a sequence and up to HEADS query heads, which share every cached row they read.
// Rows are visited in blocks with a running maximum, so no memory grows with the context.
#include "dot.h"
#include "ds_cpu.h"
#include "parallel.h"

namespace ds {
namespace {

constexpr int HEADS = 8, KEYS = 64, QUAD = 4;
constexpr int64_t MAX_LORA = 1024;

// scores[h][j] = q[h] . row[j] for M heads and four rows.
template <class T, int M>
void scores_tile(const T* const* q, const T* const* row, int64_t width, float scores[][KEYS]) {
  using D = Dot<T>;
  F acc[M][QUAD];
  for (int m = 0; m < M; ++m)
    for (int r = 0; r < QUAD; ++r) acc[m][r] = F::zero();
  for (int64_t i = 0; i < width; i += D::step) {
    const int n = int(width - i);
    const bool whole = n >= D::step;
    typename D::V rows[QUAD];
    for (int r = 0; r < QUAD; ++r)
      rows[r] = whole ? D::load(row[r] + i) : D::tail(row[r] + i, n);
    for (int m = 0; m < M; ++m) {
      typename D::V v = whole ? D::load(q[m] + i) : D::tail(q[m] + i, n);
      for (int r = 0; r < QUAD; ++r) acc[m][r] = D::mac(acc[m][r], rows[r], v);
    }
  }
  for (int m = 0; m < M; ++m) {
    float four[QUAD];
    sums4(acc[m], four);
    std::memcpy(scores[m], four, sizeof four);
  }
}

// sums[h][c0 ...] += p[h][j] * row[j][c0 ...] over the rows, for V vectors and M heads.
template <class T, int M, int V>
void values_tile(const float (*p)[KEYS], const T* const* row, int count, int64_t c0,
                 float* sums, int64_t lora) {
  F acc[M][V];
  for (int m = 0; m < M; ++m)
    for (int v = 0; v < V; ++v) acc[m][v] = F::load(sums + m * lora + c0 + v * F::W);
  for (int j = 0; j < count; ++j) {
    F x[V];
    for (int v = 0; v < V; ++v) x[v] = F::load(row[j] + c0 + v * F::W);
    for (int m = 0; m < M; ++m) {
      F w = F::all(p[m][j]);
      for (int v = 0; v < V; ++v) acc[m][v] = fma(w, x[v], acc[m][v]);
    }
  }
  for (int m = 0; m < M; ++m)
    for (int v = 0; v < V; ++v) acc[m][v].store(sums + m * lora + c0 + v * F::W);
}

template <class T, int M>
void values(const float (*p)[KEYS], const T* const* row, int count, float* sums, int64_t lora) {
  int64_t c = 0;
  for (; c + 4 * F::W <= lora; c += 4 * F::W)
    values_tile<T, M, 4>(p, row, count, c, sums, lora);
  for (; c + F::W <= lora; c += F::W) values_tile<T, M, 1>(p, row, count, c, sums, lora);
  for (; c < lora; ++c)
    for (int m = 0; m < M; ++m)
      for (int j = 0; j < count; ++j) sums[m * lora + c] += p[m][j] * to_float(row[j][c]);
}

// p[j] = e^(p[j] - top) over `count` scores, zeros after; returns their sum.
float weigh(float* p, int count, float top) {
  for (int j = count; j < KEYS; ++j) p[j] = -INFINITY;
  F total = F::zero();
  for (int j = 0; j < KEYS; j += F::W) {
    F e = exp(F::load(p + j) + F::all(-top));
    e.store(p + j);
  }
  for (int j = count; j < KEYS; ++j) p[j] = 0.0f;
  for (int j = 0; j < KEYS; j += F::W) total = total + F::load(p + j);
  return total.sum();
}

template <class T>
void attend(const T* q, int64_t stride_head, int heads, const T* cache, int64_t page_size,
            int64_t width, int64_t lora, const int32_t* pages, int64_t length, float scale,
            T* out) {
  alignas(64) float sums[HEADS * MAX_LORA];
  alignas(64) float p[HEADS][KEYS];
  float top[HEADS], total[HEADS];
  const T* qs[HEADS];
  std::memset(sums, 0, size_t(heads * lora) * sizeof(float));
  for (int h = 0; h < heads; ++h) {
    top[h] = -INFINITY;
    total[h] = 0.0f;
    qs[h] = q + h * stride_head;
  }
  for (int64_t j0 = 0; j0 < length; j0 += KEYS) {
    const int count = int(length - j0 < KEYS ? length - j0 : KEYS);
    const T* row[KEYS];
    for (int j = 0; j < count; ++j) {
      int64_t slot = int64_t(pages[(j0 + j) / page_size]) * page_size + (j0 + j) % page_size;
      row[j] = cache + slot * width;
    }
    for (int j = count; j < KEYS; ++j) row[j] = row[count - 1];  // their scores are not used
    for (int j = 0; j < count; j += QUAD) {
      int h = 0;
      for (; h + 4 <= heads; h += 4)
        scores_tile<T, 4>(qs + h, row + j, width, (float(*)[KEYS])(&p[h][j]));
      for (; h < heads; ++h)
        scores_tile<T, 1>(qs + h, row + j, width, (float(*)[KEYS])(&p[h][j]));
    }
    for (int h = 0; h < heads; ++h) {
      float high = top[h];
      for (int j = 0; j < count; ++j) {
        p[h][j] *= scale;
        high = p[h][j] > high ? p[h][j] : high;
      }
      float keep = std::exp(top[h] - high);  // 0 in the first block
      top[h] = high;
      total[h] = total[h] * keep + weigh(p[h], count, high);
      if (keep != 1.0f && j0 > 0)
        for (int64_t c = 0; c < lora; ++c) sums[h * lora + c] *= keep;
    }
    int h = 0;
    for (; h + 4 <= heads; h += 4) values<T, 4>(p + h, row, count, sums + h * lora, lora);
    for (; h < heads; ++h) values<T, 1>(p + h, row, count, sums + h * lora, lora);
  }
  for (int h = 0; h < heads; ++h)
    for (int64_t c = 0; c < lora; ++c) put(out + h * lora + c, sums[h * lora + c] / total[h]);
}

template <class T>
void mla_decode(const void* q, int64_t stride_row, int64_t stride_head, const void* cache,
                int64_t page_size, int64_t width, int64_t lora, const int32_t* pages,
                int64_t max_pages, const int32_t* lens, float scale, void* out, int64_t rows,
                int64_t heads) {
  int64_t blocks = (heads + HEADS - 1) / HEADS, bytes = 0;
  for (int64_t i = 0; i < rows; ++i) bytes += lens[i] * width * heads * int64_t(sizeof(T)) / 4;
  auto unit = [&](int64_t u) {
    int64_t i = u / blocks, h0 = u % blocks * HEADS;
    int n = int(heads - h0 < HEADS ? heads - h0 : HEADS);
    attend((const T*)q + i * stride_row + h0 * stride_head, stride_head, n, (const T*)cache,
           page_size, width, lora, pages + i * max_pages, lens[i], scale,
           (T*)out + (i * heads + h0) * lora);
  };
  parallel_each(rows * blocks, bytes, unit);
}

}  // namespace
}  // namespace ds

using namespace ds;

void ds_cpu_mla_decode(int32_t dtype, const void* q, int64_t stride_row, int64_t stride_head,
                       const void* cache, int64_t page_size, int64_t width, int64_t lora,
                       const int32_t* pages, int64_t max_pages, const int32_t* lens, double scale,
                       void* out, int64_t rows, int64_t heads) {
  (dtype == DS_F32 ? mla_decode<float> : mla_decode<bf16>)(q, stride_row, stride_head, cache,
                                                           page_size, width, lora, pages, max_pages,
                                                           lens, float(scale), out, rows, heads);
}
