// The matrix registers' part of a Tile: scores (scores_amx.h); 16 queries by 16 columns to a tile.
#pragma once

#include "attend.h"

#if DS_AMX

namespace ds {

template <class C>
void Tile<C>::matrix_score(const C* const* key) {
  const MatrixScores<C> scores{queries_, d_, words_, padded_, staged_, ahead_, scores_};
  scores.all(key, [&](int64_t v) { return sees((v + 1) * L - 1); });
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
