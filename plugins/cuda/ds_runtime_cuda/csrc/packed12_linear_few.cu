// y = x · Wᵀ for up to eight tokens and weights that a launch reads at once: what it takes is mostly
// waiting. All blocks begin together, and a warp's weights are on their way before the launch in front
// has ended.
//
// Compiled at run time with: ARGS (bytes of the arguments).

#include "hopper.cuh"
#include "packed12_rows.cuh"

using namespace packed12;

namespace {

constexpr int kTokens = 8, kWarps = 8;

struct Args {
  const u8* tiles;   // [rows / 128][columns / 64]
  const u16* x;      // bfloat16 [tokens, columns]
  void* out;         // [tokens, rows], bfloat16 or float32
  long long stride;  // between rows of x
  float back, lift;  // powers of two: what sums are multiplied by, and weights were
  int tokens, rows, columns, wide;  // float32
};
static_assert(sizeof(Args) == ARGS, "as the caller lays them out");

}  // namespace

// A block makes 16 rows of W, each warp a part of their columns. grid (rows / 16).
extern "C" __global__ void __launch_bounds__(kWarps * 32, 2) few(const __grid_constant__ Args a) {
  extern __shared__ u16 x[];  // [tokens][columns + 8]
  __shared__ float sums[kWarps][16][kTokens];
  invite();
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, steps = a.columns / kTileColumns;
  const int begin = steps * warp / kWarps, end = steps * (warp + 1) / kWarps;
  const long long block = blockIdx.x / 8;
  Rows<kTokens> rows{a.tiles + (block * steps + begin) * kTile, kTile, end - begin,
                     int(blockIdx.x % 8), lane, a.lift};
  rows.begin();
  await();
  const int line = a.columns + 8, each = a.columns / 8;
  for (int i = threadIdx.x; i < a.tokens * each; i += kWarps * 32) {
    const int token = i / each, at = i % each * 8;
    *reinterpret_cast<uint4*>(x + token * line + at) =
        __ldcg(reinterpret_cast<const uint4*>(a.x + token * a.stride + at));
  }
  __syncthreads();
  rows.finish(x + begin * kTileColumns, line, a.tokens);
#pragma unroll
  for (int i = 0; i < 4; ++i)
    sums[warp][(lane >> 2) + 8 * (i >> 1)][2 * (lane & 3) + (i & 1)] = rows.sums[i];
  __syncthreads();
  const int row = threadIdx.x & 15, token = threadIdx.x >> 4, at = blockIdx.x * 16 + row;
  if (token >= a.tokens || at >= a.rows) return;
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) sum += sums[i][row][token];
  sum *= a.back;
  if (a.wide)
    static_cast<float*>(a.out)[(long long)token * a.rows + at] = sum;
  else
    static_cast<u16*>(a.out)[(long long)token * a.rows + at] = bfloat16_pair(sum, 0.f) & 0xFFFF;
}
