// AMX's tile registers as memory of each thread, for tests on processors without them. A build with
// DS_EMULATE_AMX includes this before every source, so that the kernels are the same sources.
//
// As Intel's Software Developer's Manual, volume 2, has LDTILECFG, TILELOADD, TILESTORED, TILEZERO,
// TILERELEASE, TDPBF16PS and TDPB{SS,SU,US,UU}D. What faults there ends the program here.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace amx_emulated {

struct Tile {
  int rows, bytes;  // as configured; what lies beyond them is zero
  alignas(64) uint8_t data[16][64];
};
struct Registers {
  bool configured;
  Tile tiles[8];
};
inline thread_local Registers registers;

[[noreturn]] inline void fault(const char* what) {
  std::fprintf(stderr, "AMX fault: %s\n", what);
  std::abort();
}

inline void release() { registers = Registers(); }

inline void configure(const void* memory) {
  uint8_t bytes[64];
  std::memcpy(bytes, memory, sizeof bytes);
  release();
  if (bytes[0] == 0) return;
  if (bytes[0] != 1) fault("a palette that is not 0 or 1");
  if (bytes[1] != 0) fault("a start row: nothing here was interrupted");
  for (int i = 2; i < 64; ++i) {  // 16-bit widths of eight tiles from 16 on, heights from 48 on
    const bool used = (i >= 16 && i < 32) || (i >= 48 && i < 56);
    if (!used && bytes[i]) fault("a reserved byte that is not zero");
  }
  for (int i = 0; i < 8; ++i) {
    Tile& tile = registers.tiles[i];
    tile.rows = bytes[48 + i];
    tile.bytes = bytes[16 + 2 * i] | bytes[17 + 2 * i] << 8;
    if (tile.rows > 16 || tile.bytes > 64) fault("a tile of more than 16 rows or 64 bytes");
    if ((tile.rows == 0) != (tile.bytes == 0)) fault("a tile of rows without bytes, or the other way");
  }
  registers.configured = true;
}

template <int I>
inline Tile& tile() {
  static_assert(I >= 0 && I < 8, "there are eight tiles");
  if (!registers.configured) fault("tiles that are not configured");
  if (registers.tiles[I].rows == 0) fault("a tile without rows");
  return registers.tiles[I];
}

template <int I>
inline void zero() {
  std::memset(tile<I>().data, 0, sizeof(Tile::data));
}

template <int I>
inline void load(const void* from, int64_t stride) {
  Tile& to = tile<I>();
  zero<I>();
  for (int r = 0; r < to.rows; ++r)
    std::memcpy(to.data[r], (const char*)from + r * stride, size_t(to.bytes));
}

template <int I>
inline void store(void* to, int64_t stride) {
  const Tile& from = tile<I>();
  for (int r = 0; r < from.rows; ++r)
    std::memcpy((char*)to + r * stride, from.data[r], size_t(from.bytes));
}

inline float as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// A row of sums: of all pairs the first elements and the second ones are summed apart, from zero, and
// both sums together are added.
struct Bf16 {
  using Sum = float;
  static void row(float* sums, const uint8_t* a, const uint8_t (*b)[64], int depth) {
    float first[16] = {}, second[16] = {};
    for (int k = 0; k < depth; ++k) {
      uint32_t x, y[16];
      std::memcpy(&x, a + 4 * k, 4);
      std::memcpy(y, b[k], 64);
      for (int n = 0; n < 16; ++n) {
        first[n] = __builtin_fmaf(as_float(x << 16), as_float(y[n] << 16), first[n]);
        second[n] = __builtin_fmaf(as_float(x & 0xffff0000), as_float(y[n] & 0xffff0000), second[n]);
      }
    }
    for (int n = 0; n < 16; ++n) sums[n] += first[n] + second[n];
  }
};

// Four products of bytes at a time, in sums that wrap.
template <class X, class Y>
struct Bytes {
  using Sum = uint32_t;
  static void row(uint32_t* sums, const uint8_t* a, const uint8_t (*b)[64], int depth) {
    for (int k = 0; k < depth; ++k)
      for (int n = 0; n < 16; ++n)
        for (int i = 0; i < 4; ++i)
          sums[n] += uint32_t(int(X(a[4 * k + i])) * int(Y(b[k][4 * n + i])));
  }
};

template <class Dots>
__attribute__((noinline)) void multiply(Tile& to, const Tile& a, const Tile& b) {
  for (int r = 0; r < to.rows; ++r) {
    typename Dots::Sum sums[16];
    std::memcpy(sums, to.data[r], sizeof sums);
    Dots::row(sums, a.data[r], b.data, a.bytes / 4);
    std::memset(to.data[r], 0, sizeof to.data[r]);
    std::memcpy(to.data[r], sums, size_t(to.bytes));
  }
}

template <class Dots, int TO, int A, int B>
inline void dots() {
  static_assert(TO != A && TO != B && A != B, "three tiles");
  Tile& to = tile<TO>();
  const Tile &a = tile<A>(), &b = tile<B>();
  if (to.bytes % 4 || a.bytes % 4 || b.bytes % 4) fault("rows that are not whole words");
  if (to.rows != a.rows || to.bytes != b.bytes || a.bytes / 4 != b.rows)
    fault("tiles whose shapes do not fit");
  // To the nearest, subnormal numbers read and written as zeros, whatever the thread's state is,
  // which stays as it is.
  const unsigned before = _mm_getcsr();
  _mm_setcsr(0x9fc0);
  multiply<Dots>(to, a, b);
  _mm_setcsr(before);
}

}  // namespace amx_emulated

#define __AMX_TILE__ 1
#define __AMX_BF16__ 1
#define __AMX_INT8__ 1

// The compiler's own are functions or macros that need its flags.
#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#undef _tile_dpbsud
#undef _tile_dpbusd
#undef _tile_dpbuud
#define _tile_loadconfig(memory) amx_emulated::configure(memory)
#define _tile_release() amx_emulated::release()
#define _tile_zero(t) amx_emulated::zero<t>()
#define _tile_loadd(t, from, stride) amx_emulated::load<t>(from, stride)
#define _tile_stored(t, to, stride) amx_emulated::store<t>(to, stride)
#define _tile_dpbf16ps(t, a, b) amx_emulated::dots<amx_emulated::Bf16, t, a, b>()
#define _tile_dpbssd(t, a, b) amx_emulated::dots<amx_emulated::Bytes<int8_t, int8_t>, t, a, b>()
#define _tile_dpbsud(t, a, b) amx_emulated::dots<amx_emulated::Bytes<int8_t, uint8_t>, t, a, b>()
#define _tile_dpbusd(t, a, b) amx_emulated::dots<amx_emulated::Bytes<uint8_t, int8_t>, t, a, b>()
#define _tile_dpbuud(t, a, b) amx_emulated::dots<amx_emulated::Bytes<uint8_t, uint8_t>, t, a, b>()
