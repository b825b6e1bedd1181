// Attention of a prompt's tokens, for keys of 128 + 64 values and values of 128, on compute
// capability 9.0: blocks that stay, so that no load waits for the block before it to end.
//
// A unit is 128 queries of one head of one sequence, its tiles 128 keys each, the last ones first:
// only those need a mask. A warp fetches queries, keys and values through the copy engine, the next
// unit's as soon as there is room. Two warpgroups have 64 queries each: scores of the next tile are
// multiplied while this one's weights are, and its exponentials while those are.
//
// Compiled at run time with: BYTES (of on-chip memory), ARGS (bytes of the arguments), SEQUENCES (of a
// launch, at most).
// One file: one kernel, whose warps share all that it has on chip.
// Source of the order of steps: Shah et al., FlashAttention-3, arXiv 2407.08608.

#include "hopper.cuh"

namespace {

constexpr int kRows = 128;          // queries of a unit, keys of a tile
constexpr int kBox = kRows * 128;   // bytes: 64 values of each row
constexpr int kKeys = 3;            // boxes: two without a position, one rotated
constexpr int kValues = 2;          // boxes
constexpr int kV = 128;
constexpr int kStages = 2;          // tiles of keys and of values on their way or in use
constexpr int kUnits = 2;           // places in the ring that hands units to the warpgroups
constexpr int kGroups = 2;          // warpgroups that multiply
constexpr int kOwn = kRows / kGroups;  // queries of one
constexpr int kConsumers = kGroups * 128;
constexpr int kWarps = kConsumers / 32;
constexpr int kThreads = 128 + kConsumers;
constexpr int kMaxSequences = SEQUENCES;
#define kNone __int_as_float(0xFF800000)  // less than any score

struct alignas(64) Args {
  TensorMap q, q_rope, k, k_rope, v;  // rows of tokens; a head is a column of theirs
  const int* q_cu;                    // [sequences + 1]
  const int* k_cu;
  u16* out;                           // bfloat16 [tokens, heads, 128]
  float* lse;                         // [tokens, heads]
  u8* codes;      // or null; else out and lse are not written, but e4m3 [tokens, heads * 128] and
  float* scales;  // [heads], `aligned` apart, of every token: one for its 128 values of a head
  float scale;                        // log2(e) in it
  int sequences, heads, causal;
  int together;                             // heads whose units lie side by side; divides heads
  int q_head, q_rope_head, k_head, v_head;  // from one head's column to the next's
  int aligned, powers;                      // powers: scales are powers of two
};

static_assert(sizeof(Args) == ARGS, "as the caller lays them out");

struct Unit {
  bool real;                  // false: no units are left
  int head, first;            // of its queries
  int q_begin, queries, k_begin, keys;
  int shift, tiles;           // query j sees keys up to j + shift
};

struct alignas(1024) Shared {
  u8 q[kKeys][kBox];
  u8 k[kStages][kKeys][kBox];
  u8 v[kStages][kValues][kBox];
  u64 q_full[kGroups], q_empty[kGroups];  // each warpgroup's own, who need not keep step
  u64 k_full[kStages], k_empty[kStages];
  u64 v_full[kStages], v_empty[kStages];
  u64 unit_full[kUnits], unit_empty[kUnits];
  Unit unit[kUnits];
  int q_begin[kMaxSequences + 1];
  int k_begin[kMaxSequences + 1];
  int units[kMaxSequences + 1];  // before each sequence's, of one head
};
static_assert(sizeof(Shared) + 1024 <= BYTES, "it begins at a multiple of 1,024");

// Units of a few heads, whose keys and values the second-level cache holds together, lie one behind
// the other, those with most keys first.
__device__ __forceinline__ Unit unit_of(const Shared& s, const Args& a, int round) {
  Unit u;
  const int index = round * gridDim.x + blockIdx.x, at = index / a.heads;
  u.real = index < s.units[a.sequences] * a.heads;
  if (!u.real) return u;
  int low = 0, high = a.sequences;  // units[low] <= at < units[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (s.units[middle] <= at)
      low = middle;
    else
      high = middle;
  }
  const int blocks = s.units[low + 1] - s.units[low], rest = index - s.units[low] * a.heads;
  const int group = rest / (blocks * a.together), inside = rest - group * blocks * a.together;
  u.first = (blocks - 1 - inside / a.together) * kRows;
  u.head = group * a.together + inside % a.together;
  u.q_begin = s.q_begin[low];
  u.queries = s.q_begin[low + 1] - u.q_begin;
  u.k_begin = s.k_begin[low];
  u.keys = s.k_begin[low + 1] - u.k_begin;
  u.shift = a.causal ? u.keys - u.queries : u.keys;
  const int last = a.causal ? min(u.keys, max(u.first + kRows + u.shift, 0)) : u.keys;
  u.tiles = (last + kRows - 1) / kRows;
  return u;
}

// d (+)= 64 rows by 128 rows, 16 values deep.
__device__ __forceinline__ void multiply(float (&d)[64], u64 left, u64 right, int add) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" R64
               "}, %64, %65, p, 1, 1, 0, 0;\n}\n"
               : F64(d)
               : "l"(left), "l"(right), "r"(add));
}

// d += weights of 64 rows and 16 keys, in registers, by 16 rows of 128 values.
__device__ __forceinline__ void multiply(float (&d)[64], const u32* left, u64 right) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" R64
               "}, {%64,%65,%66,%67}, %68, 1, 1, 1, 1;\n"
               : F64(d)
               : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right));
}

// As operand(), of rows that lie one behind the other and are summed over: from a box of 64 columns
// to the next (the leading offset) kBox bytes, from eight rows to the next eight (the stride) 1,024.
__device__ __forceinline__ u64 columns(u32 address) {
  return u64((address & 0x3FFFF) >> 4) | u64(kBox >> 4) << 16 | u64(64) << 32 | u64(1) << 62;
}

__device__ __forceinline__ float power(float x) {
  float made;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(made) : "f"(x));
  return made;
}

// Queries by a tile's keys, begun: scores of 64 rows.
__device__ __forceinline__ void begin_scores(float (&scores)[64], const Shared& s, int group,
                                             int stage) {
  const u32 q = shared_address(s.q) + group * kOwn * 128, k = shared_address(s.k[stage]);
#pragma unroll
  for (int box = 0; box < kKeys; ++box)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      multiply(scores, operand(q + box * kBox + 32 * i), operand(k + box * kBox + 32 * i),
               box + i > 0);
  commit();
}

// The warpgroups take turns at the matrix unit: one's exponentials run beside the other's products.
__device__ __forceinline__ void await_turn(int group) {
  asm volatile("bar.sync %0, %1;" ::"r"(2 + group), "n"(kConsumers) : "memory");
}
__device__ __forceinline__ void give_turn(int group) {
  asm volatile("bar.arrive %0, %1;" ::"r"(2 + group), "n"(kConsumers) : "memory");
}

__device__ void produce(Shared& s, const Args& a) {
  u64 keep, once;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(keep));
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
  Ring k, v, units;
  u32 q_parity = 0;
  for (int round = 0;; ++round) {
    const Unit u = unit_of(s, a, round);
    wait(shared_address(&s.unit_empty[units.at]), units.parity ^ 1);
    s.unit[units.at] = u;
    arrive(shared_address(&s.unit_full[units.at]));
    units.step<kUnits>();
    if (!u.real) break;
    for (int tile = u.tiles - 1; tile >= 0; --tile) {
      const int row = u.k_begin + tile * kRows;
      wait(shared_address(&s.k_empty[k.at]), k.parity ^ 1);
      u32 barrier = shared_address(&s.k_full[k.at]), to = shared_address(s.k[k.at]);
      expect(barrier, kKeys * kBox);
      fetch_box(to, &a.k, u.head * a.k_head, row, barrier, keep);
      fetch_box(to + kBox, &a.k, u.head * a.k_head + 64, row, barrier, keep);
      fetch_box(to + 2 * kBox, &a.k_rope, 0, row, barrier, keep);
      k.step<kStages>();
      wait(shared_address(&s.v_empty[v.at]), v.parity ^ 1);
      barrier = shared_address(&s.v_full[v.at]), to = shared_address(s.v[v.at]);
      expect(barrier, kValues * kBox);
      fetch_box(to, &a.v, u.head * a.v_head, row, barrier, keep);
      fetch_box(to + kBox, &a.v, u.head * a.v_head + 64, row, barrier, keep);
      v.step<kStages>();
      if (tile < u.tiles - 1) continue;
      for (int group = 0; group < kGroups; ++group) {
        const int first = u.q_begin + u.first + group * kOwn;
        wait(shared_address(&s.q_empty[group]), q_parity ^ 1);
        barrier = shared_address(&s.q_full[group]), to = shared_address(s.q) + group * kOwn * 128;
        expect(barrier, kKeys * kBox / kGroups);
        fetch_box(to, &a.q, u.head * a.q_head, first, barrier, once);
        fetch_box(to + kBox, &a.q, u.head * a.q_head + 64, first, barrier, once);
        fetch_box(to + 2 * kBox, &a.q_rope, u.head * a.q_rope_head, first, barrier, once);
      }
      q_parity ^= 1;
    }
  }
}

// Values behind the last key may be anything, and 0 · NaN is NaN: zeros instead.
__device__ __forceinline__ void clear_behind(Shared& s, int stage, int rows, int thread) {
  for (int i = thread; i < kValues * (kRows - rows) * 8; i += kConsumers) {
    const int box = i / ((kRows - rows) * 8), rest = i % ((kRows - rows) * 8);
    *reinterpret_cast<uint4*>(s.v[stage][box] + (rows + rest / 8) * 128 + rest % 8 * 16) =
        make_uint4(0, 0, 0, 0);
  }
  asm volatile("fence.proxy.async;" ::: "memory");
  asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory");
}

// What a thread has of 64 queries: two of them, 8 apart.
struct Rows {
  float top[2] = {kNone, kNone}, sum[2] = {0.f, 0.f};
  float fade[2];  // what earlier sums are multiplied by
  int seen[2];    // the last key of each
  int all;        // the last key that every query of the warpgroup sees
};

// Scores of a tile to weights, in place.
__device__ __forceinline__ void soften(float (&scores)[64], Rows& rows, float scale, int tile,
                                       int lane) {
  if (rows.all < tile * kRows + kRows - 1) {
    const int first = tile * kRows + 2 * (lane & 3);
#pragma unroll
    for (int i = 0; i < 64; ++i)
      if (first + 8 * (i >> 2) + (i & 1) > rows.seen[i >> 1 & 1]) scores[i] = kNone;
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float peak = rows.top[r];
#pragma unroll
    for (int i = 2 * r; i < 64; i += 4) peak = fmaxf(peak, fmaxf(scores[i], scores[i + 1]));
    peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 1));
    peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 2));
    const float base = peak == kNone ? 0.f : peak * scale;
    rows.fade[r] = power(rows.top[r] * scale - base);
    rows.top[r] = peak;
    float added = 0.f;
#pragma unroll
    for (int i = 2 * r; i < 64; i += 4) {
      scores[i] = power(scores[i] * scale - base);
      scores[i + 1] = power(scores[i + 1] * scale - base);
      added += scores[i] + scores[i + 1];
    }
    rows.sum[r] = rows.sum[r] * rows.fade[r] + added;
  }
}

__device__ __forceinline__ void begin_sums(float (&out)[64], const u32 (&weights)[32],
                                           const u8* values) {
  const u32 at = shared_address(values);
#pragma unroll
  for (int i = 0; i < 8; ++i) multiply(out, weights + 4 * i, columns(at + i * 16 * 128));
  commit();
}

// 128 values of a query, 32 in each of four lanes, rounded to bfloat16, as codes; their scale.
__device__ __forceinline__ float store_codes(u8* to, const float (&out)[64], int r, float inverse,
                                             int powers, bool real, int lane) {
  float values[32], peak = 0.f;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float* two = out + 4 * i + 2 * r;
    const u32 pair = bfloat16_pair(two[0] * inverse, two[1] * inverse);
    values[2 * i] = __int_as_float(pair << 16);
    values[2 * i + 1] = __int_as_float(pair & 0xFFFF0000);
    peak = fmaxf(peak, fmaxf(fabsf(values[2 * i]), fabsf(values[2 * i + 1])));
  }
  peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 1));
  peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 2));
  const float scale = scale_of(peak, powers);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    u32 words[4];  // two values of 8 columns, and two of the next 8
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float* own = values + 16 * half + 4 * j;
      words[j] = e4m3_pair(own[0] / scale, own[1] / scale) |
                 e4m3_pair(own[2] / scale, own[3] / scale) << 16;
    }
    turn(words, lane);
    if (real)
      reinterpret_cast<uint4*>(to)[4 * half + (lane & 3)] =
          make_uint4(__byte_perm(words[0], words[1], 0x5410), __byte_perm(words[2], words[3], 0x5410),
                     __byte_perm(words[0], words[1], 0x7632), __byte_perm(words[2], words[3], 0x7632));
  }
  return scale;
}

__device__ void consume(Shared& s, const Args& a, int group, int warp, int lane) {
  Ring k, v, units;
  u32 q_parity = 0;
  const int thread = group * 128 + warp * 32 + lane;
  const int own = group * kOwn + warp * 16 + (lane >> 2);  // and own + 8, of the unit's queries
  if (group == 1) give_turn(0);  // its last one is never awaited
  while (true) {
    wait(shared_address(&s.unit_full[units.at]), units.parity);
    const Unit& u = s.unit[units.at];
    if (!u.real) break;
    float scores[64], out[64];
    u32 weights[32];
    Rows rows;
#pragma unroll
    for (int i = 0; i < 64; ++i) out[i] = 0.f;
#pragma unroll
    for (int r = 0; r < 2; ++r) rows.seen[r] = min(u.first + own + 8 * r + u.shift, u.keys - 1);
    rows.all = min(u.first + group * kOwn + u.shift, u.keys - 1);
    if (u.tiles) {
      wait(shared_address(&s.q_full[group]), q_parity);
      q_parity ^= 1;
      wait(shared_address(&s.k_full[k.at]), k.parity);
      hold(scores);
      begin();
      begin_scores(scores, s, group, k.at);
      settle<0>();
      hold(scores);
      arrive_warp(s.k_empty[k.at], lane);
      k.step<kStages>();
      soften(scores, rows, a.scale, u.tiles - 1, lane);
      auto pack = [&] {
#pragma unroll
        for (int i = 0; i < 32; ++i) weights[i] = bfloat16_pair(scores[2 * i], scores[2 * i + 1]);
      };
      auto values_of = [&](int tile) {
        wait(shared_address(&s.v_full[v.at]), v.parity);
        if (u.keys - tile * kRows < kRows) clear_behind(s, v.at, u.keys - tile * kRows, thread);
      };
      for (int tile = u.tiles - 1; tile > 0; --tile) {
        pack();
        wait(shared_address(&s.k_full[k.at]), k.parity);
        values_of(tile);
        await_turn(group);
        hold(scores);
        hold(out);
        begin();
        begin_scores(scores, s, group, k.at);
        begin_sums(out, weights, s.v[v.at][0]);
        give_turn(1 - group);
        settle<1>();
        hold(scores);
        soften(scores, rows, a.scale, tile - 1, lane);
        // The condition always holds. It keeps the compiler from waiting for sums before exponentials.
        __syncwarp();
        if (lane == 0 && !(rows.sum[0] + rows.sum[1] < 0.f))
          arrive(shared_address(&s.k_empty[k.at]));
        k.step<kStages>();
        settle<0>();
        hold(out);
        arrive_warp(s.v_empty[v.at], lane);
        v.step<kStages>();
#pragma unroll
        for (int i = 0; i < 64; ++i) out[i] *= rows.fade[i >> 1 & 1];
      }
      arrive_warp(s.q_empty[group], lane);
      pack();
      values_of(0);
      hold(out);
      begin();
      begin_sums(out, weights, s.v[v.at][0]);
      settle<0>();
      hold(out);
      arrive_warp(s.v_empty[v.at], lane);
      v.step<kStages>();
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum = rows.sum[r];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      const int row = u.first + own + 8 * r;
      const float inverse = sum > 0.f ? 1.f / sum : 0.f;
      const long long at = (long long)(u.q_begin + row) * a.heads + u.head;
      if (a.codes) {
        const bool real = row < u.queries;
        const float size = store_codes(a.codes + at * kV, out, r, inverse, a.powers, real, lane);
        if ((lane & 3) == 0 && real)
          a.scales[(long long)u.head * a.aligned + u.q_begin + row] = size;
        continue;
      }
      uint4* to = reinterpret_cast<uint4*>(a.out + at * kV) + (lane & 3);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        u32 words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float* two = out + 16 * i + 4 * j + 2 * r;
          words[j] = bfloat16_pair(two[0] * inverse, two[1] * inverse);
        }
        turn(words, lane);
        if (row < u.queries) to[4 * i] = make_uint4(words[0], words[1], words[2], words[3]);
      }
      if ((lane & 3) == 0 && row < u.queries)
        a.lse[at] =
            sum > 0.f ? (rows.top[r] * a.scale + __log2f(sum)) * 0.6931471805599453f : kNone;
    }
    arrive_warp(s.unit_empty[units.at], lane);
    units.step<kUnits>();
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attention(const __grid_constant__ Args a) {
  extern __shared__ u8 raw[];
  Shared& s = *reinterpret_cast<Shared*>(
      raw + ((1024 - (shared_address(raw) & 1023)) & 1023));
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kGroups; ++i) {
      init_barrier(shared_address(&s.q_full[i]), 1);
      init_barrier(shared_address(&s.q_empty[i]), kWarps / kGroups);
    }
    for (int i = 0; i < kUnits; ++i) {
      init_barrier(shared_address(&s.unit_full[i]), 1);
      init_barrier(shared_address(&s.unit_empty[i]), kWarps);
    }
    for (int i = 0; i < kStages; ++i) {
      init_barrier(shared_address(&s.k_full[i]), 1);
      init_barrier(shared_address(&s.k_empty[i]), kWarps);
      init_barrier(shared_address(&s.v_full[i]), 1);
      init_barrier(shared_address(&s.v_empty[i]), kWarps);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async;" ::: "memory");
  }
  follow();
  for (int i = threadIdx.x; i <= a.sequences; i += kThreads) {
    s.q_begin[i] = __ldcg(a.q_cu + i);
    s.k_begin[i] = __ldcg(a.k_cu + i);
  }
  __syncthreads();
  if (warp == 0) {
    int before = 0;
    for (int base = 0; base <= a.sequences; base += 32) {
      const int i = base + lane;
      const int count = i < a.sequences ? s.q_begin[i + 1] - s.q_begin[i] : 0;
      const int mine = (count + kRows - 1) / kRows;
      int sum = mine;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += other;
      }
      if (i <= a.sequences) s.units[i] = before + sum - mine;
      before += __shfl_sync(~0u, sum, 31);
    }
  }
  __syncthreads();
  if (warp < 4) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
    if (threadIdx.x == 0) produce(s, a);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
    consume(s, a, (warp - 4) / 4, warp & 3, lane);
  }
}
