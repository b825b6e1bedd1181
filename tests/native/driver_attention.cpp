// Absorbed decode over the paged cache, and prefill.
#include "driver.h"

namespace driver {
namespace {

struct Decode {
  std::vector<int32_t> lens;  // rows of the cache that the last new token of a sequence sees
  std::vector<int32_t> news;  // new tokens of each sequence
  int64_t heads, lora, rope, page;
  std::vector<int64_t> trees = {};  // per new token, which of the last 64 rows it sees
};

// Pages in a scattered order. Whatever no sequence owns is NaN.
template <class C>
struct Pages {
  Pages(Random& random, const Decode& d) : width(d.lora + d.rope) {
    int64_t used = 0;
    for (const int32_t n : d.lens) {
      const int64_t own = (n + d.page - 1) / d.page;
      most = own > most ? own : most;
      used += own;
    }
    const int64_t count = used + 3;
    cache = std::make_unique<Matrix<C>>(count * d.page, width);
    std::memset(cache->data, 0xff, size_t(cache->rows * width) * sizeof(C));  // NaN in every type
    table = std::make_unique<Matrix<int32_t>>(int64_t(d.lens.size()), most);
    table->all(-1);
    for (size_t i = 0; i < d.lens.size(); ++i)
      for (int64_t j = 0; j < d.lens[i]; ++j) {
        int32_t& page = table->at(int64_t(i), j / d.page);
        if (j % d.page == 0) page = int32_t(count - 1 - next++);
        C* row = &cache->at(int64_t(page) * d.page + j % d.page, 0);
        for (int64_t c = 0; c < width; ++c) write(row[c], random);
      }
  }
  static void write(float& to, Random& random) { to = random.unit(); }
  static void write(Half& to, Random& random) { put(to, random.unit()); }
  static void write(unsigned char& to, Random& random) {  // e4m3 between 2^-6 and 2
    to = (unsigned char)(random.below(2) << 7 | (1 + random.below(7)) << 3 | random.below(8));
  }

  const int64_t width;
  int64_t most = 1, next = 0;
  std::unique_ptr<Matrix<C>> cache;
  std::unique_ptr<Matrix<int32_t>> table;
};

std::vector<int32_t> starts_of(const std::vector<int32_t>& lens) {
  std::vector<int32_t> starts = {0};
  for (const int32_t n : lens) starts.push_back(starts.back() + n);
  return starts;
}

// What a node sees: all but those of the last four rows whose bit is missing.
int64_t tree(uint64_t last) { return int64_t(last << 60 | ~0ull >> 4); }

template <class T, class C>
void decode(std::vector<Case>& to, const Decode& d) {
  to.push_back({"mla_decode", [d](const Library& library, Results& results) {
                  constexpr int32_t cached = sizeof(C) == 1 ? DS_E4M3 : code<T>();
                  Random random(21);
                  const Pages<C> pages(random, d);
                  const std::vector<int32_t> starts = starts_of(d.news);
                  const int64_t rows = starts.back(), count = int64_t(d.lens.size());
                  Matrix<T> q(rows * d.heads, pages.width, pages.width + 3, 1);
                  Matrix<T> out(rows * d.heads, d.lora);
                  Matrix<float> sinks(1, d.heads), lse(rows, d.heads);
                  q.fill(random, nan<T>());
                  sinks.fill(random, 0.0f);
                  library.mla_decode(code<T>(), cached, q.data, d.heads * q.ld, q.ld,
                                     pages.cache->data, d.page, pages.width, d.lora,
                                     pages.table->data, pages.table->ld, d.lens.data(),
                                     starts.data(), 0.2, out.data, count, d.heads,
                                     d.trees.empty() ? nullptr : d.trees.data(), sinks.data,
                                     lse.data);
                  lse.each([](float& x) { x = x == -INFINITY ? 0.0f : x; });  // who sees nothing
                  results.take(lse, "mla_decode's lse");
                  results.take(out, "mla_decode");
                }});
}

struct Prefill {
  std::vector<int32_t> queries, keys;
  int64_t heads, d, dv;
};

template <class T>
void prefill(std::vector<Case>& to, const Prefill& p, bool causal) {
  to.push_back({"mha_prefill", [p, causal](const Library& library, Results& results) {
                  Random random(22);
                  const std::vector<int32_t> qs = starts_of(p.queries), ks = starts_of(p.keys);
                  const int64_t tokens = qs.back(), keys = ks.back();
                  Matrix<T> q(tokens * p.heads, p.d, p.d + 1, 1), k(keys * p.heads, p.d, p.d + 3, 1);
                  Matrix<T> v(keys * p.heads, p.dv, p.dv + 2, 1), out(tokens * p.heads, p.dv);
                  Matrix<float> lse(tokens, p.heads);
                  q.fill(random, nan<T>());
                  k.fill(random, nan<T>());
                  v.fill(random, nan<T>());
                  library.mha_prefill(code<T>(), q.data, p.heads * q.ld, q.ld, k.data,
                                      p.heads * k.ld, k.ld, v.data, p.heads * v.ld, v.ld, qs.data(),
                                      ks.data(), causal, 0.2, out.data, lse.data,
                                      int64_t(p.queries.size()), p.heads, p.d, p.dv);
                  results.take(out, "mha_prefill");
                  lse.each([&](float x) {  // -inf where a query sees no key
                    results.take(x == -INFINITY ? -1e30f : x, "mha_prefill's lse");
                  });
                }});
}

}  // namespace

void attention_cases(std::vector<Case>& to, bool large) {
  std::vector<Decode> decodes = {
      {{1}, {1}, 1, 1, 1, 1},
      {{5, 1, 64}, {1, 1, 1}, 3, 37, 9, 3},
      {{63, 65, 7}, {1, 2, 3}, 5, 33, 7, 16},
      {{-1, 0, 5}, {1, 2, 1}, 2, 9, 3, 3},  // two see nothing
      {{200}, {4}, 16, 64, 16, 16},
      {{700, 9}, {2, 1}, 3, 33, 7, 16},  // several ranges of keys
      {{200, 9}, {4, 2}, 5, 33, 7, 16,
       {tree(0b0001), tree(0b0011), tree(0b0101), tree(0b1011), tree(0b0111), tree(0b1111)}},
  };
  if (large) decodes.push_back({{700, 3, 129}, {1, 3, 2}, 21, 512, 64, 16});
  for (const Decode& d : decodes) {
    decode<float, float>(to, d);
    decode<float, unsigned char>(to, d);
    decode<Half, Half>(to, d);
    decode<Half, unsigned char>(to, d);
  }
  std::vector<Prefill> prefills = {
      {{1}, {1}, 1, 1, 1},
      {{3, 0, 5, 2}, {3, 4, 9, 0}, 2, 24, 17},
      {{33}, {65}, 3, 40, 32},
      {{7}, {5}, 1, 9, 3},  // the first queries see nothing
  };
  if (large) prefills.push_back({{130, 70}, {300, 70}, 2, 192, 128});
  for (const Prefill& p : prefills)
    for (const bool causal : {true, false}) {
      prefill<float>(to, p, causal);
      prefill<Half>(to, p, causal);
    }
}

}  // namespace driver
