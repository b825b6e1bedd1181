// Working memory of one call of a kernel, at a cache line.
//
// The calling thread keeps up to KEPT bytes of it for its next call, so that a decode step asks the
// operating system for nothing; more is given back. DS_SCRATCH_KEPT=0, for builds under a tool, gives
// every call a block of just its size, behind which the tool sees each byte. Where the system refuses
// memory the process ends with a sentence: behind the C interface nobody could catch an exception.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <new>

#include "arena.h"

namespace ds {

#if !defined(DS_SCRATCH_KEPT)
#define DS_SCRATCH_KEPT (16 << 20)
#endif
constexpr int64_t KEPT = DS_SCRATCH_KEPT;

class Scratch {
 public:
  explicit Scratch(int64_t bytes) {
    if (bytes > KEPT) {
      own_ = Block(bytes);
      data_ = own_.data;
    } else {
      static thread_local Block kept;
      if (bytes > kept.bytes) kept = Block(up_to(bytes, 1 << 16));
      data_ = kept.data;
    }
  }
  void* data() const { return data_; }

 private:
  struct Block {
    static constexpr std::align_val_t LINE{64};
    explicit Block(int64_t size = 0)
        : data(size > 0 ? taken(size) : nullptr), bytes(size) {}
    Block(const Block&) = delete;
    Block& operator=(Block&& other) {
      void* mine = data;
      data = other.data, bytes = other.bytes;
      other.data = mine;
      return *this;
    }
    ~Block() { operator delete(data, LINE); }
    static void* taken(int64_t size) {
      void* data = operator new(std::size_t(size), LINE, std::nothrow);
      if (data) return data;
      std::fprintf(stderr,
                   "ds_runtime_cpu: the system refuses %lld bytes of working memory for one call of "
                   "a kernel; give it more, or take a smaller --max-step-tokens\n",
                   (long long)size);
      std::abort();
    }
    void* data;
    int64_t bytes;
  };
  Block own_;
  void* data_;
};

}  // namespace ds
