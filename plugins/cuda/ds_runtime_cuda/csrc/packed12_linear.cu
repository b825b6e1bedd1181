// y = x · Wᵀ for few tokens, as fast as weights in tiles of packed12.cuh can be read.
//
// Blocks stay and take units of rows of W in turn. A warp fetches the tiles of a unit, and the tokens
// that they meet, through the copy engine into a ring of stages; the first weights before the launch in
// front has ended. Two warpgroups widen and multiply.
//
// Compiled at run time with: TOKENS (8, 16, 32, 64, 128), TILES (of weights in a unit, 1 or 2, which meet
// the same read of tokens), BLOCKS (per multiprocessor), BYTES (of on-chip memory for each block), ARGS
// (bytes of the arguments).

#include "hopper.cuh"
#include "packed12.cuh"

using namespace packed12;

namespace {

constexpr int kX = TOKENS * 128;  // bytes of a stage's tokens
constexpr int kRoom = (BYTES - 2048) / (kX + TILES * kTile + 16);
constexpr int kStages = kRoom < 16 ? kRoom : 16;
static_assert(kStages >= 2, "room for weights on their way");
constexpr int kWarps = 8;  // that multiply
constexpr int kThreads = TILES == 2 ? 384 : kWarps * 32 + 32;

struct alignas(64) Args {
  TensorMap x;      // [tokens, columns]
  const u8* tiles;  // [rows / 128][columns / 64]
  void* out;        // [tokens, rows], bfloat16 or float32
  float back, lift; // powers of two: what sums are multiplied by, and weights were
  int tokens, rows, columns, wide;  // float32
};
static_assert(sizeof(Args) == ARGS, "as the caller lays them out");

struct alignas(1024) Shared {
  u8 x[kStages][kX];
  u8 w[kStages][TILES * kTile];
  u64 full[kStages], empty[kStages];
};
static_assert(sizeof(Shared) + 1024 <= BYTES, "it begins at a multiple of 1,024");

// A warp's weights of a stage.
struct Part {
  u32 words[TILES][16], others[TILES];
};

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS)
    linear(const __grid_constant__ Args a) {
  extern __shared__ u8 raw[];
  Shared& s = *reinterpret_cast<Shared*>(raw + ((1024 - (shared_address(raw) & 1023)) & 1023));
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      init_barrier(shared_address(&s.full[i]), 2);  // of weights, of tokens
      init_barrier(shared_address(&s.empty[i]), kWarps);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async;" ::: "memory");
  }
  __syncthreads();
  invite();
  const int steps = a.columns / kTileColumns, tiles = (a.rows + kTileRows - 1) / kTileRows;
  const int units = (tiles + TILES - 1) / TILES;
  Ring ring;
  if (warp >= kWarps) {
    if constexpr (TILES == 2) asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (warp > kWarps || lane != 0) return;
    u64 first, last;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(first));
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(last));
    auto weights = [&](int unit, int k, int stage) {
      const int count = min(TILES, tiles - unit * TILES);
      const u32 full = shared_address(&s.full[stage]);
      expect(full, count * kTile);
      for (int i = 0; i < count; ++i) {
        const long long tile = (long long)(unit * TILES + i) * steps + k;
        fetch_line(shared_address(s.w[stage] + i * kTile), a.tiles + tile * kTile, kTile, full, first);
      }
    };
    auto tokens = [&](int k, int stage) {
      const u32 full = shared_address(&s.full[stage]);
      expect(full, kX);
      fetch_box(shared_address(s.x[stage]), &a.x, k * kTileColumns, 0, full, last);
    };
    const int early = blockIdx.x < units ? min(kStages, steps) : 0;
    for (int k = 0; k < early; ++k) weights(blockIdx.x, k, k);
    await();
    for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
      for (int k = 0; k < steps; ++k) {
        wait(shared_address(&s.empty[ring.at]), ring.parity ^ 1);
        if (unit != blockIdx.x || k >= early) weights(unit, k, ring.at);
        tokens(k, ring.at);
        ring.step<kStages>();
      }
    }
    return;
  }
  if constexpr (TILES == 2) asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
  // Of a unit of two tiles a warpgroup has one, of a unit of one its half: 64 rows a turn.
  const int group = warp / 4;
  auto sixteen = [&](int i) { return TILES == 2 ? i * 4 + warp % 4 : warp; };
  Ring ahead;  // of what is read while the matrix unit has the part before
  auto read = [&](Part& part) {
    wait(shared_address(&s.full[ahead.at]), ahead.parity);
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
      Codes codes;
      codes.read(s.w[ahead.at] + (TILES == 2 ? group * kTile : 0), sixteen(i), lane);
      part.others[i] = codes.other;
      widen(codes, part.words[i]);
    }
    ahead.step<kStages>();
  };
  auto turn = [&](float (&sums)[TILES][TOKENS / 2], Part& now, Part& next, bool add, bool more) {
    const u8* x = s.x[ring.at];
#pragma unroll
    for (int i = 0; i < TILES; ++i) hold(sums[i]);
    begin();
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        multiply<TOKENS>(sums[i], now.words[i] + 4 * j, operand(shared_address(x) + 32 * j),
                         j > 0 || add);
    commit();
    if (more) read(next);
    settle<0>();
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
      hold(sums[i]);
      hold(now.words[i]);
      add_others<TOKENS>(sums[i], now.others[i], sixteen(i), lane, x, a.lift);
    }
    arrive_warp(s.empty[ring.at], lane);
    ring.step<kStages>();
  };
  for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
    float sums[TILES][TOKENS / 2];
    Part first, second;
    read(first);
    for (int k = 0; k < steps; k += 2) {
      turn(sums, first, second, k > 0, k + 1 < steps);
      if (k + 1 < steps) turn(sums, second, first, true, k + 2 < steps);
    }
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
      const int block = TILES == 2 ? unit * 2 + group : unit;
      const int row = block * kTileRows + (TILES == 2 ? i * 4 + warp % 4 : warp) * 16 + (lane >> 2);
#pragma unroll
      for (int j = 0; j < TOKENS / 2; ++j) {
        const int token = 8 * (j >> 2) + 2 * (lane & 3) + (j & 1), at = row + 8 * (j >> 1 & 1);
        if (token >= a.tokens || at >= a.rows) continue;
        const long long to = (long long)token * a.rows + at;
        const float value = sums[i][j] * a.back;
        if (a.wide)
          static_cast<float*>(a.out)[to] = value;
        else
          static_cast<u16*>(a.out)[to] = bfloat16_pair(value, 0.f) & 0xFFFF;
      }
    }
  }
}
