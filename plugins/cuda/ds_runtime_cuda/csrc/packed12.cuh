// bfloat16 weights in 12 bits each, without loss: the sign and seven bits of mantissa as they are, and
// the exponent in four bits, as the distance from the lowest of 16 that nearly all weights have.
//
// A tile is 128 rows by 64 columns in kTile bytes that lie together: what eight warps need of 16 rows
// each, then up to kOthers weights whose exponent is another. A lane's bytes are those of its operands
// of four matrix instructions of 16 columns, so that 16 bytes at a time come from on-chip memory, and
// seven instructions make eight weights. Their exponents begin at kFirst here: sums are multiplied by a
// power of two in the end. One of another exponent counts as kSmallest, and what is missing is added.
//
// Source of the idea: exponents of trained weights have about 2.6 bits of information (Zhang et al., "70%
// Size, 100% Accuracy: Lossless LLM Compression ... via Dynamic-Length Float", arXiv:2504.11651).

namespace packed12 {

constexpr int kTileRows = 128, kTileColumns = 64;
constexpr int kWarpBytes = 3 * 32 * 16;  // of 16 rows: two vectors of low bytes for each lane, one of high bits
constexpr int kOthers = 32;
constexpr int kTile = 8 * kWarpBytes + 4 * kOthers;
constexpr int kFirst = 112;              // exponent of the lowest of the 16
constexpr float kSmallest = 3.0517578125e-05f;  // 2^(kFirst - 127)

// One that is not among the 16: its row, column and bits. 0: none.
constexpr u32 kUsed = 1 << 13;
__device__ __forceinline__ u32 other(int row, int column, u32 bits) {
  return row | column << 7 | kUsed | bits << 16;
}

// A lane's part of a tile.
struct Codes {
  uint4 low[2], high;
  u32 other;

  __device__ __forceinline__ void read(const u8* tile, int sixteen, int lane) {
    const uint4* from = reinterpret_cast<const uint4*>(tile + sixteen * kWarpBytes) + lane;
    low[0] = from[0];
    low[1] = from[32];
    high = from[64];
    other = reinterpret_cast<const u32*>(tile + 8 * kWarpBytes)[lane];
  }
};

// Eight weights, the left operand of a matrix instruction.
__device__ __forceinline__ void widen(u32 first, u32 second, u32 high, u32* to) {
  constexpr u32 kKept = 0x87878787, kExponent = 0x38383838;  // (kFirst >> 1) in every byte
  const u32 a = (high & kKept) | kExponent;
  const u32 b = (__funnelshift_r(high, high, 4) & kKept) | kExponent;
  to[0] = __byte_perm(first, a, 0x5140);
  to[1] = __byte_perm(first, a, 0x7362);
  to[2] = __byte_perm(second, b, 0x5140);
  to[3] = __byte_perm(second, b, 0x7362);
}

// Operands of four instructions.
__device__ __forceinline__ void widen(const Codes& c, u32 (&to)[16]) {
  widen(c.low[0].x, c.low[0].y, c.high.x, to);
  widen(c.low[0].z, c.low[0].w, c.high.y, to + 4);
  widen(c.low[1].x, c.low[1].y, c.high.z, to + 8);
  widen(c.low[1].z, c.low[1].w, c.high.w, to + 12);
}

// d += weights (64 rows of four warps) · tokens (N); add 0: d = …
template <int N>
__device__ __forceinline__ void multiply(float (&d)[N / 2], const u32* w, u64 right, int add);
#define INSTRUCTION(n) "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {"
#define MULTIPLY(n, sums, results, w0, w1, w2, w3, right_, add_)                                   \
  template <>                                                                                      \
  __device__ __forceinline__ void multiply<n>(float (&d)[n / 2], const u32* w, u64 right,          \
                                              int add) {                                           \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " add_ ", 0;\n" INSTRUCTION(n) results          \
                 "}, {" w0 "," w1 "," w2 "," w3 "}, " right_ ", p, 1, 1, 0;\n}\n"                  \
                 : sums                                                                            \
                 : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "l"(right), "r"(add));              \
  }
#define F4_ F4(d, 0)
#define F8_ F8(d, 0)
#define F16_ F16(d, 0)
#define F32_ F32(d, 0)
#define F64_ F64(d)
MULTIPLY(8, F4_, R4, "%4", "%5", "%6", "%7", "%8", "%9")
MULTIPLY(16, F8_, R8, "%8", "%9", "%10", "%11", "%12", "%13")
MULTIPLY(32, F16_, R16, "%16", "%17", "%18", "%19", "%20", "%21")
MULTIPLY(64, F32_, R32, "%32", "%33", "%34", "%35", "%36", "%37")
MULTIPLY(128, F64_, R64, "%64", "%65", "%66", "%67", "%68", "%69")
#undef MULTIPLY
#undef INSTRUCTION
#undef F4_
#undef F8_
#undef F16_
#undef F32_
#undef F64_

// Adds what is missing of the weights of 16 rows that were taken for kSmallest. x: lines of 128 bytes,
// swizzled, one per token. lift: what weights have been multiplied by. An infinite token gives NaN there.
template <int N>
__device__ __forceinline__ void add_others(float (&d)[N / 2], u32 other, int sixteen, int lane, const u8* x,
                                           float lift) {
  u32 left = __ballot_sync(~0u, (other & kUsed) && int(other >> 4 & 7) == sixteen);
  while (left) {
    const u32 one = __shfl_sync(~0u, other, __ffs(left) - 1);
    left &= left - 1;
    if (int(one & 7) != lane >> 2) continue;
    const float missing = __int_as_float(one & 0xFFFF0000) * lift - kSmallest;
    const int column = one >> 7 & 63, token = 2 * (lane & 3);
    const u8* even = x + token * 128 + ((column >> 3) ^ token) * 16 + (column & 7) * 2;
    const u8* odd = x + token * 128 + 128 + ((column >> 3) ^ token ^ 1) * 16 + (column & 7) * 2;
    auto value = [](const u8* at) {
      return __int_as_float(u32(*reinterpret_cast<const u16*>(at)) << 16);
    };
    auto add = [&](int half) {
#pragma unroll
      for (int i = 0; i < N / 8; ++i) {
        d[4 * i + 2 * half] += value(even + i * 1024) * missing;
        d[4 * i + 2 * half + 1] += value(odd + i * 1024) * missing;
      }
    };
    if (one & 8)
      add(1);
    else
      add(0);
  }
}

}  // namespace packed12
