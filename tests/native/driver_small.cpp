// Norms, activation, rotation, cache, embedding, quantisation, routing, sampling.
#include "driver.h"

namespace driver {
namespace {

struct Shape {
  int64_t rows, n;
  std::string name() const { return std::to_string(rows) + "x" + std::to_string(n); }
};

std::vector<Shape> shapes(bool large) {
  std::vector<Shape> all = {{0, 8}, {1, 1}, {1, 7}, {3, 15}, {2, 16}, {5, 33}, {4, 65}, {17, 130}};
  if (large) all.push_back({96, 1536});
  return all;
}

template <class T, class U>
void norms(std::vector<Case>& to, Shape s) {
  to.push_back({"rms_norm " + s.name(), [s](const Library& library, Results& results) {
                  Random random(7);
                  Matrix<T> x(s.rows, s.n, s.n + 3, 1), out(s.rows, s.n);
                  Matrix<U> weight(1, s.n, s.n, 1);
                  x.fill(random, nan<T>());
                  weight.fill(random, nan<U>());
                  library.rms_norm(code<T>(), code<U>(), x.data, x.ld, weight.data, 1e-6, out.data,
                                   s.rows, s.n);
                  results.take(out, "rms_norm");
                }});
  to.push_back({"add_rms_norm " + s.name(), [s](const Library& library, Results& results) {
                  Random random(8);
                  Matrix<T> x(s.rows, s.n, s.n + 1, 1), residual(s.rows, s.n, s.n + 2);
                  Matrix<T> out(s.rows, s.n), sum(s.rows, s.n);
                  Matrix<U> weight(1, s.n, s.n, 1);
                  x.fill(random, nan<T>());
                  residual.fill(random, nan<T>());
                  weight.fill(random, nan<U>());
                  library.add_rms_norm(code<T>(), code<U>(), x.data, x.ld, residual.data,
                                       residual.ld, weight.data, 1e-6, out.data, sum.data, s.rows,
                                       s.n);
                  results.take(out, "add_rms_norm");
                  results.take(sum, "add_rms_norm's sum");
                }});
}

// Positions, the table of rotations, and slots of which every third is padding.
struct Places {
  static constexpr int64_t LENGTH = 40;
  Places(Random& random, int64_t rows, int64_t d, int64_t slots)
      : table(LENGTH, d), positions(1, rows), where(1, rows) {
    table.fill(random, 0.0f);
    for (int64_t r = 0; r < rows; ++r) {
      positions.data[r] = r ? random.below(LENGTH) : LENGTH - 1;
      where.data[r] = r % 3 == 2 ? -1 : slots - 1 - r;
    }
  }
  Matrix<float> table;
  Matrix<int64_t> positions, where;
};

using Grouped = signed char;  // bytes of a token of latent_fp8_groups; those of e4m3 are unsigned

// A cache of slots of `width` elements of C, every byte 0x38: finite in every type.
template <class C>
struct Cache {
  static constexpr bool grouped = std::is_same_v<C, Grouped>;
  static constexpr int32_t dtype = grouped          ? DS_GROUPED
                                   : sizeof(C) == 1 ? DS_E4M3
                                   : sizeof(C) == 2 ? DS_BF16
                                                    : DS_F32;
  Cache(int64_t slots, int64_t width) : memory(slots, width) {
    if (slots) std::memset(memory.data, 0x38, size_t(slots * width) * sizeof(C));
  }
  void take(Results& results, const char* which) {
    memory.each([&](C& x) {
      if constexpr (sizeof(C) == 1)
        results.take(float(x), which);
      else
        results.take(value(x), which);
    });
    unsigned char first[sizeof(C)];
    std::memcpy(first, memory.data, sizeof(C));
    if (first[0] != 0x38) fail("writes a slot that is not asked for", which);
  }
  Matrix<C> memory;
};

template <class T, class C>
void caches(std::vector<Case>& to, Shape s) {
  const int64_t lora = s.n, rope = 6, width = lora + rope, slots = s.rows + 5, heads = 3;
  const int64_t size = Cache<C>::grouped ? lora + (lora + 127) / 128 * 4 + 2 * rope : width;
  to.push_back({"cache_write " + s.name(), [=](const Library& library, Results& results) {
                  Random random(11);
                  Cache<C> cache(slots, size);
                  Places at(random, s.rows, rope, slots);
                  Matrix<T> latent(s.rows, lora, lora + 2, 1), k_rope(s.rows, rope, rope + 1);
                  latent.fill(random, nan<T>());
                  k_rope.fill(random, nan<T>());
                  library.cache_write(code<T>(), cache.dtype, cache.memory.data, width, latent.data,
                                      latent.ld, lora, k_rope.data, k_rope.ld, at.where.data,
                                      s.rows);
                  cache.take(results, "cache_write");
                }});
  to.push_back({"mla_prologue " + s.name(), [=](const Library& library, Results& results) {
                  Random random(12);
                  Cache<C> cache(slots, size);
                  Places at(random, s.rows, rope, slots);
                  Matrix<T> q(s.rows * heads, rope, rope + 5, 1), kv(s.rows, width, width + 1, 1);
                  Matrix<T> weight(1, lora, lora, 1);
                  Matrix<T> q_rope(s.rows * heads, rope), latent(s.rows, lora), k_rope(s.rows, rope);
                  q.fill(random, nan<T>());
                  kv.fill(random, nan<T>());
                  weight.fill(random, nan<T>());
                  library.mla_prologue(code<T>(), code<T>(), cache.dtype, q.data, heads * q.ld,
                                       q.ld, heads, kv.data, kv.ld, lora, rope, weight.data, 1e-6,
                                       at.positions.data, at.table.data, cache.memory.data,
                                       at.where.data, q_rope.data, latent.data, k_rope.data,
                                       s.rows);
                  // Scales are compared by their bytes, and the norm before may differ by a bit.
                  if constexpr (!Cache<C>::grouped) cache.take(results, "mla_prologue");
                  results.take(q_rope, "mla_prologue's q");
                  results.take(latent, "mla_prologue's latent");
                  results.take(k_rope, "mla_prologue's k");
                }});
}

template <class T>
void rows(std::vector<Case>& to, Shape s) {
  to.push_back({"silu_mul " + s.name(), [s](const Library& library, Results& results) {
                  Random random(9);
                  Matrix<T> x(s.rows, 2 * s.n, 2 * s.n + 3, 1), out(s.rows, s.n);
                  x.fill(random, nan<T>());
                  library.silu_mul(code<T>(), x.data, x.ld, s.rows % 2 ? 1.0 : INFINITY, out.data, s.rows,
                                   s.n);
                  results.take(out, "silu_mul");
                }});
  const int64_t heads = 3, d = (s.n + 1) / 2 * 2;
  to.push_back({"rope " + s.name(), [=](const Library& library, Results& results) {
                  Random random(10);
                  Places at(random, s.rows, d, 0);
                  Matrix<T> x(s.rows * heads, d, d + 1, 1), out(s.rows * heads, d);
                  x.fill(random, nan<T>());
                  library.rope(code<T>(), x.data, heads * x.ld, x.ld, at.positions.data,
                               at.table.data, out.data, s.rows, heads, d);
                  results.take(out, "rope");
                }});
  to.push_back({"embed " + s.name(), [=](const Library& library, Results& results) {
                  Random random(13);
                  const int64_t held = 7, start = 5;
                  Matrix<T> table(held, s.n, s.n + 1), out(s.rows, s.n);
                  Matrix<int64_t> ids(1, s.rows);
                  table.fill(random, nan<T>());
                  for (int64_t r = 0; r < s.rows; ++r) ids.data[r] = start - 1 + r % (held + 2);
                  library.embed(ids.data, table.data, table.ld * int64_t(sizeof(T)), start, held,
                                out.data, s.n * int64_t(sizeof(T)), s.rows);
                  results.take(out, "embed");
                }});
  for (const int64_t groups : {1, 3})
    for (const int32_t ue8m0 : {0, 1})
      to.push_back({"quantize_group " + s.name(), [=](const Library& library, Results& results) {
                      Random random(14);
                      const int64_t n = groups * s.n;
                      Matrix<T> x(s.rows, n, n + 2, 1);
                      Matrix<unsigned char> q(s.rows, n);
                      Matrix<float> scale(s.rows, groups);
                      x.fill(random, nan<T>());
                      library.quantize_group(code<T>(), x.data, x.ld, s.n, ue8m0, q.data,
                                             scale.data, s.rows, n);
                      results.take(scale, "quantize_group's scale");
                      q.each([&](unsigned char c) { results.take(float(c), "quantize_group"); });
                    }});
  for (const int64_t experts : {1, 6, 64})
    to.push_back({"router_logits " + s.name(), [=](const Library& library, Results& results) {
                    Random random(15);
                    Matrix<T> x(s.rows, s.n, s.n + 1, 1);
                    Matrix<float> w(experts, s.n), out(s.rows, experts);
                    x.fill(random, nan<T>());
                    w.fill(random, 0.0f);
                    library.router_logits(code<T>(), x.data, x.ld, w.data, out.data, s.rows,
                                          experts, s.n);
                    results.take(out, "router_logits");
                  }});
}

struct Router {
  int64_t experts, top_k, groups, open_groups;
  int32_t method;
};

void routing(std::vector<Case>& to, int64_t tokens, int64_t shared) {
  for (const Router r : {Router{1, 1, 1, 1, DS_GREEDY}, Router{7, 3, 1, 1, DS_GREEDY},
                         Router{24, 5, 8, 3, DS_GROUP_LIMITED}, Router{64, 8, 8, 4, DS_NOAUX_TC},
                         Router{20, 20, 2, 2, DS_NOAUX_TC}})
    for (const int32_t flags : {0, 1, 2, 3})
      to.push_back({"route", [=](const Library& library, Results& results) {
                      Random random(16);
                      const int64_t width = r.top_k + shared;
                      Matrix<float> logits(tokens, r.experts, r.experts + 1), bias(1, r.experts);
                      Matrix<float> weights(tokens, width);
                      Matrix<int32_t> ids(tokens, width);
                      logits.fill(random, NAN);
                      bias.fill(random, 0.0f);
                      library.route(logits.data, logits.ld, r.method == DS_NOAUX_TC ? bias.data : nullptr,
                                    weights.data, ids.data, tokens, r.experts, r.top_k, shared,
                                    r.groups, r.open_groups, flags & 1, r.method, flags >> 1, 2.5);
                      results.take(weights, "route's weights");
                      for (int64_t t = 0; t < tokens; ++t)
                        for (int64_t i = 0; i < width; ++i) {
                          const int32_t id = ids.at(t, i);
                          if (i < r.top_k ? id < 0 || id >= r.experts
                                          : id != r.experts + i - r.top_k || weights.at(t, i) != 1)
                            fail("chooses no expert", "route");
                          results.take(float(id), "route");
                        }
                    }});
}

void sampling(std::vector<Case>& to, Shape s) {
  to.push_back({"sample " + s.name(), [s](const Library& library, Results& results) {
                  Random random(17);
                  Matrix<float> logits(s.rows, s.n, s.n + 1, 1), temperature(1, s.rows);
                  Matrix<float> top_p(1, s.rows), min_p(1, s.rows);
                  Matrix<int32_t> top_k(1, s.rows);
                  Matrix<double> uniform(1, s.rows);
                  Matrix<int64_t> tokens(1, s.rows);
                  logits.fill(random, NAN);
                  for (int64_t r = 0; r < s.rows; ++r) {
                    temperature.data[r] = float(r % 3) * 0.7f;
                    top_k.data[r] = int32_t(r % 4 ? r % s.n + 1 : s.n);
                    top_p.data[r] = r % 2 ? 0.8f : 1.0f;
                    min_p.data[r] = r % 5 == 4 ? 0.1f : 0.0f;
                    uniform.data[r] = double(random.below(1000)) / 1000;
                  }
                  library.sample(logits.data, logits.ld, temperature.data, top_k.data, top_p.data,
                                 min_p.data, uniform.data, tokens.data, s.rows, s.n);
                  tokens.each([&](int64_t t) {
                    if (t < 0 || t >= s.n) fail("draws no token", "sample");
                    results.take(float(t), "sample");
                  });
                }});
  to.push_back({"mask_logits " + s.name(), [s](const Library& library, Results& results) {
                  Random random(19);
                  const int64_t words = (s.n + 31) / 32, count = 2;
                  Matrix<float> logits(s.rows, s.n, s.n + 1, 1), out(s.rows, s.n);
                  Matrix<uint32_t> masks(count, words);
                  Matrix<int32_t> which(1, s.rows);
                  logits.fill(random, NAN);
                  masks.each([&](uint32_t& word) { word = uint32_t(random.below(1LL << 32)); });
                  for (int64_t r = 0; r < s.rows; ++r) which.data[r] = int32_t(r % 3) - 1;
                  library.mask_logits(logits.data, logits.ld, masks.data, which.data, out.data,
                                      s.rows, s.n);
                  for (int64_t r = 0; r < s.rows; ++r)
                    for (int64_t t = 0; t < s.n; ++t) {
                      const bool kept =
                          which.data[r] < 0 || (masks.at(which.data[r], t / 32) >> (t % 32) & 1);
                      if (out.at(r, t) != (kept ? logits.at(r, t) : -INFINITY))
                        fail("keeps what is forbidden, or not what is allowed", "mask_logits");
                      results.take(kept ? out.at(r, t) : 0.0f, "mask_logits");
                    }
                }});
  for (const int64_t top_n : {int64_t(0), int64_t(1), s.n < 9 ? s.n : 9})
    to.push_back({"logprobs " + s.name(), [=](const Library& library, Results& results) {
                    Random random(18);
                    Matrix<float> logits(s.rows, s.n, s.n + 1, 1), chosen(1, s.rows);
                    Matrix<float> values(s.rows, top_n);
                    Matrix<int64_t> ids(1, s.rows), top_ids(s.rows, top_n);
                    logits.fill(random, NAN);
                    ids.each([&](int64_t& id) { id = random.below(s.n); });
                    library.logprobs(logits.data, logits.ld, ids.data, top_n, chosen.data,
                                     values.data, top_ids.data, s.rows, s.n);
                    results.take(chosen, "logprobs");
                    results.take(values, "logprobs of the best");
                    top_ids.each([&](int64_t id) { results.take(float(id), "logprobs' ids"); });
                  }});
}

// Rows of one tensor among those of a wider one, in their own type or another; and sums.
template <class S, class T>
void copies(std::vector<Case>& to, Shape s) {
  to.push_back({"copy " + s.name(), [s](const Library& library, Results& results) {
                  Random random(41);
                  constexpr int64_t HEADS = 3;
                  Matrix<S> from(s.rows * HEADS, s.n, s.n + 2, 1);
                  Matrix<T> out(s.rows * HEADS, s.n, s.n + 1, 1);
                  from.fill(random, nan<S>());
                  library.copy(code<S>(), code<T>(), from.data, HEADS * from.ld, from.ld, out.data,
                               HEADS * out.ld, out.ld, s.rows, HEADS, s.n);
                  results.take(out, "copy");
                }});
}

template <class T>
void sums(std::vector<Case>& to, Shape s) {
  to.push_back({"add " + s.name(), [s](const Library& library, Results& results) {
                  Random random(42);
                  Matrix<T> x(s.rows, s.n, s.n + 2, 1), y(s.rows, s.n, s.n + 1, 1);
                  x.fill(random, nan<T>());
                  y.fill(random, nan<T>());
                  library.add(code<T>(), y.data, y.ld, x.data, x.ld, s.rows, s.n);
                  // The same twice more, from a recording.
                  const int64_t slots[] = {code<T>(),       int64_t(y.data), y.ld, int64_t(x.data),
                                           x.ld,            s.rows,          s.n};
                  const int64_t call[] = {int64_t(library.slots_add), int64_t(slots)};
                  const int64_t calls[] = {call[0], call[1], call[0], call[1]};
                  library.replay(calls, 2);
                  results.take(y, "add");
                }});
}

void housekeeping(std::vector<Case>& to) {
  to.push_back({"large_pages", [](const Library& library, Results& results) {
                  Matrix<float> some(1, 3 << 20, 3 << 20, 1);
                  library.large_pages(some.data, some.cols * 4);
                  library.large_pages(some.data, 0);
                  results.take(0.0f, "large_pages");
                }});
  for (const int64_t bytes : {0, 1, 7, 8, 65, 4099})
    to.push_back({"read", [bytes](const Library& library, Results& results) {
                    Matrix<char> some(1, bytes, bytes, 3);
                    some.all(1);
                    int64_t sum = -1;
                    library.read(some.data, bytes, 1, &sum);
                    results.take(float(sum), "read");
                    library.read(some.data, bytes, 4, &sum);
                    results.take(float(sum), "read");
                  }});
  to.push_back({"bind_threads", [](const Library& library, Results& results) {
                  const int32_t cpus[] = {0, 1, 2, 1 << 20, -1};  // not all of them are here
                  const int64_t ends[] = {5, 5};
                  library.bind_threads(cpus, ends, 2);
                  results.take(0.0f, "bind_threads");
                }});
}

}  // namespace

void small_cases(std::vector<Case>& to, bool large) {
  for (const Shape s : shapes(large)) {
    norms<float, float>(to, s);
    norms<Half, Half>(to, s);
    norms<Half, float>(to, s);
    rows<float>(to, s);
    rows<Half>(to, s);
    caches<float, float>(to, s);
    caches<Half, Half>(to, s);
    caches<Half, unsigned char>(to, s);
    caches<float, Grouped>(to, s);
    caches<Half, Grouped>(to, s);
    copies<float, float>(to, s);
    copies<float, Half>(to, s);
    copies<Half, float>(to, s);
    copies<Half, Half>(to, s);
    sums<float>(to, s);
    sums<Half>(to, s);
    sampling(to, s);
  }
  for (const int64_t tokens : {0, 1, 9})
    for (const int64_t shared : {0, 2}) routing(to, tokens, shared);
  housekeeping(to);
}

}  // namespace driver
