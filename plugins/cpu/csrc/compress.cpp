// Rows of tokens to compressed entries: where a window closes, every dim of its rows' values is
// weighed by the softmax of that dim's scores.
#include "ds_cpu.h"
#include "exponents.h"
#include "heads.h"
#include "parallel.h"

namespace ds {
namespace {

struct Windows {
  const void* rows;
  int64_t ld;
  const float* ape;
  int64_t ratio, width;
  const float* norm_weight;
  double eps;
  const int64_t* positions;
  const float* table;
  int64_t rope, group;
  float* state;
  int64_t entries;
  const int64_t* blocks;
  void* out;
  int64_t tokens, d;

  bool closes(int64_t t) const { return blocks[t] >= 0 && (positions[t] + 1) % ratio == 0; }
  float* kept(int64_t t, int64_t position) const {
    return state + (blocks[t] * entries + position % entries) * 2 * width;
  }
  const float* bias(int64_t position) const { return ape + position % ratio * width; }
};

// body(c, n): the lanes [c, c + n) of d, n <= F::W.
template <class Body>
inline void lanes(int64_t d, Body body) {
  for (int64_t c = 0; c < d; c += F::W) body(c, int(d - c < F::W ? d - c : F::W));
}
template <class T>
inline F lanes_of(const T* p, int n) {
  return n == F::W ? F::load(p) : load_tail(p, n);
}
inline void keep(F x, float* p, int n) {
  if (n == F::W)
    x.store(p);
  else
    store_tail(x, p, n);
}

// body(values, scores, what is added to these or null) of all rows that the entry of token t is made
// of, oldest first: rows of this call, and in front of them those of its state.
template <class T, class Body>
void each_seen(const Windows& w, int64_t t, Body body) {
  const int64_t p = w.positions[t], own = w.width - w.d, span = own ? 2 * w.ratio : w.ratio;
  for (int64_t back = span - 1 < p ? span - 1 : p; back >= 0; --back) {
    const int64_t column = back < w.ratio ? own : 0;  // of the window in front: the first ones
    if (t >= back && w.blocks[t - back] == w.blocks[t]) {
      const T* row = (const T*)w.rows + (t - back) * w.ld + column;
      body(row, row + w.width, w.bias(p - back) + column);
    } else {
      const float* row = w.kept(t, p - back) + column;
      body(row, row + w.width, (const float*)nullptr);
    }
  }
}

template <class T>
void entry(const Windows& w, int64_t t) {
  alignas(64) float high[MOST_DIMS], total[MOST_DIMS], sums[MOST_DIMS];
  lanes(w.d, [&](int64_t c, int n) {
    keep(F::all(-INFINITY), high + c, n);
    keep(F::zero(), total + c, n);
    keep(F::zero(), sums + c, n);
  });
  auto score = [](const auto* scores, const float* added, int64_t c, int n) {
    const F x = lanes_of(scores + c, n);
    return added ? x + lanes_of(added + c, n) : x;
  };
  each_seen<T>(w, t, [&](const auto*, const auto* scores, const float* added) {
    lanes(w.d, [&](int64_t c, int n) {
      keep(larger(score(scores, added, c, n), lanes_of(high + c, n)), high + c, n);
    });
  });
  each_seen<T>(w, t, [&](const auto* values, const auto* scores, const float* added) {
    lanes(w.d, [&](int64_t c, int n) {
      const F away = fma(lanes_of(high + c, n), F::all(-1.0f), score(scores, added, c, n));
      const F share = exp(away);
      keep(lanes_of(total + c, n) + share, total + c, n);
      keep(fma(share, lanes_of(values + c, n), lanes_of(sums + c, n)), sums + c, n);
    });
  });
  for (int64_t c = 0; c < w.d; ++c) sums[c] /= total[c];
  const float* angles = w.table + (w.positions[t] - w.ratio + 1) * w.rope;
  norm_turn(sums, w.d, w.norm_weight, w.eps, angles, w.rope, w.group);
  put_all(sums, (T*)w.out + t * w.d, w.d);
}

// The row of token t as the state holds it.
template <class T>
void store(const Windows& w, int64_t t) {
  const T* row = (const T*)w.rows + t * w.ld;
  float* to = w.kept(t, w.positions[t]);
  const float* added = w.bias(w.positions[t]);
  widen_row(row, to, w.width);
  lanes(w.width, [&](int64_t c, int n) {
    keep(lanes_of(row + w.width + c, n) + lanes_of(added + c, n), to + w.width + c, n);
  });
}

template <class T>
void compress(const Windows& w) {
  int64_t closing = 0;
  for (int64_t t = 0; t < w.tokens; ++t) closing += w.closes(t);
  parallel(w.tokens, 1, closing * w.ratio * w.width * 16, [&](int64_t t, int64_t end) {
    for (; t < end; ++t) {
      if (w.closes(t))
        entry<T>(w, t);
      else
        std::memset((void*)((T*)w.out + t * w.d), 0, size_t(w.d) * sizeof(T));
    }
  });
  parallel(w.tokens, 1, w.tokens * w.width * 16, [&](int64_t t, int64_t end) {
    for (; t < end; ++t) {
      const int64_t over = t + w.entries;  // writes over what this row would leave
      if (w.blocks[t] >= 0 && (over >= w.tokens || w.blocks[over] != w.blocks[t])) store<T>(w, t);
    }
  });
}

}  // namespace
}  // namespace ds

using namespace ds;

void ds_cpu_compress_windows(int32_t dtype, const void* rows, int64_t ld, const float* ape,
                             int64_t ratio, int64_t width, const float* norm_weight, double eps,
                             const int64_t* positions, const float* cos_sin, int64_t rope,
                             int64_t group, float* state, int64_t entries, const int64_t* blocks,
                             void* out, int64_t tokens, int64_t d) {
  const Windows windows{rows, ld,    ape,   ratio,   width,  norm_weight, eps,    positions, cos_sin,
                        rope, group, state, entries, blocks, out,         tokens, d};
  (dtype == DS_F32 ? compress<float> : compress<bf16>)(windows);
}
