// How well cached tokens match a row: the sum over heads of relu(q . k) times the head's weight.
//
// Rows of one sequence share its keys: a unit is a few of them, whose heads fill the lanes, over a
// range of keys. Every score is summed in one order, whatever else is computed with it.
#include "ds_cpu.h"
#include "e2m1.h"
#include "parallel.h"
#include "scratch.h"
#include "scores_amx.h"

namespace ds {
namespace {

constexpr int64_t LANES = 64;    // most heads of a unit, if a row has no more
constexpr int64_t RANGE = 1024;  // keys of a unit

struct Call {
  const void* q;
  int64_t heads, d;
  const float* weights;
  int64_t ld_weights;
  const void* cache;
  int64_t page_size;
  const int32_t* pages;
  int64_t max_pages;
  const int32_t *owners, *lens;
  float* out;
  int64_t width, rows;

  int64_t most_rows() const { return heads < LANES ? LANES / heads : 1; }
  int64_t lanes() const { return up_to(most_rows() * heads, F::W); }
  int64_t ld_desk() const { return up_to(heads, F::W); }  // of a desk's weights
};

struct Unit {
  int64_t row, rows, first, last;  // keys [first, last)
};

template <class Each>
void units_of(const Call& call, Each each) {
  for (int64_t row = 0, end; row < call.rows; row = end) {
    int64_t seen = 0;
    for (end = row; end < call.rows && end - row < call.most_rows(); ++end) {
      if (call.owners[end] != call.owners[row]) break;
      seen = call.lens[end] > seen ? call.lens[end] : seen;
    }
    for (int64_t k = 0; k < seen; k += RANGE)
      each(Unit{row, end - row, k, seen - k < RANGE ? seen : k + RANGE});
  }
}

// Working memory of a thread.
template <class C>
struct Desk {
  int64_t words;
  C *wide, *queries, *keys, *staged = nullptr;
  float *products, *weights;
  Desk(Arena& arena, const Call& call)
      : words(up_to((call.d + Word<C>::N - 1) / Word<C>::N, 16)),
        wide(arena.take<C>(call.lanes() * call.d)),
        queries(arena.take<C>(words * Word<C>::N * call.lanes())),
        keys(arena.take<C>(KEYS * call.d)),
        products(arena.take<float>(KEYS * call.lanes() + F::W)),
        weights(arena.take<float>(call.most_rows() * call.ld_desk())) {
    if (MATRIX<C>) staged = arena.take<C>(words * Word<C>::N * KEYS);
  }
};

template <class C>
struct Memory {
  int64_t count = 0, desk, bytes;
  Unit* units;
  char* desks;
  Memory(void* buffer, const Call& call) {
    units_of(call, [&](const Unit&) { ++count; });
    Arena one(nullptr);
    Desk<C> measured(one, call);
    desk = one.used();
    Arena arena(buffer);
    units = arena.take<Unit>(count);
    desks = arena.take<char>(0);
    bytes = arena.used();
  }
  int64_t needed() const { return bytes + max_threads() * desk; }
};

template <int NV, class C>
void products_of(int vectors, const C* queries, const Call& call, int64_t padded,
                 const C* const* key, int count, float* to) {
  if (vectors == NV) {
    constexpr int K = KEY_TILE[NV];
    RowsAhead none;
    for (int j = 0; j < count; j += K)
      score_tile<K, NV>(queries, call.d, padded, key + j, count - j < K ? count - j : K, none,
                        to + j * padded);
  } else if constexpr (NV > 1) {
    products_of<NV - 1>(vectors, queries, call, padded, key, count, to);
  }
}

// Products of `count` keys with the lanes of a unit, [count][padded].
template <class C>
void multiply(const Call& call, const Desk<C>& desk, int64_t padded, const C* const* key,
              int count) {
#if DS_AMX
  if constexpr (MATRIX<C>) {
    RowsAhead none;
    const MatrixScores<C> scores{desk.queries, call.d, desk.words,   padded,
                                 desk.staged,  none,   desk.products};
    return scores.all(key, [&](int64_t) { return count; });
  }
#endif
  const int64_t vectors = padded / F::W;
  for (int64_t v = 0; v < vectors; v += QUERY_VECTORS) {
    const int64_t some = vectors - v < QUERY_VECTORS ? vectors - v : QUERY_VECTORS;
    products_of<QUERY_VECTORS>(int(some), desk.queries + v * F::W * Word<C>::N, call, padded, key,
                               count, desk.products + v * F::W);
  }
}

// Scores of keys [first, first + count) in each row of the unit, from the products of all lanes.
template <class C>
void add_up(const Call& call, const Unit& u, const Desk<C>& desk, int64_t padded,
            const float* scales, int64_t first, int count) {
  const int64_t heads = call.heads, whole = heads / F::W * F::W;
  const uint32_t rest = (1u << (heads - whole)) - 1;
  auto weighed = [](F x, const float* w, F sums) {
    return fma(clamp(x, 0.0f, INFINITY), F::load(w), sums);
  };
  for (int64_t r = 0; r < u.rows; ++r) {
    const float *x = desk.products + r * heads, *w = desk.weights + r * call.ld_desk();
    float* out = call.out + (u.row + r) * call.width + first;
    for (int j = 0; j < count; ++j, x += padded) {
      F sums = F::zero();
      for (int64_t h = 0; h < whole; h += F::W) sums = weighed(F::load(x + h), w + h, sums);
      if (rest) sums = weighed(only(F::load(x + whole), rest), w + whole, sums);
      out[j] = sums.sum() * scales[j];
    }
  }
}

// Elements of a key in a page, and bytes of its scale behind all keys of the page.
template <class K>
int64_t key_size(int64_t d) {
  return std::is_same_v<K, e2m1> ? e2m1_bytes(d) : d;
}
template <class K>
constexpr int64_t SCALE_BYTES = std::is_same_v<K, e4m3> ? 4 : 0;

template <class Q, class K, class C>
void score(const Call& call, const Unit& u, void* memory) {
  Arena arena(memory);
  const Desk<C> desk(arena, call);
  const int64_t lanes = u.rows * call.heads, padded = up_to(lanes, F::W);
  const Q* first = (const Q*)call.q + u.row * call.heads * call.d;
  widen_row(first, desk.wide, lanes * call.d);
  auto query = [&](int64_t m) { return (const C*)desk.wide + m * call.d; };
  pack_queries<C, C>(query, lanes, padded, call.d, desk.words, desk.queries);
  std::memset(desk.weights, 0, size_t(u.rows * call.ld_desk()) * sizeof(float));
  for (int64_t r = 0; r < u.rows; ++r)
    std::memcpy(desk.weights + r * call.ld_desk(), call.weights + (u.row + r) * call.ld_weights,
                size_t(call.heads) * sizeof(float));
  const MatrixUnit matrix;

  constexpr int64_t EXTRA = SCALE_BYTES<K>;
  const int64_t size = key_size<K>(call.d);
  const int32_t* pages = call.pages + call.owners[u.row] * call.max_pages;
  const int64_t page_bytes = call.page_size * (size * int64_t(sizeof(K)) + EXTRA);
  const K* rows[KEYS];
  const C* wide[KEYS];
  float scales[KEYS];
  for (int64_t k0 = u.first; k0 < u.last; k0 += KEYS) {
    const int count = int(u.last - k0 < KEYS ? u.last - k0 : KEYS);
    int64_t page = k0 / call.page_size, row = k0 % call.page_size;
    for (int j = 0; j < count; ++j) {
      const char* base = (const char*)call.cache + pages[page] * page_bytes;
      rows[j] = (const K*)base + row * size;
      scales[j] = 1.0f;
      if (EXTRA) std::memcpy(scales + j, base + call.page_size * size + row * EXTRA, 4);
      if (++row == call.page_size) row = 0, ++page;
    }
    const C* const* keys = rows_as<C>(rows, count, call.d, desk.keys, wide);
    multiply(call, desk, padded, keys, count);
    add_up(call, u, desk, padded, scales, k0, count);
  }
}

template <class Q, class K, class C>
void index_scores(const Call& call) {
  const Scratch scratch(Memory<C>(nullptr, call).needed());
  const Memory<C> memory(scratch.data(), call);
  int64_t at = 0, cost = 0;
  units_of(call, [&](const Unit& u) {
    memory.units[at++] = u;
    cost += (u.last - u.first) * call.d * (int64_t(sizeof(K)) + u.rows * call.heads / 8);
  });
  parallel_each(memory.count, cost, [&](int64_t i, int64_t thread) {
    score<Q, K, C>(call, memory.units[i], memory.desks + thread * memory.desk);
  });
}

}  // namespace
}  // namespace ds

using namespace ds;

void ds_cpu_index_scores(int32_t dtype, int32_t index_dtype, const void* q, int64_t heads,
                         int64_t d, const float* weights, int64_t ld_weights, const void* cache,
                         int64_t page_size, const int32_t* pages, int64_t max_pages,
                         const int32_t* owners, const int32_t* lens, float* out, int64_t width,
                         int64_t rows) {
  const Call call{q,         heads,  d,    weights, ld_weights, cache, page_size, pages,
                  max_pages, owners, lens, out,     width,      rows};
  if (index_dtype == DS_E2M1)
    return (dtype == DS_F32 ? index_scores<float, e2m1, float>
                            : index_scores<bf16, e2m1, Bf16Math>)(call);
  (index_dtype == DS_F32    ? index_scores<float, float, float>
   : index_dtype == DS_BF16 ? index_scores<bf16, bf16, Bf16Math>
                            : index_scores<e4m3, e4m3, Bf16Math>)(call);
}
