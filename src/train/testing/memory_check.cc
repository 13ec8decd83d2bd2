#include "train/testing/memory_check.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "train/bench/bench_step.h"
#include "train/state/load_settings.h"

namespace tessera::testing {
namespace {

constexpr double kTolerance = 0.03;

[[noreturn, maybe_unused]] void train_and_compare(const std::vector<std::string>& overrides) {
  Settings settings;
  ConfigSchema schema = make_schema(settings);
  load_settings(schema, settings, "", overrides);
  const StepBenchResult result = bench_step({.settings = settings, .steps = 2, .warmup = 1});
  const double ratio =
      static_cast<double>(result.memory_used) / static_cast<double>(result.memory_predicted);
  fmt::print(stderr, "{} bytes in use, {} predicted: {:+.2f} %\n", result.memory_used,
             result.memory_predicted, 100 * (ratio - 1));
  std::exit(std::abs(ratio - 1) <= kTolerance ? EXIT_SUCCESS : EXIT_FAILURE);
}

}  // namespace

void expect_memory_as_predicted([[maybe_unused]] const std::vector<std::string>& overrides) {
#if defined(TESSERA_SANITIZED)
  GTEST_SKIP() << "sanitizers take memory of their own";
#else
  SCOPED_TRACE(fmt::format("{}", fmt::join(overrides, " ")));
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(train_and_compare(overrides), ::testing::ExitedWithCode(EXIT_SUCCESS), "predicted");
#endif
}

}  // namespace tessera::testing
