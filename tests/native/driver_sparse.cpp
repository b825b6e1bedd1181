// The lightning indexer, and decode over slots that it could have chosen.
#include <algorithm>

#include "driver.h"

namespace driver {
namespace {

struct Shape {
  std::vector<int32_t> owners, lens;  // of each row: its sequence, and how many tokens it sees
  int64_t heads, d, page, k;
};

// Pages of a byte each, in a scattered order, and the page table of every sequence.
struct Index {
  Index(const Shape& s, int64_t page_bytes) : page_bytes(page_bytes) {
    const int64_t sequences = s.owners.back() + 1;
    for (const int32_t n : s.lens) most = std::max(most, (n + s.page - 1) / s.page);
    cache = std::make_unique<Matrix<char>>(sequences * most, page_bytes);
    std::memset(cache->data, 0xff, size_t(cache->rows * page_bytes));  // NaN in every type
    table = std::make_unique<Matrix<int32_t>>(sequences, most);
    int32_t next = int32_t(sequences * most);
    table->each([&](int32_t& page) { page = --next; });
  }
  const int64_t page_bytes;
  int64_t most = 1;
  std::unique_ptr<Matrix<char>> cache;
  std::unique_ptr<Matrix<int32_t>> table;
};

// Keys of every token go through the prologue; then scores of every row, and the best of them.
template <class T, class K>
void index(std::vector<Case>& to, const Shape& s, bool interleaved) {
  to.push_back({"index", [s, interleaved](const Library& library, Results& results) {
    constexpr int32_t kept = sizeof(K) == 1 ? DS_E4M3 : code<T>();
    constexpr int64_t extra = sizeof(K) == 1 ? 4 : 0;
    Random random(31);
    const Index index(s, s.page * (s.d * int64_t(sizeof(K)) + extra));
    const int64_t tokens = index.table->rows * index.most * s.page, rows = int64_t(s.lens.size());
    const int64_t rope = s.d / 2;
    Matrix<T> q(tokens * s.heads, s.d, s.d + 3, 1), k(tokens, s.d, s.d + 5, 1);
    Matrix<float> weight(1, s.d), bias(1, s.d), angles(7, rope), scale(tokens, s.heads);
    Matrix<K> queries(tokens * s.heads, s.d);
    Matrix<int64_t> positions(1, tokens), slots(1, tokens);
    q.fill(random, nan<T>());
    k.fill(random, nan<T>());
    for (Matrix<float>* m : {&weight, &bias, &angles}) m->fill(random, NAN);
    for (int64_t i = 0; i < tokens; ++i) {
      positions.at(0, i) = random.below(7);
      const int32_t page = index.table->at(i / (index.most * s.page), i / s.page % index.most);
      slots.at(0, i) = i == 0 ? -1 : page * s.page + i % s.page;
    }
    auto prologue = [&] {
      library.index_prologue(code<T>(), kept, q.data, s.heads * q.ld, q.ld, s.heads, k.data, k.ld,
                             s.d, weight.data, bias.data, 1e-6, positions.data, angles.data, rope,
                             interleaved, index.cache->data, s.page, slots.data, queries.data,
                             scale.data, tokens);
    };
    prologue();
    slots.at(0, 0) = index.table->at(0, 0) * s.page;  // its first token, skipped until now
    prologue();
    results.take(scale, "index_prologue's scale");
    const int64_t width = index.most * s.page;
    Matrix<float> weights(rows, s.heads, s.heads + 1, 1), scores(rows, width, width, 1);
    Matrix<int32_t> chosen(rows, s.k);
    weights.fill(random, NAN);
    library.index_scores(code<T>(), kept, queries.data, s.heads, s.d, weights.data, weights.ld,
                         index.cache->data, s.page, index.table->data, index.table->ld,
                         s.owners.data(), s.lens.data(), scores.data, width, rows);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t t = 0; t < s.lens[size_t(r)]; ++t) results.take(scores.at(r, t), "index_scores");
    library.index_topk(scores.data, width, s.lens.data(), s.owners.data(), index.table->data,
                       index.table->ld, s.page, s.k, chosen.data, rows);
    chosen.each([&](int32_t slot) { results.take(float(slot), "index_topk"); });
  }});
}

// Queries and keys of one row a token, with and without the Hadamard matrix; then scores of these keys.
// T: of queries and keys, K: of what is cached.
template <class T, class K>
void encoded(std::vector<Case>& to, int64_t tokens, int64_t heads, int64_t d, bool mixed) {
  to.push_back({"index_encode", [=](const Library& library, Results& results) {
    constexpr bool packed = std::is_same_v<K, char>, fp8 = std::is_same_v<K, unsigned char>;
    const int32_t kept = packed ? DS_E2M1 : fp8 ? DS_E4M3 : code<T>();
    const int64_t page = 3, pages = tokens / page + 1, rope = d / 2;
    const int64_t key = packed ? d / 2 + d / 32 : d * int64_t(sizeof(K)) + (fp8 ? 4 : 0);
    Random random(34);
    Matrix<T> q(tokens * heads, d, d + 3, 1), k(tokens, d, d + 5, 1);
    Matrix<T> wide(fp8 ? 0 : tokens * heads, d);
    Matrix<unsigned char> narrow(fp8 ? tokens * heads : 0, d);
    Matrix<float> angles(7, rope), scale(tokens, heads);
    Matrix<char> cache(pages, page * key);
    Matrix<int64_t> positions(1, tokens), slots(1, tokens);
    q.fill(random, nan<T>());
    k.fill(random, nan<T>());
    angles.fill(random, NAN);
    std::memset(cache.data, 0, size_t(pages * page * key));
    void* queries = fp8 ? (void*)narrow.data : (void*)wide.data;
    for (int64_t t = 0; t < tokens; ++t) {
      positions.at(0, t) = random.below(7);
      slots.at(0, t) = t % 4 == 1 ? -1 : tokens - 1 - t;
    }
    library.index_encode(code<T>(), kept, q.data, heads * q.ld, q.ld, heads, k.data, k.ld, d,
                         positions.data, angles.data, rope, mixed, cache.data, page, slots.data,
                         queries, scale.data, tokens);
    results.take(scale, "index_encode's scale");
    if (!tokens) return;
    Matrix<float> weights(1, heads), scores(1, pages * page);
    Matrix<int32_t> table(1, pages), owners(1, 1), lens(1, 1);
    weights.fill(random, NAN);
    for (int64_t i = 0; i < pages; ++i) table.at(0, i) = int32_t(i);
    owners.at(0, 0) = 0;
    lens.at(0, 0) = int32_t(tokens);
    const int32_t asked = fp8 ? DS_E4M3 : code<T>();
    library.index_scores(asked, kept, queries, heads, d, weights.data, heads, cache.data, page,
                         table.data, pages, owners.data, lens.data, scores.data, pages * page, 1);
    // A code may be the next one where a sum differs by a bit: those scores only run.
    if (!packed && !fp8)
      for (int64_t t = 0; t < tokens; ++t) results.take(scores.at(0, t), "scores of keys");
  }});
}

// Slots with gaps, without them, and attention over pages of one token; a row without slots gives 0.
template <class T>
void chosen(std::vector<Case>& to, int64_t rows, int64_t n, int64_t heads, int64_t lora,
            bool grouped) {
  to.push_back({"compact_slots", [=](const Library& library, Results& results) {
    Random random(32);
    const int64_t width = lora + 4, held = 2 * n;
    const int64_t size = lora + (lora + 127) / 128 * 4 + 2 * 4;  // of a token, if grouped
    const int32_t kept = grouped ? DS_GROUPED : code<T>();
    Matrix<T> q(rows * heads, width), tokens(held, width), out(rows * heads, lora);
    Matrix<char> bytes_of(grouped ? held : 0, size);
    Matrix<int64_t> places(1, held);
    Matrix<int32_t> slots(rows, n, n + 2, 1), pages(rows, n), lens(1, rows), starts(1, rows + 1);
    q.fill(random, nan<T>());
    tokens.fill(random, nan<T>());
    for (int64_t i = 0; i < held; ++i) places.at(0, i) = held - 1 - i;
    if (grouped)
      library.cache_write(code<T>(), kept, bytes_of.data, width, tokens.data, tokens.ld, lora,
                          tokens.data + lora, tokens.ld, places.data, held);
    const void* cache = grouped ? (const void*)bytes_of.data : tokens.data;
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t i = 0; i < n; ++i)
        slots.at(r, i) = r == 1 || random.below(3) == 0 ? -1 : int32_t((2 * i + r) % held);
    for (int64_t r = 0; r <= rows; ++r) starts.at(0, r) = int32_t(r);
    library.compact_slots(slots.data, slots.ld, n, pages.data, lens.data, rows);
    library.mla_decode(code<T>(), kept, q.data, heads * q.ld, q.ld, cache, 1, width,
                       lora, pages.data, n, lens.data, starts.data, 0.2, out.data, rows, heads,
                       nullptr, nullptr, nullptr);
    results.take(out, "mla_decode of chosen slots");
  }});
}

}  // namespace

void sparse_cases(std::vector<Case>& to, bool large) {
  std::vector<Shape> shapes = {
      {{0}, {1}, 1, 4, 1, 1},
      {{0, 0, 0, 2}, {9, 10, 11, 70}, 5, 64, 7, 6},
      {{0, 1, 1}, {130, 3, 4}, 64, 32, 16, 40},
  };
  if (large) shapes.push_back({{0, 1, 2}, {2500, 40, 1100}, 16, 128, 64, 300});
  for (const Shape& s : shapes)
    for (const bool interleaved : {true, false}) {
      index<float, float>(to, s, interleaved);
      index<float, unsigned char>(to, s, interleaved);
      index<Half, Half>(to, s, interleaved);
      index<Half, unsigned char>(to, s, interleaved);
    }
  for (const int64_t tokens : {0, 1, 9})
    for (const bool mixed : {false, true}) {
      encoded<float, float>(to, tokens, 3, 32, mixed);
      encoded<float, unsigned char>(to, tokens, 2, 64, mixed);
      encoded<float, char>(to, tokens, 3, 32, mixed);
      encoded<Half, Half>(to, tokens, 5, 64, mixed);
      encoded<Half, unsigned char>(to, tokens, 1, 32, mixed);
      encoded<Half, char>(to, tokens, 2, 128, mixed);
    }
  for (const bool grouped : {false, true}) {
    chosen<float>(to, 3, 9, 2, 8, grouped);
    chosen<Half>(to, 2, 400, 17, 32, grouped);
    chosen<Half>(to, 2, 60, 3, 200, grouped);
  }
}

}  // namespace driver
