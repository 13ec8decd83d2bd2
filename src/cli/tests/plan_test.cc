#include "cli/tests/cli_testing.h"
#include "core/file/file.h"

namespace tessera {
namespace {

using Json = nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;

/// Small nodes of processors, for a small model.
class CliPlan : public CliTest {
 protected:
  CliPlan() {
    write_all(path("machine.toml"),
              "name = \"small\"\nsource = \"a test\"\n"
              "[device]\nkind = \"cpu\"\nf32_tflops = 0.1\nbf16_tflops = 0.1\nmemory_gbs = 20\n"
              "memory = \"2GiB\"\n"
              "[node]\ndevices = 4\nmemory = \"16GiB\"\n"
              "[link]\nnode_us = 20\nnode_gbs = 5\nnetwork_us = 50\nnetwork_gbs = 1\n");
  }

  Arguments plan(const Arguments& more) const { return plan_on(path("machine.toml"), more); }
  static Arguments plan_on(const std::string& hardware, const Arguments& more) {
    Arguments all = {"plan",
                     "--hardware=" + hardware,
                     "--model.preset=tiny",
                     "--model.num_layers=4",
                     "--moe.num_experts=8",
                     "--data.sequence_length=64",
                     "--train.global_batch=32"};
    all.insert(all.end(), more.begin(), more.end());
    const bool has_gpus =
        std::ranges::any_of(more, [](const std::string& one) { return one.starts_with("--gpus"); });
    if (!has_gpus) all.emplace_back("--gpus=8");
    return all;
  }
};

TEST_F(CliPlan, FindsALayoutAndWritesIt) {
  const std::string text =
      succeed(plan({"--write=" + path("best.toml"), "--html=" + path("step.html"),
                    "--trace=" + path("trace.json")}))
          .out;
  for (const char* part : {"layout", "memory", "step", "exposed", "idle", "tokens/s", "MFU",
                           "of the slowest stage's step", "memory of the fullest rank",
                           "as options: --parallel.tp=", "more a step", "configurations judged"})
    EXPECT_THAT(text, HasSubstr(part));
  EXPECT_THAT(read_all(path("step.html")),
              AllOf(HasSubstr("<html"), HasSubstr(R"("speeds":{"computing":[0.5,1.0,2.0])")));
  EXPECT_FALSE(Json::parse(read_all(path("trace.json")))["traceEvents"].empty());
  // What was written is a configuration that is simulated to the same.
  const Json best = succeed_json(plan({"--json", "--top=1"}))["layouts"][0];
  const Json again = succeed_json({"plan", path("best.toml"), "--explain", "--json", "--gpus=8",
                                   "--hardware=" + path("machine.toml")})["layouts"][0];
  EXPECT_EQ(again["layout"], best["layout"]);
  EXPECT_EQ(again["step_seconds"], best["step_seconds"]);
  EXPECT_EQ(again["memory_bytes"], best["memory_bytes"]);
}

TEST_F(CliPlan, ExplainsALayout) {
  const Json found =
      succeed_json(plan({"--explain", "--json", "--parallel.pp=2", "--parallel.ep=4"}));
  ASSERT_EQ(found["layouts"].size(), 1);
  const Json& layout = found["layouts"][0];
  ASSERT_EQ(layout["stages"].size(), 2);
  EXPECT_GT(layout["stages"][0]["exposed_by"]["ep"], 0);
  EXPECT_EQ(layout["layout"], "pp 2, ep 4, micro-batch 8");
}

TEST_F(CliPlan, ShowsWhatASlowRankCosts) {
  const Arguments layout = {"--explain", "--parallel.pp=2", "--parallel.ep=4"};
  const auto with = [&](const Arguments& more) {
    Arguments all = layout;
    all.insert(all.end(), more.begin(), more.end());
    return plan(all);
  };
  EXPECT_THAT(succeed(with({"--slow-rank=5=2"})).out,
              HasSubstr("with no rank slower than another: "));
  const Json even = succeed_json(with({"--json"}));
  const Json slow = succeed_json(with({"--json", "--slow-rank=5=2", "--slow-link", "0=3", "1=2"}));
  EXPECT_EQ(slow["even_step_seconds"], even["layouts"][0]["step_seconds"]);
  EXPECT_GT(slow["layouts"][0]["step_seconds"], even["layouts"][0]["step_seconds"]);
  expect_refused(with({"--slow-rank=8=2"}), {"--slow-rank 8=2", "from 0 to 7"});
  expect_refused(with({"--slow-link=1=0.5"}), {"--slow-link 1=0.5", "from 1"});
  expect_refused(with({"--slow-link=fast"}), {"--slow-link", "\"fast\"", "5=1.3"});
}

TEST_F(CliPlan, ShowsWhatHiddenExchangesGain) {
  const Arguments layout = {"--explain", "--json", "--parallel.ep=8", "--train.micro_batch=1"};
  const auto stage = [&](const Arguments& more) {
    Arguments all = layout;
    all.insert(all.end(), more.begin(), more.end());
    return succeed_json(plan(all))["layouts"][0]["stages"][0];
  };
  const Json hidden = stage({});
  const Json exposed = stage({"--exposed=ep,experts"});
  EXPECT_LT(hidden["exposed_by"]["ep"], exposed["exposed_by"]["ep"]);
  expect_refused(plan({"--explain", "--exposed=pp"}), {"--exposed", "\"pp\"", "expert_replicas"});
}

TEST_F(CliPlan, SimulatesOtherSoftware) {
  const auto step = [&](const Arguments& more) {
    Arguments all = {"--explain", "--json", "--parallel.tp=2", "--parallel.ep=4"};
    all.insert(all.end(), more.begin(), more.end());
    return succeed_json(plan(all))["layouts"][0];
  };
  const Json own = step({});
  EXPECT_EQ(own["stages"][0]["host_seconds"], 0);
  EXPECT_GT(own["stages"][0]["computed_by"]["grouped_matmul"], 0);
  const Json launched = step({"--graphs=none", "--launch-us=100000"});
  EXPECT_GT(launched["stages"][0]["host_seconds"], 0);
  EXPECT_GT(launched["step_seconds"], own["step_seconds"]);
  EXPECT_EQ(step({"--graphs=all", "--launch-us=100000"})["step_seconds"], own["step_seconds"]);
  EXPECT_LT(step({"--pipelined=tp"})["step_seconds"], own["step_seconds"]);
  EXPECT_GT(step({"--stored-scores"})["step_seconds"], own["step_seconds"]);
  EXPECT_LT(step({"--operator-share=grouped_matmul=0"})["step_seconds"], own["step_seconds"]);
  const auto attention = [&](const std::string& share) {
    const Json stage = step({"--operator-share=attention=" + share})["stages"][0];
    return stage["computed_by"]["attention"].get<double>();
  };
  EXPECT_NEAR(attention("0.8"), 2 * attention("1.6"), 1e-3 * attention("0.8"));
  expect_refused(plan({"--explain", "--graphs=some"}), {"--graphs", "\"some\"", "static"});
  expect_refused(plan({"--explain", "--operator-share=attention"}), {"--operator-share", "0.35"});
  expect_refused(plan({"--explain", "--operator-share=attention=4.5"}),
                 {"--operator-share attention=4.5", "from 0 to 4"});
  expect_refused(plan({"--explain", "--operator-share=atention=0.5"}),
                 {"\"atention\", which is no operator; did you mean 'attention'?"});
  expect_refused(plan({"--explain", "--pipelined=pp"}), {"--pipelined", "\"pp\""});
}

TEST_F(CliPlan, RoundedGradientsTravelInHalfTheTime) {
  for (const char* shard : {"state", "full"}) {
    const auto seconds = [&](const char* compression) -> double {
      return succeed_json(
          plan({"--explain", "--json", "--train.micro_batch=1", "--model.hidden_size=512",
                fmt::format("--optim.shard={}", shard),
                fmt::format("--optim.gradient_compression={}",
                            compression)}))["layouts"][0]["stages"][0]["exchange_seconds"];
    };
    const double whole = seconds("none");
    // Weights travel as before, with full sharding twice for each reduction.
    EXPECT_LT(seconds("bf16"), 0.9 * whole) << shard;
    EXPECT_GT(seconds("bf16"), 0.5 * whole) << shard;
  }
}

TEST_F(CliPlan, WritesTracesForSimulatorsOfNetworks) {
  succeed(plan({"--explain", "--parallel.pp=2", "--parallel.ep=4", "--chakra=" + path("step")}));
  for (int rank = 0; rank < 8; ++rank)
    EXPECT_GT(std::filesystem::file_size(path(fmt::format("step.{}.et", rank))), 1000);
  EXPECT_FALSE(Json::parse(read_all(path("step.groups.json"))).empty());
  expect_refused(plan({"--gpus=512", "--chakra=" + path("step")}), {"--chakra", "at most 256"});
}

/// As the clock has it where the configuration leaves it open.
TEST_F(CliPlan, ChoosesTheSchedule) {
  const Arguments layout = {"--explain", "--json", "--parallel.ep=8", "--train.micro_batch=1"};
  const auto seconds = [&](const std::string& schedule) {
    Arguments all = layout;
    all.push_back("--train.schedule=" + schedule);
    return succeed_json(plan(all))["layouts"][0]["step_seconds"].get<double>();
  };
  EXPECT_EQ(seconds("auto"), std::min(seconds("as_built"), seconds("merged")));
}

TEST_F(CliPlan, RefusesWhatCannotBe) {
  expect_refused(plan_on("h100-bi", {}), {"no hardware 'h100-bi'", "did you mean 'h100-ib'"});
  expect_refused(plan({"--parallel.tp=3"}), {"no layout of 8 ranks"});
  expect_refused(plan({"--explain", "--parallel.tp=3"}), {"8 ranks", "3"});
  expect_refused(plan({"--explain"}), {"train.global_batch 32 is not a multiple", "is 64"});
  expect_refused(plan({"--explain", "--train.micro_batch=1", "--train.memory_limit=1MiB"}),
                 {"no layout of 8 ranks keeps to 1 MiB", "the least found takes"});
  expect_refused(plan({"--gpus=0"}), {"--gpus"});
  expect_refused(plan({"--model.num_heads=3"}), {"num_heads"});
  expect_refused(plan({"--without-limit"}), {"--explain"});
  expect_refused(plan({"--run.device=cuda"}), {"run.device", "small has processors alone"});
  write_all(path("machine.toml"), "name = \"small\"\n[device]\nkind = \"cpu\"\n");
  expect_refused(plan({}), {"machine.toml: device.f32_tflops is missing"});
}

}  // namespace
}  // namespace tessera
