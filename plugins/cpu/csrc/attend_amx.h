// The matrix registers' part of a Tile: 16 keys by 16 queries, or 16 queries by 16 columns, to a tile.
#pragma once

#include "attend.h"

#if DS_AMX

namespace ds {

// As score(), 16 keys by 16 queries to a tile: keys are read as they lie, or from a copy where
// they are not evenly spaced, not whole tiles long, or fewer than sixteen.
template <class C>
void Tile<C>::matrix_score(const C* const* key) {
  constexpr int GROUPS = KEYS / 16;
  const C* at[GROUPS];
  int64_t stride[GROUPS];  // in bytes
  const int last = sees(padded_ - 1), groups = (last + 15) / 16;
  for (int g = 0; g < groups; ++g) {
    const C* const* k = key + 16 * g;
    const int count = last - 16 * g < 16 ? last - 16 * g : 16;
    const int64_t step = count < 16 ? 0 : k[1] - k[0];
    bool even = count == 16 && d_ % 32 == 0;
    for (int j = 2; even && j < 16; ++j) even = k[j] - k[j - 1] == step;
    at[g] = even ? k[0] : stage(k, count, g);
    stride[g] = (even ? step : words_ * N) * int64_t(sizeof(C));
  }
  MatrixUnit::written();
  const int64_t vectors = padded_ / L;
  for (int64_t v = 0; v < vectors;) {
    const int two = v + 1 < vectors;
    const int need = (sees((v + 1 + two) * L - 1) + 15) / 16;
    if (two)
      for (int g = 0; g < need; g += 2) score_2x2(at + g, stride + g, need - g > 1, g, v);
    else
      for (int g = 0; g < need; g += 4) score_4x1(at + g, stride + g, need - g, g, v);
    v += 1 + two;
  }
}

template <class C>
const C* Tile<C>::stage(const C* const* key, int count, int group) {
  C* to = staged_ + group * 16 * words_ * N;
  std::memset((void*)to, 0, size_t(16 * words_ * N) * sizeof(C));
  for (int j = 0; j < count; ++j) widen_row(key[j], to + j * words_ * N, d_);
  return to;
}

template <class C>
void Tile<C>::score_2x2(const C* const* at, const int64_t* stride, bool both, int group, int64_t v) {
  const C *k0 = at[0], *k1 = at[both];
  const int64_t s0 = stride[0], s1 = stride[both], row = padded_ * 4;
  const char* q = (const char*)(queries_ + v * L * N);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t w = 0; w < words_; w += 16) {
    ahead_.step(MATRIX_STEP);
    _tile_loadd(4, k0 + w * N, s0);
    _tile_loadd(6, q + w * row, row);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, q + w * row + 64, row);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, k1 + w * N, s1);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  float* s = scores_ + group * 16 * padded_ + v * L;
  _tile_stored(0, s, row);
  _tile_stored(1, s + L, row);
  if (!both) return;
  _tile_stored(2, s + 16 * padded_, row);
  _tile_stored(3, s + 16 * padded_ + L, row);
}

template <class C>
void Tile<C>::score_4x1(const C* const* at, const int64_t* stride, int count, int group, int64_t v) {
  const int i1 = count > 1, i2 = count > 2 ? 2 : 0, i3 = count > 3 ? 3 : 0;
  const int64_t row = padded_ * 4;
  const char* q = (const char*)(queries_ + v * L * N);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t w = 0; w < words_; w += 16) {
    ahead_.step(MATRIX_STEP);
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
  float* s = scores_ + group * 16 * padded_ + v * L;
  _tile_stored(0, s, row);
  if (i1) _tile_stored(1, s + 16 * padded_, row);
  if (i2) _tile_stored(2, s + 32 * padded_, row);
  if (i3) _tile_stored(3, s + 48 * padded_, row);
}

template <class C>
void Tile<C>::matrix_accumulate(int64_t c, const C* panel) {
  MatrixUnit::written();
  const int64_t vectors = padded_ / L, tiles = (columns_ - c < PANEL ? columns_ - c : PANEL) / L;
  for (int64_t v = 0; v < vectors;) {
    const int two = v + 1 < vectors;
    const int words = int(up_to(sees((v + 1 + two) * L - 1), 32)) / N;
    if (two)
      for (int64_t t = 0; t < tiles; t += 2) sum_2x2(v, c + t * L, panel + t * L * N, tiles - t > 1, words);
    else
      sum_1x4(v, c, panel, int(tiles), words);
    v += 1 + two;
  }
}

template <class C>
void Tile<C>::sum_2x2(int64_t v, int64_t c, const C* panel, bool both, int words) {
  const int64_t row = stride_ * 4, b = both ? 64 : 0;
  float *o0 = sums_ + v * L * stride_ + c, *o1 = o0 + 16 * stride_;
  const C *p0 = turned_ + v * L * KEYS, *p1 = p0 + 16 * KEYS;
  const char* y = (const char*)panel;
  if (fresh_) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, o0, row);
    _tile_loadd(1, (char*)o0 + b, row);
    _tile_loadd(2, o1, row);
    _tile_loadd(3, (char*)o1 + b, row);
  }
  for (int w = 0; w < words; w += 16) {
    ahead_.step(MATRIX_STEP);
    _tile_loadd(4, p0 + w * N, KEYS * 2);
    _tile_loadd(6, y + w * PANEL * 4, PANEL * 4);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, y + w * PANEL * 4 + b, PANEL * 4);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, p1 + w * N, KEYS * 2);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, o0, row);
  _tile_stored(2, o1, row);
  if (!both) return;
  _tile_stored(1, o0 + L, row);
  _tile_stored(3, o1 + L, row);
}

template <class C>
void Tile<C>::sum_1x4(int64_t v, int64_t c, const C* panel, int tiles, int words) {
  const int64_t row = stride_ * 4, b1 = tiles > 1 ? 64 : 0, b2 = tiles > 2 ? 128 : 0,
                b3 = tiles > 3 ? 192 : 0;
  float* o = sums_ + v * L * stride_ + c;
  const C* p = turned_ + v * L * KEYS;
  const char* y = (const char*)panel;
  if (fresh_) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, o, row);
    _tile_loadd(1, (char*)o + b1, row);
    _tile_loadd(2, (char*)o + b2, row);
    _tile_loadd(3, (char*)o + b3, row);
  }
  for (int w = 0; w < words; w += 16, y += 16 * PANEL * 4) {
    ahead_.step(MATRIX_STEP);
    _tile_loadd(4, p + w * N, KEYS * 2);
    _tile_loadd(5, y, PANEL * 4);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(6, y + b1, PANEL * 4);
    _tile_dpbf16ps(1, 4, 6);
    _tile_loadd(7, y + b2, PANEL * 4);
    _tile_dpbf16ps(2, 4, 7);
    _tile_loadd(5, y + b3, PANEL * 4);
    _tile_dpbf16ps(3, 4, 5);
  }
  _tile_stored(0, o, row);
  if (b1) _tile_stored(1, o + L, row);
  if (b2) _tile_stored(2, o + 2 * L, row);
  if (b3) _tile_stored(3, o + 3 * L, row);
}

}  // namespace ds

#endif
