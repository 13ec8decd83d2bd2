#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace tessera {

/// Instruction sets that CPU kernels choose between when the program runs, each with all of those
/// before it. The program needs the first. Kernels of our own are compiled for all but the last
/// (ops/cpu_dispatch.h, src/ops/CMakeLists.txt), whose registers those for AVX512-BF16 use where
/// they are there (ops/gemm/tile_registers.h).
enum class CpuLevel : uint8_t { kAvx2, kAvx512, kAvx512Bf16, kAmx };

inline constexpr CpuLevel kCpuLevels[] = {CpuLevel::kAvx2, CpuLevel::kAvx512, CpuLevel::kAvx512Bf16,
                                          CpuLevel::kAmx};

/// "avx2", "avx512", "avx512bf16", "amx".
std::string_view cpu_level_name(CpuLevel level);

/// What TESSERA_CPU and the processor leave.
struct CpuLevels {
  CpuLevel present = CpuLevel::kAvx2;  ///< highest that the processor and the kernel of its OS have
  std::optional<CpuLevel> limit;       ///< TESSERA_CPU

  CpuLevel in_use() const { return limit.value_or(present); }
};

/// Levels for a processor that has `present`, with the value of TESSERA_CPU or null. Throws
/// UserError where that is unknown, not present, or left out of this program.
CpuLevels choose_cpu_levels(CpuLevel present, const char* limit);

/// This process's levels: the environment is read once. Throws as choose_cpu_levels does.
const CpuLevels& cpu_levels();

/// Whether the program has kernels of this level (TESSERA_CPU_LEVELS when it was built).
bool is_cpu_level_built(CpuLevel level);

/// The level whose kernels run.
inline CpuLevel cpu_level() {
  return cpu_levels().in_use();
}

}  // namespace tessera
