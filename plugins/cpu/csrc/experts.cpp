// Routed experts: every chosen expert's weights are read once, however many tokens chose it.
#include "dot.h"
#include "ds_cpu.h"
#include "parallel.h"
#include "silu.h"

namespace ds {
namespace {

// Sorts the (token, choice) pairs by expert. order: [0, pairs) pair numbers; then, for every
// expert, the end of its pairs.
void sort_pairs(const int32_t* ids, int64_t pairs, int64_t experts, int32_t* order) {
  int32_t* ends = order + pairs;
  for (int64_t e = 0; e <= experts; ++e) ends[e] = 0;
  for (int64_t p = 0; p < pairs; ++p) ++ends[ids[p] + 1];
  for (int64_t e = 0; e < experts; ++e) ends[e + 1] += ends[e];
  for (int64_t p = 0; p < pairs; ++p) order[ends[ids[p]]++] = int32_t(p);
}

template <class T>
struct Layer {
  const T* x;
  int64_t ldx;
  const float* weights;
  const T *w13, *w2;
  T *out, *act;
  float* sums;
  const int32_t* order;
  int64_t tokens, top_k, experts, hidden, inter;

  // Calls body(expert, first pair, end) for every expert that has pairs.
  template <class Body>
  void each(Body body) const {
    const int32_t* ends = order + tokens * top_k;
    for (int64_t e = 0, from = 0; e < experts; from = ends[e++])
      if (ends[e] > from) body(e, from, int64_t(ends[e]));
  }

  // Activations of inner columns [c0, c1) for the pairs [from, to) of expert e.
  void up(int64_t e, int64_t from, int64_t to, int64_t c0, int64_t c1) const {
    const int64_t size = (inter + ROWS - 1) / ROWS * group_size<T>(hidden);
    const T* gate = w13 + e * 2 * size;
    auto row = [&](int64_t i) { return x + order[from + i] / top_k * ldx; };
    constexpr int64_t COLS = 16, PAIRS = 2 * MAX_M;
    float g[PAIRS][COLS], u[PAIRS][COLS];
    for (int64_t c = c0; c < c1; c += COLS) {
      int64_t n = c1 - c < COLS ? c1 - c : COLS;
      for (int64_t p = 0; p < to - from; p += PAIRS) {
        int64_t m = to - from - p < PAIRS ? to - from - p : PAIRS;
        auto rows = [&](int64_t i) { return row(p + i); };
        dots(gate, c, c + n, rows, m, hidden,
             [&](int64_t t, int64_t r, const float* v, int count) {
               for (int i = 0; i < count; ++i) g[t][r - c + i] = v[i];
             });
        dots(gate + size, c, c + n, rows, m, hidden,
             [&](int64_t t, int64_t r, const float* v, int count) {
               for (int i = 0; i < count; ++i) u[t][r - c + i] = v[i];
             });
        for (int64_t i = 0; i < m; ++i)
          silu_mul_row(g[i], u[i], act + (from + p + i) * inter + c, n);
      }
    }
  }

  // Adds the weighted outputs of columns [r0, r1) for one expert to the sums.
  void down(int64_t e, int64_t from, int64_t to, int64_t r0, int64_t r1) const {
    dots(
        w2 + e * ((hidden + ROWS - 1) / ROWS * group_size<T>(inter)), r0, r1,
        [&](int64_t i) { return act + (from + i) * inter; }, to - from, inter,
        [&](int64_t i, int64_t r, const float* v, int count) {
          int32_t pair = order[from + i];
          float* to_row = sums + pair / top_k * hidden + r;
          for (int j = 0; j < count; ++j) to_row[j] += weights[pair] * v[j];
        });
  }
};

template <class T>
void experts_layer(const Layer<T>& layer) {
  int64_t active = 0;
  layer.each([&](int64_t, int64_t, int64_t) { ++active; });
  // From some 16 tokens per expert on, arithmetic outweighs bytes.
  int64_t shared = layer.tokens * layer.top_k / (active > 0 ? active : 1);
  int64_t bytes = active * layer.hidden * layer.inter * int64_t(sizeof(T)) *
                  (shared < 16 ? 1 : shared / 8);
  int64_t units = (layer.inter + 15) / 16;  // of 16 inner columns; one list over all experts
  parallel(active * units, 1, 2 * bytes, [&](int64_t begin, int64_t end) {
    int64_t first = 0;
    layer.each([&](int64_t e, int64_t from, int64_t to) {
      int64_t a = begin > first ? begin - first : 0;
      int64_t b = end - first < units ? end - first : units;
      first += units;
      if (a >= b) return;
      layer.up(e, from, to, a * 16, b * 16 < layer.inter ? b * 16 : layer.inter);
    });
  });
  constexpr int64_t BLOCK = 16;
  parallel(layer.hidden, BLOCK, bytes, [&](int64_t begin, int64_t end) {
    // Every thread owns some output columns and sums them over experts in float32.
    int64_t h = layer.hidden;
    for (int64_t t = 0; t < layer.tokens; ++t)
      std::memset(layer.sums + t * h + begin, 0, size_t(end - begin) * sizeof(float));
    for (int64_t r = begin; r < end; r += BLOCK * 4) {
      int64_t r1 = end - r < BLOCK * 4 ? end : r + BLOCK * 4;
      layer.each([&](int64_t e, int64_t from, int64_t to) { layer.down(e, from, to, r, r1); });
    }
    for (int64_t t = 0; t < layer.tokens; ++t)
      for (int64_t r = begin; r < end; ++r) put(layer.out + t * h + r, layer.sums[t * h + r]);
  });
}

}  // namespace
}  // namespace ds

using namespace ds;

template <class T>
static void run(const void* x, int64_t ldx, const float* weights, const int32_t* ids,
                const void* w13, const void* w2, void* out, void* scratch, float* sums,
                int32_t* order, int64_t tokens, int64_t top_k, int64_t experts, int64_t hidden, int64_t inter) {
  sort_pairs(ids, tokens * top_k, experts, order);
  experts_layer<T>({(const T*)x, ldx, weights, (const T*)w13, (const T*)w2, (T*)out, (T*)scratch, sums,
                    order, tokens, top_k, experts, hidden, inter});
}

void ds_cpu_experts(int32_t dtype, const void* x, int64_t ldx, const float* weights,
                    const int32_t* ids, const void* w13, const void* w2, void* out, void* scratch,
                    float* sums, int32_t* order, int64_t tokens, int64_t top_k, int64_t experts,
                    int64_t hidden, int64_t inter) {
  (dtype == DS_F32 ? run<float> : run<bf16>)(x, ldx, weights, ids, w13, w2, out, scratch, sums,
                                             order, tokens, top_k, experts, hidden, inter);
}
