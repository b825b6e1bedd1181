// Matmuls over panels of packed weights, plain and per head.
#include "ds_cpu.h"
#include "formats.h"
#include "scratch.h"

namespace ds {
namespace {

// Activations as the format wants them.
template <class Fmt, class X>
struct Inputs {
  const X* x;
  int64_t ldx, sxh;
  Quantised q;
  Scratch scratch;  // holds them where they have to be rounded

  Inputs(const void* data, int64_t ld, int64_t per_head, int64_t heads, int64_t m, int64_t k,
         int64_t group)
      : x((const X*)data), ldx(ld), sxh(per_head), scratch(bytes(sxh ? heads * m : m, k, group)) {
    if constexpr (QUANTISES<Fmt>) {
      const int64_t own = sxh ? heads : 1;
      Arena arena(scratch.data());
      q.template buffers<Fmt>(arena, own * m, k, group);
      parallel(own * m, 1, own * m * k, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) q.set(i, x + i / m * sxh + i % m * ldx);
      });
    } else {
      (void)heads, (void)m, (void)k, (void)group;
    }
  }
  static int64_t bytes(int64_t rows, int64_t k, int64_t group) {
    Arena arena(nullptr);
    if constexpr (QUANTISES<Fmt>) Quantised().template buffers<Fmt>(arena, rows, k, group);
    (void)rows, (void)k, (void)group;
    return arena.used();
  }
  typename Fmt::Tokens of(int64_t head, int64_t m) const {
    if constexpr (QUANTISES<Fmt>)
      return q.tokens(sxh ? head * m : 0);
    else
      return {x + head * sxh, ldx};
  }
};

}  // namespace
}  // namespace ds

using namespace ds;

void ds_cpu_linear(int32_t format, int32_t dtype, const void* x, int64_t ldx, int64_t sxh,
                   const void* w, int64_t group, void* y, int64_t ldy, int64_t syh, int64_t heads,
                   int64_t m, int64_t n, int64_t k) {
  with_format(format, dtype, [&](auto fmt, auto element) {
    using Fmt = decltype(fmt);
    using X = decltype(element);
    if (k <= 0) {  // sums of nothing
      for (int64_t i = 0; i < heads * m; ++i)
        std::memset((void*)((X*)y + i / m * syh + i % m * ldy), 0, size_t(n) * sizeof(X));
      return;
    }
    const Panels<Fmt> weight{(const char*)w, group, k, format == DS_INT4_ZEROS};
    const Inputs<Fmt, X> inputs(x, ldx, sxh, heads, m, k, group);
    const int64_t panels = panels_of(n);
    const int64_t cost = heads * panels * weight.bytes() * (m < 16 ? 1 : m / 8);
    struct Job {
      typename Fmt::Panel panel;
      typename Fmt::Tokens tokens;
    };
    matmul<Fmt>(
        heads * panels, m, k, cost,
        [&](int64_t i) { return Job{weight.at(i), inputs.of(i / panels, m)}; },
        [&](int64_t i, int64_t t, const float* values) {
          const int64_t head = i / panels, c = i % panels * NB;
          put_row((X*)y + head * syh + t * ldy + c, values, n - c < NB ? n - c : NB);
        });
  });
}
