#include "train/metrics/writer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>

#include "train/metrics/synthetic_run.h"
#include "train/metrics/test_folder.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

RunWriterOptions options_for(const std::filesystem::path& folder) {
  RunWriterOptions options;
  options.folder = folder;
  options.report_seconds = 1e9;
  return options;
}

RunInfo titled(const std::string& title) {
  RunInfo info;
  info.title = title;
  return info;
}

void record_steps(RunWriter& writer, const SyntheticRun& run, int64_t first, int64_t last) {
  for (int64_t step = first; step <= last; ++step) writer.record(run.step(step));
}

size_t num_files(const std::filesystem::path& folder) {
  const std::filesystem::directory_iterator files(folder);
  return static_cast<size_t>(std::distance(begin(files), end(files)));
}

TEST(RunWriter, WritesEveryKindOfFile) {
  const TestFolder folder;
  std::ostringstream out;
  RunWriter writer(out, options_for(folder.path() / "run"), titled("my run"));
  record_steps(writer, {20, 2}, 1, 20);
  writer.validation({20, 0, 4.0, 0.5});
  writer.note("saved");
  writer.set_sample("Once", " upon a time");
  writer.finish();
  EXPECT_THAT(out.str(), HasSubstr("20/20"));
  EXPECT_THAT(out.str(), HasSubstr("best so far"));
  EXPECT_THAT(out.str(), HasSubstr("saved\n"));
  const std::string html = read_text_file(writer.report_path());
  EXPECT_THAT(html, HasSubstr("my run"));
  EXPECT_THAT(html, HasSubstr("<b>Once</b> upon a time"));
  EXPECT_EQ(num_files(folder.path() / "run" / "tensorboard"), 1U);
  EXPECT_EQ(num_files(folder.path() / "run"), 4U) << "nothing temporary is left";
  EXPECT_EQ(load_run_info(folder.path() / "run").sample_prompt, "Once");
}

TEST(RunWriter, AResumedRunHasTheFilesOfAnUnbrokenOne) {
  const TestFolder folder;
  const SyntheticRun run{50, 2};
  std::ostringstream out;
  const auto broken = options_for(folder.path() / "broken");
  {
    RunWriter writer(out, broken, {});
    record_steps(writer, run, 1, 30);
  }
  auto resumed = broken;
  resumed.resume_after = 20;
  {
    RunWriter writer(out, resumed, {});
    EXPECT_EQ(writer.history().steps().size(), 20U);
    record_steps(writer, run, 21, 50);
    writer.finish();
  }
  const auto unbroken = options_for(folder.path() / "unbroken");
  RunWriter writer(out, unbroken, {});
  record_steps(writer, run, 1, 50);
  writer.finish();
  for (const char* name : {"metrics.jsonl", "report.html", "run.json"}) {
    EXPECT_EQ(read_text_file(broken.folder / name), read_text_file(unbroken.folder / name)) << name;
  }
}

TEST(RunWriter, ANewRunStartsEmptyMetrics) {
  const TestFolder folder;
  std::ostringstream out;
  for (int i = 0; i < 2; ++i) {
    RunWriter writer(out, options_for(folder.path()), {});
    record_steps(writer, {5}, 1, 5);
  }
  int64_t count = 0;
  read_metrics(folder.path() / "metrics.jsonl", {[&](const StepRecord&) { ++count; }, {}});
  EXPECT_EQ(count, 5);
}

TEST(RunWriter, MetricsThatDoNotFitAreSetAside) {
  const TestFolder folder;
  std::ostringstream out;
  const SyntheticRun run{50, 2};
  RunWriterOptions options = options_for(folder.path());
  options.resume_after = 20;
  { RunWriter writer(out, options_for(folder.path()), {}); }
  const auto path = folder.path() / "metrics.jsonl";
  std::string fits;
  for (int step = 1; step <= 20; ++step) fits += to_json_line(run.step(step)) + "\n";
  const std::string others = to_json_line(SyntheticRun{50, 3}.step(20)) + "\n";
  const std::string line = to_json_line(run.step(5)) + "\n";
  int number = 0;
  for (const std::string& bad : {fits + line, "{}\n" + fits, "x" + fits, line + others}) {
    folder.write("metrics.jsonl", bad);
    RunWriter writer(out, options, {});
    EXPECT_TRUE(writer.history().steps().empty()) << "of a history that does not fit";
    EXPECT_EQ(read_text_file(path.string() + "." + std::to_string(++number)), bad);
    record_steps(writer, run, 21, 22);
    int64_t count = 0;
    read_metrics(path, {[&](const StepRecord&) { ++count; }, {}});
    EXPECT_EQ(count, 2);
  }
  EXPECT_THAT(out.str(), HasSubstr("does not fit the checkpoint"));
  folder.write("metrics.jsonl", fits);
  options.resume_tokens = run.step(20).tokens_seen + 1;
  { RunWriter writer(out, options, {}); }
  EXPECT_THAT(out.str(), HasSubstr("tokens there, and"));
  folder.write("metrics.jsonl", line);
  options.resume_tokens.reset();
  { RunWriter writer(out, options, {}); }
  EXPECT_THAT(out.str(), HasSubstr("lacks the steps 6 to 20"));
}

TEST(RunWriter, RestoresWhatOthersRemoveOrReplace) {
  const TestFolder folder;
  const auto run = folder.path() / "run";
  std::ostringstream out;
  RunWriter writer(out, options_for(run), {});
  record_steps(writer, {50, 2}, 1, 10);
  writer.restore_files();
  EXPECT_THAT(out.str(), Not(HasSubstr("warning")));
  const std::string before = read_text_file(run / "metrics.jsonl");
  std::filesystem::remove(run / "metrics.jsonl");
  std::filesystem::remove_all(run / "tensorboard");
  writer.restore_files();
  EXPECT_EQ(read_text_file(run / "metrics.jsonl"), before);
  EXPECT_EQ(num_files(run / "tensorboard"), 1U);
  folder.write("other", "other");
  std::filesystem::rename(folder.path() / "other", run / "metrics.jsonl");
  writer.restore_files();
  EXPECT_EQ(read_text_file(run / "metrics.jsonl.1"), "other");
  record_steps(writer, {50, 2}, 11, 12);
  EXPECT_TRUE(read_text_file(run / "metrics.jsonl").starts_with(before));
  int64_t count = 0;
  read_metrics(run / "metrics.jsonl", {[&](const StepRecord&) { ++count; }, {}});
  EXPECT_EQ(count, 12);
}

TEST(RunWriter, LeavesOutWhatIsNotWanted) {
  const TestFolder folder;
  std::ostringstream out;
  RunWriterOptions options = options_for(folder.path());
  options.tensorboard = false;
  options.report = false;
  RunWriter writer(out, options, {});
  record_steps(writer, {5}, 1, 5);
  writer.finish();
  EXPECT_FALSE(std::filesystem::exists(folder.path() / "tensorboard"));
  EXPECT_FALSE(std::filesystem::exists(writer.report_path()));
}

TEST(RunWriter, RewritesTheReportAtIntervals) {
  const TestFolder folder;
  std::ostringstream out;
  RunWriter writer(out, options_for(folder.path()), {});
  record_steps(writer, {50}, 1, 1);
  const std::string first = read_text_file(writer.report_path());
  EXPECT_THAT(first, HasSubstr("at step 1 of 50"));
  record_steps(writer, {50}, 2, 50);
  EXPECT_EQ(read_text_file(writer.report_path()), first) << "the interval has not passed";
  writer.finish();
  EXPECT_THAT(read_text_file(writer.report_path()), HasSubstr("finished after step 50"));
}

TEST(RunWriter, SaysAValidationIsBestOnlyWhereItIs) {
  const TestFolder folder;
  std::ostringstream out;
  RunWriter writer(out, options_for(folder.path()), {});
  writer.validation({1, 0, 5.0, 0.0});
  out.str("");
  writer.validation({2, 0, 5.5, 0.0});
  EXPECT_THAT(out.str(), Not(HasSubstr("best")));
  StepRecord record = SyntheticRun{3}.step(3);
  record.validation_loss = 4.5;
  writer.record(record);
  EXPECT_THAT(out.str(),
              HasSubstr("validation at step 3: loss 4.5000 (perplexity 90.02), best so far"));
}

TEST(RunWriter, FailuresToWriteAreUserErrors) {
  const TestFolder folder;
  std::ostringstream out;
  folder.write("file", "");
  EXPECT_THAT(user_error_of([&] { RunWriter(out, options_for(folder.path() / "file"), {}); }),
              HasSubstr("file"));
  std::filesystem::create_symlink("/dev/full", folder.path() / "metrics.jsonl");
  RunWriter writer(out, options_for(folder.path()), {});
  EXPECT_THAT(user_error_of([&] { writer.record(SyntheticRun{}.step(1)); }),
              HasSubstr("disk or quota is full"));
}

}  // namespace
}  // namespace tessera
