// A sum over ranks, the add of the residual and the norm, in one launch: for small messages.
//
// Each rank lays its part down where the others read it, says so to each, and waits for theirs. It then reads
// all parts, so that every rank adds the same values in the same order.
// Compiled at run time with: ARGS (bytes of the arguments), and what ranks.cuh needs.

#include "ranks.cuh"

namespace {

struct Args {
  u64 peers[8];         // address of each rank's memory: signals, then two halves of parts
  const u16* x;         // this rank's part, bfloat16 [rows, width]
  const u16* residual;  // [rows, width]
  const void* weight;   // [width]
  u16* normed;          // [rows, width], where codes are none
  u16* summed;          // [rows, width]; may be residual
  u8* codes;            // e4m3 [rows, width], or none
  float* scale;         // of each group of 128: of its first row, then of the next
  u64* calls;           // how many there were, then how many blocks of this one have met
  long long half;       // bytes of one
  int pitch;            // from a group's scales to the next's
  int powers;           // scales are powers of two
  int rank, rows, width;
  int wide;             // weight is float32
  float eps;
};
static_assert(sizeof(Args) == ARGS, "as the caller lays them out");

// To the nearest, ties to even; values that are not finite keep their kind.
__device__ __forceinline__ u32 rounded(float value) {
  u16 bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

__device__ __forceinline__ uint4 packed(const float (&from)[8]) {
  u32 words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = rounded(from[2 * i]) | rounded(from[2 * i + 1]) << 16;
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// The sum of a value of each thread, on all of them, in an order that follows from their number.
__device__ __forceinline__ float over_block(float value) {
  __shared__ float warps[32];
#pragma unroll
  for (int apart = 16; apart; apart /= 2) value += __shfl_xor_sync(~0u, value, apart);
  __syncthreads();  // the row before has been read
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  value = threadIdx.x % 32 < blockDim.x / 32 ? warps[threadIdx.x % 32] : 0;
#pragma unroll
  for (int apart = 16; apart; apart /= 2) value += __shfl_xor_sync(~0u, value, apart);
  return value;
}

__device__ __forceinline__ u32 coded(float low, float high) {
  u16 pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}

// Eight values from column `at` on, as codes; sixteen threads side by side have a group. As quant.groups_of.
__device__ __forceinline__ void quantise(const Args& a, const uint4& normed, int row, int at) {
  float values[8], largest = 1e-4f;
  unpack(values, normed);
  bool missing = false;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    largest = fmaxf(largest, fabsf(values[j]));
    missing |= isnan(values[j]);
  }
  const u32 group = 0xFFFFu << (threadIdx.x & 16);
#pragma unroll
  for (int apart = 8; apart; apart /= 2)
    largest = fmaxf(largest, __shfl_xor_sync(group, largest, apart));
  if (__ballot_sync(group, missing) & group) largest = __int_as_float(0x7FC00000);
  float scale = __fdiv_rn(largest, 448.0f);
  if (a.powers) scale = __int_as_float(__float_as_int(scale) + 0x7FFFFF & ~0x7FFFFF);
  u32 words[2];
#pragma unroll
  for (int j = 0; j < 8; ++j) values[j] = __fdiv_rn(values[j], scale);
#pragma unroll
  for (int j = 0; j < 2; ++j)
    words[j] = coded(values[4 * j], values[4 * j + 1]) | coded(values[4 * j + 2], values[4 * j + 3]) << 16;
  *reinterpret_cast<uint2*>(a.codes + (long long)row * a.width + at) = make_uint2(words[0], words[1]);
  if (threadIdx.x % 16 == 0) a.scale[(long long)(at / 128) * a.pitch + row] = scale;
}

// CHUNKS: of 8 values that a thread has of a row.
template <int CHUNKS>
__device__ __forceinline__ void run(const Args& a) {
  // Weights are there before the launch in front of this one ends, and far away.
  if (blockIdx.x == 0)
    for (int at = 8 * threadIdx.x; at < a.width; at += 8 * blockDim.x)
      asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const u8*>(a.weight) + (a.wide ? 4 : 2) * at));
  await();
  const u64 call = next_call(a.calls);
  const u64 parts = SIGNALS + (call & 1) * a.half;
  const int each = 8 * blockDim.x;
  for (int row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const long long begin = (long long)row * a.width;
    for (int at = 8 * threadIdx.x; at < a.width; at += each)
      *reinterpret_cast<uint4*>(a.peers[a.rank] + parts + 2 * (begin + at)) =
          *reinterpret_cast<const uint4*>(a.x + begin + at);
  }
  meet(a.peers, a.rank, call);
  count(a.calls, call);
  invite();
  for (int row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const long long begin = (long long)row * a.width;
    float values[CHUNKS][8], squares = 0;
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
      const int at = 8 * threadIdx.x + i * each;
      if (at >= a.width) continue;
      uint4 words[RANKS];
#pragma unroll
      for (int r = 0; r < RANKS; ++r) words[r] = fetched(a.peers[r] + parts + 2 * (begin + at));
      float total[8], more[8];
      unpack(total, words[0]);
#pragma unroll
      for (int r = 1; r < RANKS; ++r) {
        unpack(more, words[r]);
#pragma unroll
        for (int j = 0; j < 8; ++j) total[j] += more[j];
      }
      unpack(more, *reinterpret_cast<const uint4*>(a.residual + begin + at));
#pragma unroll
      for (int j = 0; j < 8; ++j) total[j] = widened(rounded(total[j])) + more[j];
      const uint4 kept = packed(total);
      *reinterpret_cast<uint4*>(a.summed + begin + at) = kept;
      unpack(values[i], kept);
#pragma unroll
      for (int j = 0; j < 8; ++j) squares += values[i][j] * values[i][j];
    }
    const float inverse = rsqrtf(over_block(squares) / a.width + a.eps);
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
      const int at = 8 * threadIdx.x + i * each;
      if (at >= a.width) continue;
      float weight[8];
      if (a.wide) {
#pragma unroll
        for (int j = 0; j < 8; ++j) weight[j] = static_cast<const float*>(a.weight)[at + j];
      } else {
        unpack(weight, *reinterpret_cast<const uint4*>(static_cast<const u16*>(a.weight) + at));
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) values[i][j] *= inverse * weight[j];
      const uint4 normed = packed(values[i]);
      if (a.codes == nullptr)
        *reinterpret_cast<uint4*>(a.normed + begin + at) = normed;
      else
        quantise(a, normed, row, at);
    }
  }
}

}  // namespace

// Grid: rows, at most BLOCKS, the same on all ranks; width of up to 8 (16) values a thread.
extern "C" __global__ void __launch_bounds__(1024) normed_sum(const __grid_constant__ Args a) {
  run<1>(a);
}

extern "C" __global__ void __launch_bounds__(1024) normed_sum_wide(const __grid_constant__ Args a) {
  run<2>(a);
}
