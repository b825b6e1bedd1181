// Kernels of up to eight tokens whose warps read 16 rows of tiles of packed12.cuh straight into
// registers, several tiles ahead, and widen them for mma.

#include "packed12.cuh"

namespace packed12 {

constexpr int kAhead = 3;  // tiles whose bytes a warp has on their way, twice

__device__ __forceinline__ void multiply(float (&d)[4], const u32* w, u32 x0, u32 x1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9},"
      " {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "r"(x0), "r"(x1));
}

// A warp's 16 rows of a run of tiles, `pitch` bytes apart. TOKENS: 1, which is in every column of the
// product, or up to 8.
template <int TOKENS>
struct Rows {
  const u8* tiles;
  long long pitch;
  int count, sixteen, lane;
  float lift;
  Codes first[kAhead], second[kAhead];
  float sums[4] = {};  // of row lane / 4 and tokens 2 (lane % 4) and one more; of 8 rows more

  __device__ __forceinline__ void read(Codes& codes, const u8* tile) {
    const uint4* from = reinterpret_cast<const uint4*>(tile + sixteen * kWarpBytes) + lane;
    codes.low[0] = __ldcs(from);
    codes.low[1] = __ldcs(from + 32);
    codes.high = __ldcs(from + 64);
    codes.other = __ldg(reinterpret_cast<const u32*>(tile + 8 * kWarpBytes) + lane);
  }
  __device__ __forceinline__ void read(Codes (&to)[kAhead], int from) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      if (from + i < count) read(to[i], tiles + (from + i) * pitch);
  }
  // x: a tile's values of the first token; from one to the next `line`.
  __device__ __forceinline__ void use(const Codes& codes, const u16* x, int line, int tokens) {
    u32 words[16];
    widen(codes, words);
    const int token = TOKENS == 1 ? 0 : lane >> 2;
    const u32* at = reinterpret_cast<const u32*>(x + token * line) + (lane & 3);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const u32 x0 = token < tokens ? at[8 * j] : 0, x1 = token < tokens ? at[8 * j + 4] : 0;
      multiply(sums, words + 4 * j, x0, x1);
    }
    u32 left = __ballot_sync(~0u, (codes.other & kUsed) && int(codes.other >> 4 & 7) == sixteen);
    while (left) {
      const u32 one = __shfl_sync(~0u, codes.other, __ffs(left) - 1);
      left &= left - 1;
      if (int(one & 7) != lane >> 2) continue;
      const float missing = __int_as_float(one & 0xFFFF0000) * lift - kSmallest;
#pragma unroll
      for (int i = 0; i < (TOKENS == 1 ? 1 : 2); ++i) {
        const int to = TOKENS == 1 ? 0 : 2 * (lane & 3) + i;
        if (to >= tokens) continue;
        const float value = __int_as_float(u32(x[to * line + (one >> 7 & 63)]) << 16) * missing;
        if (one & 8)
          sums[2 + i] += value;
        else
          sums[i] += value;
      }
    }
  }
  __device__ __forceinline__ void use(const Codes (&codes)[kAhead], int from, const u16* x,
                                      int line, int tokens) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      if (from + i < count) use(codes[i], x + (from + i) * kTileColumns, line, tokens);
  }
  __device__ __forceinline__ void begin() {
    read(first, 0);
    read(second, kAhead);
  }
  // x: values of the run's first tile, in on-chip memory.
  __device__ __forceinline__ void finish(const u16* x, int line, int tokens) {
    for (int at = 0; at < count; at += 2 * kAhead) {
      use(first, at, x, line, tokens);
      read(first, at + 2 * kAhead);
      use(second, at + kAhead, x, line, tokens);
      read(second, at + 3 * kAhead);
    }
  }
};

}  // namespace packed12
