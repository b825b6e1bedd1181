// Dot products on the matrix registers, 16 keys by 16 queries to a tile.
#pragma once

#include "scores.h"

namespace ds {

// The matrix registers, eight tiles of 16 rows by 64 bytes, while it lives.
struct MatrixUnit {
#if DS_AMX
  MatrixUnit() {
    struct alignas(64) {
      uint8_t palette = 1, start = 0, none[14] = {};
      uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } shape;
    written();
    _tile_loadconfig(&shape);
  }
  ~MatrixUnit() { _tile_release(); }
  // The compiler does not see that tiles are loaded from memory: what they read is written before.
  static void written() { asm volatile("" ::: "memory"); }
#else
  MatrixUnit() {}
  ~MatrixUnit() {}
#endif
  MatrixUnit(const MatrixUnit&) = delete;
};

// Whether words of C are multiplied there.
template <class C>
constexpr bool MATRIX = DS_AMX && Word<C>::N == 2;

constexpr int MATRIX_STEP = 192;  // four tiles of dot products, as products of vectors

#if DS_AMX

// Of up to KEYS keys with all packed queries: to [keys][padded]. The caller holds a MatrixUnit.
template <class C>
struct MatrixScores {
  static constexpr int N = Word<C>::N, L = F::W;

  const C* queries;  // as pack_queries leaves them
  int64_t d, words, padded;
  C* staged;  // [KEYS][words]
  RowsAhead& ahead;
  float* to;

  // Vector v of the queries wants the first sees(v) keys, no fewer than the one before it. Keys are
  // read as they lie, or from a copy where they are not evenly spaced, not whole tiles long, or
  // fewer than sixteen.
  template <class Sees>
  void all(const C* const* key, Sees sees) const {
    constexpr int GROUPS = KEYS / 16;
    const C* at[GROUPS];
    int64_t stride[GROUPS];  // in bytes
    const int64_t vectors = padded / L;
    const int last = sees(vectors - 1), groups = (last + 15) / 16;
    for (int g = 0; g < groups; ++g) {
      const C* const* k = key + 16 * g;
      const int count = last - 16 * g < 16 ? last - 16 * g : 16;
      const int64_t step = count < 16 ? 0 : k[1] - k[0];
      bool even = count == 16 && d % 32 == 0;
      for (int j = 2; even && j < 16; ++j) even = k[j] - k[j - 1] == step;
      at[g] = even ? k[0] : stage(k, count, g);
      stride[g] = (even ? step : words * N) * int64_t(sizeof(C));
    }
    MatrixUnit::written();
    for (int64_t v = 0; v < vectors;) {
      const int two = v + 1 < vectors;
      const int need = (sees(v + two) + 15) / 16;
      if (two)
        for (int g = 0; g < need; g += 2) score_2x2(at + g, stride + g, need - g > 1, g, v);
      else
        for (int g = 0; g < need; g += 4) score_4x1(at + g, stride + g, need - g, g, v);
      v += 1 + two;
    }
  }

 private:
  const C* stage(const C* const* key, int count, int group) const {
    C* copy = staged + group * 16 * words * N;
    std::memset((void*)copy, 0, size_t(16 * words * N) * sizeof(C));
    for (int j = 0; j < count; ++j) widen_row(key[j], copy + j * words * N, d);
    return copy;
  }

  void score_2x2(const C* const* at, const int64_t* stride, bool both, int group, int64_t v) const {
    const C *k0 = at[0], *k1 = at[both];
    const int64_t s0 = stride[0], s1 = stride[both], row = padded * 4;
    const char* q = (const char*)(queries + v * L * N);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t w = 0; w < words; w += 16) {
      ahead.step(MATRIX_STEP);
      _tile_loadd(4, k0 + w * N, s0);
      _tile_loadd(6, q + w * row, row);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, q + w * row + 64, row);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, k1 + w * N, s1);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    float* s = to + group * 16 * padded + v * L;
    _tile_stored(0, s, row);
    _tile_stored(1, s + L, row);
    if (!both) return;
    _tile_stored(2, s + 16 * padded, row);
    _tile_stored(3, s + 16 * padded + L, row);
  }

  void score_4x1(const C* const* at, const int64_t* stride, int count, int group, int64_t v) const {
    const int i1 = count > 1, i2 = count > 2 ? 2 : 0, i3 = count > 3 ? 3 : 0;
    const int64_t row = padded * 4;
    const char* q = (const char*)(queries + v * L * N);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t w = 0; w < words; w += 16) {
      ahead.step(MATRIX_STEP);
      _tile_loadd(6, q + w * row, row);
      _tile_loadd(4, at[0] + w * N, stride[0]);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(5, at[i1] + w * N, stride[i1]);
      _tile_dpbf16ps(1, 5, 6);
      _tile_loadd(4, at[i2] + w * N, stride[i2]);
      _tile_dpbf16ps(2, 4, 6);
      _tile_loadd(5, at[i3] + w * N, stride[i3]);
      _tile_dpbf16ps(3, 5, 6);
    }
    float* s = to + group * 16 * padded + v * L;
    _tile_stored(0, s, row);
    if (i1) _tile_stored(1, s + 16 * padded, row);
    if (i2) _tile_stored(2, s + 32 * padded, row);
    if (i3) _tile_stored(3, s + 48 * padded, row);
  }
};

#endif

}  // namespace ds
