// Compiled without the instruction set of its library, so that asking is always safe.
#include "ds_cpu.h"

int32_t ds_cpu_abi_version() { return DS_CPU_ABI; }

int32_t ds_cpu_score() {
#if defined(DS_ISA_AVX512BF16)
  __builtin_cpu_init();
  bool ok = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
            __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni") &&
            __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  return ok ? 30 : 0;
#elif defined(DS_ISA_AVX2)
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? 20 : 0;
#else
  return 10;
#endif
}
