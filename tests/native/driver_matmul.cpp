// Weights into panels and back, what multiplies by them, and experts.
#include "driver.h"

namespace driver {
namespace {

// A format as panels.py has it: `group` elements along k share a scale.
struct Form {
  int32_t code;
  int64_t group;

  int64_t groups(int64_t k) const { return group > 0 ? (k + group - 1) / group : 1; }
  int64_t bytes(const Library& library, int64_t size, int64_t n, int64_t k,
                int64_t width = 64) const {
    const int32_t dtype = size == 4 ? DS_F32 : DS_BF16;
    return (n + width - 1) / width * library.panel_bytes(code, dtype, k, group);
  }
  unsigned char code_of(Random& random) const {
    if (code == DS_FP8) {
      const unsigned char c = (unsigned char)random.below(256);
      return (c & 0x7f) == 0x7f ? 0 : c;  // no NaN
    }
    if (code == DS_INT8) return (unsigned char)(random.below(255) - 127);
    return (unsigned char)(code == DS_INT4 ? random.below(16) - 8 : random.below(16));
  }
};

// Random weights into the rows [n0, n0 + rows) of a packed matrix; as columns of their source, where
// `transposed`.
template <class T>
void pack(const Library& library, Random& random, const Form& form, char* panels, int64_t n0,
          int64_t rows, int64_t n, int64_t k, bool transposed = false, int32_t part = -1) {
  Matrix<float> scales(rows, form.groups(k)), zeros(rows, form.groups(k));
  scales.fill(random, 0.0f);
  zeros.each([&](float& z) { z = float(random.below(16)); });
  const float* zero = form.code == DS_INT4_ZEROS ? zeros.data : nullptr;
  auto call = [&](const auto& source) {
    const bool dense = form.code == DS_DENSE;
    library.pack(form.code, code<T>(), source.data, transposed ? 1 : source.ld,
                 transposed ? source.ld : 1, dense ? nullptr : scales.data, zero, scales.ld, panels,
                 n0, rows, n, k, form.group, part);
  };
  const int64_t lines = transposed ? k : rows, length = transposed ? rows : k;
  if (form.code == DS_DENSE) {
    Matrix<T> source(lines, length, length + 3, 1);
    source.fill(random, nan<T>());
    call(source);
  } else {
    Matrix<unsigned char> source(lines, length, length + 1, 1);
    source.each([&](unsigned char& c) { c = form.code_of(random); });
    call(source);
  }
}

// What `fill` packs of a matrix: into `panels`, or in bfloat16 and then into 12 bits of it.
template <class Fill>
void filled(const Library& library, const Form& form, char* panels, int64_t n, int64_t k,
            int64_t width, Fill fill) {
  if (form.code != DS_BF12) return fill(form, panels);
  const Form dense{DS_DENSE, 0};
  Matrix<char> wide(1, dense.bytes(library, 2, n, k, width));
  fill(dense, wide.data);
  int64_t left = -1;
  library.narrow(wide.data, panels, (n + width - 1) / width, k, &left);
  if (left != 0) fail("does not fit", "narrow");
}

struct Weights {
  int64_t heads, n, k;
};

template <class T>
void linear(std::vector<Case>& to, const Weights& w, int64_t m, const Form& form) {
  to.push_back({"linear " + std::to_string(form.code), [=](const Library& library, Results& results) {
                  Random random(31);
                  const int64_t bytes = form.bytes(library, sizeof(T), w.n, w.k), first = w.n / 3;
                  Matrix<char> panels(1, w.heads * bytes);
                  for (int64_t h = 0; h < w.heads; ++h) {
                    filled(library, form, panels.data + h * bytes, w.n, w.k, 64,
                           [&](const Form& own, char* at) {
                             pack<T>(library, random, own, at, 0, first, w.n, w.k);
                             pack<T>(library, random, own, at, first, w.n - first, w.n, w.k, true);
                           });
                  }
                  Matrix<float> values(w.heads * w.n, w.k);
                  for (int64_t h = 0; h < w.heads; ++h)
                    library.unpack(form.code, code<T>(), panels.data + h * bytes,
                                   values.data + h * w.n * w.k, w.n, w.k, form.group);
                  results.take(values, "unpack");
                  const int64_t ldx = w.heads * w.k + 1, ldy = w.heads * w.n + 2;
                  Matrix<T> x(m, w.heads * w.k, ldx, 1), y(m, w.heads * w.n, ldy, 1);
                  x.fill(random, nan<T>());
                  library.linear(form.code, code<T>(), x.data, x.ld, w.k, panels.data, form.group,
                                 y.data, y.ld, w.n, w.heads, m, w.n, w.k);
                  results.take(y, "linear");
                  if (w.k == 0)
                    y.each([](T& v) {
                      if (value(v) != 0) fail("is not 0 without k", "linear");
                    });
                }});
}

struct Experts {
  int64_t tokens, top_k, experts, hidden, inter;
  bool same = false;   // a token's choices are one expert
  bool nodes = false;  // threads are on several memory nodes
};

template <class T>
void experts(std::vector<Case>& to, const Experts& e, const Form& form) {
  to.push_back({"experts " + std::to_string(form.code), [=](const Library& library,
                                                            Results& results) {
                  Random random(32);
                  const int64_t size13 = form.bytes(library, sizeof(T), e.inter, e.hidden, 32);
                  const int64_t size2 = form.bytes(library, sizeof(T), e.hidden, e.inter);
                  Matrix<char> w13(1, e.experts * size13), w2(1, e.experts * size2);
                  for (int64_t i = 0; i < e.experts; ++i) {
                    filled(library, form, w13.data + i * size13, e.inter, e.hidden, 32,
                           [&](const Form& own, char* up) {
                             for (const int32_t half : {0, 1})
                               pack<T>(library, random, own, up, 0, e.inter, e.inter, e.hidden,
                                       false, half);
                           });
                    filled(library, form, w2.data + i * size2, e.hidden, e.inter, 64,
                           [&](const Form& own, char* down) {
                             pack<T>(library, random, own, down, 0, e.hidden, e.hidden, e.inter);
                           });
                  }
                  Matrix<T> x(e.tokens, e.hidden, e.hidden + 1, 1), out(e.tokens, e.hidden);
                  Matrix<float> weights(e.tokens, e.top_k);
                  Matrix<int32_t> ids(e.tokens, e.top_k);
                  x.each([&](T& v) { put(v, random.unit() / 16); });
                  weights.fill(random, 0.0f);
                  for (int64_t t = 0; t < e.tokens; ++t) {  // some are not here
                    const int64_t first = random.below(e.experts + 1) - 1;
                    for (int64_t k = 0; k < e.top_k; ++k)
                      ids.at(t, k) = int32_t(e.same ? 0 : first + k);
                  }
                  const int32_t cpus[] = {0, 1, 2, 1, 2, 0, 2, 0, 1};
                  const int64_t ends[] = {3, 6, 9};
                  if (e.nodes) library.bind_threads(cpus, ends, 3);
                  library.experts(form.code, code<T>(), x.data, x.ld, weights.data, ids.data,
                                  w13.data, form.group, w2.data, form.group,
                                  e.same ? 0.5 : INFINITY, out.data, e.tokens, e.top_k, e.experts,
                                  e.hidden, e.inter);
                  if (e.nodes) library.bind_threads(cpus, ends, 0);
                  results.take(out, "experts");
                }});
}

}  // namespace

void matmul_cases(std::vector<Case>& to, bool large) {
  const Form forms[] = {{DS_DENSE, 0}, {DS_FP8, 32},  {DS_FP8, 128},       {DS_INT8, 0},
                        {DS_INT4, 32}, {DS_INT4, 96}, {DS_INT4_ZEROS, 128}, {DS_BF12, 0}, {DS_FP4, 32}};
  std::vector<Weights> weights = {{1, 1, 1},   {1, 9, 31},   {2, 70, 129},
                                  {1, 64, 64}, {3, 130, 33}, {1, 70, 0}};
  std::vector<int64_t> tokens = {0, 1, 2, 7, 37};
  // Results of those with tokens * top_k * hidden > 1200 are summed by column (check_native.py).
  std::vector<Experts> layers = {{0, 1, 1, 8, 8},   {1, 2, 3, 40, 33},       {3, 3, 3, 129, 37},
                                 {9, 2, 16, 65, 5}, {21, 1, 2, 64, 100},     {5, 2, 3, 197, 40},
                                 {2, 2, 3, 70, 0},  {1, 3, 2, 40, 33, true}, {2, 2, 4, 70, 140}};
  layers.back().nodes = true;
  if (large) {
    weights.push_back({1, 200, 1100});
    tokens.push_back(130);
    layers.push_back({70, 3, 5, 520, 260});
  }
  for (const Form& form : forms) {
    for (const Weights& w : weights)
      for (const int64_t m : tokens) {
        if (form.code != DS_BF12) linear<float>(to, w, m, form);
        linear<Half>(to, w, m, form);
      }
    for (const Experts& e : layers) {
      if (form.code != DS_BF12) experts<float>(to, e, form);
      experts<Half>(to, e, form);
    }
  }
}

}  // namespace driver
