// Weights into panels (gemm.h) at load, and back.
#include <algorithm>
#include <atomic>

#include "ds_cpu.h"
#include "formats.h"

namespace ds {
namespace {

// Where things are in a panel. `Element` lies in runs of RUN elements along k, STEP apart, of which
// one takes STRIDE elements of the panel; groups of k have a head of their own, where there are
// scales. `stored`: what is written for an element.
struct PackF32 {
  using Element = float;
  static constexpr int64_t RUN = 1, STEP = 1, STRIDE = NB, HEAD = 0;
  static float stored(float x) { return x; }
  static int64_t bytes(int64_t k, int64_t) { return DenseF32::bytes(k); }
  static int64_t padded(int64_t k) { return k; }
  static int64_t group(int64_t k, int64_t) { return k; }
  static int64_t column(int64_t c) { return c; }
  static float value(float x) { return x; }
};
struct PackBf16 {
  using Element = bf16;
  static constexpr int64_t RUN = 2, STEP = 1, STRIDE = 2 * NB, HEAD = 0;
  static bf16 stored(bf16 x) { return x; }
  static int64_t bytes(int64_t k, int64_t) { return DenseBf16::bytes(k); }
  static int64_t padded(int64_t k) { return padded_k(k); }
  static int64_t group(int64_t k, int64_t) { return padded_k(k); }
  static int64_t column(int64_t c) { return 2 * c; }
  static float value(bf16 x) { return to_float(x); }
};
struct PackFp8 {
  using Element = uint8_t;
  static constexpr int64_t RUN = 2, STEP = 2, STRIDE = 2 * NB, HEAD = Fp8<bf16>::HEAD;
  static uint8_t stored(uint8_t code) { return FP8_CODES.stored[code]; }
  static int64_t bytes(int64_t k, int64_t group) { return Fp8<bf16>::bytes(k, group); }
  static int64_t padded(int64_t k) { return padded_k(k); }
  static int64_t group(int64_t, int64_t own) { return own; }
  static int64_t column(int64_t c) { return c / 32 * 64 + fp8_place(int(c % 32), 0); }
  static float value(uint8_t code) { return to_float(bf16{fp8_bits(code)}) * FP8_LIFT; }
};
struct PackInt8 {
  using Element = uint8_t;
  static constexpr int64_t RUN = 4, STEP = 1, STRIDE = 4 * NB, HEAD = Int8::HEAD;
  static uint8_t stored(uint8_t code) { return code; }
  static int64_t bytes(int64_t k, int64_t) { return Int8::bytes(k); }
  static int64_t padded(int64_t k) { return padded8(k); }
  static int64_t group(int64_t k, int64_t) { return padded8(k); }
  static int64_t column(int64_t c) { return 4 * c; }
  static float value(uint8_t code) { return float(int8_t(code)); }
};

// What the calls have in common.
struct Source {
  const void* data;
  int64_t sn, sk;
  const float *scales, *zeros;
  int64_t ld_scales, n0, rows, n, k, group;
  int32_t half;
};

// Calls body(panel, first column, end, end with the padding, row of the source) for all panels that
// get rows, on the threads that will read them.
template <class Body>
void each_panel(const Source& s, int64_t bytes, Body body) {
  const int64_t width = s.half < 0 ? NB : NB / 2, left = s.half == 1 ? NB / 2 : 0;
  const int64_t panels = (s.n + width - 1) / width;
  parallel(panels, 1, bytes, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      const int64_t n0 = p * width, n1 = n0 + width, last = s.n0 + s.rows;
      const int64_t from = n0 > s.n0 ? n0 : s.n0, to = n1 < last ? n1 : last;
      if (from >= to) continue;
      const int64_t padded = last == s.n && p == panels - 1 ? n1 : to;
      body(p, from - n0 + left, to - n0 + left, padded - n0 + left, from - s.n0);
    }
  });
}

// Elements [k0, k0 + n) of a row, runs of them STRIDE apart; zeros from `have` on.
template <class P>
void put_row(const typename P::Element* from, int64_t sk, int64_t have, int64_t n,
             typename P::Element* to) {
  using E = typename P::Element;
  int64_t i = 0;
  if (sk == 1)
    for (; i + P::RUN <= have; i += P::RUN, to += P::STRIDE) {
      if constexpr (P::STEP == 1)
        std::memcpy((void*)to, from + i, size_t(P::RUN) * sizeof(E));
      else
        for (int64_t j = 0; j < P::RUN; ++j) to[j * P::STEP] = P::stored(from[i + j]);
    }
  for (; i < n; i += P::RUN, to += P::STRIDE)
    for (int64_t j = 0; j < P::RUN && i + j < n; ++j)
      to[j * P::STEP] = i + j < have ? P::stored(from[(i + j) * sk]) : E{};
}

#if defined(__AVX512F__) && defined(__AVX512BW__)
// Rows whose elements put_rows moves at once: those of a line of 64 bytes.
template <class P>
constexpr int64_t LINE = P::RUN * sizeof(typename P::Element) == 2 ? 32 : 16;

// fp8_stored of 64 codes.
inline __m512i fp8_stored(__m512i code) {
  const __m512i sign = _mm512_set1_epi8(char(0x80));
  const __mmask64 zero = _mm512_cmpeq_epi8_mask(code, sign);
  const __mmask64 nan =
      _mm512_cmpeq_epi8_mask(_mm512_or_si512(code, sign), _mm512_set1_epi8(char(0xff)));
  return _mm512_mask_mov_epi8(_mm512_maskz_mov_epi8(~zero, code), nan, sign);
}

// put_row for LINE rows, sn apart, 64 bytes of each at a time; returns how many elements.
template <class P>
int64_t put_rows(const typename P::Element* from, int64_t sn, int64_t have,
                 typename P::Element* to) {
  using E = typename P::Element;
  constexpr int64_t STEP = 64 / int64_t(sizeof(E)), RUNS = 4 / (P::RUN * int64_t(sizeof(E)));
  int64_t i = 0;
  for (; i + STEP <= have; i += STEP, to += STEP / P::RUN * P::STRIDE) {
    __m512i a[16];
    if constexpr (RUNS == 1) {
      for (int64_t c = 0; c < 16; ++c) a[c] = _mm512_loadu_si512(from + c * sn + i);
      transpose16(a);
      for (int64_t w = 0; w < 16; ++w) _mm512_storeu_si512(to + w * P::STRIDE, a[w]);
    } else {  // FP8: two runs to a word, the codes of 16 rows between those of the next 16
      __m512i b[16];
      for (int64_t c = 0; c < 16; ++c) {
        a[c] = fp8_stored(_mm512_loadu_si512(from + c * sn + i));
        b[c] = fp8_stored(_mm512_loadu_si512(from + (16 + c) * sn + i));
      }
      transpose16(a);
      transpose16(b);
      for (int64_t w = 0; w < 16; ++w)
        for (int run = 0; run < 2; ++run) {
          // Of each word the bytes 2 * run and 2 * run + 1, to the even places and to the odd ones.
          const __m512i word = _mm512_set4_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0);
          const __m512i even = _mm512_add_epi8(word, _mm512_set1_epi32(run ? 0x80038002 : 0x80018000));
          const __m512i odd = _mm512_add_epi8(word, _mm512_set1_epi32(run ? 0x03800280 : 0x01800080));
          const __m512i line =
              _mm512_or_si512(_mm512_shuffle_epi8(a[w], even), _mm512_shuffle_epi8(b[w], odd));
          _mm512_storeu_si512(to + (2 * w + run) * P::STRIDE, line);
        }
    }
  }
  return i;
}
#endif

template <class P>
void pack(const Source& s, void* panels) {
  using E = typename P::Element;
  const int64_t size = P::bytes(s.k, s.group), padded = P::padded(s.k);
  const int64_t group = P::group(s.k, s.group);
  each_panel(s, s.rows * s.k * int64_t(sizeof(E)), [&](int64_t p, int64_t c0, int64_t c1, int64_t c2,
                                                       int64_t row0) {
    char* panel = (char*)panels + p * size;
    const E* from = (const E*)s.data + row0 * s.sn;
    for (int64_t k0 = 0, g = 0; k0 < padded; k0 += group, ++g) {
      char* head = panel + g * (P::HEAD + group * NB);
      E* to = (E*)(head + P::HEAD);
      const int64_t end = padded - k0 < group ? padded : k0 + group;
      constexpr int64_t CHUNK = 256 / int64_t(sizeof(E));  // so that the panel's lines stay near
      for (int64_t k = k0; k < end; k += CHUNK, to += CHUNK / P::RUN * P::STRIDE) {
        const int64_t n = end - k < CHUNK ? end - k : CHUNK, have = s.k - k;
        const int64_t whole = have < n ? have : n;
        for (int64_t c = c0; c < c2; ++c) {
          const E* row = from + (c - c0) * s.sn + k * s.sk;
#if defined(__AVX512F__) && defined(__AVX512BW__)
          if (s.sk == 1 && c % LINE<P> == 0 && c + LINE<P> <= c1) {
            const int64_t done = put_rows<P>(row, s.sn, whole, to + P::column(c));
            for (const int64_t last = c + LINE<P>; c < last; ++c, row += s.sn)
              put_row<P>(row + done, 1, whole - done, n - done,
                         to + P::column(c) + done / P::RUN * P::STRIDE);
            --c;
            continue;
          }
#endif
          put_row<P>(row, s.sk, c >= c1 ? 0 : whole, n, to + P::column(c));
        }
      }
      if constexpr (P::HEAD > 0)
        for (int64_t c = c0; c < c2; ++c)
          ((float*)head)[c] = c < c1 ? s.scales[(row0 + c - c0) * s.ld_scales + g] : 0;
    }
    if constexpr (std::is_same<P, PackInt8>::value)
      for (int64_t c = c0; c < c2; ++c) {
        int32_t sum = 0;
        const int8_t* row = (const int8_t*)from + (c - c0) * s.sn;
        if (c < c1 && s.sk == 1)
          for (int64_t i = 0; i < s.k; ++i) sum += row[i];
        else if (c < c1)
          for (int64_t i = 0; i < s.k; ++i) sum += row[i * s.sk];
        ((int32_t*)panel)[NB + c] = sum;
      }
  });
}

// Two codes to a byte: -8 .. 7, or 0 .. 15 with zero points.
void pack_int4(const Source& s, void* panels, bool zeros) {
  const Int4::Panel shape{nullptr, s.group, zeros};
  const int64_t size = Int4::bytes(shape, s.k);
  const uint8_t flip = s.zeros ? 0 : 8;
  each_panel(s, s.rows * s.k, [&](int64_t p, int64_t c0, int64_t c1, int64_t c2, int64_t row0) {
    const Int4::Panel panel{(const uint8_t*)panels + p * size, s.group, zeros};
    for (int64_t k0 = 0, g = 0; k0 < s.k; k0 += s.group, ++g) {
      const int64_t n = s.k - k0 < s.group ? s.k - k0 : s.group;
      const int64_t end = n < s.group ? padded8(s.k) - k0 : n;
      float* head = (float*)Int4::at(panel, k0);
      uint8_t* to = (uint8_t*)Int4::weights(panel, k0);
      for (int64_t c = c0; c < c2; ++c) {
        const int64_t row = row0 + c - c0, at = row * s.ld_scales + g;
        head[c] = c < c1 ? s.scales[at] : 0;
        if (zeros) head[NB + c] = c >= c1 ? 0 : s.zeros ? s.zeros[at] : 8.0f;
        const uint8_t* codes = (const uint8_t*)s.data + row * s.sn + k0 * s.sk;
        int64_t i = 0;
        if (c < c1 && s.sk == 1)  // eight at a time
          for (; i + 8 <= n; i += 8) {
            uint64_t v;
            std::memcpy(&v, codes + i, 8);
            v = (v ^ flip * 0x0101010101010101u) & 0x0f0f0f0f0f0f0f0fu;
            v |= v >> 28;  // the halves of 4 bytes, together
            std::memcpy(to + i / 8 * 4 * NB + 4 * c, &v, 4);
          }
        for (; i < end; i += 8) {
          uint8_t eight[8] = {};
          if (c < c1)
            for (int64_t j = 0; j < 8 && i + j < n; ++j)
              eight[j] = (codes[(i + j) * s.sk] ^ flip) & 15;
          for (int64_t j = 0; j < 4; ++j)
            to[i / 8 * 4 * NB + 4 * c + j] = uint8_t(eight[j] | eight[j + 4] << 4);
        }
      }
    }
  });
}

template <class P>
void unpack(const void* panels, float* out, int64_t n, int64_t k, int64_t own_group) {
  const int64_t size = P::bytes(k, own_group), group = P::group(k, own_group);
  const Source all{nullptr, 0, 0, nullptr, nullptr, 0, 0, n, n, k, own_group, -1};
  each_panel(all, n * k * 4, [&](int64_t p, int64_t, int64_t count, int64_t, int64_t row) {
    for (int64_t c = 0; c < count; ++c)
      for (int64_t i = 0; i < k; ++i) {
        const char* head = (const char*)panels + p * size + i / group * (P::HEAD + group * NB);
        const auto* from = (const typename P::Element*)(head + P::HEAD) + P::column(c);
        float v = P::value(from[i % group / P::RUN * P::STRIDE + i % P::RUN * P::STEP]);
        if constexpr (P::HEAD > 0) v *= ((const float*)head)[c];
        out[(row + c) * k + i] = v;
      }
  });
}

void unpack_int4(const void* panels, float* out, int64_t n, int64_t k, int64_t group, bool zeros) {
  const int64_t size = Int4::bytes({nullptr, group, zeros}, k);
  const Source all{nullptr, 0, 0, nullptr, nullptr, 0, 0, n, n, k, group, -1};
  each_panel(all, n * k * 4, [&](int64_t p, int64_t, int64_t count, int64_t, int64_t row) {
    const Int4::Panel panel{(const uint8_t*)panels + p * size, group, zeros};
    for (int64_t c = 0; c < count; ++c)
      for (int64_t i = 0; i < k; ++i) {
        const int64_t k0 = i / group * group, j = i - k0;
        const float* head = (const float*)Int4::at(panel, k0);
        const uint8_t two = Int4::weights(panel, k0)[j / 8 * 4 * NB + 4 * c + j % 4];
        const float code = float(j % 8 < 4 ? two & 15 : two >> 4);
        out[(row + c) * k + i] = (code - (zeros ? head[NB + c] : 8.0f)) * head[c];
      }
  });
}

// What the high byte of a bfloat16 becomes in a panel of Bf12.
struct Bf12Places {
  static constexpr uint8_t NONE = 0x80;
  alignas(64) uint8_t of[256];

  // The most frequent ones of `pairs` pairs of k of a panel. Of equally frequent ones the lowest.
  Bf12Places(const bf16* w, int64_t pairs, uint8_t (&high)[16]) {
    uint32_t counts[4][256] = {};
    for (int64_t i = 0; i < pairs * 2 * NB; i += 4)
      for (int j = 0; j < 4; ++j) ++counts[j][w[i + j].bits >> 8];
    for (int h = 0; h < 256; ++h)
      counts[0][h] += counts[1][h] + counts[2][h] + counts[3][h];
    std::memset(of, NONE, sizeof of);
    of[0] = high[0] = counts[0][0] = 0;
    for (uint8_t i = 1; i < 16; ++i) {
      const uint32_t* best = std::max_element(counts[0], counts[0] + 256);
      const int h = int(best - counts[0]);
      high[i] = uint8_t(h);
      if (*best) of[h] = i;
      counts[0][h] = 0;
    }
  }
};

// One line of a pair of k: low bytes and places of 64 weights, 0 for those without a place, of which
// a mask tells.
#if defined(__AVX512VBMI__) && defined(__AVX512BW__)
struct Bf12Line {
  __m512i places[4];
  explicit Bf12Line(const Bf12Places& p) {
    for (int i = 0; i < 4; ++i) places[i] = _mm512_load_si512(p.of + 64 * i);
  }
  uint64_t operator()(const bf16* w, uint8_t* low, uint8_t* place) const {
    const __m512i a = _mm512_loadu_si512(w), b = _mm512_loadu_si512(w + 32);
    const __m512i byte = _mm512_set1_epi16(255);
    const __m512i high = _mm512_packus_epi16(_mm512_srli_epi16(a, 8), _mm512_srli_epi16(b, 8));
    const __m512i found = _mm512_mask_mov_epi8(
        _mm512_permutex2var_epi8(places[0], high, places[1]), _mm512_movepi8_mask(high),
        _mm512_permutex2var_epi8(places[2], high, places[3]));
    const __mmask64 none = _mm512_movepi8_mask(found);
    const __m512i lows =
        _mm512_packus_epi16(_mm512_and_si512(a, byte), _mm512_and_si512(b, byte));
    _mm512_storeu_si512(low, _mm512_maskz_mov_epi8(~none, lows));
    _mm512_storeu_si512(place, _mm512_maskz_mov_epi8(~none, found));
    return none;
  }
};
#else
struct Bf12Line {
  const Bf12Places& places;
  explicit Bf12Line(const Bf12Places& p) : places(p) {}
  uint64_t operator()(const bf16* w, uint8_t* low, uint8_t* place) const {
    uint64_t none = 0;
    for (int i = 0; i < 64; ++i) {
      const uint16_t bits = w[bf12_element(i)].bits;
      const uint8_t found = places.of[bits >> 8];
      const bool here = found != Bf12Places::NONE;
      none |= uint64_t(!here) << i;
      low[i] = here ? uint8_t(bits) : 0;
      place[i] = here ? found : 0;
    }
    return none;
  }
};
#endif

// One panel; false: it has no room for its exceptions.
bool narrow(const bf16* w, int64_t k, uint8_t* panel) {
  std::memset(panel, 0, sizeof(Bf12Head));
  auto& head = *(Bf12Head*)panel;
  const int64_t pairs = padded_k(k) / 2, room = Bf12::room(k);
  const Bf12Places places(w, pairs, head.high);
  const Bf12Line line(places);
  uint8_t* to = panel + Bf12::HEAD;
  auto* rest = (Bf12Rest*)(to + Bf12::lines(k));
  std::memset((void*)rest, 0, size_t(Bf12::bytes(k) - Bf12::HEAD - Bf12::lines(k)));
  for (int64_t i = 0; i < pairs; ++i, w += 2 * NB, to += Bf12::LINES) {
    uint8_t place[2][64];
    for (int half = 0; half < 2; ++half)
      for (uint64_t none = line(w + half * NB, to + half * 64, place[half]); none; none &= none - 1) {
        if (head.count == room) return false;
        int at = 0;
        while (!(none >> at & 1)) ++at;
        const int element = half * NB + bf12_element(at);
        rest[head.count++] = {uint32_t((2 * i + element % 2) * NB + element / 2),
                              to_float(w[element])};
      }
    for (int c = 0; c < 64; ++c) to[128 + c] = uint8_t(place[0][c] | place[1][c] << 4);
  }
  return true;
}

void unpack_bf12(const void* panels, float* out, int64_t n, int64_t k) {
  const Source all{nullptr, 0, 0, nullptr, nullptr, 0, 0, n, n, k, 0, -1};
  each_panel(all, n * k * 4, [&](int64_t p, int64_t, int64_t count, int64_t, int64_t row) {
    const Bf12::Panel panel{(const uint8_t*)panels + p * Bf12::bytes(k), k};
    const Bf12Widen widen(panel.head().high);
    const uint8_t* lines = panel.data + Bf12::HEAD;
    for (int64_t i = 0; i < k; i += 2, lines += Bf12::LINES) {
      bf16 pair[2 * NB];
      widen.pair(lines, pair);
      for (int64_t c = 0; c < count; ++c)
        for (int64_t j = 0; j < 2 && i + j < k; ++j)
          out[(row + c) * k + i + j] = to_float(pair[2 * c + j]);
    }
    for (const Bf12Rest *r = panel.rest(), *end = r + panel.head().count; r < end; ++r)
      if (r->place % NB < count) out[(row + r->place % NB) * k + r->place / NB] = r->value;
  });
}

}  // namespace
}  // namespace ds

using namespace ds;

void ds_cpu_pack(int32_t format, int32_t dtype, const void* source, int64_t sn, int64_t sk,
                 const float* scales, const float* zeros, int64_t ld_scales, void* panels,
                 int64_t n0, int64_t rows, int64_t n, int64_t k, int64_t group, int32_t half) {
  const Source s{source, sn, sk, scales, zeros, ld_scales, n0, rows, n, k, group, half};
  if (format == DS_INT4 || format == DS_INT4_ZEROS)
    pack_int4(s, panels, format == DS_INT4_ZEROS);
  else if (format == DS_INT8)
    pack<PackInt8>(s, panels);
  else if (format == DS_FP8)
    pack<PackFp8>(s, panels);
  else if (dtype == DS_F32)
    pack<PackF32>(s, panels);
  else
    pack<PackBf16>(s, panels);
}

int64_t ds_cpu_panel_bytes(int32_t format, int32_t dtype, int64_t k, int64_t group) {
  int64_t bytes = 0;
  with_format(format, dtype, [&](auto of, auto) {
    bytes = Panels<decltype(of)>{nullptr, group, k, format == DS_INT4_ZEROS}.bytes();
  });
  return bytes;
}

void ds_cpu_unpack(int32_t format, int32_t dtype, const void* panels, float* out, int64_t n,
                   int64_t k, int64_t group) {
  if (format == DS_BF12)
    unpack_bf12(panels, out, n, k);
  else if (format == DS_INT4 || format == DS_INT4_ZEROS)
    unpack_int4(panels, out, n, k, group, format == DS_INT4_ZEROS);
  else if (format == DS_INT8)
    unpack<PackInt8>(panels, out, n, k, group);
  else if (format == DS_FP8)
    unpack<PackFp8>(panels, out, n, k, group);
  else if (dtype == DS_F32)
    unpack<PackF32>(panels, out, n, k, group);
  else
    unpack<PackBf16>(panels, out, n, k, group);
}

void ds_cpu_narrow(const void* dense, void* panels, int64_t count, int64_t k, int64_t* left) {
  const int64_t wide = DenseBf16::bytes(k), bytes = Bf12::bytes(k);
  std::atomic<int64_t> failed{0};
  parallel(count, 1, count * wide, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p)
      if (!narrow((const bf16*)((const char*)dense + p * wide), k, (uint8_t*)panels + p * bytes))
        ++failed;
  });
  *left = failed;
}

int32_t ds_cpu_narrows() { return DS_BF16_DOTS; }
