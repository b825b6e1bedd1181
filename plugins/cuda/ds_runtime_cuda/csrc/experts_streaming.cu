// Routed experts for few tokens on compute capability 9.0: as fast as the weights can be read.
//
// Three launches. `arrange` sorts pairs (token, choice) into tiles of up to BM pairs of one expert and
// puts each token's row, quantised where weights are FP8, into the rows of its pairs. `experts` runs
// both matmuls: its blocks take units of work in order from one counter, first those of gate and up,
// then those of down, so that memory is never idle between the two. `combine` adds up each token's
// pairs.
//
// A unit is 128 rows of one expert's matrix (gate and up: 128 of each) by one tile. Every block has
// two warpgroups that multiply, 64 of the rows each; a warp that fetches weights, and one that reads
// what else belongs to a unit and fetches activations, through the copy engine into rings of stages.
// A unit of down waits until all units of gate and up of its tile have been written; weights are
// fetched ahead all the same. What is on its way to a multiprocessor delays all else that it reads:
// rings are as deep as bandwidth needs, and nothing that multiplies waits for a read of its own.
//
// Compiled at run time with: FP8 (1: e4m3 in 128 x 128 blocks, activations in groups of 128; 0:
// bfloat16), CODED (1: bfloat16 as tiles of packed12.cuh, FP8 as those of fp8_compressed.cuh), BM (pairs of a
// tile: 16; of bfloat16 32, too), BLOCKS (per multiprocessor), BYTES (of on-chip memory for each block),
// STAGES (of weights, at most), ARGS (bytes of the arguments).
// One file: its three launches share tiles, rings and the order of units.

#include "hopper.cuh"
#include "packed12.cuh"
#include "fp8_compressed.cuh"

namespace {

constexpr int kRows = 128;    // of a matrix in a stage
constexpr int kWidth = 128;   // bytes of each row in a stage: one swizzled line
constexpr int kColumns = FP8 ? 128 : 64;  // the values that they are
constexpr int kStage = !CODED ? kRows * kWidth : FP8 ? fp8_compressed::kMostTile : packed12::kTile;
constexpr int kXStages = 4;
constexpr int kXStage = BM * kWidth;
constexpr int kGroups = 2;                // warpgroups that multiply: the first eight warps
constexpr int kWarps = kGroups * 4;
constexpr int kConsumers = kGroups * 128;
constexpr int kThreads = 64 + kConsumers;
constexpr int kUnits = 3;                 // units that may be handed out in a block
constexpr int kMaxSteps = 64;             // scales of a unit's rows
constexpr int kLine = kRows * 2 + 16;     // bytes from one pair's results to the next, on chip
constexpr int kMaxExperts = 512;
constexpr int kOwn = CODED && FP8 ? fp8_compressed::kOwn : 16;  // bytes of each warp that multiplies
constexpr int kRest = kXStages * (kXStage + BM * 4) + BM * (kLine + kWarps * 4) + kWarps * kOwn +
                      kUnits * (8 * kMaxSteps + 8 * BM + 32) + 2 * (2 * kMaxExperts + 2) + 1024 + 640;
constexpr int kRoom = (BYTES - kRest) / kStage;
constexpr int kStages = kRoom < STAGES ? kRoom : STAGES;  // of weights
static_assert(kStages >= 2, "room for weights on their way");
static_assert(BM == 16 || (BM == 32 && !FP8), "of FP8, more would not fit in registers");

struct alignas(64) Args {
  TensorMap gate_up, down;  // weights: [experts * 2 * inter, hidden], [experts * hidden, inter]
  TensorMap x, h;           // arranged rows: [rows, hidden], [rows, inter]
  const float* gate_up_scale;
  const float* down_scale;
  float* x_scale;           // [hidden / 128, rows]
  float* h_scale;           // [inter / 128, rows]
  void* x_rows;
  void* h_rows;
  u16* y;                   // bfloat16 [pairs, hidden]
  int* pair_of;             // [rows]
  float* weight_of;         // [rows]
  u16* begins;              // [experts + 1] of tiles, then [experts] how many pairs
  int* state;               // next unit, then finished units of gate and up of each tile
  const u16* input;         // bfloat16 [tokens, hidden]; with scales, e4m3
  const float* scales;      // of groups of the input's columns, if it is codes already
  const float* weights;     // [tokens, top_k]
  const int* ids;           // [tokens, top_k]; below 0: another rank has the expert
  u16* out;                 // bfloat16 [tokens, hidden]
  long long stride;         // between rows of the input
  long long scale_row, scale_group;  // from one scale to the next
  int tokens, top_k, experts, hidden, inter, rows, most, powers;
  // CODED: [experts][inter / 128][hidden / kColumns][gate, up] tiles of gate_up_stride bytes,
  // [experts][hidden / 128][inter / kColumns] of down_stride
  const u8* gate_up_tiles;
  const u8* down_tiles;
  int gate_up_stride, down_stride;
  int gate_up_base, down_base;  // of FP8, the lowest exponent
  // Of bfloat16, powers of two: what sums are multiplied by, and weights were.
  float gate_up_back, gate_up_lift;
  float down_back, down_lift;
};

static_assert(sizeof(Args) == ARGS, "as the caller lays them out");

// What a unit is, put together by the warp that fetches activations. number: -1 at the end.
struct Unit {
  int number, tile, part, count;
  float scales[2][kMaxSteps];  // of the weights' groups: gate and up, or down
  int pairs[BM];
  float weights[BM];
};

struct alignas(1024) Shared {
  u8 x[kXStages][kXStage];
  u8 w[kStages][kStage];
  u8 own[kWarps][kOwn];
  u8 result[BM][kLine];
  float scales[kXStages][BM];
  float peaks[kWarps][BM];
  u64 w_full[kStages], w_empty[kStages];
  u64 x_full[kXStages], x_empty[kXStages];
  u64 taken[kUnits], unit_full[kUnits], unit_empty[kUnits];
  int number[kUnits];
  Unit unit[kUnits];
  u16 begins[kMaxExperts + 1];  // of each expert's tiles
  u16 counts[kMaxExperts];      // of its pairs
};
static_assert(sizeof(Shared) + 1024 <= BYTES, "it begins at a multiple of 1,024");

#if FP8
#define SHAPE(n) "m64n" #n "k32.f32.e4m3.e4m3"
#define LAST ", p, 1, 1;\n}\n"
#else
#define SHAPE(n) "m64n" #n "k16.f32.bf16.bf16"
#define LAST ", p, 1, 1, 0, 0;\n}\n"
#endif
// d += rows (64) x pairs (N); add 0: d = …
template <int N>
__device__ __forceinline__ void multiply(float (&d)[N / 2], u64 left, u64 right, int add) {
  if constexpr (N == 8) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\n"
                 "wgmma.mma_async.sync.aligned." SHAPE(8) " {" R4 "}, %4, %5" LAST
                 : F4(d, 0)
                 : "l"(left), "l"(right), "r"(add));
  } else if constexpr (N == 16) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %10, 0;\n"
                 "wgmma.mma_async.sync.aligned." SHAPE(16) " {" R8 "}, %8, %9" LAST
                 : F8(d, 0)
                 : "l"(left), "l"(right), "r"(add));
  } else {
    static_assert(N == 32, "8, 16 or 32 pairs");
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"
                 "wgmma.mma_async.sync.aligned." SHAPE(32) " {" R16 "}, %16, %17" LAST
                 : F16(d, 0)
                 : "l"(left), "l"(right), "r"(add));
  }
}

// One stage: 64 rows by N pairs, 128 bytes deep.
template <int N>
__device__ __forceinline__ void stage(float (&d)[N / 2], u32 w, u32 x, bool add) {
#pragma unroll
  for (int k = 0; k < 4; ++k)
    multiply<N>(d, operand(w + 32 * k), operand(x + 32 * k), k > 0 || add);
  commit();
}

#if FP8
namespace coded = fp8_compressed;
#else
namespace coded = packed12;
#endif

// The same with weights from registers.
template <int N>
__device__ __forceinline__ void stage(float (&d)[N / 2], const u32 (&w)[16], u32 x, bool add) {
#pragma unroll
  for (int k = 0; k < 4; ++k)
    coded::multiply<N>(d, w + 4 * k, operand(x) + 2 * k, k > 0 || add);  // in steps of 16 bytes
  commit();
}

__device__ __forceinline__ void meet() {  // of all that multiply
  asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory");
}

struct Tile {
  int expert, count;
};

__device__ __forceinline__ Tile tile_of(const Shared& s, int experts, int tile) {
  int low = 0, high = experts;  // begins[low] <= tile < begins[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (s.begins[middle] <= tile)
      low = middle;
    else
      high = middle;
  }
  return {low, min(BM, s.counts[low] - (tile - s.begins[low]) * BM)};
}

// What a warp needs to know of the block, and where it is in the rings.
struct Place {
  Shared& s;
  const Args& args;
  Ring w, x;
  int lane, warp;  // of those that multiply
  int base = -1;   // the lowest exponent of the tiles that are read

  __device__ __forceinline__ u32 full_w() { return shared_address(&s.w_full[w.at]); }
  __device__ __forceinline__ u32 full_x() { return shared_address(&s.x_full[x.at]); }
  __device__ __forceinline__ u32 rows() {
    return shared_address(s.w[w.at]) + (warp / 4) * 64 * kWidth;
  }
  __device__ __forceinline__ void read_w(packed12::Codes& codes) {
    wait(full_w(), w.parity);
    codes.read(s.w[w.at], warp, lane);
    release_w();
  }
  __device__ __forceinline__ void begin_unit(int lowest) {
    if (lowest == base) return;
    base = lowest;
    fp8_compressed::prepare(s.own[warp], base, lane);
  }
  __device__ __forceinline__ void read_w(u32 (&words)[16]) {
    wait(full_w(), w.parity);
    fp8_compressed::read(s.w[w.at], s.own[warp], base, warp, lane, words);
    release_w();
  }
  __device__ __forceinline__ void release_w() {
    __syncwarp();
    if (lane == 0) arrive(shared_address(&s.w_empty[w.at]));
    w.step<kStages>();
  }
  __device__ __forceinline__ void release_x() {
    __syncwarp();
    if (lane == 0) arrive(shared_address(&s.x_empty[x.at]));
    x.step<kXStages>();
  }
};

// sum += product · (scale of the rows · scales of the pairs)
template <int N>
__device__ __forceinline__ void add_scaled(float (&sum)[N / 2], float (&product)[N / 2],
                                           const float (&pairs)[N / 4], float rows) {
#pragma unroll
  for (int i = 0; i < N / 2; ++i)
    sum[i] += product[i] * (pairs[(i >> 2) * 2 + (i & 1)] * rows);
}

template <int N>
__device__ __forceinline__ void pair_scales(float (&to)[N / 4], const float* from, int lane) {
#pragma unroll
  for (int i = 0; i < N / 8; ++i) {
    to[2 * i] = from[8 * i + 2 * (lane & 3)];
    to[2 * i + 1] = from[8 * i + 2 * (lane & 3) + 1];
  }
}

// sum += the next tile of fp8_compressed.cuh · pairs (at x) · scales, which are those of its block and of pairs
template <int N>
__device__ __forceinline__ void add_block(Place& p, float (&sum)[N / 2], u32 x,
                                          const float (&pairs)[N / 4], float scale) {
  float product[N / 2];
  u32 words[16];
  p.read_w(words);
  hold(words);
  hold(product);
  begin();
  stage<N>(product, words, x, false);
  settle<0>();
  hold(product);
  hold(words);
  add_scaled<N>(sum, product, pairs, scale);
}

// Results of a thread lie at row() + 8 · (i >> 1 & 1), pair 8 · (i >> 2) + 2 · (lane & 3) + (i & 1).
__device__ __forceinline__ int row_of(int warp, int lane) { return warp * 16 + (lane >> 2); }

template <int N>
__device__ void gate_up(Place& p, const Unit& unit) {
  const Args& a = p.args;
  const int steps = a.hidden / kColumns, tile = unit.tile, part = unit.part, count = unit.count;
  float gate[N / 2], up[N / 2];
#pragma unroll
  for (int i = 0; i < N / 2; ++i) gate[i] = up[i] = 0.f;
  for (int k = 0; k < steps; ++k) {
    wait(p.full_x(), p.x.parity);
    const u32 x = shared_address(p.s.x[p.x.at]);
    if constexpr (FP8 && CODED) {
      float pairs[N / 4];
      pair_scales<N>(pairs, p.s.scales[p.x.at], p.lane);
      add_block<N>(p, gate, x, pairs, unit.scales[0][k]);
      add_block<N>(p, up, x, pairs, unit.scales[1][k]);
      p.release_x();
    } else if constexpr (FP8) {
      float first[N / 2], second[N / 2], pairs[N / 4];
      wait(p.full_w(), p.w.parity);
      hold(first);
      begin();
      stage<N>(first, p.rows(), x, false);
      Ring now = p.w;
      p.w.template step<kStages>();
      wait(p.full_w(), p.w.parity);
      hold(second);
      begin();
      stage<N>(second, p.rows(), x, false);
      pair_scales<N>(pairs, p.s.scales[p.x.at], p.lane);
      settle<1>();
      hold(first);
      if (p.lane == 0) arrive(shared_address(&p.s.w_empty[now.at]));
      add_scaled<N>(gate, first, pairs, unit.scales[0][k]);
      settle<0>();
      hold(second);
      p.release_w();
      p.release_x();
      add_scaled<N>(up, second, pairs, unit.scales[1][k]);
    } else if constexpr (CODED) {
      packed12::Codes of_gate, of_up;
      u32 first[16], second[16];
      p.read_w(of_gate);
      widen(of_gate, first);
      hold(gate);
      hold(up);
      begin();
      stage<N>(gate, first, x, k > 0);
      p.read_w(of_up);
      widen(of_up, second);
      begin();
      stage<N>(up, second, x, k > 0);
      settle<0>();
      hold(gate);
      hold(up);
      hold(first);
      hold(second);
      const u8* lines = p.s.x[p.x.at];
      packed12::add_others<N>(gate, of_gate.other, p.warp, p.lane, lines, a.gate_up_lift);
      packed12::add_others<N>(up, of_up.other, p.warp, p.lane, lines, a.gate_up_lift);
      p.release_x();
    } else {
      wait(p.full_w(), p.w.parity);
      hold(gate);
      hold(up);
      begin();
      stage<N>(gate, p.rows(), x, k > 0);
      Ring now = p.w;
      p.w.template step<kStages>();
      wait(p.full_w(), p.w.parity);
      hold(up);
      begin();
      stage<N>(up, p.rows(), x, k > 0);
      settle<1>();
      if (p.lane == 0) arrive(shared_address(&p.s.w_empty[now.at]));
      settle<0>();
      hold(gate);
      hold(up);
      p.release_w();
      p.release_x();
    }
  }
  const int row = row_of(p.warp, p.lane), thread = p.warp * 32 + p.lane;
  if constexpr (CODED && !FP8) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) gate[i] *= a.gate_up_back, up[i] *= a.gate_up_back;
  }
#pragma unroll
  for (int i = 0; i < N / 2; ++i) gate[i] = gate[i] / (1.f + __expf(-gate[i])) * up[i];
  if constexpr (FP8) {
#pragma unroll
    for (int c = 0; c < N / 4; ++c) {
      const int i = (c >> 1) * 4 + (c & 1);
      float peak = fmaxf(fabsf(gate[i]), fabsf(gate[i + 2]));
#pragma unroll
      for (int step = 4; step < 32; step *= 2) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, step));
      if (p.lane < 4) p.s.peaks[p.warp][8 * (c >> 1) + 2 * p.lane + (c & 1)] = peak;
    }
    meet();
#pragma unroll
    for (int c = 0; c < N / 4; ++c) {
      const int i = (c >> 1) * 4 + (c & 1), pair = 8 * (c >> 1) + 2 * (p.lane & 3) + (c & 1);
      float peak = 0.f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) peak = fmaxf(peak, p.s.peaks[w][pair]);
      const float scale = scale_of(peak, a.powers);
      const u32 codes = e4m3_pair(gate[i] / scale, gate[i + 2] / scale);
      p.s.result[pair][row] = codes & 0xFF;
      p.s.result[pair][row + 8] = codes >> 8;
      if (p.warp == 0 && p.lane < 4 && pair < count)
        a.h_scale[(long long)part * a.rows + tile * BM + pair] = scale;
    }
  } else {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      const int pair = 8 * (i >> 2) + 2 * (p.lane & 3) + (i & 1);
      u16* line = reinterpret_cast<u16*>(p.s.result[pair]);
      line[row + 8 * (i >> 1 & 1)] = bfloat16_pair(gate[i], 0.f) & 0xFFFF;
    }
  }
  meet();
  constexpr int kBytes = FP8 ? 128 : 256, kPieces = kBytes / 16;
  u8* to = static_cast<u8*>(a.h_rows);
  const long long pitch = (long long)a.inter * (FP8 ? 1 : 2);
  for (int i = thread; i < count * kPieces; i += kConsumers) {
    const int pair = i / kPieces, piece = i % kPieces;
    *reinterpret_cast<uint4*>(to + (tile * BM + pair) * pitch + part * kBytes + piece * 16) =
        *reinterpret_cast<const uint4*>(p.s.result[pair] + piece * 16);
  }
  asm volatile("fence.proxy.async;" ::: "memory");  // other blocks read it through the copy engine
  meet();
  if (thread == 0) {
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(a.state + 1 + tile) : "memory");
  }
}

template <int N>
__device__ void down(Place& p, const Unit& unit) {
  const Args& a = p.args;
  const int steps = a.inter / kColumns, part = unit.part, count = unit.count;
  const int thread = p.warp * 32 + p.lane, row = row_of(p.warp, p.lane);
  float sum[N / 2];
#pragma unroll
  for (int i = 0; i < N / 2; ++i) sum[i] = 0.f;
  for (int k = 0; k < steps; ++k) {
    wait(p.full_x(), p.x.parity);
    const u32 x = shared_address(p.s.x[p.x.at]);
    if constexpr (FP8 && CODED) {
      float pairs[N / 4];
      pair_scales<N>(pairs, p.s.scales[p.x.at], p.lane);
      add_block<N>(p, sum, x, pairs, unit.scales[0][k]);
      p.release_x();
      continue;
    } else if constexpr (CODED) {
      packed12::Codes codes;
      u32 words[16];
      p.read_w(codes);
      widen(codes, words);
      hold(sum);
      begin();
      stage<N>(sum, words, x, k > 0);
      settle<0>();
      hold(sum);
      hold(words);
      packed12::add_others<N>(sum, codes.other, p.warp, p.lane, p.s.x[p.x.at], a.down_lift);
      p.release_x();
      continue;
    }
    wait(p.full_w(), p.w.parity);
    if constexpr (FP8) {
      float product[N / 2], pairs[N / 4];
      hold(product);
      begin();
      stage<N>(product, p.rows(), x, false);
      pair_scales<N>(pairs, p.s.scales[p.x.at], p.lane);
      settle<0>();
      hold(product);
      p.release_w();
      p.release_x();
      add_scaled<N>(sum, product, pairs, unit.scales[0][k]);
    } else {
      hold(sum);
      begin();
      stage<N>(sum, p.rows(), x, k > 0);
      settle<0>();
      hold(sum);
      p.release_w();
      p.release_x();
    }
  }
  meet();
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    const int pair = 8 * (i >> 2) + 2 * (p.lane & 3) + (i & 1);
    const float weight = unit.weights[pair] * (CODED && !FP8 ? a.down_back : 1.f);
    u16* line = reinterpret_cast<u16*>(p.s.result[pair]);
    line[row + 8 * (i >> 1 & 1)] = bfloat16_pair(sum[i] * weight, 0.f) & 0xFFFF;
  }
  meet();
  for (int i = thread; i < count * 16; i += kConsumers) {
    const int pair = i / 16, piece = i % 16;
    const long long to = (long long)unit.pairs[pair] * a.hidden + part * 128;
    *reinterpret_cast<uint4*>(a.y + to + piece * 8) =
        *reinterpret_cast<const uint4*>(p.s.result[pair] + piece * 16);
  }
}

template <int N>
__device__ __forceinline__ void run(Place& p, const Unit& unit, bool first) {
  if (first)
    gate_up<N>(p, unit);
  else
    down<N>(p, unit);
}

__device__ __forceinline__ void wait_for(const int* counter, int least) {
  int seen;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
  } while (seen < least);
  asm volatile("fence.proxy.async;" ::: "memory");
}

}  // namespace

// A row of blocks per token, each for a part of its columns: a whole number of 1,024. Those of
// `experts` stay until the layer's end: what runs beside this finds its place before them.
extern "C" __global__ void __launch_bounds__(256) arrange(const __grid_constant__ Args a) {
  await();
  __shared__ int counts[kMaxExperts];
  __shared__ int begins[kMaxExperts];
  __shared__ int rows[kMaxExperts];  // of this token's pairs
  const int token = blockIdx.x, thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  const int pairs = a.tokens * a.top_k;
  const int columns = ((a.hidden + 1023) / 1024 + gridDim.y - 1) / gridDim.y * 1024;
  const int begin = blockIdx.y * columns, end = min(a.hidden, begin + columns);
  const bool coded = FP8 && a.scales != nullptr;
  const u16* input = a.input + (coded ? 0 : token * a.stride);
  const u8* codes_of = reinterpret_cast<const u8*>(a.input) + (coded ? token * a.stride : 0);
  constexpr int kAhead = 4;
  uint2 words[kAhead];
  auto fetch = [&](int from) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int at = from + i * 1024 + thread * 4;
      if (at >= end) break;
      if (coded)
        words[i].x = __ldcg(reinterpret_cast<const u32*>(codes_of + at));
      else
        words[i] = __ldcg(reinterpret_cast<const uint2*>(input + at));
    }
  };
  fetch(begin);
  for (int e = thread; e < a.experts; e += 256) counts[e] = 0;
  __syncthreads();
  for (int i = thread; i < pairs; i += 256) {
    const int e = __ldcg(a.ids + i);
    if (e >= 0) atomicAdd(&counts[e], 1);
  }
  int place = 0, expert = 0;
  const int pair = token * a.top_k + warp;  // the first of this warp's
  auto look = [&](int at) {
    expert = __ldcg(a.ids + at);
    place = 0;
    for (int i = lane; i < at; i += 32) place += __ldcg(a.ids + i) == expert;
    place = __reduce_add_sync(~0u, place);
  };
  if (warp < a.top_k) look(pair);
  __syncthreads();
  if (warp == 0) {
    const bool writes = token == 0 && blockIdx.y == 0;
    int before = 0;
    for (int base = 0; base < a.experts; base += 32) {
      const int e = base + lane, count = e < a.experts ? counts[e] : 0, own = (count + BM - 1) / BM;
      int sum = own;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += other;
      }
      if (e < a.experts) {
        begins[e] = before + sum - own;
        if (writes) {
          a.begins[e] = before + sum - own;
          a.begins[a.experts + 1 + e] = count;
        }
      }
      before += __shfl_sync(~0u, sum, 31);
    }
    if (writes && lane == 0) a.begins[a.experts] = before;
  }
  if (token == 0 && blockIdx.y == 0)
    for (int i = thread; i < 1 + a.most; i += 256) a.state[i] = 0;
  __syncthreads();
  for (int k = warp; k < a.top_k; k += 8) {
    if (k > warp) look(token * a.top_k + k);
    if (lane == 0) {
      const int row = expert < 0 ? -1 : (begins[expert] + place / BM) * BM + place % BM;
      rows[k] = row;
      if (begin == 0 && row >= 0) {
        a.pair_of[row] = token * a.top_k + k;
        a.weight_of[row] = a.weights[token * a.top_k + k];
      }
    }
  }
  __syncthreads();
  for (int from = begin; from < end; from += kAhead * 1024) {
    if (from > begin) fetch(from);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int at = from + i * 1024 + thread * 4;
      if (at >= end) break;
      if constexpr (FP8) {
        const float v0 = __int_as_float(words[i].x << 16);
        const float v1 = __int_as_float(words[i].x & 0xFFFF0000);
        const float v2 = __int_as_float(words[i].y << 16);
        const float v3 = __int_as_float(words[i].y & 0xFFFF0000);
        float peak = fmaxf(fmaxf(fabsf(v0), fabsf(v1)), fmaxf(fabsf(v2), fabsf(v3)));
#pragma unroll
        for (int step = 16; step > 0; step /= 2)
          peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, step));
        float scale = scale_of(peak, a.powers);
        u32 codes = e4m3_pair(v0 / scale, v1 / scale) | e4m3_pair(v2 / scale, v3 / scale) << 16;
        if (coded) {
          codes = words[i].x;
          scale = __ldcg(a.scales + token * a.scale_row + at / 128 * a.scale_group);
        }
        for (int k = 0; k < a.top_k; ++k) {
          const long long row = rows[k];
          if (row < 0) continue;
          *reinterpret_cast<u32*>(static_cast<u8*>(a.x_rows) + row * a.hidden + at) = codes;
          if (lane == 0) a.x_scale[(long long)(at / 128) * a.rows + row] = scale;
        }
      } else {
        for (int k = 0; k < a.top_k; ++k) {
          const long long row = rows[k];
          if (row < 0) continue;
          *reinterpret_cast<uint2*>(static_cast<u16*>(a.x_rows) + row * a.hidden + at) = words[i];
        }
      }
    }
  }
  invite();
}

// Both matmuls of one layer; as many blocks as the device can run at once.
extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS)
    experts(const __grid_constant__ Args a) {
  extern __shared__ u8 raw[];
  Shared& s = *reinterpret_cast<Shared*>(
      raw + ((1024 - (shared_address(raw) & 1023)) & 1023));
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      init_barrier(shared_address(&s.w_full[i]), 1);
      init_barrier(shared_address(&s.w_empty[i]), kWarps);
    }
    for (int i = 0; i < kXStages; ++i) {
      init_barrier(shared_address(&s.x_full[i]), 1);
      init_barrier(shared_address(&s.x_empty[i]), kWarps);
    }
    for (int i = 0; i < kUnits; ++i) {
      init_barrier(shared_address(&s.taken[i]), 1);
      init_barrier(shared_address(&s.unit_full[i]), 1);
      init_barrier(shared_address(&s.unit_empty[i]), kWarps);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async;" ::: "memory");
  }
  __syncthreads();
  follow();
  for (int e = threadIdx.x; e <= a.experts; e += kThreads) {
    s.begins[e] = __ldcg(a.begins + e);
    if (e < a.experts) s.counts[e] = __ldcg(a.begins + a.experts + 1 + e);
  }
  __syncthreads();
  const int used = s.begins[a.experts];
  const int per_up = a.inter / kRows, per_down = a.hidden / kRows;
  const int ups = used * per_up, total = ups + used * per_down;
  Ring units, w, x;
  if (warp == kWarps) {  // fetches weights
    if (lane != 0) return;
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    int next = atomicAdd(a.state, 1);
    while (true) {
      const int unit = next < total ? next : -1;
      wait(shared_address(&s.unit_empty[units.at]), units.parity ^ 1);
      s.number[units.at] = unit;
      arrive(shared_address(&s.taken[units.at]));
      units.step<kUnits>();
      if (unit < 0) return;
      next = atomicAdd(a.state, 1);
      const bool first = unit < ups;
      const int within = first ? unit : unit - ups, per = first ? per_up : per_down;
      const int tile = within / per, part = within % per;
      const int expert = tile_of(s, a.experts, tile).expert;
      const int steps = (first ? a.hidden : a.inter) / kColumns;
      const TensorMap* map = first ? &a.gate_up : &a.down;
      const int row = expert * (first ? 2 * a.inter : a.hidden) + part * kRows;
      const int bytes = !CODED ? kStage : first ? a.gate_up_stride : a.down_stride;
      const u8* tiles = (first ? a.gate_up_tiles : a.down_tiles) +
                        (long long)(expert * per + part) * steps * (first ? 2 : 1) * bytes;
      for (int k = 0; k < steps; ++k) {
        for (int half = 0; half < (first ? 2 : 1); ++half) {
          wait(shared_address(&s.w_empty[w.at]), w.parity ^ 1);
          const u32 full = shared_address(&s.w_full[w.at]);
          expect(full, bytes);
          if constexpr (CODED)
            fetch_line(shared_address(s.w[w.at]), tiles + (k * (first ? 2 : 1) + half) * bytes,
                       bytes, full, policy);
          else
            fetch_box(shared_address(s.w[w.at]), map, k * kColumns, row + half * a.inter, full,
                      policy);
          w.step<kStages>();
        }
      }
    }
  } else if (warp > kWarps) {  // reads what belongs to a unit, and fetches activations
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("fence.proxy.async;" ::: "memory");
    while (true) {
      wait(shared_address(&s.taken[units.at]), units.parity);
      Unit& unit = s.unit[units.at];
      const int number = *reinterpret_cast<volatile int*>(&s.number[units.at]);
      const bool first = number < ups;
      const int within = first ? number : number - ups, per = first ? per_up : per_down;
      const int tile = within / per, part = within % per;
      const int steps = (first ? a.hidden : a.inter) / kColumns;
      Tile of = {0, 0};
      if (number >= 0) {
        of = tile_of(s, a.experts, tile);
        if (FP8) {
          const int groups = (first ? 2 * a.inter : a.hidden) / 128;
          const float* scales = (first ? a.gate_up_scale : a.down_scale) +
                                (long long)(of.expert * groups + part) * steps;
          for (int i = lane; i < steps; i += 32) {
            unit.scales[0][i] = __ldcg(scales + i);
            if (first) unit.scales[1][i] = __ldcg(scales + per_up * steps + i);
          }
        }
        if (!first) {
          for (int i = lane; i < BM; i += 32) {
            unit.pairs[i] = i < of.count ? __ldcg(a.pair_of + tile * BM + i) : 0;
            unit.weights[i] = i < of.count ? __ldcg(a.weight_of + tile * BM + i) : 0.f;
          }
        }
      }
      if (lane == 0) {
        unit.number = number;
        unit.tile = tile;
        unit.part = part;
        unit.count = of.count;
      }
      __syncwarp();
      if (lane == 0) arrive(shared_address(&s.unit_full[units.at]));
      units.step<kUnits>();
      if (number < 0) return;
      if (lane == 0) {
        const int eights = (of.count + 7) / 8;
        const TensorMap* map = first ? &a.x : &a.h;
        const float* scales = (first ? a.x_scale : a.h_scale) + tile * BM;
        if (!first) wait_for(a.state + 1 + tile, per_up);
        for (int k = 0; k < steps; ++k) {
          wait(shared_address(&s.x_empty[x.at]), x.parity ^ 1);
          const u32 full = shared_address(&s.x_full[x.at]), to = shared_address(s.x[x.at]);
          expect(full, eights * (8 * kWidth + (FP8 ? 32 : 0)));
          for (int i = 0; i < eights; ++i)
            fetch_box(to + i * 8 * kWidth, map, k * kColumns, tile * BM + i * 8, full, policy);
          if (FP8)
            fetch_line(shared_address(s.scales[x.at]), scales + (long long)k * a.rows, eights * 32,
                       full);
          x.step<kXStages>();
        }
      }
      __syncwarp();
    }
  } else {
    Place p{s, a, w, x, lane, warp};
    while (true) {
      wait(shared_address(&s.unit_full[units.at]), units.parity);
      const Unit& unit = s.unit[units.at];
      const int number = unit.number, count = unit.count;
      if (number < 0) return;
      const bool first = number < ups;
      if (CODED && FP8) p.begin_unit(first ? a.gate_up_base : a.down_base);
      if (count <= 8)
        run<8>(p, unit, first);
      else if (BM == 16 || count <= 16)
        run<16>(p, unit, first);
      else
        run<BM>(p, unit, first);
      __syncwarp();
      if (lane == 0) arrive(shared_address(&s.unit_empty[units.at]));
      units.step<kUnits>();
    }
  }
}

// out[t] = Σ_k y[t · top_k + k]; a thread has eight columns.
extern "C" __global__ void __launch_bounds__(128) combine(const __grid_constant__ Args a) {
  follow();
  const int at = (blockIdx.y * 128 + threadIdx.x) * 8;
  if (at >= a.hidden) return;
  const long long token = blockIdx.x;
  const u16* from = a.y + token * a.top_k * a.hidden + at;
  const int* ids = a.ids + token * a.top_k;
  float sum[8] = {};
#pragma unroll 4
  for (int k = 0; k < a.top_k; ++k) {
    if (__ldcg(ids + k) < 0) continue;  // nobody has written this row
    const uint4 words = __ldcg(reinterpret_cast<const uint4*>(from + (long long)k * a.hidden));
    const u32 each[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sum[2 * i] += __int_as_float(each[i] << 16);
      sum[2 * i + 1] += __int_as_float(each[i] & 0xFFFF0000);
    }
  }
  uint4 made;
  made.x = bfloat16_pair(sum[0], sum[1]);
  made.y = bfloat16_pair(sum[2], sum[3]);
  made.z = bfloat16_pair(sum[4], sum[5]);
  made.w = bfloat16_pair(sum[6], sum[7]);
  *reinterpret_cast<uint4*>(a.out + token * a.hidden + at) = made;
}
