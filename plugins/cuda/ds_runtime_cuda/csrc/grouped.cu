// Routed experts for thousands of tokens on compute capability 9.0, in FP8: two launches of grouped
// matmuls over rows that are sorted by expert.
//
// `gate_up` multiplies, activates and quantises: what it writes is what `down` reads. A unit is up to 128
// rows of one expert by 256 columns: 128 of gate and the same 128 of up, which are one group of the
// quantised product, or 256 of down. Blocks stay and take units in order from one counter, those of
// the same weights one behind the other: they run at the same time, and the second-level cache gives
// all but the first of them their weights. A warp fetches rows and weights, the next unit's as soon as
// there is room, and two warpgroups multiply 64 rows each; the second has nothing to do in a unit of
// up to 64. Products of 128 values of k are added in float32.
//
// Compiled at run time with: BYTES (of on-chip memory), ARGS (bytes of the arguments).

#include "hopper.cuh"

namespace {

constexpr int kRows = 128;             // of a unit
constexpr int kGroups = 2;             // warpgroups that multiply
constexpr int kOwn = kRows / kGroups;  // rows of one
constexpr int kBlock = 128;            // columns with one scale; bytes of k in a stage
constexpr int kHalves = 2;             // blocks of columns in a unit
constexpr int kStages = 4;
constexpr int kUnits = 2;              // places in the ring that hands units to the warpgroups
constexpr int kConsumers = kGroups * 128;
constexpr int kWarps = kConsumers / 32;
constexpr int kThreads = 128 + kConsumers;
constexpr int kMaxExperts = 512;

struct alignas(64) Args {
  TensorMap x;           // e4m3 [rows, k]
  TensorMap w;           // e4m3 [experts * columns, k]
  const float* x_scale;  // [k / 128, pitch]
  const float* w_scale;  // [experts, columns / 128, k / 128]
  const int* ends;       // [experts]: behind each expert's last row, a multiple of four
  void* out;             // gate_up: e4m3 [rows, columns / 2]; down: bfloat16 [rows, columns]
  float* out_scale;      // gate_up: [columns / 256, pitch]
  int* next;             // the next unit, 0 at first
  long long pitch;       // from one column of scales to the next
  int experts, columns, k, powers;
};

static_assert(sizeof(Args) == ARGS, "as the caller lays them out");

struct Unit {
  bool real;  // false: no units are left
  int expert, part;  // of its columns
  int first, count;  // of its rows
};

struct alignas(1024) Shared {
  u8 x[kStages][kGroups][kOwn * kBlock];
  u8 w[kStages][kHalves][kBlock * kBlock];
  float scales[kStages][kRows];
  u64 full[kStages], empty[kStages];
  u64 unit_full[kUnits], unit_empty[kUnits];
  Unit unit[kUnits];
  int ends[kMaxExperts];
  int tiles[kMaxExperts + 1];  // before each expert's
};
static_assert(sizeof(Shared) + 1024 <= BYTES, "it begins at a multiple of 1,024");

__device__ __forceinline__ Unit unit_of(const Shared& s, const Args& a, int number) {
  Unit u;
  const int parts = a.columns / (kHalves * kBlock), at = number / parts;
  u.real = at < s.tiles[a.experts];
  if (!u.real) return u;
  int low = 0, high = a.experts;  // tiles[low] <= at < tiles[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (s.tiles[middle] <= at)
      low = middle;
    else
      high = middle;
  }
  const int tiles = s.tiles[low + 1] - s.tiles[low], rest = number - s.tiles[low] * parts;
  u.expert = low;
  u.part = rest / tiles;
  u.first = (low ? s.ends[low - 1] : 0) + rest % tiles * kRows;
  u.count = min(kRows, s.ends[low] - u.first);
  return u;
}

// Where a block of weights begins: the first of its rows, of an expert's.
template <bool FIRST>
__device__ __forceinline__ int block_of(const Args& a, int part, int half) {
  return FIRST ? part * kBlock + half * (a.columns / 2) : (part * kHalves + half) * kBlock;
}

template <bool FIRST>
__device__ void produce(Shared& s, const Args& a) {
  u64 keep;  // weights, too: with evict_first, units beside each other read them from memory again
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(keep));
  Ring at, units;
  int next = atomicAdd(a.next, 1);
  while (true) {
    const Unit u = unit_of(s, a, next);
    wait(shared_address(&s.unit_empty[units.at]), units.parity ^ 1);
    s.unit[units.at] = u;
    arrive(shared_address(&s.unit_full[units.at]));
    units.step<kUnits>();
    if (!u.real) break;
    next = atomicAdd(a.next, 1);
    const int groups = u.count > kOwn ? 2 : 1;
    const u32 scales = u.count * 4;  // a multiple of 16, as ends are of four
    const u32 bytes = groups * kOwn * kBlock + kHalves * kBlock * kBlock + scales;
    const int row = u.expert * a.columns;
    const int rows[2] = {row + block_of<FIRST>(a, u.part, 0), row + block_of<FIRST>(a, u.part, 1)};
    const float* x_scale = a.x_scale + u.first;
    for (int k = 0; k < a.k; k += kBlock) {
      wait(shared_address(&s.empty[at.at]), at.parity ^ 1);
      const u32 barrier = shared_address(&s.full[at.at]);
      expect(barrier, bytes);
      for (int group = 0; group < groups; ++group)
        fetch_box(shared_address(s.x[at.at][group]), &a.x, k, u.first + group * kOwn, barrier, keep);
      for (int half = 0; half < kHalves; ++half)
        fetch_box(shared_address(s.w[at.at][half]), &a.w, k, rows[half], barrier, keep);
      fetch_line(shared_address(s.scales[at.at]), x_scale, scales, barrier);
      x_scale += a.pitch;
      at.step<kStages>();
    }
  }
}

// d (+)= 64 rows by 128 columns, 32 values deep.
__device__ __forceinline__ void multiply(float (&d)[64], u64 left, u64 right, int add) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" R64
               "}, %64, %65, p, 1, 1;\n}\n"
               : F64(d)
               : "l"(left), "l"(right), "r"(add));
}

// What a thread has of row r (two of them, 8 apart), in order of columns: i of 32.
__device__ __forceinline__ int place(int i, int r) { return 4 * (i >> 1) + 2 * r + (i & 1); }

__device__ __forceinline__ float rounded(float x) {  // to bfloat16
  return __int_as_float(bfloat16_pair(0.f, x));
}

// Gate and up to one quantised group of each row, rounded where separate kernels round.
__device__ __forceinline__ void write_group(float (&gate)[64], float (&up)[64], const Args& a,
                                            const Unit& u, int own, int lane) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float peak = 0.f;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      float& g = gate[place(i, r)];
      const float x = rounded(g);
      g = rounded(x / (1.f + __expf(-x)) * rounded(up[place(i, r)]));
      peak = fmaxf(peak, fabsf(g));
    }
    peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 1));
    peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 2));
    const float scale = scale_of(peak, a.powers);
    const int row = own + 8 * r;
    const long long at = u.first + row;
    uint4* to = reinterpret_cast<uint4*>(static_cast<u8*>(a.out) + at * (a.columns / 2) +
                                         u.part * kBlock) + (lane & 3);
#pragma unroll
    for (int piece = 0; piece < 2; ++piece) {
      u32 words[4];  // two codes of eight columns and two of the next eight
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int i = piece * 16 + 4 * j;
        words[j] = e4m3_pair(gate[place(i, r)] / scale, gate[place(i + 1, r)] / scale) |
                   e4m3_pair(gate[place(i + 2, r)] / scale, gate[place(i + 3, r)] / scale) << 16;
      }
      turn(words, lane);
      if (row < u.count)
        to[4 * piece] = make_uint4(__byte_perm(words[0], words[1], 0x5410),
                                   __byte_perm(words[2], words[3], 0x5410),
                                   __byte_perm(words[0], words[1], 0x7632),
                                   __byte_perm(words[2], words[3], 0x7632));
    }
    if ((lane & 3) == 0 && row < u.count) a.out_scale[u.part * a.pitch + at] = scale;
  }
}

__device__ __forceinline__ void write_block(float (&sum)[64], const Args& a, const Unit& u,
                                            int half, int own, int lane) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = own + 8 * r;
    uint4* to = reinterpret_cast<uint4*>(static_cast<u16*>(a.out) +
                                         (long long)(u.first + row) * a.columns +
                                         (u.part * kHalves + half) * kBlock) + (lane & 3);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      u32 words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float* two = sum + 16 * i + 4 * j + 2 * r;
        words[j] = bfloat16_pair(two[0], two[1]);
      }
      turn(words, lane);
      if (row < u.count) to[4 * i] = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

template <bool FIRST>
__device__ void consume(Shared& s, const Args& a, int group, int warp, int lane) {
  Ring at, units;
  const int own = group * kOwn + warp * 16 + (lane >> 2);  // and own + 8, of the unit's rows
  const int steps = a.k / kBlock, blocks = a.columns / kBlock;
  while (true) {
    wait(shared_address(&s.unit_full[units.at]), units.parity);
    const Unit u = s.unit[units.at];
    arrive_warp(s.unit_empty[units.at], lane);
    units.step<kUnits>();
    if (!u.real) break;
    if (u.count <= group * kOwn) {  // the other warpgroup has all rows
      for (int k = 0; k < steps; ++k) {
        wait(shared_address(&s.full[at.at]), at.parity);
        arrive_warp(s.empty[at.at], lane);
        at.step<kStages>();
      }
      continue;
    }
    float sum[kHalves][64], product[64];
    const float* from[kHalves];
    float next[kHalves];  // scales of the weights, read a step ahead
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const int block = block_of<FIRST>(a, u.part, half) / kBlock;
      from[half] = a.w_scale + (long long)(u.expert * blocks + block) * steps;
      next[half] = __ldg(from[half]);
#pragma unroll
      for (int i = 0; i < 64; ++i) sum[half][i] = 0.f;
    }
    for (int k = 0; k < steps; ++k) {
      float now[kHalves];
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        now[half] = next[half];
        next[half] = __ldg(from[half] + min(k + 1, steps - 1));
      }
      wait(shared_address(&s.full[at.at]), at.parity);
      const float scale[2] = {s.scales[at.at][own], s.scales[at.at][own + 8]};
      const u32 x = shared_address(s.x[at.at][group]);
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        const u32 w = shared_address(s.w[at.at][half]);
        hold(product);
        begin();
#pragma unroll
        for (int i = 0; i < 4; ++i)
          multiply(product, operand(x + 32 * i), operand(w + 32 * i), i > 0);
        commit();
        settle<0>();
        hold(product);
        if (half == kHalves - 1) arrive_warp(s.empty[at.at], lane);
        const float factor[2] = {scale[0] * now[half], scale[1] * now[half]};
#pragma unroll
        for (int i = 0; i < 64; ++i) sum[half][i] += product[i] * factor[i >> 1 & 1];
      }
      at.step<kStages>();
    }
    if constexpr (FIRST) {
      write_group(sum[0], sum[1], a, u, own, lane);
    } else {
#pragma unroll
      for (int half = 0; half < kHalves; ++half) write_block(sum[half], a, u, half, own, lane);
    }
  }
}

template <bool FIRST>
__device__ __forceinline__ void run(const Args& a) {
  extern __shared__ u8 raw[];
  Shared& s = *reinterpret_cast<Shared*>(
      raw + ((1024 - (shared_address(raw) & 1023)) & 1023));
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      init_barrier(shared_address(&s.full[i]), 1);
      init_barrier(shared_address(&s.empty[i]), kWarps);
    }
    for (int i = 0; i < kUnits; ++i) {
      init_barrier(shared_address(&s.unit_full[i]), 1);
      init_barrier(shared_address(&s.unit_empty[i]), kWarps);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async;" ::: "memory");
  }
  follow();
  for (int i = threadIdx.x; i < a.experts; i += kThreads) s.ends[i] = __ldcg(a.ends + i);
  __syncthreads();
  if (warp == 0) {
    int before = 0;
    for (int base = 0; base <= a.experts; base += 32) {
      const int i = base + lane;
      const int count = i < a.experts ? s.ends[i] - (i ? s.ends[i - 1] : 0) : 0;
      const int mine = (count + kRows - 1) / kRows;
      int sum = mine;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += other;
      }
      if (i <= a.experts) s.tiles[i] = before + sum - mine;
      before += __shfl_sync(~0u, sum, 31);
    }
  }
  __syncthreads();
  if (warp < 4) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0) produce<FIRST>(s, a);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    consume<FIRST>(s, a, (warp - 4) / 4, warp & 3, lane);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    gate_up(const __grid_constant__ Args a) {
  run<true>(a);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) down(const __grid_constant__ Args a) {
  run<false>(a);
}
