#include <cmath>

#include "cli/tests/cli_testing.h"

namespace tessera {
namespace {

using Json = nlohmann::json;
using ::testing::HasSubstr;

class CliCpuLevel : public CliTest {
 protected:
  static Finished run_at(const std::string& level, const Arguments& arguments) {
    return ChildProcess(arguments, 0, {{"TESSERA_CPU", level}}).wait();
  }

  Json doctor() const { return succeed_json({"doctor", "--json"}); }

  /// The levels that this machine's processor has and the program was built with.
  std::vector<std::string> usable_levels() const {
    std::vector<std::string> levels;
    const Json features = doctor()["features"];
    for (const auto& [level, state] : features.items()) {
      if (state["present"] && state["compiled"]) levels.push_back(level);
    }
    return levels;
  }

  std::vector<double> train_at(const std::string& level, const std::string& precision) const {
    const std::string run = level + precision;
    const Finished finished =
        run_at(level, train(run, {"--train.steps=8", "--train.precision=" + precision}));
    EXPECT_EQ(finished.code, 0) << finished.err;
    std::vector<double> losses;
    for (const Json& step : read_steps(run)) losses.push_back(step["loss"].get<double>());
    return losses;
  }
};

TEST_F(CliCpuLevel, DoctorSaysWhatTesseraCpuMasks) {
  const Finished finished = run_at("avx2", {"doctor", "--json"});
  ASSERT_EQ(finished.code, 0) << finished.err;
  const Json masked = Json::parse(finished.out);
  for (const auto& [level, state] : masked["features"].items()) {
    EXPECT_EQ(state["used"].get<bool>(), level == "avx2") << level;
  }
  EXPECT_EQ(masked["onednn"], "avx2");
  const Finished text = run_at("avx2", {"doctor"});
  EXPECT_THAT(text.out, HasSubstr("avx2        used\n"));
  EXPECT_THAT(text.out, HasSubstr("onednn      avx2 in matrix products\n"));
  if (masked["features"]["avx512"]["present"] && masked["features"]["avx512"]["compiled"]) {
    EXPECT_THAT(text.out, HasSubstr("avx512      present, masked by TESSERA_CPU=avx2\n"));
  }
}

TEST_F(CliCpuLevel, AllThatIsPresentIsUsedWithoutTesseraCpu) {
  if (std::getenv("TESSERA_CPU") != nullptr) GTEST_SKIP() << "TESSERA_CPU is set";
  const Json found = doctor();
  for (const auto& [level, state] : found["features"].items()) {
    EXPECT_EQ(state["used"].get<bool>(), state["present"] && state["compiled"]) << level;
  }
}

TEST_F(CliCpuLevel, RefusesWhatIsUnknownOrMissing) {
  for (const Arguments& command :
       {Arguments{"doctor"}, train("refused"), Arguments{"inspect", "--presets"}}) {
    expect_error(run_at("sse2", command), {"TESSERA_CPU is \"sse2\"", "avx2"});
  }
  EXPECT_FALSE(std::filesystem::exists(path("refused")));
  const Json features = doctor()["features"];
  for (const auto& [level, state] : features.items()) {
    if (state["present"]) continue;
    expect_error(run_at(level, {"doctor"}), {"TESSERA_CPU: this processor has no " + level});
  }
}

/// Other vectors sum in another order, so losses agree to rounding, and not to more.
TEST_F(CliCpuLevel, AWholeRunIsTheSameAtEveryLevelButForRounding) {
  for (const auto& [precision, tolerance] : {std::pair{"f32", 1e-4}, std::pair{"bf16", 2e-2}}) {
    const std::vector<double> expected = train_at("avx2", precision);
    ASSERT_EQ(expected.size(), 8);
    for (const std::string& level : usable_levels()) {
      if (level == "avx2") continue;
      const std::vector<double> losses = train_at(level, precision);
      ASSERT_EQ(losses.size(), expected.size()) << level;
      for (size_t i = 0; i < losses.size(); ++i) {
        EXPECT_NEAR(losses[i], expected[i], tolerance) << level << " " << precision << " " << i;
      }
    }
  }
}

}  // namespace
}  // namespace tessera
