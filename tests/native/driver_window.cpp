// Residual streams, choices by the root of softplus, and what stands around attention over a window.
#include "driver.h"

namespace driver {
namespace {

template <class T>
void streams(std::vector<Case>& to, int64_t tokens, int64_t n, int64_t d) {
  to.push_back({"streams", [=](const Library& library, Results& results) {
                  Random random(41);
                  const int64_t width = n * (2 + n);
                  Matrix<T> x(tokens, n * d), y(tokens, d, d + 2, 1), out(tokens, d);
                  Matrix<T> one(tokens, d), back(tokens, n * d);
                  Matrix<float> m(tokens, width), few(tokens, n), base(1, width), scale(1, 3);
                  Matrix<float> post(tokens, n), mix(tokens, n * n);
                  x.fill(random, nan<T>());
                  y.fill(random, nan<T>());
                  for (Matrix<float>* part : {&m, &few, &base, &scale}) part->fill(random, 0.0f);
                  library.hc_pre(code<T>(), x.data, m.data, base.data, scale.data, 1e-6, 1e-6, 20,
                                 out.data, post.data, mix.data, tokens, n, d);
                  library.hc_pre(code<T>(), x.data, few.data, base.data, scale.data, 1e-6, 1e-6, 0,
                                 one.data, nullptr, nullptr, tokens, n, d);
                  library.hc_post(code<T>(), y.data, y.ld, x.data, post.data, mix.data, back.data,
                                  tokens, n, d);
                  results.take(out, "hc_pre");
                  results.take(one, "hc_head");
                  results.take(back, "hc_post");
                }});
}

template <class T>
void heads(std::vector<Case>& to, int64_t rows, int64_t count, int64_t d, int64_t r) {
  to.push_back({"heads", [=](const Library& library, Results& results) {
                  Random random(42);
                  Matrix<T> x(rows * count, d, d + 3, 1), out(rows, count * d);
                  Matrix<T> back(rows, count * d);
                  Matrix<float> weight(1, d), table(9, r);
                  Matrix<int64_t> positions(1, rows);
                  x.fill(random, nan<T>());
                  weight.fill(random, 0.0f);
                  table.fill(random, 0.0f);
                  positions.each([&](int64_t& p) { p = random.below(9); });
                  library.norm_rope(code<T>(), x.data, count * x.ld, x.ld,
                                    rows % 2 ? weight.data : nullptr, 1e-6, positions.data,
                                    table.data, 0, out.data, rows, count, d, r);
                  results.take(out, "norm_rope");
                  // A code may be the next one where the norm differs by a bit: this one only runs.
                  library.norm_rope(code<T>(), x.data, count * x.ld, x.ld, nullptr, 1e-6,
                                    positions.data, table.data, 16, out.data, rows, count, d, r);
                  library.rope_back(code<T>(), x.data, count * x.ld, x.ld, positions.data,
                                    table.data, back.data, rows, count, d, r);
                  results.take(back, "rope_back");
                }});
}

template <class T>
void window(std::vector<Case>& to, int64_t tokens, int64_t n, bool held) {
  to.push_back({"window_rows", [=](const Library& library, Results& results) {
                  Random random(43);
                  const int64_t width = 21, entries = 8, window = 5, slots = 7, first = tokens / 3;
                  Matrix<T> kv(tokens, width, width + 1, 1), recent(2 * entries, width);
                  Matrix<T> compressed(slots, width), out(tokens - first, (window + n) * width);
                  Matrix<int64_t> positions(1, tokens), blocks(1, tokens);
                  Matrix<int32_t> chosen(tokens, n, n + 1), lens(1, tokens - first);
                  kv.fill(random, nan<T>());
                  recent.fill(random, nan<T>());
                  compressed.fill(random, nan<T>());
                  out.each([](T& v) { put(v, 0); });
                  for (int64_t t = 0; t < tokens; ++t) {
                    positions.at(0, t) = 3 + t;
                    blocks.at(0, t) = t + 1 < tokens ? 1 : -1;
                  }
                  chosen.each([&](int32_t& s) { s = int32_t(random.below(slots + 1)) - 1; });
                  library.window_rows(code<T>(), code<T>(), held ? nullptr : kv.data, kv.ld,
                                      recent.data, entries, positions.data, blocks.data, window,
                                      compressed.data, chosen.data, chosen.ld, n, width, first,
                                      out.data, lens.data, tokens - first);
                  results.take(out, "window_rows");
                  for (int64_t i = 0; i < tokens - first; ++i)
                    if (lens.at(0, i) < 0 || lens.at(0, i) > window + n)
                      fail("too many rows", "window_rows");
                }});
}

// A sequence's tokens, another's, padding; then one token more of the first, by the state alone.
template <class T>
void compress(std::vector<Case>& to, int64_t tokens, int64_t ratio, int64_t d, bool overlap) {
  to.push_back({"compress_windows", [=](const Library& library, Results& results) {
                  Random random(45);
                  const int64_t width = overlap ? 2 * d : d, rope = 4;
                  const int64_t entries = (overlap ? 2 : 1) * ratio - 1 + tokens % 2;
                  Matrix<T> rows(tokens, 2 * width, 2 * width + 3, 1), out(tokens, d), one(1, d);
                  Matrix<float> ape(ratio, width), weight(1, d), table(40, rope);
                  Matrix<float> state(2 * entries, 2 * width);
                  Matrix<int64_t> positions(1, tokens), blocks(1, tokens);
                  rows.fill(random, nan<T>());
                  for (Matrix<float>* part : {&ape, &weight, &table, &state})
                    part->fill(random, 0.0f);
                  const int64_t first = tokens / 2, second = tokens - tokens / 5;
                  for (int64_t t = 0; t < tokens; ++t) {
                    positions.at(0, t) = t < first ? t : 5 + t - first;
                    blocks.at(0, t) = t < first ? 1 : t < second ? 0 : -1;
                  }
                  library.compress_windows(code<T>(), rows.data, rows.ld, ape.data, ratio, width,
                                           weight.data, 1e-6, positions.data, table.data, rope, 0,
                                           state.data, entries, blocks.data, out.data, tokens, d);
                  results.take(out, "compress_windows");
                  results.take(state, "its state");
                  if (!tokens) return;
                  positions.at(0, 0) = 2 * ratio - 1;
                  blocks.at(0, 0) = 1;
                  // A code may be the next one where a sum differs by a bit: this one only runs.
                  library.compress_windows(code<T>(), rows.data, rows.ld, ape.data, ratio, width,
                                           weight.data, 1e-6, positions.data, table.data, rope, 16,
                                           state.data, entries, blocks.data, one.data, 1, d);
                }});
}

void softplus(std::vector<Case>& to, int64_t tokens, int64_t experts, int64_t top_k, bool given) {
  to.push_back({"route_softplus", [=](const Library& library, Results& results) {
                  Random random(44);
                  Matrix<float> logits(tokens, experts, experts + 1), bias(1, experts);
                  Matrix<float> weights(tokens, top_k);
                  Matrix<int64_t> chosen(tokens, top_k);
                  Matrix<int32_t> ids(tokens, top_k);
                  logits.fill(random, 0.0f);
                  bias.fill(random, 0.0f);
                  for (int64_t t = 0; t < tokens; ++t)
                    for (int64_t i = 0; i < top_k; ++i) chosen.at(t, i) = (t + i) % experts;
                  library.route_softplus(logits.data, logits.ld, bias.data,
                                         given ? chosen.data : nullptr, weights.data, ids.data,
                                         tokens, experts, top_k, 1.5);
                  results.take(weights, "route_softplus");
                  ids.each([&](int32_t id) {
                    if (id < 0 || id >= experts) fail("no expert", "route_softplus");
                  });
                }});
}

template <class T>
void of_type(std::vector<Case>& to) {
  for (const int64_t tokens : {0, 1, 5}) {
    streams<T>(to, tokens, 4, 37);
    streams<T>(to, tokens, 1, 16);
    heads<T>(to, tokens, 3, 50, 6);
    heads<T>(to, tokens, 1, 64, 64);
    for (const bool overlap : {true, false}) {
      compress<T>(to, 4 * tokens, 4, 37, overlap);
      compress<T>(to, 7 * tokens, 3, 32, overlap);
    }
    for (const bool held : {true, false}) window<T>(to, tokens + 1, tokens, held);
  }
}

}  // namespace

void window_cases(std::vector<Case>& to) {
  of_type<float>(to);
  of_type<Half>(to);
  for (const bool given : {true, false}) {
    softplus(to, 0, 4, 2, given);
    softplus(to, 3, 4, 4, given);
    softplus(to, 9, 70, 6, given);
  }
}

}  // namespace driver
