#include "cli/tests/cli_testing.h"

namespace tessera {
namespace {

using Json = nlohmann::json;
using ::testing::HasSubstr;

/// A run of ten good steps, continued at a learning rate that ruins the weights in step 11.
class CliNonFinite : public CliTest {
 protected:
  CliNonFinite() { succeed(train("run")); }
  Arguments ruin(const std::string& learning_rate, const std::string& on_nonfinite) const {
    return train("run", {"--train.steps=20", "--optim.learning_rate=" + learning_rate,
                         "--train.max_grad_norm=0", "--train.on_nonfinite=" + on_nonfinite});
  }
};

TEST_F(CliNonFinite, StopsAndKeepsTheLastCheckpoint) {
  const auto before = snapshot(folder_ / "run" / "checkpoints");
  // Weights of 1e30 give a finite loss, but no finite gradient; infinite weights give neither.
  for (const std::string learning_rate : {"1e30", "1e40"}) {
    expect_error(run_tessera(ruin(learning_rate, "stop")),
                 {"step 12", "nothing was updated", "train.on_nonfinite"});
    EXPECT_EQ(snapshot(folder_ / "run" / "checkpoints"), before);
    EXPECT_EQ(read_steps("run").size(), 11);
  }
  EXPECT_THAT(succeed(train("run", {"--train.steps=12"})).out,
              HasSubstr("continuing after step 10 of 12"));
}

TEST_F(CliNonFinite, SkipsAndCounts) {
  const Finished finished = succeed(ruin("1e40", "skip"));
  EXPECT_THAT(finished.out, HasSubstr("no sample of text"));
  const auto steps = read_steps("run");
  ASSERT_EQ(steps.size(), 20);
  for (size_t i = 0; i < steps.size(); ++i) {
    EXPECT_EQ(steps[i]["skipped_steps"], i < 11 ? 0 : i - 10);
    EXPECT_EQ(steps[i]["loss"].is_null(), i >= 11) << "step " << i + 1;
  }
  EXPECT_EQ(steps.back()["nonfinite"]["loss"], "nan");
  const auto saved = succeed_json({"inspect", "--checkpoint", path("run"), "--json"});
  EXPECT_EQ(saved["state"]["skipped_steps"], 9);
  EXPECT_EQ(saved["state"]["step"], 20);
  expect_refused({"generate", path("run"), "--prompt", "The"}, {"NaN"});
}

TEST_F(CliNonFinite, WeightsAreRefusedByEveryCommandThatReadsThem) {
  succeed(ruin("1e40", "skip"));
  const std::vector<std::string> parts = {"the tensor 'embedding.weight' has", "NaN or infinite",
                                          "step-00000020"};
  expect_refused({"eval", path("run")}, parts);
  expect_refused({"generate", path("run"), "--prompt", "The"}, parts);
  expect_refused({"convert", path("run"), path("hf")}, {"NaN or infinite", "--allow-nonfinite"});
  expect_refused_after_tokens(train("started", {"--run.init_from=" + path("run")}),
                              {"run.init_from", parts[0], parts[1]});
  const Finished told = run_tessera({"eval", path("run"), "--allow-nonfinite", "--json"});
  ASSERT_EQ(told.code, 0) << told.err;
  const auto counted = Json::parse(told.out);
  EXPECT_EQ(counted["nonfinite_tokens"], counted["tokens"]);
  EXPECT_THAT(told.err, HasSubstr("NaN or infinite"));
  EXPECT_THAT(succeed({"convert", path("run"), path("hf"), "--allow-nonfinite"}).out,
              HasSubstr("note: " + path("run")));
  expect_refused({"convert", path("hf"), path("back")}, {"NaN or infinite", path("hf")});
}

TEST_F(CliNonFinite, UpcyclingIsRefusedUnlessItIsAllowed) {
  const Arguments dense = {"--moe.num_experts=0", "--moe.top_k=1"};
  const auto train_dense = [&](Arguments more) {
    more.insert(more.end(), dense.begin(), dense.end());
    return train("dense", more);
  };
  succeed(train_dense({}));
  succeed(train_dense({"--train.steps=20", "--optim.learning_rate=1e40", "--train.max_grad_norm=0",
                       "--train.on_nonfinite=skip"}));
  const Arguments upcycle = {"upcycle", path("dense"), path("moe"), "--experts", "4"};
  expect_refused(upcycle, {"NaN or infinite", "--allow-nonfinite"});
  Arguments allowed = upcycle;
  allowed.push_back("--allow-nonfinite");
  EXPECT_THAT(succeed(allowed).out, HasSubstr("NaN or infinite"));
  expect_refused({"eval", path("moe")}, {"NaN or infinite"});
}

TEST_F(CliNonFinite, AGradientNormOfExactlyZeroIsTold) {
  // Windows that hold nothing but a prompt give no gradient.
  std::string lines;
  for (int i = 0; i < 4; ++i) {
    const Json line = {{"prompt", make_prose(200)}, {"completion", "so"}};
    lines += line.dump() + "\n";
  }
  write_all(path("lines.jsonl"), lines);
  const Finished finished =
      succeed(train("zero", {"--data.text=" + path("lines.jsonl"), "--data.instructions=true",
                             "--moe.balance_coefficient=0", "--data.validation_fraction=0"}));
  const std::string note = "the gradient norm is exactly 0 in step";
  const size_t first = finished.out.find(note);
  ASSERT_NE(first, std::string::npos) << finished.out;
  EXPECT_EQ(finished.out.find(note, first + 1), std::string::npos) << "told more than once";
}

TEST_F(CliNonFinite, ADeviationThatOverflowsIsRefused) {
  for (const char* value : {"1e+30", "1e-30", "11"})
    expect_refused(train("deviation", {std::string("--model.init_deviation=") + value}),
                   {"model.init_deviation", "must be from", value});
  succeed(train("deviation", {"--model.init_deviation=10", "--train.steps=2"}));
  EXPECT_GT(read_steps("deviation").back()["grad_norm"].get<double>(), 0);
}

TEST_F(CliNonFinite, SkipsWhereOnlyTheGradientIsNotFinite) {
  succeed(ruin("1e30", "skip"));
  const auto steps = read_steps("run");
  ASSERT_EQ(steps.size(), 20);
  EXPECT_EQ(steps.back()["skipped_steps"], 9);
  EXPECT_TRUE(steps.back()["loss"].is_number());
  EXPECT_TRUE(steps.back()["grad_norm"].is_null());
}

}  // namespace
}  // namespace tessera
