// The router: scores in float32, and which experts a token goes to.
#include "ds_cpu.h"
#include "lanes.h"
#include "parallel.h"

namespace ds {
namespace {

// ---- scores ----
//
// Every dot runs along k in blocks of BLOCK elements, one vector of partial sums per block, added up
// block by block: in the same order for one token and for many.

constexpr int ROWS = 4;  // experts of a tile
#if defined(__AVX512F__)
constexpr int TILE = 6;  // tokens of a tile, bounded by registers
#else
constexpr int TILE = 2;
#endif
constexpr int64_t BLOCK = 512;  // of k: a tile's weights and tokens stay in the first cache

inline F load_some(const float* p, int n) { return n >= F::W ? F::load(p) : load_tail(p, n); }
inline F load_some(const bf16* p, int n) { return n >= F::W ? F::load(p) : load_tail(p, n); }

// out[m][r] += x[m] . w[r] over n <= BLOCK elements.
template <class X, int M>
void dot_tile(const X* x, int64_t ldx, const float* const* w, int64_t n, float out[][ROWS]) {
  F sums[M][ROWS];
  for (int m = 0; m < M; ++m)
    for (int r = 0; r < ROWS; ++r) sums[m][r] = F::zero();
  int64_t i = 0;
  auto step = [&](auto load) {
    F rows[ROWS];
    for (int r = 0; r < ROWS; ++r) rows[r] = load(w[r] + i);
    for (int m = 0; m < M; ++m) {
      F v = load(x + m * ldx + i);
      for (int r = 0; r < ROWS; ++r) sums[m][r] = fma(rows[r], v, sums[m][r]);
    }
  };
  for (; i + F::W <= n; i += F::W) step([](const auto* p) { return F::load(p); });
  if (i < n) step([&](const auto* p) { return load_tail(p, int(n - i)); });
  for (int m = 0; m < M; ++m)
    for (int r = 0; r < ROWS; ++r) out[m][r] += sums[m][r].sum();
}

template <class X, int M>
void dot_tiles(const X* x, int64_t ldx, int64_t m, const float* const* w, int64_t n,
               float out[][ROWS]) {
  if (m == M)
    dot_tile<X, M>(x, ldx, w, n, out);
  else if constexpr (M > 1)
    dot_tiles<X, M - 1>(x, ldx, m, w, n, out);
}

struct Logits {
  int64_t ldx;
  const float* w;
  float* out;
  int64_t tokens, experts, hidden;

  // The rows of one tile; experts past the last are the last again.
  void rows(int64_t e, const float** w_rows) const {
    for (int r = 0; r < ROWS; ++r)
      w_rows[r] = w + (e + r < experts ? e + r : experts - 1) * hidden;
  }

  // Few tokens: every row of the weight is read once, from end to end.
  template <class X>
  void stream(const X* x, int64_t e0, int64_t e1) const {
    for (int64_t e = e0; e < e1; e += ROWS) {
      const float *w_rows[ROWS], *at[ROWS];
      rows(e, w_rows);
      float sums[TILE][ROWS] = {};
      for (int64_t k = 0; k < hidden; k += BLOCK) {
        for (int r = 0; r < ROWS; ++r) at[r] = w_rows[r] + k;
        dot_tiles<X, TILE>(x + k, ldx, tokens, at, hidden - k < BLOCK ? hidden - k : BLOCK, sums);
      }
      for (int64_t t = 0; t < tokens; ++t)
        for (int64_t r = 0; r < ROWS && e + r < e1; ++r) out[t * experts + e + r] = sums[t][r];
    }
  }

  // Many: a block of k of all rows stays in the second cache while the tokens pass, tile by tile.
  template <class X>
  void block(const X* x, int64_t e0, int64_t e1) const {
    alignas(64) float wide[TILE * BLOCK];
    for (int64_t k = 0; k < hidden; k += BLOCK) {
      const int64_t n = hidden - k < BLOCK ? hidden - k : BLOCK;
      for (int64_t t = 0; t < tokens; t += TILE) {
        const int64_t m = tokens - t < TILE ? tokens - t : TILE;
        for (int64_t j = 0; j < m; ++j)
          for (int64_t i = 0; i < n; ++i) wide[j * BLOCK + i] = to_float(x[(t + j) * ldx + k + i]);
        for (int64_t e = e0; e < e1; e += ROWS) {
          const float* w_rows[ROWS];
          rows(e, w_rows);
          for (int r = 0; r < ROWS; ++r) w_rows[r] += k;
          float sums[TILE][ROWS] = {};
          dot_tiles<float, TILE>(wide, BLOCK, m, w_rows, n, sums);
          for (int64_t j = 0; j < m; ++j) {
            float* to = out + (t + j) * experts + e;
            for (int64_t r = 0; r < ROWS && e + r < e1; ++r)
              to[r] = k ? to[r] + sums[j][r] : sums[j][r];
          }
        }
      }
    }
  }

  template <class X>
  void run(const X* x) const {
    const int64_t bytes = experts * hidden * 4 * (tokens <= TILE ? 1 : 1 + tokens / 8);
    parallel((experts + ROWS - 1) / ROWS, 1, bytes, [&](int64_t begin, int64_t end) {
      const int64_t e1 = end * ROWS < experts ? end * ROWS : experts;
      tokens <= TILE ? stream(x, begin * ROWS, e1) : block(x, begin * ROWS, e1);
    });
  }
};

// ---- choice ----

constexpr int64_t MOST = 1024;  // experts, and groups of them
constexpr int64_t SPAN = 16;    // keys with one maximum

// Keys of which the largest is taken again and again; the first of equal ones goes first.
struct Largest {
  alignas(64) int32_t keys[MOST];
  int32_t tops[MOST / SPAN];
  int64_t spans;

  void fill(const float* values, int64_t n) {
    for (int64_t i = 0; i < n; i += F::W)
      Keys::of(load_some(values + i, int(n - i))).store(keys + i);
    spans = (n + SPAN - 1) / SPAN;
    for (int64_t i = n; i < spans * SPAN; ++i) keys[i] = LEAST;
    for (int64_t s = 0; s < spans; ++s) tops[s] = top(keys + s * SPAN);
  }
  static int32_t top(const int32_t* span) {
    int32_t most = LEAST;
    for (int64_t i = 0; i < SPAN; ++i) most = span[i] > most ? span[i] : most;
    return most;
  }
  // The index of the largest that is left. Every float has a key above LEAST, so as many times as
  // there are values.
  int64_t take() {
    int32_t most = LEAST;
    for (int64_t s = 0; s < spans; ++s) most = tops[s] > most ? tops[s] : most;
    int64_t s = 0, i = 0;
    while (tops[s] != most) ++s;
    int32_t* span = keys + s * SPAN;
    while (span[i] != most) ++i;
    span[i] = LEAST;
    tops[s] = top(span);
    return s * SPAN + i;
  }
};

// As torch has it: beyond 20 x itself.
inline float root_softplus(float x) {
  return std::sqrt(x > 20.0f ? x : std::log1p(std::exp(x)));
}

struct Softplus {
  const float* bias;  // or null
  int64_t experts, top_k;
  float scale;

  // chosen: [top_k], or null for the best.
  void one(const float* x, const int64_t* chosen, float* weights, int32_t* ids) const {
    float total = 0.0f;
    if (chosen) {
      for (int64_t i = 0; i < top_k; ++i) {
        const int64_t e = chosen[i];
        ids[i] = int32_t(e);
        weights[i] = e >= 0 && e < experts ? root_softplus(x[e]) : 0.0f;
        total += weights[i];
      }
    } else {
      float s[MOST], c[MOST];
      Largest left;
      for (int64_t i = 0; i < experts; ++i) s[i] = root_softplus(x[i]);
      for (int64_t i = 0; i < experts; ++i) c[i] = bias ? s[i] + bias[i] : s[i];
      left.fill(c, experts);
      for (int64_t i = 0; i < top_k; ++i) {
        ids[i] = int32_t(left.take());
        weights[i] = s[ids[i]];
        total += weights[i];
      }
    }
    for (int64_t i = 0; i < top_k; ++i) weights[i] *= scale / (total + 1e-20f);
  }
};

struct Choice {
  const float* bias;  // or null
  int64_t experts, top_k, shared, groups, open_groups;
  bool sigmoid, limited, biased, renormalise;
  float scale;

  void score(const float* x, float* s) const {
    float top = -INFINITY;
    if (!sigmoid)
      for (int64_t i = 0; i < experts; ++i) top = x[i] > top ? x[i] : top;
    const F one = F::all(1.0f), shift = F::all(-top);
    float total = 0.0f;
    for (int64_t i = 0; i < experts; i += F::W) {
      const int n = int(experts - i < F::W ? experts - i : F::W);
      F v = load_some(x + i, n);
      v = sigmoid ? v : v + shift;
      v = zero_below(sigmoid ? one / (one + exp(v * F::all(-1.0f))) : exp(v), v, LEAST_EXP);
      store_tail(v, s + i, n);
      for (int j = 0; j < n; ++j) total += s[i + j];
    }
    if (!sigmoid)
      for (int64_t i = 0; i < experts; ++i) s[i] /= total;
  }

  // The value of one group: its largest choice, or with a bias the sum of the two largest.
  float group_score(const float* choice, int64_t size) const {
    int32_t first = LEAST, second = LEAST;
    int64_t a = 0, b = 0;
    for (int64_t i = 0; i < size; ++i) {
      const int32_t key = order(choice[i]);
      if (key > first) {
        second = first, b = a;
        first = key, a = i;
      } else if (key > second) {
        second = key, b = i;
      }
    }
    return biased && size > 1 ? choice[a] + choice[b] : choice[a];
  }

  void close_groups(float* choice, Largest& left) const {
    float values[MOST];
    bool open[MOST] = {};
    const int64_t size = experts / groups;
    for (int64_t g = 0; g < groups; ++g) values[g] = group_score(choice + g * size, size);
    left.fill(values, groups);
    for (int64_t i = 0; i < open_groups; ++i) open[left.take()] = true;
    // With a bias, choices can be negative: a closed group is -inf there, not 0.
    const float closed = biased ? -INFINITY : 0.0f;
    for (int64_t g = 0; g < groups; ++g)
      if (!open[g])
        for (int64_t i = 0; i < size; ++i) choice[g * size + i] = closed;
  }

  void one(const float* x, float* weights, int32_t* ids) const {
    float s[MOST], c[MOST];
    Largest left;
    score(x, s);
    for (int64_t i = 0; i < experts; ++i) c[i] = biased && bias ? s[i] + bias[i] : s[i];
    if (limited && open_groups < groups) close_groups(c, left);
    left.fill(c, experts);
    float total = 0.0f;
    for (int64_t i = 0; i < top_k; ++i) {
      const int64_t e = left.take();
      ids[i] = int32_t(e);
      weights[i] = s[e];
      total += s[e];
    }
    const float factor = renormalise ? scale / (total + 1e-20f) : scale;
    for (int64_t i = 0; i < top_k; ++i) weights[i] *= factor;
    for (int64_t i = 0; i < shared; ++i) {
      ids[top_k + i] = int32_t(experts + i);
      weights[top_k + i] = 1.0f;
    }
  }
};

}  // namespace
}  // namespace ds

using namespace ds;

void ds_cpu_router_logits(int32_t dtype, const void* x, int64_t ldx, const float* w, float* out,
                          int64_t tokens, int64_t experts, int64_t hidden) {
  const Logits all{ldx, w, out, tokens, experts, hidden};
  dtype == DS_F32 ? all.run((const float*)x) : all.run((const bf16*)x);
}

void ds_cpu_route_softplus(const float* logits, int64_t ldl, const float* bias,
                           const int64_t* chosen, float* weights, int32_t* ids, int64_t tokens,
                           int64_t experts, int64_t top_k, double scale) {
  if (experts > MOST || top_k > experts) return;
  const Softplus choice{bias, experts, top_k, float(scale)};
  parallel(tokens, 1, tokens * experts * 128, [&](int64_t t, int64_t end) {
    for (; t < end; ++t)
      choice.one(logits + t * ldl, chosen ? chosen + t * top_k : nullptr, weights + t * top_k,
                 ids + t * top_k);
  });
}

void ds_cpu_route(const float* logits, int64_t ldl, const float* bias, float* weights, int32_t* ids,
                  int64_t tokens, int64_t experts, int64_t top_k, int64_t shared,
                  int64_t groups, int64_t open_groups, int32_t sigmoid, int32_t method,
                  int32_t renormalise, double scale) {
  if (experts > MOST || groups > experts || top_k > experts) return;
  const Choice choice{bias,         experts,           top_k,
                      shared,       groups,            open_groups,
                      sigmoid != 0, method != DS_GREEDY, method == DS_NOAUX_TC,
                      renormalise != 0, float(scale)};
  const int64_t width = top_k + shared;
  parallel(tokens, 1, tokens * experts * 32, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      choice.one(logits + t * ldl, weights + t * width, ids + t * width);
  });
}
