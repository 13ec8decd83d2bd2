#include "cli/tests/cli_testing.h"
#include "core/file/file.h"

namespace tessera {
namespace {

using Json = nlohmann::json;
using ::testing::HasSubstr;
using ::testing::Not;

/// Two stages that exchange hidden states, with two ranks each that exchange gradients.
class CliStep : public CliTest {
 protected:
  static Arguments step(const Arguments& more) {
    Arguments all = {"inspect",
                     "--ranks=4",
                     "--model.preset=tiny",
                     "--model.num_layers=2",
                     "--data.sequence_length=32",
                     "--train.micro_batch=1",
                     "--train.global_batch=8",
                     "--parallel.pp=2",
                     "--run.device=cpu"};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
};

TEST_F(CliStep, PrintsEachStagesTasks) {
  const std::string text = succeed(step({"--step", "--all"})).out;
  for (const char* part :
       {"rank 0:", "rank 2:", "lanes host", "pp_gradients (2 ranks)", "begin: read micro-batches",
        "forward, layer 0, micro-batch 3", "backward, layer 1, micro-batch 3",
        "send hidden states 0, chunk 0, micro-batch 0", "receive start",
        "wait: receive gradients 0, chunk 0, micro-batch 0",
        "reduce gradients, dense_replicas_1, bucket 0", "gradient norm", "update, ",
        "gather weights", "by lifetime", "saved activations"}) {
    EXPECT_THAT(text, HasSubstr(part));
  }
  const std::string cut = succeed(step({"--step"})).out;
  EXPECT_THAT(cut, HasSubstr("more tasks; --all prints them"));
  EXPECT_LT(cut.size(), text.size());
}

TEST_F(CliStep, PrintsCopies) {
  const std::string text =
      succeed(step({"--step", "--all", "--model.num_layers=6", "--train.offload=all"})).out;
  for (const char* part :
       {" stores, ", "copy start     store, layer 0, micro-batch 3",
        "wait: store, layer 0, micro-batch 3", "reload, layer 0, micro-batch 3"}) {
    EXPECT_THAT(text, HasSubstr(part));
  }
}

TEST_F(CliStep, PrintsUpdatesOnTheHost) {
  const Arguments options = {"--step", "--all", "--optim.offload=true", "--optim.update=host"};
  const std::string text = succeed(step(options)).out;
  for (const char* part :
       {" host updates, ", "copy start     store gradients, dense_replicas_1, bucket 0",
        "optimizer start update on the host, dense_replicas_1, bucket 0",
        "copy start     load weights, dense_replicas_1, bucket 0",
        "wait: load weights, dense_replicas_1, bucket 0", "gather weights"}) {
    EXPECT_THAT(text, HasSubstr(part));
  }
  EXPECT_THAT(text, Not(HasSubstr("moments")));
  expect_refused(step({"--step", "--optim.update=host"}),
                 {"optim.update is \"host\"", "set optim.offload = true"});
  expect_refused(
      step({"--step", "--optim.offload=true", "--optim.update=host", "--optim.name=muon"}),
      {"optim.name = \"adamw\"", "set optim.update = \"device\""});
}

TEST_F(CliStep, PrintsFullSharding) {
  const std::string text = succeed(step({"--step", "--all", "--optim.shard=full"})).out;
  for (const char* part : {"gather weights, layers.0", "reduce gradients, layers.0",
                           "wait: gather weights, embedding.weight", "update, all shares"}) {
    EXPECT_THAT(text, HasSubstr(part));
  }
}

TEST_F(CliStep, WritesJson) {
  const Json stages = succeed_json(step({"--step", "--json"}));
  ASSERT_EQ(stages.size(), 2);
  for (const Json& stage : stages) {
    const size_t num_tasks = stage["tasks"].size();
    EXPECT_GT(num_tasks, 30);
    EXPECT_LE(stage["memory"]["most"], stage["memory"]["placed"]);
    for (const Json& buffer : stage["buffers"]) EXPECT_LT(buffer["last"], num_tasks);
    for (size_t i = 0; i < num_tasks; ++i) {
      for (const Json& before : stage["tasks"][i]["after"]) EXPECT_LT(before, i);
      EXPECT_LT(stage["tasks"][i]["lane"], stage["lanes"].size());
    }
  }
}

/// The page has all it needs.
TEST_F(CliStep, DrawsATimeline) {
  const std::string file = path("step.html");
  EXPECT_THAT(succeed(step({"--step-html", file})).out, HasSubstr(file));
  const std::string page = read_text_file(file);
  for (const char* part : {"<!doctype html>", "forward, layer 0, micro-batch 0", "dense_replicas_1",
                           "Content-Security-Policy", "new Chart("}) {
    EXPECT_THAT(page, HasSubstr(part));
  }
  for (const char* part : {"{{", "http:", "https:", "src="})
    EXPECT_THAT(page, Not(HasSubstr(part)));
  expect_refused(step({"--step-html", path("none/step.html")}), {path("none")});
}

}  // namespace
}  // namespace tessera
