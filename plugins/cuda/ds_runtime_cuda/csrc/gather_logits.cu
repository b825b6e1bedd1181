// Logits of all ranks side by side, in float32, in one launch.
//
// Each rank lays its part down where the others read it, and meets them. It then reads all parts, widens them and
// writes the first `width` columns: what fills up the last rank's part is left out.
// Compiled at run time with: ARGS (bytes of the arguments), and what ranks.cuh needs.

#include "ranks.cuh"

namespace {

struct Args {
  u64 peers[8];     // address of each rank's memory: signals, then two halves of parts
  const u16* x;     // this rank's part, bfloat16 [rows, each]
  float* out;       // [rows, width]
  u64* calls;       // as next_call and count have it
  long long half;   // bytes of one
  long long pitch;  // values from a row of out to the next
  int rank, rows, each, width;
};
static_assert(sizeof(Args) == ARGS, "as the caller lays them out");

}  // namespace

// Grid: at most BLOCKS, the same on all ranks.
extern "C" __global__ void __launch_bounds__(1024) gather_logits(const __grid_constant__ Args a) {
  await();
  const u64 call = next_call(a.calls);
  const u64 parts = SIGNALS + (call & 1) * a.half;
  const int chunks = a.each / 8, all = a.rows * chunks;  // of 8 values; blocks have the same on all ranks
  const int begin = blockIdx.x * blockDim.x + threadIdx.x, apart = gridDim.x * blockDim.x;
  const uint4* own = reinterpret_cast<const uint4*>(a.x);
  uint4* shared = reinterpret_cast<uint4*>(a.peers[a.rank] + parts);
  for (int at = begin; at < all; at += apart) shared[at] = own[at];
  meet(a.peers, a.rank, call);
  count(a.calls, call);
  invite();
  for (int at = begin; at < all; at += apart) {
    const int row = at / chunks, column = at % chunks * 8;
    uint4 words[RANKS];
#pragma unroll
    for (int r = 0; r < RANKS; ++r)
      words[r] = r == a.rank ? own[at] : fetched(a.peers[r] + parts + 16ll * at);
#pragma unroll
    for (int r = 0; r < RANKS; ++r) {
      float values[8];
      unpack(values, words[r]);
      const int first = r * a.each + column;
      float* to = a.out + row * a.pitch + first;
      if (first + 8 <= a.width) {
        reinterpret_cast<float4*>(to)[0] = make_float4(values[0], values[1], values[2], values[3]);
        reinterpret_cast<float4*>(to)[1] = make_float4(values[4], values[5], values[6], values[7]);
      } else {
        for (int j = 0; j < 8 && first + j < a.width; ++j) to[j] = values[j];
      }
    }
  }
}
