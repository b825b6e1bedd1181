// Routed experts of up to three tokens from weights in tiles of packed12.cuh: every pair (token, choice)
// reads its own expert.
//
// Warps read their 16 rows straight into registers, several tiles ahead, and widen them for mma, whose
// columns all hold the one token. `gate_up` makes h, `down` a token's sum over its choices; its first
// weights are on their way before h is there.
//
// Compiled at run time with: ARGS (bytes of the arguments).

#include "hopper.cuh"
#include "packed12_rows.cuh"

using namespace packed12;

namespace {

constexpr int kMostWarps = 16;

struct Args {
  const u8* gate_up;  // [experts][inter / 128][hidden / 64][gate, up] tiles
  const u8* down;     // [experts][hidden / 128][inter / 64] tiles
  const u16* x;       // bfloat16 [tokens, hidden]
  u16* h;             // bfloat16 [pairs, inter]
  const float* weights;
  const int* ids;     // [tokens, top_k]; below 0: another rank has the expert
  u16* out;           // bfloat16 [tokens, hidden]
  long long stride;   // between rows of x
  float gate_up_back, gate_up_lift, down_back, down_lift;
  int tokens, top_k, hidden, inter;
};
static_assert(sizeof(Args) == ARGS, "as the caller lays them out");

__device__ __forceinline__ void copy(u16* to, const u16* from, int count) {
  for (int i = threadIdx.x; i < count / 8; i += blockDim.x)
    reinterpret_cast<uint4*>(to)[i] = __ldcg(reinterpret_cast<const uint4*>(from) + i);
}

__device__ __forceinline__ int cut(int steps, int part) { return steps * part / 2; }

}  // namespace

// grid (inter / 16, pairs), four warps: gate and up, each halves of the columns.
extern "C" __global__ void __launch_bounds__(128, 4) gate_up(const __grid_constant__ Args a) {
  extern __shared__ u16 x[];
  __shared__ float sums[4][16];
  await();  // what follows may read what this has waited for
  invite();
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, pair = blockIdx.y;
  const int half = warp & 1, steps = a.hidden / kTileColumns, first = cut(steps, warp >> 1);
  const int expert = __ldcg(a.ids + pair);
  if (expert < 0) return;
  const long long block = (long long)expert * (a.inter / kTileRows) + blockIdx.x / 8;
  Rows<1> rows{a.gate_up + ((block * steps + first) * 2 + half) * kTile, 2 * kTile,
               cut(steps, (warp >> 1) + 1) - first, int(blockIdx.x % 8), lane, a.gate_up_lift};
  rows.begin();
  copy(x, a.x + pair / a.top_k * a.stride, a.hidden);
  __syncthreads();
  rows.finish(x + first * kTileColumns, 0, 1);
  if ((lane & 3) == 0) {
    sums[warp][lane >> 2] = rows.sums[0];
    sums[warp][8 + (lane >> 2)] = rows.sums[2];
  }
  __syncthreads();
  if (threadIdx.x >= 16) return;
  const int row = threadIdx.x;
  const float gate = (sums[0][row] + sums[2][row]) * a.gate_up_back;
  const float up = (sums[1][row] + sums[3][row]) * a.gate_up_back;
  const float value = gate / (1.f + __expf(-gate)) * up;
  a.h[(long long)pair * a.inter + blockIdx.x * 16 + row] = bfloat16_pair(value, 0.f) & 0xFFFF;
}

// grid (hidden / 16, tokens), two warps a choice: halves of the columns.
extern "C" __global__ void __launch_bounds__(kMostWarps * 32, 1)
    down(const __grid_constant__ Args a) {
  extern __shared__ u16 h[];
  __shared__ float sums[kMostWarps][16];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, token = blockIdx.y;
  const int choice = warp >> 1, steps = a.inter / kTileColumns, first = cut(steps, warp & 1);
  const int pair = token * a.top_k + choice;
  const int expert = __ldcg(a.ids + pair);
  const bool here = expert >= 0;  // else neither its weights nor its row of h are there
  const long long block = (long long)max(expert, 0) * (a.hidden / kTileRows) + blockIdx.x / 8;
  const float weight = __ldcg(a.weights + pair) * a.down_back;
  Rows<1> rows{a.down + (block * steps + first) * kTile, kTile,
               cut(steps, (warp & 1) + 1) - first, int(blockIdx.x % 8), lane, a.down_lift};
  if (here) rows.begin();
  follow();
  copy(h, a.h + (long long)token * a.top_k * a.inter, a.top_k * a.inter);
  __syncthreads();
  if (here) rows.finish(h + choice * a.inter + first * kTileColumns, 0, 1);
  if ((lane & 3) == 0) {
    sums[warp][lane >> 2] = here ? rows.sums[0] * weight : 0.f;
    sums[warp][8 + (lane >> 2)] = here ? rows.sums[2] * weight : 0.f;
  }
  __syncthreads();
  if (threadIdx.x >= 16) return;
  float sum = 0.f;
  for (int i = 0; i < 2 * a.top_k; ++i) sum += sums[i][threadIdx.x];
  a.out[(long long)token * a.hidden + blockIdx.x * 16 + threadIdx.x] =
      bfloat16_pair(sum, 0.f) & 0xFFFF;
}
