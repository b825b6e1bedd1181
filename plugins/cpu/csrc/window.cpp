// What stands around attention over a window and compressed entries: norms and rotations of heads, and
// the rows that a token sees, gathered for mla_decode.cpp.
#include "ds_cpu.h"
#include "heads.h"
#include "parallel.h"

namespace ds {
namespace {

struct Heads {
  int64_t stride_row, stride_head;
  const int64_t* positions;
  const float* table;
  int64_t rows, heads, d, r;

  // body(a head as float32 [d], its row)
  template <class T, class Body>
  void each(const void* x, void* out, Body body) const {
    parallel(rows * heads, 1, 4 * rows * heads * d * int64_t(sizeof(T)), [&](int64_t i, int64_t end) {
      alignas(64) float y[MOST_DIMS];
      for (; i < end; ++i) {
        const T* from = (const T*)x + i / heads * stride_row + i % heads * stride_head;
        widen_row(from, y, d);
        body(y, i / heads);
        put_all(y, (T*)out + i * d, d);
      }
    });
  }
};

template <class T>
void norm_rope(const Heads& all, const void* x, const float* weight, double eps, int64_t group,
               void* out) {
  const int64_t d = all.d, r = all.r;
  all.each<T>(x, out, [&](float* y, int64_t row) {
    norm_turn(y, d, weight, eps, all.table + all.positions[row] * r, r, group);
  });
}

template <class T>
void rope_back(const Heads& all, const void* x, void* out) {
  all.each<T>(x, out, [&](float* y, int64_t row) {
    turn(y, all.d, all.table + all.positions[row] * all.r, all.r, true);
  });
}

struct Seen {
  const void* kv;  // or null
  int64_t ldkv;
  const void* recent;
  int64_t entries;
  const int64_t *positions, *blocks;
  int64_t window;
  const void* compressed;
  const int32_t* slots;
  int64_t ld, n, width, first;
  int32_t* lens;
  int64_t rows;
};

template <class T, class K>
void window_rows(const Seen& s, void* out) {
  const int64_t most = s.window + s.n;
  parallel(s.rows, 1, 2 * s.rows * most * s.width * int64_t(sizeof(T)), [&](int64_t i, int64_t end) {
    for (; i < end; ++i) {
      const int64_t t = s.first + i, p = s.positions[t], block = s.blocks[t];
      s.lens[i] = 0;
      if (block < 0) continue;
      T* to = (T*)out + i * most * s.width;
      auto add = [&](const auto* from) {
        widen_row(from, to + s.lens[i]++ * s.width, s.width);
      };
      for (int64_t back = s.window - 1 < p ? s.window - 1 : p; back >= 0; --back) {
        if (s.kv && t >= back && s.blocks[t - back] == block)
          add((const T*)s.kv + (t - back) * s.ldkv);
        else
          add((const K*)s.recent + (block * s.entries + (p - back) % s.entries) * s.width);
      }
      for (int64_t j = 0; j < s.n; ++j)
        if (const int64_t slot = s.slots[t * s.ld + j]; slot >= 0)
          add((const K*)s.compressed + slot * s.width);
    }
  });
}

}  // namespace
}  // namespace ds

using namespace ds;

void ds_cpu_norm_rope(int32_t dtype, const void* x, int64_t stride_row, int64_t stride_head,
                      const float* weight, double eps, const int64_t* positions,
                      const float* cos_sin, int64_t group, void* out, int64_t rows, int64_t heads,
                      int64_t d, int64_t rope) {
  const Heads all{stride_row, stride_head, positions, cos_sin, rows, heads, d, rope};
  (dtype == DS_F32 ? norm_rope<float> : norm_rope<bf16>)(all, x, weight, eps, group, out);
}

void ds_cpu_rope_back(int32_t dtype, const void* x, int64_t stride_row, int64_t stride_head,
                      const int64_t* positions, const float* cos_sin, void* out, int64_t rows,
                      int64_t heads, int64_t d, int64_t rope) {
  const Heads all{stride_row, stride_head, positions, cos_sin, rows, heads, d, rope};
  (dtype == DS_F32 ? rope_back<float> : rope_back<bf16>)(all, x, out);
}

void ds_cpu_window_rows(int32_t dtype, int32_t kv_dtype, const void* kv, int64_t ldkv,
                        const void* recent, int64_t entries, const int64_t* positions,
                        const int64_t* blocks, int64_t window, const void* compressed,
                        const int32_t* slots, int64_t ld, int64_t n, int64_t width, int64_t first,
                        void* out, int32_t* lens, int64_t rows) {
  const Seen seen{kv,         ldkv,  recent, entries, positions, blocks, window,
                  compressed, slots, ld,     n,       width,     first,  lens, rows};
  if (kv_dtype == DS_E4M3)
    (dtype == DS_F32 ? window_rows<float, e4m3> : window_rows<bf16, e4m3>)(seen, out);
  else
    (dtype == DS_F32 ? window_rows<float, float> : window_rows<bf16, bf16>)(seen, out);
}
