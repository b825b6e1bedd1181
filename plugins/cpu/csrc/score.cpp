// Whether a library runs here. Compiled without its instruction set, so that asking is always safe.
#include "ds_cpu.h"

#if defined(DS_ISA_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

#if defined(DS_ISA_AVX2) || defined(DS_ISA_AVX512) || defined(DS_ISA_AVX512BF16) || \
    defined(DS_ISA_AMX)
bool avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}
#endif

#if defined(DS_ISA_AVX512) || defined(DS_ISA_AVX512BF16) || defined(DS_ISA_AMX)
bool avx512() {
  return avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vnni");
}
#endif

#if defined(DS_ISA_AVX512BF16) || defined(DS_ISA_AMX)
bool avx512bf16() {
  return avx512() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi");
}
#endif

#if defined(DS_ISA_AMX)
// The tile registers are handed out by the kernel, to a whole process, when it asks.
bool amx() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  const unsigned wanted = 1u << 22 | 1u << 24 | 1u << 25;  // AMX-BF16, AMX-TILE, AMX-INT8
  const long request_permission = 0x1023, tile_data = 18;
  return (d & wanted) == wanted && syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}
#endif

}  // namespace

int32_t ds_cpu_abi_version() { return DS_CPU_ABI; }

int32_t ds_cpu_score() {
#if defined(DS_ISA_GENERIC)
  return 10;
#else
  __builtin_cpu_init();
#if defined(DS_ISA_AMX)
  return avx512bf16() && amx() ? 50 : 0;
#elif defined(DS_ISA_AVX512BF16)
  // Intel's processors start a VDPBF16PS every other cycle and two VFMADD in each: less than avx512.
  return !avx512bf16() ? 0 : __builtin_cpu_is("intel") ? 25 : 40;
#elif defined(DS_ISA_AVX512)
  return avx512() ? 30 : 0;
#elif defined(DS_ISA_AVX2)
  return avx2() ? 20 : 0;
#else
#error "a variant without a test"
#endif
#endif
}
