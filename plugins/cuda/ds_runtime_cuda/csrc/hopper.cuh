// Instructions of compute capability 9.0 that the files of this folder share.
//
// Source: PTX ISA 8.x, "Asynchronous Warpgroup Level Matrix Instructions", "Data Movement and
// Conversion Instructions: cp.async.bulk.tensor", "griddepcontrol".

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

namespace {

struct alignas(64) TensorMap {
  u64 words[16];
};

__device__ __forceinline__ u32 shared_address(const void* p) {
  return static_cast<u32>(__cvta_generic_to_shared(p));
}

// The next launch may begin where there is room, and waits for this one's end all the same.
__device__ __forceinline__ void invite() { asm volatile("griddepcontrol.launch_dependents;"); }

__device__ __forceinline__ void await() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

__device__ __forceinline__ void follow() {
  invite();
  await();
}

__device__ __forceinline__ void init_barrier(u32 at, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(count));
}

__device__ __forceinline__ void arrive(u32 at) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
}

__device__ __forceinline__ void expect(u32 at, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void wait(u32 at, u32 parity) {
  u32 done;
  do {
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}\n"
        : "=r"(done)
        : "r"(at), "r"(parity)
        : "memory");
  } while (!done);
}

__device__ __forceinline__ void fetch_box(u32 to, const TensorMap* map, int column, int row,
                                          u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(column), "r"(row), "l"(policy)
      : "memory");
}

__device__ __forceinline__ void fetch_line(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to), "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void fetch_line(u32 to, const void* from, u32 bytes, u32 barrier,
                                           u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

__device__ __forceinline__ void arrive_warp(u64& barrier, int lane) {
  __syncwarp();
  if (lane == 0) arrive(shared_address(&barrier));
}

// Place in a ring of stages, and the parity of its barriers.
struct Ring {
  int at = 0;
  u32 parity = 0;
  template <int N>
  __device__ __forceinline__ void step() {
    if (++at == N) {
      at = 0;
      parity ^= 1;
    }
  }
};

// ---- the matrix unit ----

// Rows of 128 bytes, swizzled, one behind the other: 64 or more of them.
__device__ __forceinline__ u64 operand(u32 address) {
  return u64((address & 0x3FFFF) >> 4) | u64(1) << 16 | u64(64) << 32 | u64(1) << 62;
}

#define F4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define F8(d, i) F4(d, i), F4(d, i + 4)
#define F16(d, i) F8(d, i), F8(d, i + 8)
#define R4 "%0,%1,%2,%3"
#define R8 R4 ",%4,%5,%6,%7"
#define R16 R8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define F32(d, i) F16(d, i), F16(d, i + 16)
#define F64(d) F32(d, 0), F32(d, 32)
#define R32 R16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define R64                                                                                     \
  R32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58," \
      "%59,%60,%61,%62,%63"
template <int N>
__device__ __forceinline__ void hold(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int N>
__device__ __forceinline__ void hold(u32 (&words)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(words[i])::"memory");
}

__device__ __forceinline__ void begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int N>
__device__ __forceinline__ void settle() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

__device__ __forceinline__ u32 bfloat16_pair(float low, float high) {
  u32 made;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(made) : "f"(high), "f"(low));
  return made;
}

__device__ __forceinline__ u32 e4m3_pair(float low, float high) {
  u16 made;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(made) : "f"(high), "f"(low));
  return made;
}

// Of a group of values with this peak. powers: rounded up to a power of two.
__device__ __forceinline__ float scale_of(float peak, int powers) {
  const float scale = fmaxf(peak, 1e-4f) / 448.0f;
  return powers ? __int_as_float((__float_as_int(scale) + 0x7FFFFF) & 0x7F800000) : scale;
}

// Of four neighbouring lanes, lane t gets the word t of each: 16 bytes that lie together.
__device__ __forceinline__ void turn(u32 (&words)[4], int lane) {
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    const bool high = lane & step;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      const u32 other = __shfl_xor_sync(~0u, high ? words[i] : words[i + step], step);
      if (high)
        words[i] = other;
      else
        words[i + step] = other;
    }
  }
}

}  // namespace
