// Dividing work: OpenMP if the build has it, else one thread.
#pragma once

#include <cstdint>

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace ds {

inline int max_threads() {
#if defined(_OPENMP)
  return omp_get_max_threads();
#else
  return 1;
#endif
}

// Whether work of `cost` bytes in `pieces` is worth the other threads. Waking them and waiting costs
// some microseconds, and far more where other processes want the cores, so that two threads must
// have several microseconds each: GRAIN bytes, as fast as a core streams them. All threads or one:
// libgomp ends and restarts threads when the size of its team changes.
constexpr int64_t GRAIN = 256 << 10;
inline bool worth_threads(int64_t cost, int64_t pieces) {
#if defined(_OPENMP)
  return pieces > 1 && cost >= 2 * GRAIN && max_threads() > 1 && !omp_in_parallel();
#else
  (void)cost, (void)pieces;
  return false;
#endif
}

// body(begin, end) over contiguous pieces of [0, n), multiples of `grain` but the last. One
// piece per thread; small work (`cost` in bytes streamed) stays on the caller's thread.
template <class Body>
inline void parallel(int64_t n, int64_t grain, int64_t cost, Body body) {
  if (n <= 0) return;
#if defined(_OPENMP)
  if (worth_threads(cost, (n + grain - 1) / grain)) {
#pragma omp parallel
    {
      int64_t pieces = omp_get_num_threads(), me = omp_get_thread_num();
      int64_t units = (n + grain - 1) / grain;
      int64_t begin = units * me / pieces * grain, end = units * (me + 1) / pieces * grain;
      if (end > n) end = n;
      if (begin < end) body(begin, end);
    }
    return;
  }
#endif
  (void)grain;
  (void)cost;
  body(int64_t(0), n);
}

// body(i) for i in [0, n), handed out one by one: for units of uneven size.
template <class Body>
inline void parallel_each(int64_t n, int64_t cost, Body body) {
#if defined(_OPENMP)
  if (worth_threads(cost, n)) {
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t i = 0; i < n; ++i) body(i);
    return;
  }
#endif
  (void)cost;
  for (int64_t i = 0; i < n; ++i) body(i);
}

}  // namespace ds
