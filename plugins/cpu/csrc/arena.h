// The parts of a buffer.
#pragma once

#include <cstdint>

namespace ds {

inline int64_t up_to(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// Hands out the parts of a buffer, each at a cache line; counts only if there is none.
class Arena {
 public:
  explicit Arena(void* memory) : base_((char*)memory), at_(base_ ? -(uintptr_t)base_ & 63 : 0) {}
  template <class T>
  T* take(int64_t count) {
    T* found = base_ ? (T*)(base_ + at_) : nullptr;
    at_ += up_to(count * int64_t(sizeof(T)), 64);
    return found;
  }
  int64_t used() const { return int64_t(at_); }

 private:
  char* base_;
  uintptr_t at_;
};

}  // namespace ds
