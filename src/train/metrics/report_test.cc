#include "train/metrics/report.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <regex>

#include "train/metrics/findings.h"
#include "train/metrics/jsonl.h"
#include "train/metrics/synthetic_run.h"
#include "train/metrics/test_folder.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::Field;
using ::testing::HasSubstr;
using ::testing::Not;

RunHistory history_of(const SyntheticRun& run) {
  RunHistory history;
  for (int64_t step = 1; step <= run.total_steps; ++step) history.add(run.step(step));
  return history;
}

/// The data that the page's script reads.
nlohmann::json data_of(const std::string& html) {
  const std::string opening = "<script type=\"application/json\" id=\"data\">";
  const size_t begin = html.find(opening) + opening.size();
  return nlohmann::json::parse(html.substr(begin, html.find("</script>", begin) - begin));
}

nlohmann::json chart_of(const nlohmann::json& data, const std::string& id) {
  for (const auto& chart : data["charts"]) {
    if (chart["id"] == id) return chart;
  }
  return nullptr;
}

auto finding(Severity severity, const std::string& text) {
  return AllOf(Field(&Finding::severity, severity), Field(&Finding::text, HasSubstr(text)));
}

TEST(Report, HoldsEveryStepOfAShortRun) {
  const SyntheticRun run{20, 2, 4};
  const auto data = data_of(make_report(history_of(run), {}));
  const auto curve = chart_of(data, "loss")["curves"][0];
  ASSERT_EQ(curve["value"].size(), 20U);
  for (int64_t step = 1; step <= 20; ++step) {
    const size_t i = step - 1;
    EXPECT_EQ(curve["step"][i], step);
    EXPECT_NEAR(curve["value"][i].get<double>(), run.step(step).loss, 1e-4);
  }
  EXPECT_EQ(data["experts"]["layers"], nlohmann::json({1, 3}));
  EXPECT_EQ(data["experts"]["windows"].size(), 20U);
}

TEST(Report, SharesOfALayerAddUpToItsExperts) {
  const auto data = data_of(make_report(history_of({200, 3, 8}), {}));
  for (const auto& window : data["experts"]["windows"]) {
    for (const auto& row : window["load"]) {
      int64_t sum = 0;
      for (const auto& hundredths : row) sum += hundredths.get<int64_t>();
      EXPECT_NEAR(static_cast<double>(sum), 800.0, 4.0);
    }
  }
}

TEST(Report, ShowsNoExpertsForADenseModel) {
  const auto data = data_of(make_report(history_of({50}), {}));
  EXPECT_TRUE(data["experts"].is_null());
  EXPECT_TRUE(chart_of(data, "balance").is_null());
  EXPECT_FALSE(chart_of(data, "norm").is_null());
}

TEST(Report, WorksForNoStepAndForOne) {
  EXPECT_THAT(make_report({}, {}), HasSubstr("No step has been recorded yet"));
  const auto data = data_of(make_report(history_of({1, 2}), {}));
  EXPECT_EQ(chart_of(data, "loss")["curves"][0]["value"].size(), 1U);
}

TEST(Report, StaysUnderAMegabyte) {
  // 20,000 steps; loads as large as those of a model with 58 layers of 256 experts in some of them.
  const SyntheticRun dense{20'000};
  const SyntheticRun wide{20'000, 58, 256};
  RunHistory history;
  for (int64_t step = 1; step <= 20'000; ++step) {
    history.add(step % 250 == 0 ? wide.step(step) : dense.step(step));
    if (step % 100 == 0) history.add(ValidationRecord{step, 0, 4.0, 0.0});
  }
  EXPECT_LT(make_report(history, {}).size(), 1'000'000U);
}

TEST(Report, LoadsNothingFromOutside) {
  const std::string html = make_report(history_of({30, 2}), {});
  EXPECT_FALSE(std::regex_search(
      html, std::regex("(src|href)\\s*=|url\\(|@import|fetch\\(|XMLHttpRequest")));
  EXPECT_THAT(html, HasSubstr("default-src 'none'"));
}

TEST(Report, EscapesEveryText) {
  const std::string attack = "</script><script>alert('x')</script>&\"{{data}}\xff";
  RunInfo info;
  info.title = info.started = info.machine = info.tokenizer = attack;
  info.model_summary = info.config_text = info.sample_prompt = info.sample_text = attack;
  const std::string html = make_report(history_of({5, 1}), info);
  EXPECT_THAT(html, Not(HasSubstr("<script>alert")));
  EXPECT_THAT(
      html,
      HasSubstr("&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;&amp;&quot;{{data}}\xef\xbf\xbd"));
  EXPECT_NO_THROW(data_of(html));
}

TEST(Report, LeavesGapsWhereNumbersAreNotFinite) {
  SyntheticRun run{40};
  RunHistory history;
  for (int64_t step = 1; step <= 40; ++step) {
    StepRecord record = run.step(step);
    if (step == 7) record.loss = std::nan("");
    history.add(record);
  }
  const auto curves = chart_of(data_of(make_report(history, {})), "loss")["curves"];
  for (const auto& curve : curves) {
    EXPECT_TRUE(curve["value"][6].is_null());
    EXPECT_FALSE(curve["value"][7].is_null());
  }
}

TEST(Findings, CallOutDeadAndStarvedAndOverloadedExperts) {
  StepRecord record = SyntheticRun{2, 0}.step(2);
  record.balance_loss = 1.5;
  record.expert_load = {{4, {0, 100, 100, 100}}, {6, {5, 100, 100, 795}}};
  RunHistory history;
  history.add(record);
  const auto findings = find_findings(history);
  EXPECT_THAT(
      findings,
      Contains(finding(Severity::kBad,
                       "1 expert dead, without a single token, in step 2: layer 4 expert 0.")));
  EXPECT_THAT(findings, Contains(finding(Severity::kWarning, "layer 6 expert 0 (0.02×)")));
  EXPECT_THAT(findings, Contains(finding(Severity::kWarning, "layer 6 expert 3 (3.2×)")));
}

TEST(Findings, SpeakOfTheRecentPastOnly) {
  EXPECT_THAT(find_findings(history_of({400, 2, 8, 3})),
              Contains(finding(Severity::kBad, "layer 1 expert 3")));
  EXPECT_THAT(find_findings(history_of({400, 2, 8})),
              Contains(finding(Severity::kGood, "Every expert")));
}

TEST(Findings, CountDropsSkipsAndNumbersThatAreNotFinite) {
  const SyntheticRun run{30, 1};
  RunHistory history;
  for (int64_t step = 1; step <= 30; ++step) {
    StepRecord record = run.step(step);
    record.dropped_tokens = step % 10 == 0 ? 7 : 0;
    if (step == 12 || step == 13) record.loss = std::nan("");
    record.skipped_steps = step >= 13 ? 2 : 0;
    record.repeated_steps = step >= 13 ? 3 : 0;
    history.add(record);
  }
  const auto findings = find_findings(history);
  EXPECT_THAT(findings, Contains(finding(Severity::kWarning,
                                         "21 assignments dropped by the experts' capacity, in 3 of "
                                         "30 steps; 7 in the last step")));
  EXPECT_THAT(findings, Contains(finding(Severity::kBad, "not finite in 2 steps: step 12, 13.")));
  EXPECT_THAT(findings, Contains(finding(Severity::kWarning, "2 updates skipped")));
  EXPECT_THAT(findings, Contains(finding(Severity::kWarning, "3 steps done again")));
  EXPECT_TRUE(
      std::is_sorted(findings.begin(), findings.end(),
                     [](const Finding& a, const Finding& b) { return a.severity > b.severity; }));
}

/// What overflows at a scale that follows the gradients is how it finds the scale.
TEST(Findings, TellOverflowsApartFromNumbersThatAreNotFinite) {
  RunHistory history;
  for (int64_t step = 1; step <= 10; ++step) {
    StepRecord record = SyntheticRun{10}.step(step);
    record.loss_scale = step <= 2 ? 1024 : 256;
    if (step <= 2) record.grad_norm = std::numeric_limits<double>::infinity();
    record.skipped_steps = std::min<int64_t>(step, 2);
    history.add(record);
  }
  const auto findings = find_findings(history);
  EXPECT_THAT(findings, Contains(finding(Severity::kInfo,
                                         "Gradients overflowed F16 in 2 steps, whose updates were "
                                         "left out; the loss scale was 256 at last.")));
  EXPECT_THAT(findings, Not(Contains(finding(Severity::kBad, "not finite"))));
  EXPECT_THAT(findings, Not(Contains(finding(Severity::kWarning, "skipped"))));
}

TEST(Findings, NameTheLayersWhoseValuesSaturate) {
  RunHistory history;
  EXPECT_EQ(find_findings(history).size(), 1U);
  for (int64_t step = 1; step <= 4; ++step) {
    StepRecord record = SyntheticRun{4}.step(step);
    record.saturated = 0;
    history.add(record);
  }
  EXPECT_THAT(find_findings(history),
              Contains(finding(Severity::kGood, "No value was beyond the scale")));
  StepRecord record = SyntheticRun{5}.step(5);
  record.saturated = 0.02;
  record.roundings = {{1, 0, 0, 0.001, 0}, {3, 0.02, 0, 0.01, 0}};
  history.add(record);
  EXPECT_THAT(find_findings(history),
              Contains(finding(Severity::kWarning,
                               "in 1 of 5 steps; at most activations of layer 3 (2%), "
                               "gradients of layer 1 (0.1%)")));
}

TEST(Findings, CallOutAGradientNormOfExactlyZero) {
  const SyntheticRun run{30, 1};
  RunHistory history;
  for (int64_t step = 1; step <= 30; ++step) {
    StepRecord record = run.step(step);
    if (step == 3 || step == 9) record.grad_norm = 0;
    history.add(record);
  }
  EXPECT_THAT(find_findings(history),
              Contains(finding(Severity::kBad,
                               "exactly 0 in 2 steps, which learnt nothing: step "
                               "3, 9.")));
  EXPECT_THAT(find_findings(history_of(run)),
              ::testing::Not(Contains(finding(Severity::kBad, "exactly 0"))));
}

TEST(Findings, NameTheRankThatOthersWaitFor) {
  RunHistory history;
  StepRecord record = SyntheticRun{10}.step(4);
  record.step_seconds = 0.5;
  record.waits = {.num_ranks = 4, .num_steps = 2, .seconds = 2.0, .for_ranks = {{3, 1.0}}};
  history.add(record);
  history.add(SyntheticRun{10}.step(5));
  EXPECT_THAT(
      find_findings(history),
      Contains(finding(Severity::kWarning,
                       "In 2 traced steps up to step 4, 50% of the time of 4 ranks was "
                       "waiting: most of it that a late rank caused was for rank 3 (25%).")));
}

TEST(Findings, SeeOverfittingAndAWrongMemoryPrediction) {
  RunHistory history;
  StepRecord record = SyntheticRun{10}.step(10);
  record.memory_predicted = 1000;
  record.memory_used = 1100;
  history.add(record);
  history.add(ValidationRecord{5, 0, 4.0, 0.0});
  history.add(ValidationRecord{10, 0, 4.5, 0.0});
  const auto findings = find_findings(history);
  EXPECT_THAT(findings, Contains(finding(Severity::kWarning, "overfitting")));
  EXPECT_THAT(findings, Contains(finding(Severity::kWarning, "predicted 1000 B (+10.0%)")));
}

TEST(WriteReportFromRun, GivesTheReportOfTheRecordedSteps) {
  const TestFolder folder;
  const SyntheticRun run{60, 2};
  RunInfo info;
  info.title = "a run";
  info.sample_text = "once upon \xff a time";
  {
    MetricsFile file(folder.path() / "metrics.jsonl", AppendFile::Start::kEmpty);
    for (int64_t step = 1; step <= 60; ++step) file.write(run.step(step));
  }
  save_run_info(folder.path(), info);
  const auto path = write_report_from_run(folder.path());
  EXPECT_EQ(path, folder.path() / "report.html");
  EXPECT_EQ(read_text_file(path), make_report(history_of(run), info));
}

TEST(WriteReportFromRun, RefusesWhatIsNoRun) {
  const TestFolder folder;
  EXPECT_THAT(user_error_of([&] { write_report_from_run(folder.path()); }),
              HasSubstr("no metrics.jsonl"));
  folder.write("metrics.jsonl", "{\"type\":\"step\",\"step\":1}\nnonsense\n");
  EXPECT_THAT(user_error_of([&] { write_report_from_run(folder.path()); }),
              HasSubstr("metrics.jsonl:2: not valid JSON"));
  EXPECT_FALSE(std::filesystem::exists(folder.path() / "report.html"));
  folder.write("metrics.jsonl", "");
  folder.write("run.json", "[]");
  EXPECT_THAT(user_error_of([&] { write_report_from_run(folder.path()); }),
              HasSubstr("run.json is damaged"));
  folder.write("run.json", "{\"title\":3}");
  EXPECT_THAT(user_error_of([&] { write_report_from_run(folder.path()); }),
              HasSubstr("'title' must be text"));
}

TEST(WriteReportFromRun, SurvivesExtremeNumbers) {
  const TestFolder folder;
  std::string text;
  const std::string huge = "9223372036854775807";
  for (const std::string& step : {std::string("1"), huge}) {
    text += fmt::format(
        R"({{"type":"step","step":{0},"total_steps":{1},"tokens_seen":{1},"loss":1e308,)"
        R"("grad_norm":-1e308,"step_seconds":1e308,"tokens_per_second":1e300,"memory_used":{1},)"
        R"("memory_predicted":1,"dropped_tokens":{1},"skipped_steps":{1},)"
        R"("expert_load":[{{"layer":{1},"tokens":[{1},{1},0]}},{{"layer":1,"tokens":[]}}]}})"
        "\n",
        step, huge);
  }
  folder.write("metrics.jsonl", text);
  EXPECT_NO_THROW(data_of(read_text_file(write_report_from_run(folder.path()))));
}

}  // namespace
}  // namespace tessera
