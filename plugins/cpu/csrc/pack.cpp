// Weights into panels (gemm.h) at load, and back.
#include "ds_cpu.h"
#include "pack.h"

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

// Two codes to a byte, of columns 16 apart.
void pack_fp4(const Source& s, void* panels) {
  const int64_t size = Fp4<bf16>::bytes(s.k, s.group), padded = padded_k(s.k);
  each_panel(s, s.rows * s.k, [&](int64_t p, int64_t c0, int64_t c1, int64_t c2, int64_t row0) {
    const Fp4<bf16>::Panel panel{(const uint8_t*)panels + p * size, s.group};
    auto row = [&](int64_t c) { return row0 + c - c0; };
    auto codes = [&](int64_t c, int64_t k) {
      return (const uint8_t*)s.data + row(c) * s.sn + k * s.sk;
    };
    for (int64_t k0 = 0, g = 0; k0 < padded; k0 += s.group, ++g) {
      uint8_t* head = (uint8_t*)Fp4<bf16>::at(panel, k0);
      uint8_t* lines = head + Fp4Codes::HEAD;
      const int64_t end = padded - k0 < s.group ? padded - k0 : s.group;
      const int64_t n = s.k - k0 < s.group ? s.k - k0 : s.group;
      for (int64_t c = c0; c < c2; ++c)
        head[c] = c < c1 ? fp4_scale_byte(s.scales[row(c) * s.ld_scales + g]) : 0;
      for (int64_t c = c0; c < c2; ++c) {
        const int64_t left = c - 16;
        if (c / 16 % 2 && left >= c0 && c < c1) continue;  // done with the column before it
        const bool both = c / 16 % 2 == 0 && c + 16 < c1;
        const uint8_t *a = codes(c, k0), *b = codes(both ? c + 16 : c, k0);
        for (int64_t i = 0; i < end; ++i) {
          const Fp4Place at = fp4_place(int(c), int(i % 2));
          uint8_t& to = lines[i / 2 * Fp4Codes::PAIR + at.byte];
          const unsigned code = i < n && c < c1 ? a[i * s.sk] & 15u : 0;
          if (both)
            to = uint8_t(code | (i < n ? b[i * s.sk] & 15u : 0) << 4);
          else  // the other half is another call's, or another turn's
            to = uint8_t((to & ~(15u << at.shift)) | code << at.shift);
        }
      }
    }
  });
}

void unpack_fp4(const void* panels, float* out, int64_t n, int64_t k, int64_t group) {
  const int64_t size = Fp4<bf16>::bytes(k, group);
  const Source all{nullptr, 0, 0, nullptr, nullptr, 0, 0, n, n, k, group, -1};
  each_panel(all, n * k * 4, [&](int64_t p, int64_t, int64_t count, int64_t, int64_t row) {
    const Fp4<bf16>::Panel panel{(const uint8_t*)panels + p * size, group};
    for (int64_t c = 0; c < count; ++c)
      for (int64_t i = 0; i < k; ++i) {
        const int64_t k0 = i / group * group;
        const uint8_t* head = (const uint8_t*)Fp4<bf16>::at(panel, k0);
        const Fp4Place at = fp4_place(int(c), int((i - k0) % 2));
        const uint8_t two = head[Fp4Codes::HEAD + (i - k0) / 2 * Fp4Codes::PAIR + at.byte];
        out[(row + c) * k + i] =
            to_float(bf16{fp4_bits(unsigned(two) >> at.shift & 15)}) * fp4_scale(head[c]);
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
  else if (format == DS_FP4)
    pack_fp4(s, panels);
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
  else if (format == DS_FP4)
    unpack_fp4(panels, out, n, k, group);
  else if (dtype == DS_F32)
    unpack<PackF32>(panels, out, n, k, group);
  else
    unpack<PackBf16>(panels, out, n, k, group);
}
