#include "cli/tests/cli_testing.h"

namespace tessera {
namespace {

using Json = nlohmann::json;
using ::testing::HasSubstr;
using CliTrain = CliTest;

double mean_loss(const std::vector<Json>& steps, size_t begin, size_t end) {
  double sum = 0;
  for (size_t i = begin; i < end; ++i) sum += steps[i]["loss"].get<double>();
  return sum / static_cast<double>(end - begin);
}

TEST_F(CliTrain, LearnsAndWritesEverythingOfARun) {
  const Finished finished = succeed(train(
      "run", {"--train.steps=60", "--run.report=true", "--run.checkpoint_interval=20",
              "--run.keep_last=2", "--train.validation_interval=30", "--train.global_batch=8"}));
  const auto steps = read_steps("run");
  ASSERT_EQ(steps.size(), 60);
  for (size_t i = 0; i < steps.size(); ++i) EXPECT_EQ(steps[i]["step"], i + 1);
  EXPECT_LT(mean_loss(steps, 50, 60), mean_loss(steps, 0, 5) - 1.0);
  EXPECT_EQ(steps.back()["tokens_seen"], 60 * 8 * 16);
  EXPECT_EQ(steps[0]["expert_load"].size(), 2);

  EXPECT_EQ(checkpoints("run"), (std::vector<std::string>{"step-00000040", "step-00000060"}));
  EXPECT_THAT(read_all(path("run/report.html")), HasSubstr("</html>"));
  const auto events = std::filesystem::directory_iterator(path("run/tensorboard"));
  EXPECT_GT(std::filesystem::file_size(events->path()), 1000);
  EXPECT_THAT(finished.out, HasSubstr("validation at step 30"));
  EXPECT_THAT(finished.out, HasSubstr("saved " + path("run/checkpoints/step-00000060")));
}

TEST_F(CliTrain, ReadsAConfigurationFileAndAPreset) {
  write_all(path("run.toml"), "[train]\nsteps = 2\n[run]\nfolder = \"" + path("run") + "\"\n");
  succeed({"train", path("run.toml"), "--model.preset=tiny", "--data.sequence_length=16",
           "--train.micro_batch=1", "--train.global_batch=1", "--train.validation_batches=1",
           "--data.text=" + path("text.txt")});
  EXPECT_EQ(read_steps("run").size(), 2);
  const Json saved = succeed_json({"inspect", "--checkpoint", path("run"), "--json"});
  EXPECT_EQ(saved["step"], 2);
  EXPECT_THAT(saved["state"]["config"].get<std::string>(), ::testing::ContainsRegex("steps += 2 "));
}

TEST_F(CliTrain, TheSameCommandAfterTheEndChangesNothing) {
  succeed(train("run"));
  const auto before = snapshot(folder_ / "run" / "checkpoints");
  const Finished again = succeed(train("run"));
  EXPECT_THAT(again.out, HasSubstr("nothing to train: all 10 steps are done"));
  EXPECT_EQ(snapshot(folder_ / "run" / "checkpoints"), before);
  EXPECT_EQ(read_steps("run").size(), 10);
}

TEST_F(CliTrain, EveryKindOfLayerTrains) {
  const std::vector<Arguments> kinds = {
      {"--moe.num_experts=0", "--model.activation=gelu"},
      {"--moe.capacity_factor=0.5"},
      {"--moe.capacity_factor=1", "--moe.pad_to_capacity=true", "--moe.drop_policy=position"},
      {"--moe.shared_inner_size=16", "--moe.shared_gate=true", "--moe.memory_efficient=false"},
      {"--moe.first_dense_layers=1", "--model.num_kv_heads=1", "--model.window=4"},
      {"--moe.experts=block_sparse", "--moe.block_size=8", "--moe.inner_sizes=8,16,24,32"},
      {"--moe.score=sigmoid", "--moe.num_groups=2", "--moe.bias_update_speed=0.001"},
      {"--train.recompute=all", "--model.tie_embeddings=false", "--data.split_documents=true"},
  };
  for (size_t i = 0; i < kinds.size(); ++i) {
    SCOPED_TRACE(::testing::PrintToString(kinds[i]));
    const std::string run = "run" + std::to_string(i);
    Arguments options = kinds[i];
    options.emplace_back("--train.steps=20");
    succeed(train(run, options));
    const auto steps = read_steps(run);
    ASSERT_EQ(steps.size(), 20);
    EXPECT_LT(mean_loss(steps, 15, 20), mean_loss(steps, 0, 2) - 0.3);
    succeed({"generate", path(run), "--max-tokens", "4"});
  }
  EXPECT_GT(read_steps("run1")[0]["dropped_tokens"], 0);
}

/// Stops a run in its midst by a signal and lets the same command finish it.
void stop_and_continue(const Arguments& arguments, int signal) {
  ChildProcess child(arguments);
  ASSERT_NE(child.read_line_with("  5/"), "");
  child.send(signal);
  const Finished stopped = child.wait();
  EXPECT_EQ(stopped.code, 0) << stopped.err;
  EXPECT_THAT(stopped.out, HasSubstr("stopped by signal " + std::to_string(signal)));
  EXPECT_THAT(stopped.out, HasSubstr("saved "));
  const Finished continued = run_tessera(arguments);
  EXPECT_EQ(continued.code, 0) << continued.err;
  EXPECT_THAT(continued.out, HasSubstr("continuing after step "));
}

TEST_F(CliTrain, NothingIsSavedWithoutRunSave) {
  succeed(train("run", {"--train.steps=6", "--run.checkpoint_interval=2", "--run.save=false"}));
  EXPECT_EQ(read_steps("run").size(), 6);
  EXPECT_FALSE(std::filesystem::exists(path("run") + "/checkpoints"));
  ChildProcess child(train("stopped", {"--train.steps=100000", "--run.save=false"}));
  ASSERT_NE(child.read_line_with("  5/"), "");
  child.send(SIGINT);
  const Finished stopped = child.wait();
  EXPECT_EQ(stopped.code, 0) << stopped.err;
  EXPECT_THAT(stopped.out, HasSubstr("nothing is saved, since run.save is false"));
  EXPECT_FALSE(std::filesystem::exists(path("stopped") + "/checkpoints"));
}

TEST_F(CliTrain, SignalsSaveAndTheSameCommandContinues) {
  for (const int signal : {SIGINT, SIGTERM}) {
    const std::string run = "run" + std::to_string(signal);
    stop_and_continue(train(run, {"--train.steps=64"}), signal);
    const auto steps = read_steps(run);
    ASSERT_EQ(steps.size(), 64);
    for (size_t i = 0; i < steps.size(); ++i) EXPECT_EQ(steps[i]["step"], i + 1);
    EXPECT_EQ(checkpoints(run).back(), "step-00000064");
  }
}

}  // namespace
}  // namespace tessera
