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

// body(begin, end) over contiguous pieces of [0, n), multiples of `grain` but the last. One
// piece per thread; small work (`cost` in bytes touched) stays on the caller's thread.
template <class Body>
inline void parallel(int64_t n, int64_t grain, int64_t cost, Body body) {
  if (n <= 0) return;
#if defined(_OPENMP)
  int64_t threads = max_threads();
  if (threads > 1 && n > grain && cost > (64 << 10) && !omp_in_parallel()) {
#pragma omp parallel num_threads(int(threads))
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
  if (n > 1 && max_threads() > 1 && cost > (64 << 10) && !omp_in_parallel()) {
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t i = 0; i < n; ++i) body(i);
    return;
  }
#endif
  (void)cost;
  for (int64_t i = 0; i < n; ++i) body(i);
}

}  // namespace ds
