// Routed experts: every chosen expert's weights are read once, however many tokens chose it.
//
// Gate and up are packed as one matrix whose panels hold 32 columns of gate, then the same 32 of up:
// the sums of one panel become 32 activations at once. Tokens are gathered by expert, so that those
// of one expert lie together.
#include "ds_cpu.h"
#include "formats.h"
#include "scratch.h"
#include "share.h"
#include "silu.h"

namespace ds {
namespace {

constexpr int64_t HALF = NB / 2;

// Results of a few tokens, up to so many floats, are kept by pair, which cuts work anywhere; those
// of many are summed as they come, a few columns of all tokens at a time.
#if !defined(DS_BY_PAIR)
#define DS_BY_PAIR (1 << 19)
#endif
constexpr int64_t BY_PAIR = DS_BY_PAIR;

// The (token, choice) pairs in the order of their experts; a place is a position in that order.
struct Routes {
  int64_t tokens, top_k, active;
  int64_t pairs;       // with an expert that is here
  int32_t* pair;       // [pairs] at a place: token * top_k + choice
  int32_t* place;      // [tokens, top_k] a token's places in ascending order, then -1
  int32_t *expert, *from;  // [active], [active + 1]: who, and the first of its places

  static int64_t ints(int64_t tokens, int64_t top_k, int64_t experts) {
    return 2 * tokens * top_k + 2 * experts + 2;
  }
  void sort(const int32_t* ids, int64_t experts, int32_t* memory) {
    const int64_t all = tokens * top_k;
    pair = memory, place = pair + all, expert = place + all, from = expert + experts;
    for (int64_t e = 0; e <= experts; ++e) from[e] = 0;
    for (int64_t p = 0; p < all; ++p)
      if (ids[p] >= 0 && ids[p] < experts) ++from[ids[p] + 1];
    for (int64_t e = 0; e < experts; ++e) from[e + 1] += from[e];
    pairs = from[experts];
    for (int64_t p = 0; p < all; ++p)
      if (ids[p] >= 0 && ids[p] < experts) pair[from[ids[p]]++] = int32_t(p);
    active = 0;  // from[e] is now the end of expert e
    for (int64_t e = 0, begin = 0; e < experts; ++e) {
      const int32_t end = from[e];
      if (end > begin) {
        expert[active] = int32_t(e);
        from[active++] = int32_t(begin);
      }
      begin = end;
    }
    from[active] = int32_t(pairs);
    for (int64_t p = 0; p < all; ++p) place[p] = -1;
    for (int64_t i = 0; i < pairs; ++i) {
      int32_t* own = place + pair[i] / top_k * top_k;
      while (*own >= 0) ++own;
      *own = int32_t(i);
    }
  }
  int64_t count(int64_t a) const { return from[a + 1] - from[a]; }
  int64_t token(int64_t place) const { return pair[place] / top_k; }
};

template <class Fmt, class X>
class Layer {
  using Tokens = typename Fmt::Tokens;
  using Act = typename std::conditional<QUANTISES<Fmt>, float, X>::type;  // between the matmuls

 public:
  Layer(Panels<Fmt> w13, Panels<Fmt> w2, float limit, int64_t experts, int64_t tokens,
        int64_t top_k)
      : w13_(w13), w2_(w2), limit_(limit), experts_(experts), hidden_(w13.k), inter_(w2.k) {
    r_.tokens = tokens, r_.top_k = top_k;
    by_pair_ = tokens * top_k * hidden_ <= BY_PAIR;
  }

  // Lays the buffers out.
  void buffers(Arena& arena) {
    const int64_t pairs = r_.tokens * r_.top_k;
    ints_ = arena.take<int32_t>(Routes::ints(r_.tokens, r_.top_k, experts_));
    act_ = arena.take<Act>(pairs * inter_);
    sums_ = arena.take<float>((by_pair_ ? pairs : r_.tokens) * hidden_);
    if constexpr (QUANTISES<Fmt>) {
      in_.template buffers<Fmt>(arena, r_.tokens > 1 ? pairs : r_.tokens, hidden_, w13_.group);
      mid_.template buffers<Fmt>(arena, pairs, inter_, w2_.group);
    } else if (r_.tokens > 1) {
      gathered_ = arena.take<X>(pairs * hidden_);
    }
  }

  void run(const void* tokens, int64_t ldx, const float* weights, const int32_t* ids, void* result) {
    const X* x = (const X*)tokens;
    X* out = (X*)result;
    r_.sort(ids, experts_, ints_);
    gather(x, ldx);
    up(x, ldx);
    if constexpr (QUANTISES<Fmt>)
      parallel(r_.pairs, 1, r_.pairs * inter_ * 2, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) mid_.set(i, act_ + i * inter_);
      });
    if (by_pair_)
      down_by_pair(weights, out);
    else
      down_by_column(weights, out);
  }

 private:
  // The tokens of every expert, one after the other; a single token stays where it is.
  void gather(const X* x, int64_t ldx) {
    const int64_t h = hidden_;
    if (r_.tokens == 1) {
      if constexpr (QUANTISES<Fmt>) in_.set(0, x);
      return;
    }
    parallel(r_.tokens, 1, r_.pairs * h, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const int32_t* place = r_.place + t * r_.top_k;
        for (int64_t j = 0; j < r_.top_k && place[j] >= 0; ++j)
          if constexpr (!QUANTISES<Fmt>)
            std::memcpy(gathered_ + place[j] * h, x + t * ldx, size_t(h) * sizeof(X));
          else if (j == 0)
            in_.set(place[0], x + t * ldx);
          else
            in_.copy(place[0], place[j]);
      }
    });
  }
  Tokens inputs(const X* x, int64_t ldx) const {
    if constexpr (QUANTISES<Fmt>)
      return in_.tokens(0);
    else
      return r_.tokens > 1 ? Tokens{gathered_, hidden_} : Tokens{x, ldx};
  }
  Tokens middle() const {
    if constexpr (QUANTISES<Fmt>)
      return mid_.tokens(0);
    else
      return Tokens{act_, inter_};
  }

  // Units of one panel of each active expert, `panels` to an expert; body(active expert, panel).
  // Threads begin with equal work, one expert after the other. On several memory nodes thread i has
  // instead the panels of every expert that it packed (`parallel` divides them so), and helps its
  // neighbours where these do not divide evenly.
  template <class Body>
  void each_panel(int64_t panels, int64_t panel_bytes, Body body) {
    const bool local = on_several_nodes.load(std::memory_order_relaxed);
    const int64_t n = r_.active * panels;
    // A panel costs its bytes, and arithmetic outweighs them from some 16 tokens on.
    auto weight = [&](int64_t a) { return 16 + r_.count(a); };
    int64_t total = 0;
    for (int64_t a = 0; a < r_.active; ++a) total += weight(a) * panels;
    auto first = [&](int64_t i, int64_t pieces) {
      if (local) return panels * i / pieces * r_.active;
      int64_t want = total * i / pieces;
      for (int64_t a = 0; a < r_.active; ++a) {
        const int64_t all = weight(a) * panels;
        if (want < all) return a * panels + want / weight(a);
        want -= all;
      }
      return n;
    };
    share(n, total / 16 * panel_bytes, first, [&](auto next, int64_t pieces) {
      TileSession session;
      (void)session;
      const int64_t strips = local ? pieces : 1;  // of panels, one after the other
      for (int64_t u = next(); u >= 0; u = next()) {
        const int64_t s = ((u / r_.active + 1) * strips - 1) / panels;
        const int64_t p = panels * s / strips, width = panels * (s + 1) / strips - p;
        const int64_t at = u - p * r_.active;
        body(at / width, p + at % width);
      }
    });
  }

  // emit(place, 64 values) for the tokens of active expert a and one panel. one_row: x is the only
  // token's row, which is that of every place, even where the token names an expert twice.
  template <class Emit>
  void product(const typename Fmt::Panel& panel, const Tokens& x, bool one_row, int64_t a, int64_t k,
               Emit emit) const {
    alignas(64) typename Fmt::Sum sums[Fmt::TOKENS][NB];
    const int64_t m = r_.count(a);
    const int64_t cuts = one_row ? m : (m + Fmt::TOKENS - 1) / Fmt::TOKENS;
    for (int64_t c = 0; c < cuts; ++c) {
      const int64_t begin = r_.from[a] + m * c / cuts, end = r_.from[a] + m * (c + 1) / cuts;
      const int64_t row = one_row ? 0 : begin;
      panel_sums<Fmt>(panel, x, row, end - begin, k, sums);
      for (int64_t i = 0; i < end - begin; ++i) {
        float* values = (float*)sums[i];
        Fmt::finish(panel, x, row + i, sums[i], values);
        emit(begin + i, (const float*)values);
      }
    }
  }

  void up(const X* x, int64_t ldx) {
    const Tokens rows = inputs(x, ldx);
    const int64_t panels = (inter_ + HALF - 1) / HALF;
    each_panel(panels, w13_.bytes(), [&](int64_t a, int64_t p) {
      const int64_t left = inter_ - p * HALF, n = left < HALF ? left : HALF;
      product(w13_.at(r_.expert[a] * panels + p), rows, r_.tokens == 1, a, hidden_,
              [&](int64_t place, const float* v) {
                silu_mul_row(v, v + HALF, act_ + place * inter_ + p * HALF, n, limit_);
              });
    });
  }

  void down_by_pair(const float* weights, X* out) {
    const Tokens rows = middle();
    const int64_t h = hidden_, panels = panels_of(h);
    each_panel(panels, w2_.bytes(), [&](int64_t a, int64_t p) {
      const int64_t left = h - p * NB, n = left < NB ? left : NB;
      product(w2_.at(r_.expert[a] * panels + p), rows, false, a, inter_,
              [&](int64_t place, const float* v) { put_row(sums_ + place * h + p * NB, v, n); });
    });
    const int64_t cuts = panels;
    parallel(r_.tokens * cuts, 1, r_.pairs * h * 4, [&](int64_t begin, int64_t end) {
      for (int64_t u = begin; u < end; ++u) {
        const int64_t t = u / cuts, c = u % cuts * NB, n = h - c < NB ? h - c : NB;
        const int32_t* place = r_.place + t * r_.top_k;
        alignas(64) float sum[NB] = {};
        for (int64_t j = 0; j < r_.top_k && place[j] >= 0; ++j)
          add(sum, weights[r_.pair[place[j]]], sums_ + place[j] * h + c, n);
        put_row(out + t * h + c, sum, n);
      }
    });
  }

  // Every unit is a few columns of the results of all tokens, summed over the experts in order.
  void down_by_column(const float* weights, X* out) {
    const Tokens rows = middle();
    const int64_t h = hidden_, panels = panels_of(h);
    const int64_t fit = (256 << 10) / (r_.tokens * NB * int64_t(sizeof(float)));
    int64_t width = panels / (4 * max_threads());
    width = width < 1 || fit < 1 ? 1 : width < fit ? width : fit;
    const int64_t units = (panels + width - 1) / width;
    const int64_t cost = (r_.active + r_.pairs / 16) * panels * w2_.bytes();
    auto first = [&](int64_t i, int64_t pieces) { return units * i / pieces; };
    share(units, cost, first, [&](auto next, int64_t) {
      TileSession session;
      (void)session;
      for (int64_t u = next(); u >= 0; u = next()) {
        const int64_t p0 = u * width, p1 = p0 + width < panels ? p0 + width : panels;
        const int64_t c0 = p0 * NB, c1 = p1 * NB < h ? p1 * NB : h;
        for (int64_t t = 0; t < r_.tokens; ++t)
          std::memset(sums_ + t * h + c0, 0, size_t(c1 - c0) * sizeof(float));
        for (int64_t a = 0; a < r_.active; ++a)
          for (int64_t p = p0; p < p1; ++p) {
            const int64_t left = h - p * NB, n = left < NB ? left : NB;
            product(w2_.at(r_.expert[a] * panels + p), rows, false, a, inter_,
                    [&](int64_t place, const float* v) {
                      add(sums_ + r_.token(place) * h + p * NB, weights[r_.pair[place]], v, n);
                    });
          }
        for (int64_t t = 0; t < r_.tokens; ++t) put_row(out + t * h + c0, sums_ + t * h + c0, c1 - c0);
      }
    });
  }

  static void add(float* to, float weight, const float* v, int64_t n) {
    const F w = F::all(weight);
    int64_t i = 0;
    for (; i + F::W <= n; i += F::W) fma(w, F::load(v + i), F::load(to + i)).store(to + i);
    if (i < n) {
      const int m = int(n - i);
      store_tail(fma(w, load_tail(v + i, m), load_tail(to + i, m)), to + i, m);
    }
  }

  Panels<Fmt> w13_, w2_;
  float limit_;
  int64_t experts_, hidden_, inter_;
  Routes r_;
  bool by_pair_;
  int32_t* ints_;
  Act* act_;
  float* sums_;
  X* gathered_;
  Quantised in_, mid_;
};

}  // namespace
}  // namespace ds

using namespace ds;

void ds_cpu_experts(int32_t format, int32_t dtype, const void* x, int64_t ldx, const float* weights,
                    const int32_t* ids, const void* w13, int64_t group13, const void* w2,
                    int64_t group2, double limit, void* out, int64_t tokens, int64_t top_k,
                    int64_t experts, int64_t hidden, int64_t inter) {
  if (tokens <= 0) return;
  if (hidden <= 0 || inter <= 0) {  // matmuls want k > 0
    std::memset(out, 0, size_t(tokens * hidden * (dtype == DS_F32 ? 4 : 2)));
    return;
  }
  with_format(format, dtype, [&](auto fmt, auto element) {
    using Fmt = decltype(fmt);
    const bool zeros = format == DS_INT4_ZEROS;
    const Panels<Fmt> up{(const char*)w13, group13, hidden, zeros};
    const Panels<Fmt> down{(const char*)w2, group2, inter, zeros};
    Layer<Fmt, decltype(element)> layer(up, down, float(limit), experts, tokens, top_k);
    Arena counted(nullptr);
    layer.buffers(counted);
    const Scratch scratch(counted.used());
    Arena arena(scratch.data());
    layer.buffers(arena);
    layer.run(x, ldx, weights, ids, out);
  });
}
