#include "checkpoint/slicing_testing.h"
#include "cli/tests/cli_testing.h"
#include "train/state/checkpointing.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

/// A run's checkpoint as one process wrote it, and as several ranks would have written it.
class CliSliced : public CliTest {
 protected:
  CliSliced() {
    succeed(train("run"));
    const fs::path whole = open_checkpoint(path("run")).reader.path();
    fs::copy(path("run"), path("sliced"), fs::copy_options::recursive);
    fs::remove_all(checkpoint_folder(path("sliced")));
    save_sliced(whole, checkpoint_folder(path("sliced")), 4, 1);
  }
};

TEST_F(CliSliced, EvaluatesAndGeneratesTheSame) {
  const auto evaluate = [&](const std::string& run) {
    return succeed_json({"eval", path(run), "--json"}).at("loss");
  };
  EXPECT_EQ(evaluate("sliced"), evaluate("run"));
  const auto generate = [&](const std::string& run) {
    const auto result = succeed_json(
        {"generate", path(run), "--prompt", "the old", "--max-tokens", "30", "--json"});
    return result.at("tokens");
  };
  EXPECT_EQ(generate("sliced"), generate("run"));
}

TEST_F(CliSliced, ConvertsToTheSameBytes) {
  const auto convert = [&](const std::string& run) {
    succeed({"convert", path(run), path(run + "-hf"), "--to", "hf"});
    return read_all(path(run + "-hf/model.safetensors"));
  };
  EXPECT_TRUE(convert("sliced") == convert("run"));
}

TEST_F(CliSliced, GoesOnWithTheSameLosses) {
  const auto go_on = [&](const std::string& run) {
    succeed(train(run, {"--train.steps=15"}));
    std::vector<nlohmann::json> losses;
    for (const auto& record : read_steps(run)) losses.push_back(record.at("loss"));
    EXPECT_GE(losses.size(), 15U);
    return losses;
  };
  EXPECT_EQ(go_on("sliced"), go_on("run"));
}

}  // namespace
}  // namespace tessera
