// What the driver's calls are made of: a library, memory of exactly the size that is needed, values.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ds_cpu.h"

namespace driver {

// Every function of ds_cpu.h. tests/plugins/test_cpu_driver.py compares the list.
#define DRIVER_FUNCTIONS(X) \
  X(abi_version)            \
  X(score)                  \
  X(threads)                \
  X(set_threads)            \
  X(bind_threads)           \
  X(large_pages)            \
  X(read)                   \
  X(rms_norm)               \
  X(add_rms_norm)           \
  X(silu_mul)               \
  X(rope)                   \
  X(cache_write)            \
  X(mla_prologue)           \
  X(embed)                  \
  X(quantize_group)         \
  X(router_logits)          \
  X(route)                  \
  X(sample)                 \
  X(mask_logits)            \
  X(logprobs)               \
  X(pack)                   \
  X(panel_bytes)            \
  X(narrow)                 \
  X(narrows)                \
  X(unpack)                 \
  X(linear)                 \
  X(experts)                \
  X(mla_decode)             \
  X(compact_slots)          \
  X(index_prologue)         \
  X(index_encode)           \
  X(index_scores)           \
  X(index_topk)             \
  X(mha_prefill)            \
  X(route_softplus)         \
  X(hc_pre)                 \
  X(hc_post)                \
  X(norm_rope)              \
  X(rope_back)              \
  X(window_rows)            \
  X(compress_windows)       \
  X(copy)                   \
  X(add)                    \
  X(slots_add)              \
  X(replay)

extern "C" void ds_cpu_slots_add(const void* slots);

struct Library {
#define X(name) decltype(&ds_cpu_##name) name;
  DRIVER_FUNCTIONS(X)
#undef X
};

[[noreturn]] inline void fail(const char* what, const std::string& which) {
  std::fprintf(stderr, "driver: %s: %s\n", which.c_str(), what);
  std::exit(1);
}

struct Half {  // bfloat16
  uint16_t bits;
};
inline float value(float x) { return x; }
inline float value(Half x) {
  uint32_t u = uint32_t(x.bits) << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
inline void put(float& to, float x) { to = x; }
inline void put(Half& to, float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  to.bits = x != x ? 0x7fc0 : uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
template <class T>
constexpr int32_t code() {
  return std::is_same_v<T, float> ? DS_F32 : DS_BF16;
}

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15ull + 1) {}
  uint64_t bits() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return state_;
  }
  int64_t below(int64_t n) { return int64_t(bits() % uint64_t(n)); }
  float unit() { return float(bits() >> 40) / float(1 << 24) * 2 - 1; }  // [-1, 1)

 private:
  uint64_t state_;
};

// Rows of `cols` elements, `ld` apart, `offset` elements into a block of its own. The block ends with
// the last element of the last row, so that a tool sees the first byte read or written beyond it;
// between rows lies `gap`.
template <class T>
class Matrix {
 public:
  Matrix(int64_t rows, int64_t cols, int64_t ld, int64_t offset = 0)
      : rows(rows),
        cols(cols),
        ld(ld),
        offset_(offset),
        count_(rows && cols ? (rows - 1) * ld + cols : 0) {
    block_ = static_cast<T*>(std::malloc(size_t(offset_ + count_) * sizeof(T)));
    data = block_ + offset_;
  }
  Matrix(int64_t rows, int64_t cols) : Matrix(rows, cols, cols) {}
  Matrix(const Matrix&) = delete;
  Matrix& operator=(const Matrix&) = delete;
  ~Matrix() { std::free(block_); }

  T& at(int64_t r, int64_t c) { return data[r * ld + c]; }
  const T& at(int64_t r, int64_t c) const { return data[r * ld + c]; }

  // Random values in rows, `gap` before them and between them.
  void fill(Random& random, T gap) {
    for (int64_t i = -offset_; i < count_; ++i) data[i] = gap;
    each([&](T& x) { put(x, random.unit()); });
  }
  void all(T x) {
    each([&](T& to) { to = x; });
  }
  template <class Body>
  void each(Body body) {
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < cols; ++c) body(at(r, c));
  }

  T* data;
  const int64_t rows, cols, ld;

 private:
  T* block_;
  const int64_t offset_, count_;
};

inline Half half(float x) {
  Half h;
  put(h, x);
  return h;
}
template <class T>
T number(float x) {
  T t;
  put(t, x);
  return t;
}
template <class T>
T nan() {
  return number<T>(NAN);
}

// The results of one case, as they are compared: every element is read and must be finite.
class Results {
 public:
  template <class T>
  void take(Matrix<T>& m, const std::string& which) {
    m.each([&](T& x) { take(value(x), which); });
  }
  void take(float x, const std::string& which) {
    if (!(std::fabs(x) < INFINITY)) fail("a result is no finite number", which);
    values_.push_back(x);
  }
  bool operator==(const Results& other) const { return values_ == other.values_; }
  const std::vector<float>& values() const { return values_; }

 private:
  std::vector<float> values_;
};

// A case computes from the same seed each time it is called.
struct Case {
  std::string name;
  std::function<void(const Library&, Results&)> run;
};

// Of one area each; `large`: shapes that are worth several threads.
void small_cases(std::vector<Case>& to, bool large);
void matmul_cases(std::vector<Case>& to, bool large);
void attention_cases(std::vector<Case>& to, bool large);
void sparse_cases(std::vector<Case>& to, bool large);
void window_cases(std::vector<Case>& to);

}  // namespace driver
