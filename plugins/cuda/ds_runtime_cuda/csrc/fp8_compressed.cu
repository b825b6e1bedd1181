// Makes the tiles of fp8_compressed.cuh: first how long the longest list would be, then tiles of a size for it.
//
// Compiled at run time with: ARGS (bytes of the arguments), OTHERS_AT and MOST_OTHERS (where a tile's list
// begins, and its longest).

#include "hopper.cuh"
#include "fp8_compressed.cuh"

using namespace fp8_compressed;

namespace {

struct Args {
  const u8* weight;  // e4m3 [rows, columns]
  u8* tiles;         // [row block][columns / 128][of `halves`], each of `stride` bytes
  int* most;         // [9] entries of the longest list, by the lowest exponent
  int columns, stride, lowest;
  int halves, half;  // matrices of `half` row blocks each whose tiles lie in turns
};
static_assert(sizeof(Args) == ARGS, "as the caller lays them out");
static_assert(kOthers == OTHERS_AT && kMostOthers == MOST_OTHERS, "as the caller counts them");

constexpr int kExponents = 16, kWindow = 8;

struct Block {
  u8 weight[kSide][kSide + 16];
  int counts[8][kExponents];
  int found[8];
};

__device__ __forceinline__ int exponent(u32 weight) { return weight >> 3 & 15; }

// The block's tile, and how often exponents come in it.
__device__ __forceinline__ void load(const Args& a, Block& b) {
  const int warp = threadIdx.x >> 5;
  if (threadIdx.x < 8 * kExponents) b.counts[0][threadIdx.x] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < kSide * 8; i += 256) {
    const int row = i / 8, at = i % 8 * 16;
    const long long from = ((long long)blockIdx.x * kSide + row) * a.columns;
    const uint4 words =
        *reinterpret_cast<const uint4*>(a.weight + from + blockIdx.y * kSide + at);
    *reinterpret_cast<uint4*>(&b.weight[row][at]) = words;
    const u32 each[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int j = 0; j < 16; ++j) atomicAdd(&b.counts[warp][exponent(each[j / 4] >> j % 4 * 8)], 1);
  }
  __syncthreads();
}

}  // namespace

// Grid (row blocks, columns / 128), here and below.
extern "C" __global__ void __launch_bounds__(256) measure(const __grid_constant__ Args a) {
  await();
  __shared__ alignas(16) Block b;
  load(a, b);
  if (threadIdx.x > kExponents - kWindow) return;
  int others = 0;
  for (int e = 0; e < kExponents; ++e)
    if (u32(e - threadIdx.x) >= kWindow)
      for (int w = 0; w < 8; ++w) others += b.counts[w][e];
  atomicMax(a.most + threadIdx.x, others);
}

extern "C" __global__ void __launch_bounds__(256) encode(const __grid_constant__ Args a) {
  await();
  __shared__ alignas(16) Block b;
  load(a, b);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, lowest = a.lowest;
  const long long block = blockIdx.x / (a.halves * a.half) * a.half + blockIdx.x % a.half;
  const int half = blockIdx.x / a.half % a.halves;
  u8* tile = a.tiles + ((block * gridDim.y + blockIdx.y) * a.halves + half) * a.stride;
  // As a lane's operands have them: byte j of word w.
  auto weight = [&](int w, int j) -> u32 {
    const int row = warp * 16 + (w & 1) * 8 + (lane >> 2);
    return b.weight[row][(w >> 2) * 32 + (w >> 1 & 1) * 16 + (lane & 3) * 4 + j];
  };
  auto apart = [&](u32 one) { return u32(exponent(one) - lowest) >= kWindow; };
  u32 words[16];
  int own = 0;
#pragma unroll
  for (int w = 0; w < 16; ++w) {
    words[w] = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const u32 one = weight(w, j);
      const int distance = apart(one) ? 0 : exponent(one) - lowest;
      own += apart(one);
      words[w] |= ((one & 0x87) | distance << 3) << 8 * j;
    }
  }
  int before = own;  // entries of the warp's lanes up to this one
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int lower = __shfl_up_sync(~0u, before, step);
    if (lane >= step) before += lower;
  }
  if (lane == 31) b.found[warp] = before;
  __syncthreads();
  int begin = 0;
  for (int w = 0; w < warp; ++w) begin += b.found[w];
  u16* list = reinterpret_cast<u16*>(tile + kOthers);
  const int end = begin + b.found[warp];
  if (lane == 0)
    reinterpret_cast<u16*>(tile + kEnds)[warp] = end;
  int next = begin + before - own;
#pragma unroll
  for (int w = 0; w < 16; ++w) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const u32 one = weight(w, j);
      if (apart(one))
        list[next++] = u16(other(lane, w, j, exponent(one)));
    }
  }
  if (warp == 7)
    for (int i = end + lane; i < (a.stride - kOthers) / 2; i += 32) list[i] = 0;
  u32 code[14];
#pragma unroll
  for (int g = 0; g < 2; ++g) {
    const u32* of = words + 8 * g;
    code[7 * g] = of[0] | (of[7] & 0x80808080) >> 1;
#pragma unroll
    for (int j = 1; j < 7; ++j) code[7 * g + j] = of[j] | (of[7] & (0x40404040 >> j)) << j;
  }
  u8* to = tile + warp * kWarpBytes;
#pragma unroll
  for (int i = 0; i < 3; ++i)
    reinterpret_cast<uint4*>(to)[32 * i + lane] = {code[4 * i], code[4 * i + 1], code[4 * i + 2],
                                                   code[4 * i + 3]};
  reinterpret_cast<uint2*>(to + 3 * 512)[lane] = {code[12], code[13]};
}
