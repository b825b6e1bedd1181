// Every kernel twice more: with its arguments in an array of 8-byte slots, and with most of them
// given beforehand.
//
// Python's ctypes converts the arguments of a typed call one by one, a tenth of a microsecond each,
// which for a small op is more than its work. Packing one array is four times faster.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "ds_cpu.h"

namespace {

union Slot {
  int64_t i;
  double d;
};

template <class T>
T get(Slot slot) {
  if constexpr (std::is_pointer_v<T>)
    return reinterpret_cast<T>(static_cast<intptr_t>(slot.i));
  else if constexpr (std::is_floating_point_v<T>)
    return T(slot.d);
  else
    return T(slot.i);
}

template <class... Args, std::size_t... I>
void unpack(void (*kernel)(Args...), const Slot* slots, std::index_sequence<I...>) {
  kernel(get<Args>(slots[I])...);
}

template <class... Args>
void call(void (*kernel)(Args...), const Slot* slots) {
  unpack(kernel, slots, std::index_sequence_for<Args...>());
}

// plan: how many arguments are open, their places, then all slots with those of the others filled.
template <class... Args>
void call_bound(void (*kernel)(Args...), const Slot* plan, const Slot* open) {
  Slot slots[sizeof...(Args)];
  const int64_t count = plan[0].i;
  std::memcpy(slots, plan + 1 + count, sizeof slots);
  for (int64_t i = 0; i < count; ++i) slots[plan[1 + i].i] = open[i];
  call(kernel, slots);
}

struct Recorded {
  void (*function)(const Slot*);
  const Slot* slots;
};

}  // namespace

void ds_cpu_replay(const void* calls, int64_t count) {
  const auto* recorded = (const Recorded*)calls;
  for (int64_t i = 0; i < count; ++i) recorded[i].function(recorded[i].slots);
}

#define DS_SLOTS(name)                                                                \
  DS_EXPORT void ds_cpu_slots_##name(const Slot* slots) { call(ds_cpu_##name, slots); } \
  DS_EXPORT void ds_cpu_bound_##name(const Slot* plan, const Slot* open) {              \
    call_bound(ds_cpu_##name, plan, open);                                              \
  }

DS_SLOTS(set_threads)
DS_SLOTS(bind_threads)
DS_SLOTS(large_pages)
DS_SLOTS(read)
DS_SLOTS(rms_norm)
DS_SLOTS(add_rms_norm)
DS_SLOTS(silu_mul)
DS_SLOTS(rope)
DS_SLOTS(cache_write)
DS_SLOTS(mla_prologue)
DS_SLOTS(embed)
DS_SLOTS(quantize_group)
DS_SLOTS(router_logits)
DS_SLOTS(route)
DS_SLOTS(sample)
DS_SLOTS(mask_logits)
DS_SLOTS(logprobs)
DS_SLOTS(pack)
DS_SLOTS(narrow)
DS_SLOTS(unpack)
DS_SLOTS(linear)
DS_SLOTS(mla_decode)
DS_SLOTS(compact_slots)
DS_SLOTS(index_prologue)
DS_SLOTS(index_encode)
DS_SLOTS(index_scores)
DS_SLOTS(index_topk)
DS_SLOTS(mha_prefill)
DS_SLOTS(experts)
DS_SLOTS(copy)
DS_SLOTS(add)
DS_SLOTS(route_softplus)
DS_SLOTS(hc_pre)
DS_SLOTS(hc_post)
DS_SLOTS(norm_rope)
DS_SLOTS(rope_back)
DS_SLOTS(window_rows)
DS_SLOTS(compress_windows)
DS_SLOTS(replay)
