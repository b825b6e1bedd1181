// y = x · Wᵀ for up to eight tokens and weights in FP8, as fast as they can be read. Two blocks of a
// cluster halve the columns; their warps divide tiles of 16 rows and, of each, blocks of 128 columns.
// A warp has weights of several such pieces on their way straight into registers, from before the
// launch in front has ended, and widens them to bfloat16 for mma: activations stay as they are.
//
// Sums are added in one order, whatever the timing: by columns of a warp, warps, blocks.
//
// Compiled at run time with: ARGS (bytes of the arguments), AHEAD (pieces on their way).

#include "hopper.cuh"

namespace {

constexpr int kTokens = 8, kWarps = 16, kThreads = 32 * kWarps, kBlock = 128;
constexpr int kPad = 8;                           // values between tokens, for the banks
constexpr int kSums = kWarps * 16 * kTokens;      // of a block
constexpr u32 kLift = 0x7B807B80;                 // two of 2^120 in bfloat16
constexpr u32 kRest = 0x07F007F0, kSign = 0x80008000;

struct Args {
  const u8* weight;    // e4m3 [rows, columns], none of them NaN
  const float* scale;  // [⌈rows / 128⌉, columns / 128]
  const u16* x;        // bfloat16 [tokens, columns]
  u16* out;            // bfloat16 [tokens, rows]
  long long stride;    // between rows of x
  int tokens, rows, columns, group;  // tiles of 16 rows that a cluster takes together: 1 to 16
};
static_assert(sizeof(Args) == ARGS, "as the caller lays them out");

// A warp's 16 rows of 128 columns: of lane's rows, 16 bytes of each half.
struct Piece {
  uint4 upper[2], lower[2];  // rows lane / 4, and 8 more
  float scale;
};

__device__ __forceinline__ uint4 stream(const u8* from) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}

// Four e4m3 as two pairs of bfloat16: bytes 0 and 2, and 1 and 3. As bfloat16 their bits are 2^120
// times too small, of subnormals, too.
__device__ __forceinline__ u32 lifted(u32 bits) {
  u32 made;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(made) : "r"(bits), "r"(kLift));
  return made;
}
__device__ __forceinline__ u32 even(u32 w) { return lifted((w << 4 & kRest) | (w << 8 & kSign)); }
__device__ __forceinline__ u32 odd(u32 w) { return lifted((w >> 4 & kRest) | (w & kSign)); }

__device__ __forceinline__ void multiply(float (&d)[4], u32 upper, u32 lower, u32 x0, u32 x1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9},"
      " {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(even(upper)), "r"(even(lower)), "r"(odd(upper)), "r"(odd(lower)), "r"(x0), "r"(x1));
}

__device__ __forceinline__ u32 word(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// sums += scale · the piece times x: from the lane's token and 16 of 128 columns, in staged order.
__device__ __forceinline__ void use(const Piece& piece, const u16* x, float (&sums)[4]) {
  float d[4] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint4* at = reinterpret_cast<const uint4*>(x + 64 * half);
    const uint4 some[2] = {at[0], at[1]};
#pragma unroll
    for (int j = 0; j < 4; ++j)
      multiply(d, word(piece.upper[half], j), word(piece.lower[half], j),
               word(some[j / 2], j % 2 * 2), word(some[j / 2], j % 2 * 2 + 1));
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) sums[i] += d[i] * piece.scale;
}

__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ void meet() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Where the block of this rank has what lies at `at` here.
__device__ __forceinline__ u32 shared_of(u32 at, u32 rank) {
  u32 there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
  return there;
}

__device__ __forceinline__ float load_of(u32 at) {
  float value;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(at) : "memory");
  return value;
}

}  // namespace

// grid (2 · clusters). On-chip memory: sums of two turns, and x [tokens][its columns + kPad].
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
    fp8_few(const __grid_constant__ Args a) {
  extern __shared__ __align__(16) u8 memory[];
  float* const sums = reinterpret_cast<float*>(memory);
  u16* const x = reinterpret_cast<u16*>(sums + 2 * kSums);
  invite();
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, rank = cluster_rank();
  const int cluster = blockIdx.x / 2, clusters = gridDim.x / 2, ways = kWarps / a.group;
  const int units = (a.rows + 16 * a.group - 1) / (16 * a.group);
  const int blocks = a.columns / kBlock, first = blocks * rank / 2;
  const int own = blocks * (rank + 1) / 2 - first;  // blocks of columns
  const int tile = warp % a.group, way = warp / a.group;
  const int begin = first + own * way / ways, end = first + own * (way + 1) / ways;
  const int turns = cluster < units ? (units - 1 - cluster) / clusters + 1 : 0;
  const int total = turns * (end - begin);

  int next_unit = cluster, next = begin;  // what is fetched next
  const auto fetch = [&](Piece& to) {
    const int row = (next_unit * a.group + tile) * 16, last = a.rows - 1;
    const int upper = min(row + (lane >> 2), last), lower = min(row + 8 + (lane >> 2), last);
    const u8* from = a.weight + next * kBlock + (lane & 3) * 16;
    const u8* up = from + (long long)upper * a.columns;
    const u8* low = from + (long long)lower * a.columns;
    to.upper[0] = stream(up);
    to.lower[0] = stream(low);
    to.upper[1] = stream(up + 64);
    to.lower[1] = stream(low + 64);
    to.scale = __ldg(a.scale + (long long)(min(row, last) / kBlock) * blocks + next);
    if (++next == end) next = begin, next_unit += clusters;
  };
  Piece pieces[AHEAD];
#pragma unroll
  for (int i = 0; i < AHEAD; ++i)
    if (i < total) fetch(pieces[i]);

  await();
  const int line = own * kBlock + kPad, eights = own * kBlock / 8;
  for (int i = threadIdx.x; i < a.tokens * eights; i += kThreads) {
    const int token = i / eights, at = i % eights * 8;
    const u16* from = a.x + token * a.stride + first * kBlock + at;
    const uint4 v = __ldcg(reinterpret_cast<const uint4*>(from));
    // Of four values in the order in which `even` and `odd` pair weights: 0 2, 1 3.
    *reinterpret_cast<uint4*>(x + token * line + at) =
        uint4{__byte_perm(v.x, v.y, 0x5410), __byte_perm(v.x, v.y, 0x7632),
              __byte_perm(v.z, v.w, 0x5410), __byte_perm(v.z, v.w, 0x7632)};
  }
  __syncthreads();

  // A column of the product that is no token's repeats the last one's, and is not written.
  const u16* const mine = x + min(lane >> 2, a.tokens - 1) * line + (lane & 3) * 16;
  float made[4] = {};
  int unit = cluster, at = begin, turn = 0;
  const auto finish = [&] {
    float* const to = sums + (turn & 1) * kSums;
    float2* const here = reinterpret_cast<float2*>(to + warp * 16 * kTokens) + lane;
    here[0] = float2{made[0], made[1]};    // row lane / 4, tokens 2 (lane % 4) and one more
    here[32] = float2{made[2], made[3]};   // 8 rows more
    meet();
    const int rows = 8 * a.group;  // that this block adds up
    for (int i = threadIdx.x; i < rows * a.tokens; i += kThreads) {
      const int token = i / rows, row = i % rows + rank * rows;
      const u32 value = shared_address(to + (row * kTokens + token));
      float sum = 0.f;
      for (int block = 0; block < 2; ++block) {
        const u32 there = shared_of(value, block);
#pragma unroll 4
        for (int i = 0; i < ways; ++i)
          sum += load_of(there + i * (a.group * 16 * kTokens * sizeof(float)));
      }
      const int to_row = unit * a.group * 16 + row;
      if (to_row < a.rows)
        a.out[(long long)token * a.rows + to_row] = bfloat16_pair(sum, 0.f) & 0xFFFF;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) made[i] = 0.f;
    at = begin, unit += clusters, ++turn;
  };
  for (int done = 0; done < total; done += AHEAD) {
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      if (done + i >= total) break;
      use(pieces[i], mine + (at - first) * kBlock, made);
      if (done + i + AHEAD < total) fetch(pieces[i]);
      if (++at == end) finish();
    }
  }
  meet();  // the other one may still read sums here
}
