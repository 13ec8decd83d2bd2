#include "core/process/cpu_level.h"

#include <cpuid.h>

#include <cstdlib>
#include <string>

#include "core/error.h"

namespace tessera {
namespace {

/// Whether processor and OS have AMX with BF16, which compilers' __builtin_cpu_supports learnt
/// late.
bool has_amx() {
  constexpr unsigned kBf16Tiles = 1U << 22 | 1U << 24;  // of leaf 7's EDX: AMX-BF16, AMX-TILE
  constexpr unsigned kTileState = 3U << 17;             // of XCR0: the OS keeps the tiles
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d & kBf16Tiles) != kBf16Tiles) return false;
  unsigned low = 0, high = 0;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & kTileState) == kTileState;
}

CpuLevel find_present() {
  const bool avx512 =
      __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
      __builtin_cpu_supports("avx512cd") != 0 && __builtin_cpu_supports("avx512dq") != 0 &&
      __builtin_cpu_supports("avx512vl") != 0;
  if (!avx512) return CpuLevel::kAvx2;
  if (__builtin_cpu_supports("avx512bf16") == 0) return CpuLevel::kAvx512;
  return has_amx() ? CpuLevel::kAmx : CpuLevel::kAvx512Bf16;
}

std::string list_available(CpuLevel present) {
  std::string list;
  for (const CpuLevel level : kCpuLevels) {
    if (level > present || !is_cpu_level_built(level)) continue;
    list += fmt::format("{}{}", list.empty() ? "" : ", ", cpu_level_name(level));
  }
  return list;
}

CpuLevel parse_limit(std::string_view name, CpuLevel present) {
  for (const CpuLevel level : kCpuLevels) {
    if (cpu_level_name(level) != name) continue;
    require(level <= present, "TESSERA_CPU: this processor has no {}; it has {}", name,
            list_available(present));
    require(is_cpu_level_built(level), "TESSERA_CPU: this program was built without {}; it has {}",
            name, list_available(present));
    return level;
  }
  user_error("TESSERA_CPU is \"{}\"; this processor has {}", name, list_available(present));
}

}  // namespace

std::string_view cpu_level_name(CpuLevel level) {
  switch (level) {
    case CpuLevel::kAvx2:
      return "avx2";
    case CpuLevel::kAvx512:
      return "avx512";
    case CpuLevel::kAvx512Bf16:
      return "avx512bf16";
    case CpuLevel::kAmx:
      return "amx";
  }
  throw InternalError("an unknown CPU level");
}

bool is_cpu_level_built(CpuLevel level) {
  switch (level) {
#if !defined(TESSERA_HAS_AVX512)
    case CpuLevel::kAvx512:
      return false;
#endif
#if !defined(TESSERA_HAS_AVX512BF16)
    case CpuLevel::kAvx512Bf16:
      return false;
#endif
    default:
      return true;
  }
}

CpuLevels choose_cpu_levels(CpuLevel present, const char* limit) {
  if (limit == nullptr) return {.present = present};
  return {.present = present, .limit = parse_limit(limit, present)};
}

const CpuLevels& cpu_levels() {
  static const CpuLevels kLevels = choose_cpu_levels(find_present(), std::getenv("TESSERA_CPU"));
  return kLevels;
}

}  // namespace tessera
