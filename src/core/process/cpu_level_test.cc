#include "core/process/cpu_level.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "core/error.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TEST(CpuLevel, TheHighestPresentIsUsed) {
  for (const CpuLevel present : kCpuLevels) {
    const CpuLevels levels = choose_cpu_levels(present, nullptr);
    EXPECT_EQ(levels.present, present);
    EXPECT_EQ(levels.limit, std::nullopt);
    EXPECT_EQ(levels.in_use(), present);
  }
}

TEST(CpuLevel, TesseraCpuMasksWhatIsAboveIt) {
  for (const CpuLevel present : kCpuLevels) {
    for (const CpuLevel limit : kCpuLevels) {
      if (limit > present || !is_cpu_level_built(limit)) continue;
      const CpuLevels levels = choose_cpu_levels(present, cpu_level_name(limit).data());
      EXPECT_EQ(levels.present, present);
      EXPECT_EQ(levels.in_use(), limit) << cpu_level_name(limit);
    }
  }
}

TEST(CpuLevel, RefusesLevelsThatTheProcessorLacks) {
  EXPECT_THAT([] { choose_cpu_levels(CpuLevel::kAvx2, "avx512"); },
              ThrowsMessage<UserError>(
                  HasSubstr("TESSERA_CPU: this processor has no avx512; it has avx2")));
  EXPECT_THAT([] { choose_cpu_levels(CpuLevel::kAvx2, "amx"); },
              ThrowsMessage<UserError>(HasSubstr("this processor has no amx; it has avx2")));
}

TEST(CpuLevel, RefusesOtherNames) {
  for (const char* name : {"", "AVX2", "avx", "avx512f", "native", " avx2"}) {
    EXPECT_THAT([&] { choose_cpu_levels(CpuLevel::kAmx, name); },
                ThrowsMessage<UserError>(HasSubstr(
                    fmt::format("TESSERA_CPU is \"{}\"; this processor has avx2", name))));
  }
}

TEST(CpuLevel, TheProcessAgreesWithItsEnvironment) {
  const char* limit = std::getenv("TESSERA_CPU");
  if (limit == nullptr) {
    EXPECT_EQ(cpu_level(), cpu_levels().present);
  } else {
    EXPECT_EQ(cpu_level_name(cpu_level()), limit);
  }
}

}  // namespace
}  // namespace tessera
