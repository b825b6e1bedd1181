// Makes the tiles of packed12.cuh.
//
// Compiled at run time with: ARGS (bytes of the arguments).

#include "hopper.cuh"
#include "packed12.cuh"

using namespace packed12;

namespace {

struct Args {
  const u16* weight;   // bfloat16 [rows, columns]
  u8* tiles;           // [row block][columns / 64][of `halves`] of kTile bytes
  u64* counts;         // [256] of each exponent
  int* crowded;        // 1 if a tile has more others than it has room for
  long long rows;      // of all matrices
  int columns, lowest; // exponent of the 16
  int halves, half;    // matrices of `half` row blocks each whose tiles lie in turns
};
static_assert(sizeof(Args) == ARGS, "as the caller lays them out");

}  // namespace

// How often each exponent comes.
extern "C" __global__ void __launch_bounds__(256) count(const __grid_constant__ Args a) {
  await();
  __shared__ u32 own[8][256];
  for (int i = threadIdx.x; i < 8 * 256; i += 256) own[i / 256][i % 256] = 0;
  __syncthreads();
  const long long words = a.rows * a.columns / 8;
  const uint4* from = reinterpret_cast<const uint4*>(a.weight);
  u32* mine = own[threadIdx.x / 32];
  for (long long i = blockIdx.x * 256ll + threadIdx.x; i < words; i += gridDim.x * 256ll) {
    const uint4 w = from[i];
    const u32 each[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      atomicAdd(mine + (each[j] >> 7 & 255), 1);
      atomicAdd(mine + (each[j] >> 23 & 255), 1);
    }
  }
  __syncthreads();
  u32 sum = 0;
  for (int w = 0; w < 8; ++w) sum += own[w][threadIdx.x];
  if (sum) atomicAdd(reinterpret_cast<unsigned long long*>(a.counts) + threadIdx.x, sum);
}

// A block makes a tile: grid (row blocks, columns / 64).
extern "C" __global__ void __launch_bounds__(256) encode(const __grid_constant__ Args a) {
  await();
  __shared__ u16 bits[kTileRows][kTileColumns + 8];
  __shared__ u32 others[kOthers];
  __shared__ int found;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const long long first = (long long)blockIdx.x * kTileRows;
  if (threadIdx.x == 0) found = 0;
  if (threadIdx.x < kOthers) others[threadIdx.x] = 0;
  for (int i = threadIdx.x; i < kTileRows * 8; i += 256) {
    const int row = i / 8, at = i % 8 * 8;
    uint4 words = {};
    if (first + row < a.rows)
      words = *reinterpret_cast<const uint4*>(a.weight + (first + row) * a.columns +
                                              blockIdx.y * kTileColumns + at);
    else  // behind the last row: any weight that has a code
      words.x = words.y = words.z = words.w = a.lowest << 7 | a.lowest << 23;
    *reinterpret_cast<uint4*>(&bits[row][at]) = words;
  }
  __syncthreads();
  // The code of a weight: its low byte, and four bits: the sign and the upper three of the distance.
  auto code = [&](int row, int column, u32& low, u32& high) {
    const u32 w = bits[row][column];
    const int distance = int(w >> 7 & 255) - a.lowest;
    low = high = 0;
    if (distance < 0 || distance > 15) {
      const int at = atomicAdd(&found, 1);
      if (at < kOthers) others[at] = other(row, column, w);
      return;
    }
    low = (distance & 1) << 7 | (w & 127);
    high = w >> 15 << 7 | distance >> 1;
  };
  const long long block = blockIdx.x / (a.halves * a.half) * a.half + blockIdx.x % a.half;
  const int half = blockIdx.x / a.half % a.halves;
  u8* tile = a.tiles + ((block * gridDim.y + blockIdx.y) * a.halves + half) * kTile;
  u32 lows[4][2], highs[4];
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    lows[step][0] = lows[step][1] = highs[step] = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {  // as the words of an operand have them
      const int row = warp * 16 + (lane >> 2) + (i >> 1 & 1) * 8;
      const int column = step * 16 + (i >> 2) * 8 + (lane & 3) * 2 + (i & 1), j = i & 3;
      u32 low, high;
      code(row, column, low, high);
      lows[step][i >> 2] |= low << 8 * j;
      if (i < 4)
        highs[step] |= high << 8 * j;
      else  // found behind a turn by four bits
        highs[step] |= (high & 7) << (8 * j + 4) | (high >> 7) << (8 * ((j + 1) & 3) + 3);
    }
  }
  uint4* to = reinterpret_cast<uint4*>(tile + warp * kWarpBytes) + lane;
  to[0] = {lows[0][0], lows[0][1], lows[1][0], lows[1][1]};
  to[32] = {lows[2][0], lows[2][1], lows[3][0], lows[3][1]};
  to[64] = {highs[0], highs[1], highs[2], highs[3]};
  __syncthreads();
  if (threadIdx.x == 0) {
    const int count = min(found, kOthers);
    if (found > kOthers) *a.crowded = 1;
    for (int i = 1; i < count; ++i) {  // in one order, so that sums are the same every time
      const u32 one = others[i];
      int at = i;
      for (; at > 0 && (others[at - 1] & 0x1FFF) > (one & 0x1FFF); --at) others[at] = others[at - 1];
      others[at] = one;
    }
  }
  __syncthreads();
  if (threadIdx.x < kOthers)
    reinterpret_cast<u32*>(tile + 8 * kWarpBytes)[threadIdx.x] = others[threadIdx.x];
}
