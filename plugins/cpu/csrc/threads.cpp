// How many threads there are, and on which processors each may run.
#include "ds_cpu.h"
#include "parallel.h"

#if defined(__linux__)
#include <sched.h>
#endif

using namespace ds;

int32_t ds_cpu_threads() { return max_threads(); }

void ds_cpu_set_threads(int64_t count) { set_threads(int(count)); }

void ds_cpu_bind_threads(const int32_t* cpus, const int64_t* ends, int64_t threads) {
#if defined(__linux__)
  constexpr int MOST = 8192;
  team([&](int64_t me, int64_t) {
    if (me >= threads) return;
    alignas(cpu_set_t) unsigned char mask[MOST / 8] = {};
    for (int64_t i = me ? ends[me - 1] : 0; i < ends[me]; ++i)
      if (cpus[i] >= 0 && cpus[i] < MOST) CPU_SET_S(cpus[i], sizeof mask, (cpu_set_t*)mask);
    sched_setaffinity(0, sizeof mask, (cpu_set_t*)mask);  // a wish: failure is fine
  });
  int32_t low = INT32_MAX, high = -1;  // of the threads' first processors
  for (int64_t i = 0, begin = 0; i < threads; begin = ends[i++])
    if (begin < ends[i]) {
      low = cpus[begin] < low ? cpus[begin] : low;
      high = cpus[begin] > high ? cpus[begin] : high;
    }
  on_several_nodes.store(low < high, std::memory_order_relaxed);
#else
  (void)cpus, (void)ends, (void)threads;
#endif
}
