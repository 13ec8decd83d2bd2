#include "cli/tests/cli_testing.h"

namespace tessera {
namespace {

using Json = nlohmann::json;

/// More than the lines that the pipe of a child holds, so that it cannot end before the signal.
constexpr int kSteps = 64;

struct ResumeCase {
  const char* name;
  Arguments options;
};

void PrintTo(const ResumeCase& test, std::ostream* out) {
  *out << test.name;
}

class CliResume : public CliTest, public ::testing::WithParamInterface<ResumeCase> {
 protected:
  Arguments command(const std::string& run) const {
    Arguments options = GetParam().options;
    options.push_back("--train.steps=" + std::to_string(kSteps));
    return train(run, options);
  }
  /// All tensor files of the last checkpoint, by name.
  std::map<std::string, std::string> read_tensors(const std::string& run) const {
    std::map<std::string, std::string> files;
    const auto folder = folder_ / run / "checkpoints" / checkpoints(run).back();
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
      if (entry.path().extension() != ".safetensors") continue;
      files[entry.path().filename().string()] = read_all(entry.path());
    }
    return files;
  }
};

/// A record without what depends on the clock and on the memory of the process.
Json deterministic_part(const Json& record) {
  Json part;
  for (const char* key : {"step", "tokens_seen", "loss", "balance_loss", "z_loss", "grad_norm",
                          "learning_rate", "clip_factor", "dropped_tokens", "expert_load"}) {
    if (record.contains(key)) part[key] = record[key];
  }
  return part;
}

TEST_P(CliResume, EqualsAnUnbrokenRunBitForBit) {
  succeed(command("whole"));

  ChildProcess first(command("parts"));
  ASSERT_NE(first.read_line_with("  7/"), "");
  first.send(SIGTERM);
  ASSERT_EQ(first.wait().code, 0);
  ASSERT_LT(read_steps("parts").size(), kSteps) << "it ended before the signal came";
  succeed(command("parts"));

  const auto whole = read_tensors("whole");
  const auto parts = read_tensors("parts");
  ASSERT_EQ(whole.size(), 2) << "model and optimizer";
  ASSERT_EQ(parts.size(), whole.size());
  for (const auto& [name, bytes] : whole) EXPECT_TRUE(parts.at(name) == bytes) << name;

  const auto whole_steps = read_steps("whole");
  const auto parts_steps = read_steps("parts");
  ASSERT_EQ(whole_steps.size(), kSteps);
  ASSERT_EQ(parts_steps.size(), kSteps);
  for (size_t i = 0; i < kSteps; ++i) {
    EXPECT_EQ(deterministic_part(parts_steps[i]), deterministic_part(whole_steps[i]));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Kinds, CliResume,
    ::testing::Values(
        ResumeCase{"F32", {}}, ResumeCase{"Bf16", {"--train.precision=bf16"}},
        ResumeCase{"ExpertBias", {"--moe.bias_update_speed=0.01", "--moe.score=sigmoid"}},
        ResumeCase{"GlobalBatchBalance",
                   {"--moe.balance_scope=global_batch", "--train.global_batch=4"}},
        ResumeCase{"Accumulation",
                   {"--train.global_batch=6", "--train.precision=bf16", "--optim.schedule=wsd"}},
        ResumeCase{"BlockSparse", {"--moe.experts=block_sparse", "--moe.block_size=8"}}),
    [](const auto& info) { return info.param.name; });

TEST_F(CliTest, ResumeRefusesWeightsOfAnotherType) {
  succeed(train("run", {"--train.steps=2"}));
  expect_refused_after_tokens(
      train("run", {"--train.steps=4", "--train.precision=bf16"}),
      {"step-00000002 has weights in f32", "train.precision", "in bf16", "run.init_from"});
}

TEST_F(CliTest, ResumeTellsOfSettingsThatChangeTheData) {
  succeed(train("run"));
  const Finished finished = succeed(train("run", {"--train.steps=12", "--run.seed=9"}));
  EXPECT_THAT(finished.out, ::testing::HasSubstr("seed was 1 when the checkpoint was written"));
  EXPECT_EQ(read_steps("run").size(), 12);
}

}  // namespace
}  // namespace tessera
