#include "train/metrics/jsonl.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "train/metrics/synthetic_run.h"
#include "train/metrics/test_folder.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

struct Lines {
  std::vector<StepRecord> steps;
  std::vector<ValidationRecord> validations;

  MetricsVisitor visitor() {
    return {[this](const StepRecord& record) { steps.push_back(record); },
            [this](const ValidationRecord& record) { validations.push_back(record); }};
  }
  std::vector<int64_t> numbers() const {
    std::vector<int64_t> result;
    for (const StepRecord& record : steps) result.push_back(record.step);
    return result;
  }
};

Lines read_text(const std::string& text) {
  const TestFolder folder;
  Lines lines;
  read_metrics(folder.write("metrics.jsonl", text), lines.visitor());
  return lines;
}

std::string error_of(const std::string& text) {
  return user_error_of([&] { read_text(text); });
}

TEST(Jsonl, KeepsEveryNumberOfAStep) {
  for (const int64_t layers : {0, 3}) {
    StepRecord record = SyntheticRun{100, layers}.step(37);
    record.validation_loss = 4.25;
    record.mtp_loss = 6.5;
    record.max_logit = 101.5;
    record.clipped_heads = 3;
    record.loss_scale = 4096;
    record.host_seconds = 3e-5;
    record.dropped_tokens = 5;
    record.skipped_steps = 2;
    record.repeated_steps = 4;
    const Lines lines = read_text(to_json_line(record) + '\n');
    ASSERT_EQ(lines.steps.size(), 1U);
    // Two records are the same where all that is written of them is.
    EXPECT_EQ(to_json_line(lines.steps[0]), to_json_line(record));
    EXPECT_EQ(lines.steps[0].loss, record.loss);
    EXPECT_EQ(lines.steps[0].clip_factor, record.clip_factor);
    EXPECT_EQ(lines.steps[0].memory_predicted, record.memory_predicted);
    EXPECT_EQ(lines.steps[0].mtp_loss, record.mtp_loss);
    EXPECT_EQ(lines.steps[0].max_logit, record.max_logit);
    EXPECT_EQ(lines.steps[0].clipped_heads, record.clipped_heads);
    EXPECT_EQ(lines.steps[0].loss_scale, record.loss_scale);
    EXPECT_EQ(lines.steps[0].repeated_steps, record.repeated_steps);
    EXPECT_EQ(lines.steps[0].host_seconds, record.host_seconds);
    EXPECT_EQ(lines.steps[0].balance_loss, record.balance_loss);
    ASSERT_EQ(lines.steps[0].expert_load.size(), static_cast<size_t>(layers));
    for (int64_t i = 0; i < layers; ++i) {
      EXPECT_EQ(lines.steps[0].expert_load[i].tokens_per_expert,
                record.expert_load[i].tokens_per_expert);
    }
  }
}

TEST(Jsonl, KeepsAnObjectivesNumbers) {
  StepRecord record = SyntheticRun{}.step(3);
  record.objective = {{"reward_mean", 0.5}, {"another", -2}};
  const Lines lines = read_text(to_json_line(record) + '\n');
  EXPECT_EQ(lines.steps.at(0).objective, record.objective);
  const std::string begin = "{\"type\":\"step\",\"step\":1,\"objective\":";
  EXPECT_THAT(error_of(begin + "3}\n"), HasSubstr("'objective' must be a table"));
  EXPECT_THAT(error_of(begin + "{\"a\":\"b\"}}\n"), HasSubstr("'objective' must hold numbers"));
}

TEST(Jsonl, KeepsWaits) {
  StepRecord record = SyntheticRun{}.step(3);
  record.waits = {.num_ranks = 4,
                  .num_steps = 2,
                  .seconds = 0.5,
                  .for_ranks = {{3, 0.25}, {0, 0.125}},
                  .why = "its experts"};
  const Lines lines = read_text(to_json_line(record) + '\n');
  EXPECT_EQ(lines.steps.at(0).waits, record.waits);
  const std::string begin = "{\"type\":\"step\",\"step\":1,\"waits\":";
  EXPECT_THAT(error_of(begin + "3}\n"), HasSubstr("'waits' must hold"));
  EXPECT_THAT(error_of(begin + "{\"ranks\":2,\"steps\":1,\"for_ranks\":[]}}\n"),
              HasSubstr("'seconds' must be a number"));
  EXPECT_THAT(error_of(begin + "{\"ranks\":2,\"steps\":1,\"seconds\":1,\"for_ranks\":[7]}}\n"),
              HasSubstr("each entry of 'for_ranks'"));
}

TEST(Jsonl, KeepsRoundings) {
  StepRecord record = SyntheticRun{100}.step(5);
  record.saturated = 0.25;
  record.roundings = {{3, 0.0, 0.125, 0.25, 0.0}, {7, 0.0, 0.0, 0.0, 0.5}};
  const std::string text = to_json_line(record);
  EXPECT_THAT(text, HasSubstr(R"("saturated":0.25,"roundings":[{"layer":3,"activations":0.0,)"
                              R"("weights":0.125,"gradients":0.25,"nonfinite":0.0},)"));
  const Lines lines = read_text(text + '\n');
  ASSERT_EQ(lines.steps.size(), 1U);
  EXPECT_EQ(lines.steps[0].saturated, record.saturated);
  EXPECT_EQ(lines.steps[0].roundings, record.roundings);
  EXPECT_THAT(error_of(R"({"type":"step","step":1,"roundings":[{"layer":1}]})"
                       "\n"),
              HasSubstr("'activations' must be a number"));
}

TEST(Jsonl, NamesEveryFieldOfAStep) {
  const auto json = nlohmann::json::parse(to_json_line(SyntheticRun{100, 1}.step(5)));
  for (const char* key : {"type",
                          "step",
                          "total_steps",
                          "tokens_seen",
                          "loss",
                          "balance_loss",
                          "z_loss",
                          "grad_norm",
                          "learning_rate",
                          "clip_factor",
                          "step_seconds",
                          "tokens_per_second",
                          "model_flops",
                          "tflops",
                          "utilisation",
                          "memory_used",
                          "memory_predicted",
                          "dropped_tokens",
                          "skipped_steps",
                          "eta_seconds",
                          "expert_load"}) {
    EXPECT_TRUE(json.contains(key)) << key;
  }
  EXPECT_FALSE(json.contains("nonfinite"));
  EXPECT_FALSE(json.contains("validation_loss"));
  EXPECT_FALSE(json.contains("mtp_loss"));
  EXPECT_FALSE(json.contains("max_logit"));
  EXPECT_FALSE(json.contains("loss_scale"));
  EXPECT_FALSE(json.contains("clipped_heads"));
  EXPECT_FALSE(json.contains("repeated_steps"));
  EXPECT_FALSE(json.contains("host_seconds"));
}

TEST(Jsonl, StaysValidWhereNumbersAreNotFinite) {
  StepRecord record = SyntheticRun{}.step(3);
  record.loss = std::nan("");
  record.grad_norm = std::numeric_limits<double>::infinity();
  record.eta_seconds = -std::numeric_limits<double>::infinity();
  const std::string line = to_json_line(record);
  const auto json = nlohmann::json::parse(line);
  EXPECT_TRUE(json["loss"].is_null());
  EXPECT_EQ(json["nonfinite"]["loss"], "nan");
  EXPECT_EQ(json["nonfinite"]["grad_norm"], "inf");
  const Lines lines = read_text(line + '\n');
  EXPECT_TRUE(std::isnan(lines.steps[0].loss));
  EXPECT_EQ(lines.steps[0].grad_norm, record.grad_norm);
  EXPECT_EQ(lines.steps[0].eta_seconds, record.eta_seconds);
}

TEST(Jsonl, PassesOverATornLastLine) {
  const std::string whole = to_json_line(SyntheticRun{}.step(1)) + '\n';
  const std::string next = to_json_line(SyntheticRun{}.step(2));
  for (size_t length = 0; length <= next.size(); ++length) {
    EXPECT_THAT(read_text(whole + next.substr(0, length)).numbers(), ElementsAre(1));
  }
  EXPECT_TRUE(read_text("").steps.empty());
}

TEST(Jsonl, NamesTheLineOfAnError) {
  const std::string whole = to_json_line(SyntheticRun{}.step(1)) + '\n';
  EXPECT_THAT(error_of(whole + "{\"type\":\n"), HasSubstr("metrics.jsonl:2: not valid JSON"));
  EXPECT_THAT(error_of(whole + "\n"), HasSubstr(":2: not valid JSON"));
  EXPECT_THAT(error_of("[1]\n"), HasSubstr(":1: expected a JSON object, found array"));
  EXPECT_THAT(error_of("{}\n"), HasSubstr("the key 'type'"));
  EXPECT_THAT(error_of("{\"type\":\"epoch\",\"step\":1}\n"), HasSubstr("unknown type 'epoch'"));
  EXPECT_THAT(error_of("{\"type\":\"step\"}\n"), HasSubstr("'step' is missing"));
  EXPECT_THAT(error_of("{\"type\":\"step\",\"step\":1.5}\n"),
              HasSubstr("'step' must be an integer"));
  EXPECT_THAT(error_of("{\"type\":\"step\",\"step\":-3}\n"), HasSubstr("out of range: -3"));
  EXPECT_THAT(error_of("{\"type\":\"step\",\"step\":18446744073709551615}\n"),
              HasSubstr("out of range"));
  EXPECT_THAT(error_of("{\"type\":\"step\",\"step\":1,\"loss\":\"low\"}\n"),
              HasSubstr("'loss' must be a number"));
  EXPECT_THAT(error_of("{\"type\":\"step\",\"step\":1,\"expert_load\":[{\"layer\":0}]}\n"),
              HasSubstr("'expert_load'"));
  EXPECT_THAT(
      error_of("{\"type\":\"step\",\"step\":1,\"expert_load\":[{\"layer\":0,\"tokens\":[-1]}]}\n"),
      HasSubstr("'tokens' is out of range"));
  EXPECT_THAT(error_of(whole + whole), HasSubstr(":2: step 1 comes after step 1"));
  EXPECT_THAT(error_of(std::string(200'000, '[') + "\n"), HasSubstr(":1: not valid JSON"));
}

TEST(Jsonl, AMissingFileIsAnErrorWhenRead) {
  const TestFolder folder;
  EXPECT_THAT(user_error_of([&] { read_metrics(folder.path() / "none.jsonl", {}); }),
              HasSubstr("cannot read"));
}

TEST(TruncateMetrics, LeavesEachStepUpToTheResumedOne) {
  const TestFolder folder;
  const auto path = folder.path() / "metrics.jsonl";
  {
    MetricsFile file(path, AppendFile::Start::kEmpty);
    for (int64_t step = 1; step <= 10; ++step) {
      file.write(SyntheticRun{}.step(step));
      if (step % 5 == 0) file.write(ValidationRecord{step, 0, 4.0, 0.0});
    }
  }
  AppendFile(path, AppendFile::Start::kAtEnd)
      .append("{\"type\":\"step\",\"st");  // what kill -9 may leave
  Lines kept;
  truncate_metrics(path, 7, kept.visitor());
  EXPECT_THAT(kept.numbers(), ElementsAre(1, 2, 3, 4, 5, 6, 7));
  EXPECT_EQ(kept.validations.size(), 1U);

  MetricsFile(path, AppendFile::Start::kAtEnd).write(SyntheticRun{}.step(8));
  Lines all;
  read_metrics(path, all.visitor());
  EXPECT_THAT(all.numbers(), ElementsAre(1, 2, 3, 4, 5, 6, 7, 8));
}

TEST(TruncateMetrics, RemovesATornLineAndAcceptsAMissingFile) {
  const TestFolder folder;
  const std::string whole = to_json_line(SyntheticRun{}.step(1)) + '\n';
  const auto path = folder.write("metrics.jsonl", whole + "{\"type");
  truncate_metrics(path, 100, {});
  EXPECT_EQ(read_text_file(path), whole);
  truncate_metrics(folder.path() / "none.jsonl", 100, {});
  EXPECT_FALSE(std::filesystem::exists(folder.path() / "none.jsonl"));
}

TEST(MetricsFile, AFullDiskIsAUserError) {
  const TestFolder folder;
  const auto path = folder.path() / "metrics.jsonl";
  std::filesystem::create_symlink("/dev/full", path);
  MetricsFile file(path, AppendFile::Start::kAtEnd);
  EXPECT_THAT(user_error_of([&] { file.write(SyntheticRun{}.step(1)); }),
              HasSubstr("the disk or quota is full"));
}

}  // namespace
}  // namespace tessera
