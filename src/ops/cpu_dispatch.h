#pragma once

#include "core/process/cpu_level.h"

/// Sources with vector code are compiled once for each CPU level that the program is built with,
/// and what they offer to others is chosen when the program runs. They are listed in
/// src/ops/CMakeLists.txt. In each, what others call is defined by one of the macros below; what
/// only sources of the same level call is declared in `inline namespace TESSERA_CPU_LEVEL`.
#if !defined(TESSERA_VECTOR_SOURCE)
#error "vector code is compiled for every CPU level: list this file in src/ops/CMakeLists.txt"
#endif

/// The level that this source is being compiled for.
#if defined(__AVX512BF16__)
#define TESSERA_CPU_LEVEL avx512bf16
#elif defined(__AVX512F__)
#define TESSERA_CPU_LEVEL avx512
#else
#define TESSERA_CPU_LEVEL avx2
#endif

#define TESSERA_JOIN(name, level) name##_##level
#define TESSERA_LEVEL_NAME(name, level) TESSERA_JOIN(name, level)

// The build says which levels above AVX2 this source is compiled for.
#if defined(TESSERA_HAS_AVX512)
#define TESSERA_DECLARE_AVX512(result, name, parameters) result name##_avx512 parameters;
#define TESSERA_TRY_AVX512(name, arguments) \
  if (cpu_level() >= CpuLevel::kAvx512) return name##_avx512 arguments;
#else
#define TESSERA_DECLARE_AVX512(result, name, parameters)
#define TESSERA_TRY_AVX512(name, arguments)
#endif
#if defined(TESSERA_HAS_AVX512BF16)
#define TESSERA_DECLARE_AVX512BF16(result, name, parameters) result name##_avx512bf16 parameters;
#define TESSERA_TRY_AVX512BF16(name, arguments) \
  if (cpu_level() >= CpuLevel::kAvx512Bf16) return name##_avx512bf16 arguments;
#else
#define TESSERA_DECLARE_AVX512BF16(result, name, parameters)
#define TESSERA_TRY_AVX512BF16(name, arguments)
#endif

/// Begins the definition of a function that is compiled for every level, in the namespace of its
/// declaration; the one for the lowest level brings the function that chooses:
///   TESSERA_LEVELED(int64_t, f, (int64_t x, float y), (x, y)) { ... }
#if defined(__AVX512F__)
#define TESSERA_LEVELED(result, name, parameters, arguments)     \
  result TESSERA_LEVEL_NAME(name, TESSERA_CPU_LEVEL) parameters; \
  result TESSERA_LEVEL_NAME(name, TESSERA_CPU_LEVEL) parameters
#else
#define TESSERA_LEVELED(result, name, parameters, arguments) \
  result name##_avx2 parameters;                             \
  TESSERA_DECLARE_AVX512(result, name, parameters)           \
  TESSERA_DECLARE_AVX512BF16(result, name, parameters)       \
  result name parameters {                                   \
    TESSERA_TRY_AVX512BF16(name, arguments)                  \
    TESSERA_TRY_AVX512(name, arguments)                      \
    return name##_avx2 arguments;                            \
  }                                                          \
  result name##_avx2 parameters
#endif

/// The same for the functions that add kernels to a table:
///   TESSERA_CPU_KERNELS(add_add_cpu, table) { add_kernel<Add>(table, add); }
// NOLINTNEXTLINE(bugprone-macro-parentheses): a declaration takes none
#define TESSERA_CPU_KERNELS(name, table) TESSERA_LEVELED(void, name, (KernelTable & table), (table))
