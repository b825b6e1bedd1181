// bfloat16 panels into 12 bits a weight (bf12.h), and back.
#include <algorithm>
#include <atomic>

#include "ds_cpu.h"
#include "pack.h"

namespace ds {
namespace {

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

}  // namespace

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

}  // namespace ds

using namespace ds;

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
