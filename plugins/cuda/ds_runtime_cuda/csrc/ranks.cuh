// How kernels of several ranks meet and read each other's memory; the files of this folder share it.
//
// Memory of a rank: signals of each rank's blocks, then two halves of parts, which take turns. Before a rank
// writes call n + 2 into a half, it has met all ranks in call n + 1. Each begins that after it has read call n.
//
// Source of the orders between ranks: PTX ISA 8.x, "Memory Consistency Model" (release and acquire at .sys).
// Compiled at run time with: RANKS, SIGNALS (bytes in front of the parts), BLOCKS (the largest grid).

#include "hopper.cuh"

namespace {

constexpr int kMostRanks = 8;
static_assert(SIGNALS == kMostRanks * BLOCKS * sizeof(u64), "a signal of each rank's block");

__device__ __forceinline__ float widened(u32 bits) { return __uint_as_float(bits << 16); }

__device__ __forceinline__ void unpack(float (&to)[8], const uint4& from) {
  const u32 words[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) to[i] = widened(words[i / 2] >> i % 2 * 16 & 0xFFFF);
}

// What another rank has written; never an older copy.
__device__ __forceinline__ uint4 fetched(u64 at) {
  uint4 found;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(found.x), "=r"(found.y), "=r"(found.z), "=r"(found.w)
               : "l"(at)
               : "memory");
  return found;
}

// calls: how many there were, then how many blocks of this one have met.
__device__ __forceinline__ u64 next_call(const u64* calls) {
  return *reinterpret_cast<const volatile u64*>(calls) + 1;
}

__device__ __forceinline__ u64* signal_of(u64 memory, int rank) {
  return reinterpret_cast<u64*>(memory) + rank * BLOCKS + blockIdx.x;
}

// Blocks of the same number on all ranks wait for each other; what each wrote before is seen after it.
__device__ __forceinline__ void meet(const u64 (&peers)[kMostRanks], int rank, u64 call) {
  __syncthreads();
  if (threadIdx.x < RANKS) {
    u64* to = signal_of(peers[threadIdx.x], rank);
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(to), "l"(call) : "memory");
    const u64* from = signal_of(peers[rank], threadIdx.x);
    u64 seen;
    do {  // a rank that is ahead has written a later call
      asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(seen) : "l"(from) : "memory");
    } while (seen < call);
  }
  __syncthreads();
}

// Every block calls it once it has met: all have read `calls` then.
__device__ __forceinline__ void count(u64* calls, u64 call) {
  if (threadIdx.x == 0 && atomicAdd(calls + 1, 1ull) == gridDim.x - 1) {
    calls[1] = 0;
    calls[0] = call;
  }
}

}  // namespace
