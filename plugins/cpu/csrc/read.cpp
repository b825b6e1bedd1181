// Reading memory as fast as it goes, to hold kernels against.
#include <atomic>
#include <cstring>

#include "ds_cpu.h"
#include "gemm.h"

namespace {

constexpr int64_t STEP = 32;  // words of one stream in a row: four cache lines

int64_t fold(const char* from, int64_t words, int64_t streams) {
  const int64_t part = words / streams / STEP * STEP;
  int64_t sums[STEP] = {}, sum = 0;
  for (int64_t i = 0; i < part; i += STEP)
    for (int64_t s = 0; s < streams; ++s) {
      const char* at = from + 8 * (s * part + i);
      int64_t read[STEP];
      std::memcpy(read, at, sizeof read);
      for (int64_t j = 0; j < STEP; j += 8) ds::prefetch(at + 8 * j + ds::STREAM_AHEAD);
      for (int64_t j = 0; j < STEP; ++j) sums[j] ^= read[j];
    }
  for (int64_t i = streams * part; i < words; ++i) {
    int64_t word;
    std::memcpy(&word, from + 8 * i, 8);
    sum ^= word;
  }
  for (int64_t s : sums) sum ^= s;
  return sum;
}

}  // namespace

void ds_cpu_read(const void* data, int64_t bytes, int64_t streams, int64_t* sum) {
  const char* from = static_cast<const char*>(data);
  std::atomic<int64_t> total{0};
  ds::parallel(bytes / 8, streams * STEP, bytes, [&](int64_t begin, int64_t end) {
    total ^= fold(from + 8 * begin, end - begin, streams);
  });
  *sum = total;
}
