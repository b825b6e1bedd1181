// Sharing uneven work: every thread starts with a long piece of its own, and helps out at the end.
#pragma once

#include <atomic>

#include "parallel.h"

namespace ds {

// A piece [begin, end) of units; its owner takes from the front, others from the back.
class alignas(64) Piece {
 public:
  void set(int64_t begin, int64_t end) { ends_.store(uint64_t(begin) << 32 | uint64_t(end)); }
  // The next unit, or -1 when none is left.
  int64_t take(bool front) {
    uint64_t now = ends_.load(std::memory_order_relaxed);
    for (;;) {
      const uint64_t begin = now >> 32, end = now & 0xffffffffu;
      if (begin >= end) return -1;
      const uint64_t left = front ? (begin + 1) << 32 | end : begin << 32 | (end - 1);
      if (ends_.compare_exchange_weak(now, left, std::memory_order_relaxed))
        return int64_t(front ? begin : end - 1);
    }
  }

 private:
  std::atomic<uint64_t> ends_;  // nothing until set(): most of an array of pieces is never used
};

// Units [0, n), n < 2^31, on all threads. first(i, pieces) is where piece i begins, that of thread i.
// worker(next, pieces) runs once per thread and calls next() for unit after unit until it gets -1.
// Threads beyond MAX_PIECES only help.
template <class First, class Worker>
inline void share(int64_t n, int64_t cost, First first, Worker worker) {
  constexpr int64_t MAX_PIECES = 1024;
  Piece pieces[MAX_PIECES];
  const int64_t threads = max_threads();
  const int64_t count = !worth_threads(cost, n) ? 1 : threads < MAX_PIECES ? threads : MAX_PIECES;
  for (int64_t i = 0; i < count; ++i) pieces[i].set(first(i, count), first(i + 1, count));
  each_thread(count > 1, [&](int64_t me) {
    auto next = [&, i = int64_t(0)]() mutable {  // a piece that is used up stays so
      for (; i < count; ++i) {
        const int64_t unit = pieces[(me + i) % count].take(i == 0);
        if (unit >= 0) return unit;
      }
      return int64_t(-1);
    };
    worker(next, count);
  });
}

}  // namespace ds
