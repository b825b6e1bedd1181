// Multi-head attention of new tokens, by tiles of queries of one head of one sequence.
#include "attend.h"
#include "ds_cpu.h"
#include "parallel.h"
#include "scratch.h"

namespace ds {
namespace {

constexpr int64_t ROWS = 64;  // queries of a tile

struct Matrix {  // [tokens, heads, d]
  const void* data;
  int64_t stride_row, stride_head, d;
  template <class T>
  const T* at(int64_t row, int64_t head) const {
    return (const T*)data + row * stride_row + head * stride_head;
  }
};

struct Call {
  Matrix q, k, v;
  const int32_t *q_starts, *k_starts;
  bool causal;
  float scale;
  void* out;
  float* lse;
  int64_t sequences, heads;
};

// Working memory of a thread.
template <class C>
struct Desk {
  Tile<C> tile;
  float* sums;
  Desk(Arena& arena, const Call& call)
      : tile(arena, ROWS, call.q.d, call.v.d),
        sums(arena.take<float>(ROWS * tile.stride())) {}
};

// Queries [row, row + rows) of sequence i and one head.
template <class T, class C>
void attend(const Call& call, int64_t i, int64_t head, int64_t row, int64_t rows, void* memory) {
  Arena arena(memory);
  Desk<C> desk(arena, call);
  Tile<C>& tile = desk.tile;
  MatrixUnit matrix;
  const int64_t q0 = call.q_starts[i], queries = call.q_starts[i + 1] - q0;
  const int64_t k0 = call.k_starts[i], keys = call.k_starts[i + 1] - k0;
  auto sees = [&](int64_t m) {
    const int64_t n = call.causal ? row + m + 1 + keys - queries : keys;
    return int32_t(n < 0 ? 0 : n);
  };
  auto query = [&](int64_t m) { return call.q.at<T>(q0 + row + m, head); };
  tile.template begin<T>(rows, call.scale, desk.sums, query, sees);
  const int64_t last = sees(rows - 1);
  const T *key[2][KEYS], *value[2][KEYS];
  auto next = [&](int64_t j0, const T** keys, const T** values) {
    const int count = int(last - j0 < KEYS ? last - j0 : KEYS);
    for (int j = 0; j < count; ++j) {
      keys[j] = call.k.at<T>(k0 + j0 + j, head);
      values[j] = call.v.at<T>(k0 + j0 + j, head);
    }
    return count;
  };
  int count = next(0, key[0], value[0]);
  for (int64_t j0 = 0, i = 0; j0 < last; j0 += KEYS, i = 1 - i) {
    const int later = next(j0 + KEYS, key[1 - i], value[1 - i]);
    RowsAhead ahead;
    ahead.add(key[1 - i], call.k.d, later).add(value[1 - i], call.v.d, later);
    tile.block(key[i], value[i], j0, count, ahead);
    count = later;
  }
  for (int64_t m = 0; m < rows; ++m) {
    const int64_t at = (q0 + row + m) * call.heads + head;
    const float total = tile.total()[m];
    T* out = (T*)call.out + at * call.v.d;
    if (total == 0.0f) {  // no key, or none of weight
      for (int64_t c = 0; c < call.v.d; ++c) put(out + c, 0.0f);
      call.lse[at] = -INFINITY;
    } else {
      store_scaled(desk.sums + m * tile.stride(), 1.0f / total, out, call.v.d);
      call.lse[at] = (tile.top()[m] + std::log2(total)) * 0.69314718f;
    }
  }
}

template <class C>
int64_t desk_bytes(const Call& call) {
  Arena arena(nullptr);
  Desk<C> desk(arena, call);
  return arena.used();
}

template <class T, class C>
void mha_prefill(const Call& call) {
  const int64_t desk = desk_bytes<C>(call);
  const Scratch scratch(desk * max_threads());
  char* desks = (char*)scratch.data();
  // All sequences' tiles in one row; those of one head follow each other, for they share its keys.
  int64_t units = 0, cost = 0;
  for (int64_t i = 0; i < call.sequences; ++i) {
    const int64_t queries = call.q_starts[i + 1] - call.q_starts[i];
    const int64_t keys = call.k_starts[i + 1] - call.k_starts[i];
    units += (queries + ROWS - 1) / ROWS * call.heads;
    cost += queries * keys * call.heads * (call.q.d + call.v.d) / (call.causal ? 16 : 8);
  }
  parallel_each(units, cost, [&](int64_t unit, int64_t thread) {
    int64_t i = 0, tiles = 0, queries = 0;
    for (;; ++i, unit -= tiles * call.heads) {
      queries = call.q_starts[i + 1] - call.q_starts[i];
      tiles = (queries + ROWS - 1) / ROWS;
      if (unit < tiles * call.heads) break;
    }
    const int64_t row = unit % tiles * ROWS, rows = queries - row < ROWS ? queries - row : ROWS;
    attend<T, C>(call, i, unit / tiles, row, rows, desks + thread * desk);
  });
}

}  // namespace
}  // namespace ds

using namespace ds;

void ds_cpu_mha_prefill(int32_t dtype, const void* q, int64_t q_row, int64_t q_head, const void* k,
                        int64_t k_row, int64_t k_head, const void* v, int64_t v_row,
                        int64_t v_head, const int32_t* q_starts, const int32_t* k_starts,
                        int32_t causal, double scale, void* out, float* lse, int64_t sequences,
                        int64_t heads, int64_t d, int64_t dv) {
  const Call call{{q, q_row, q_head, d},
                  {k, k_row, k_head, d},
                  {v, v_row, v_head, dv},
                  q_starts,
                  k_starts,
                  causal != 0,
                  float(scale),
                  out,
                  lse,
                  sequences,
                  heads};
  (dtype == DS_F32 ? mha_prefill<float, float> : mha_prefill<bf16, Bf16Math>)(call);
}
