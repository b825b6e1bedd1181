// The slots of the best-scored tokens, and lists of slots without their gaps.
#include "ds_cpu.h"
#include "lanes.h"
#include "parallel.h"

namespace ds {
namespace {

// Keys (lanes.h) as unsigned numbers, looked at 11, 11 and 10 bits at a time.
constexpr int DIGITS = 3, SHIFT[DIGITS] = {21, 10, 0}, BITS[DIGITS] = {11, 11, 10};
inline uint32_t rank_of(int32_t key) { return uint32_t(key) ^ 0x80000000u; }

// The key of the k-th best of n scores, k < n, and how many that are equal to it are among the best.
int32_t kth_best(const float* scores, int64_t n, int64_t k, int64_t* equal) {
  uint32_t prefix = 0, mask = 0;
  for (int digit = 0; digit < DIGITS; ++digit) {
    int64_t counts[1 << 11] = {};
    const uint32_t low = (1u << BITS[digit]) - 1;
    int32_t keys[F::W];
    for (int64_t i = 0; i < n; i += F::W) {
      const int some = n - i < F::W ? int(n - i) : F::W;
      const F x = some == F::W ? F::load(scores + i) : load_tail(scores + i, some);
      Keys::of(x).store(keys);
      for (int j = 0; j < some; ++j) {
        const uint32_t rank = rank_of(keys[j]);
        if ((rank & mask) == prefix) ++counts[rank >> SHIFT[digit] & low];
      }
    }
    uint32_t at = low;
    for (; counts[at] < k; --at) k -= counts[at];
    prefix |= at << SHIFT[digit];
    mask |= low << SHIFT[digit];
  }
  *equal = k;
  return int32_t(prefix ^ 0x80000000u);
}

struct Call {
  const float* scores;
  int64_t ld;
  const int32_t *owners, *lens, *pages;
  int64_t max_pages, page_size, k;

  int32_t slot(const int32_t* table, int64_t token) const {
    return int32_t(table[token / page_size] * page_size + token % page_size);
  }
};

void best_of(const Call& call, int64_t row, int32_t* slots) {
  const float* scores = call.scores + row * call.ld;
  const int32_t* table = call.pages + call.owners[row] * call.max_pages;
  const int64_t n = call.lens[row];
  if (n <= call.k) {
    for (int64_t i = 0; i < n; ++i) slots[i] = call.slot(table, i);
    for (int64_t i = n; i < call.k; ++i) slots[i] = -1;
    return;
  }
  int64_t equal, taken = 0;
  const int32_t least = kth_best(scores, n, call.k, &equal);
  for (int64_t i = 0; i < n && taken < call.k; i += F::W) {
    const int some = n - i < F::W ? int(n - i) : F::W;
    const F x = some == F::W ? F::load(scores + i) : load_tail(scores + i, some);
    uint32_t bits = Keys::of(x).between(least, INT32_MAX) & ((1u << some) - 1);
    for (; bits; bits &= bits - 1) {
      const int64_t token = i + lowest(bits);
      if (order(scores[token]) == least && equal-- <= 0) continue;
      slots[taken++] = call.slot(table, token);
    }
  }
}

}  // namespace
}  // namespace ds

using namespace ds;

void ds_cpu_index_topk(const float* scores, int64_t ld, const int32_t* lens, const int32_t* owners,
                       const int32_t* pages, int64_t max_pages, int64_t page_size, int64_t k,
                       int32_t* slots, int64_t rows) {
  const Call call{scores, ld, owners, lens, pages, max_pages, page_size, k};
  int64_t cost = 0;
  for (int64_t r = 0; r < rows; ++r) cost += lens[r] * 32;
  parallel_each(rows, cost, [&](int64_t r, int64_t) { best_of(call, r, slots + r * k); });
}

void ds_cpu_compact_slots(const int32_t* slots, int64_t ld, int64_t n, int32_t* out, int32_t* lens,
                          int64_t rows) {
  parallel(rows, 1, rows * n * 8, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      int32_t count = 0;
      for (int64_t i = 0; i < n; ++i) {
        const int32_t slot = slots[r * ld + i];
        out[r * n + count] = slot;
        count += slot >= 0;
      }
      lens[r] = count;
    }
  });
}
