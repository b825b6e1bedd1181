// FP8 weights (e4m3) in about 7.3 bits each, without loss: the sign and three bits of mantissa as they
// are, and the exponent in three bits, as the distance from the lowest of eight that nearly all weights
// of a stack of matrices have. Those that have another are listed, with their exponent, and have the
// distance 0.
//
// A tile is 128 rows by 128 columns, a block that has one scale: what eight warps need of 16 rows each,
// then eight words of 16 bits, then the list. A lane has the operands of four matrix instructions of 32
// columns: 16 words of four weights. Seven words keep eight: bit 6 of each byte, free in a code of seven
// bits, has one bit of the eighth. What is added to every code, the lowest exponent, is read from memory
// of the warp's own on chip, where exponents of the list are put for the moment: an entry says where.
//
// Source of the idea: exponents of trained weights have about 2.6 bits of information (Zhang et al., "70%
// Size, 100% Accuracy: Lossless LLM Compression ... via Dynamic-Length Float", arXiv:2504.11651).

namespace fp8_compressed {

constexpr int kSide = 128;
constexpr int kWarpBytes = 14 * 4 * 32;  // of 16 rows: three vectors of 16 bytes for each lane, one of 8
constexpr int kEnds = 8 * kWarpBytes;    // [8] where a warp's entries end
constexpr int kOthers = kEnds + 16;
constexpr int kMostOthers = 448;
constexpr int kMostTile = kOthers + 2 * kMostOthers;
constexpr int kOwn = 16 * 4 * 32;        // bytes on chip of a warp

constexpr u32 kKept = 0xBFBFBFBF;        // of a byte: all but bit 6

// Of word `word` of a lane's 16, byte `byte`.
__device__ __forceinline__ u32 other(int lane, int word, int byte, int exponent) {
  return (word >> 2) * 512 + lane * 16 + (word & 3) * 4 + byte | exponent << 11;
}

// What stands in a warp's own memory between tiles. base: the lowest exponent of the stack.
__device__ __forceinline__ void prepare(u8* own, int base, int lane) {
  const u32 all = base * 0x08080808;
#pragma unroll
  for (int i = 0; i < 4; ++i) reinterpret_cast<uint4*>(own)[32 * i + lane] = {all, all, all, all};
  __syncwarp();
}

// Eight words of weights; first, second: exponents that belong to their bytes.
__device__ __forceinline__ void widen(const u32 (&code)[7], const uint4& first, const uint4& second,
                                      u32* to) {
  const u32 exponents[8] = {first.x,  first.y,  first.z,  first.w,
                            second.x, second.y, second.z, second.w};
  u32 last = (code[0] << 1) & 0x80808080;
#pragma unroll
  for (int j = 1; j < 7; ++j) last |= (code[j] >> j) & (0x40404040 >> j);
#pragma unroll
  for (int j = 0; j < 7; ++j) to[j] = (code[j] & kKept) + exponents[j];
  to[7] = last + exponents[7];
}

// A warp's 16 rows of a tile, as operands of four instructions, and leaves its own memory as it was.
__device__ __forceinline__ void read(const u8* tile, u8* own, int base, int sixteen, int lane,
                                     u32 (&to)[16]) {
  const u16* ends = reinterpret_cast<const u16*>(tile + kEnds);
  const u16* list = reinterpret_cast<const u16*>(tile + kOthers);
  const int first = (sixteen ? ends[sixteen - 1] : 0) + lane, end = ends[sixteen];
  const u8* from = tile + sixteen * kWarpBytes;
  const uint4 a = reinterpret_cast<const uint4*>(from)[lane];
  const uint4 b = reinterpret_cast<const uint4*>(from)[32 + lane];
  const uint4 c = reinterpret_cast<const uint4*>(from)[64 + lane];
  const uint2 d = reinterpret_cast<const uint2*>(from + 3 * 512)[lane];
  auto place = [&](u32 entry) { return own + (entry & (kOwn - 1)); };
  auto put = [&](u32 entry) { *place(entry) = entry >> 8 & 0x78; };
  const u32 entry = first < end ? list[first] : 0;
  if (first < end) put(entry);
  const bool more = __any_sync(~0u, first + 32 < end);
  if (more) {
#pragma unroll 1
    for (int i = first + 32; i < end; i += 32) put(list[i]);
  }
  __syncwarp();
  const uint4* exponents = reinterpret_cast<const uint4*>(own) + lane;
  widen({a.x, a.y, a.z, a.w, b.x, b.y, b.z}, exponents[0], exponents[32], to);
  widen({b.w, c.x, c.y, c.z, c.w, d.x, d.y}, exponents[64], exponents[96], to + 8);
  __syncwarp();
  if (first < end) *place(entry) = base << 3;
  if (more) {
#pragma unroll 1
    for (int i = first + 32; i < end; i += 32) *place(list[i]) = base << 3;
  }
}

// d += weights (64 rows of four warps) · tokens (N); add 0: d = …
template <int N>
__device__ __forceinline__ void multiply(float (&d)[N / 2], const u32* w, u64 right, int add);
#define MULTIPLY(n, sums, results, w0, w1, w2, w3, right_, add_)                                    \
  template <>                                                                                      \
  __device__ __forceinline__ void multiply<n>(float (&d)[n / 2], const u32* w, u64 right,          \
                                              int add) {                                           \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " add_                                          \
                 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n "k32.f32.e4m3.e4m3 {" results        \
                 "}, {" w0 "," w1 "," w2 "," w3 "}, " right_ ", p, 1, 1;\n}\n"                     \
                 : sums                                                                            \
                 : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "l"(right), "r"(add));              \
  }
#define F4_ F4(d, 0)
#define F8_ F8(d, 0)
#define F16_ F16(d, 0)
MULTIPLY(8, F4_, R4, "%4", "%5", "%6", "%7", "%8", "%9")
MULTIPLY(16, F8_, R8, "%8", "%9", "%10", "%11", "%12", "%13")
MULTIPLY(32, F16_, R16, "%16", "%17", "%18", "%19", "%20", "%21")
#undef MULTIPLY
#undef F4_
#undef F8_
#undef F16_

}  // namespace fp8_compressed
