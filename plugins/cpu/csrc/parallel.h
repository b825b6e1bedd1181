// Dividing work. Every kernel divides with these functions and no pragma of its own: they run on
// the OpenMP pool that torch has, on std::thread where ThreadSanitizer is to look on
// (DS_STD_THREADS), or on the caller's thread where neither is there.
//
// On a machine with several memory nodes thread i stays on one node (threads.cpp). `parallel` gives
// thread i the same piece whenever n, grain and the number of threads are the same, so panels that
// are packed with it lie in the memory of the node that reads them later. Experts, of which few are
// read at a time, are divided likewise on such a machine (experts.cpp).
#pragma once

#include <atomic>
#include <cstdint>

#if defined(_OPENMP)
#include <omp.h>
#elif defined(DS_STD_THREADS)
#include <thread>
#endif

namespace ds {

inline std::atomic<bool> on_several_nodes{false};  // whether threads are bound to such

#if defined(_OPENMP)
// Threads of the process's engine, 0: not told. OpenMP keeps the number per calling thread, so a
// thread that calls for the first time takes it over.
inline std::atomic<int> wanted_threads{0};
inline thread_local bool asked_for_threads = false;

inline int max_threads() {
  if (!asked_for_threads) {
    asked_for_threads = true;
    const int wanted = wanted_threads.load(std::memory_order_relaxed);
    if (wanted > 0) omp_set_num_threads(wanted);
  }
  return omp_get_max_threads();
}
inline void set_threads(int count) {
  wanted_threads.store(count, std::memory_order_relaxed);
  asked_for_threads = true;
  omp_set_num_threads(count);
}
inline bool in_team() { return omp_in_parallel(); }

// body(me, count) on every thread of the team, me in [0, count).
template <class Body>
inline void team(Body body) {
#pragma omp parallel
  body(int64_t(omp_get_thread_num()), int64_t(omp_get_num_threads()));
}
#elif defined(DS_STD_THREADS)
inline std::atomic<int> wanted_threads{1};
inline thread_local bool inside_team = false;

inline int max_threads() { return wanted_threads.load(std::memory_order_relaxed); }
inline void set_threads(int count) { wanted_threads.store(count, std::memory_order_relaxed); }
inline bool in_team() { return inside_team; }

template <class Body>
inline void team(Body body) {
  constexpr int MOST = 64;
  const int count = max_threads() < MOST ? max_threads() : MOST;
  auto run = [&](int me) {
    inside_team = true;
    body(int64_t(me), int64_t(count));
    inside_team = false;
  };
  std::thread others[MOST];
  for (int i = 1; i < count; ++i) others[i] = std::thread(run, i);
  run(0);
  for (int i = 1; i < count; ++i) others[i].join();
}
#else
inline int max_threads() { return 1; }
inline void set_threads(int) {}
inline bool in_team() { return false; }
template <class Body>
inline void team(Body body) {
  body(int64_t(0), int64_t(1));
}
#endif

// Whether work of `cost` bytes in `pieces` is worth the other threads. Waking them and waiting costs
// some microseconds, and far more where other processes want the cores, so that two threads must
// have several microseconds each: GRAIN bytes, as fast as a core streams them. All threads or one:
// libgomp ends and restarts threads when the size of its team changes.
#if !defined(DS_GRAIN)
#define DS_GRAIN (256 << 10)
#endif
constexpr int64_t GRAIN = DS_GRAIN;
inline bool worth_threads(int64_t cost, int64_t pieces) {
  return pieces > 1 && cost >= 2 * GRAIN && max_threads() > 1 && !in_team();
}

// body(number of the thread) on all threads, or on the caller's alone.
template <class Body>
inline void each_thread(bool all, Body body) {
  if (all)
    team([&](int64_t me, int64_t) { body(me); });
  else
    body(int64_t(0));
}

// body(begin, end) over contiguous pieces of [0, n), multiples of `grain` but the last. One
// piece per thread; small work (`cost` in bytes streamed) stays on the caller's thread.
template <class Body>
inline void parallel(int64_t n, int64_t grain, int64_t cost, Body body) {
  if (n <= 0) return;
  const int64_t units = (n + grain - 1) / grain;
  if (!worth_threads(cost, units)) return body(int64_t(0), n);
  team([&](int64_t me, int64_t count) {
    const int64_t begin = units * me / count * grain, to = units * (me + 1) / count * grain;
    const int64_t end = to < n ? to : n;
    if (begin < end) body(begin, end);
  });
}

// body(i, thread) for i in [0, n), handed out one by one, for units of uneven size; thread <
// max_threads(), for those that need working memory of their thread.
template <class Body>
inline void parallel_each(int64_t n, int64_t cost, Body body) {
  if (!worth_threads(cost, n)) {
    for (int64_t i = 0; i < n; ++i) body(i, int64_t(0));
    return;
  }
  std::atomic<int64_t> next{0};
  team([&](int64_t me, int64_t) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;) body(i, me);
  });
}

}  // namespace ds
