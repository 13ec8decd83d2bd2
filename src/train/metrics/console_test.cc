#include "train/metrics/console.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <sstream>

#include "train/metrics/synthetic_run.h"

namespace tessera {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int kWide = 400;

StepRecord plain_record() {
  StepRecord record;
  record.step = 10;
  record.total_steps = 2000;
  record.loss = 6.54321;
  record.balance_loss = 1.025;
  record.grad_norm = 1.2345;
  record.learning_rate = 3e-4;
  record.step_seconds = 0.5;
  record.tokens_per_second = 12345;
  record.model_flops = 1.5e11;
  record.utilisation = 0.6149;
  record.memory_used = 3LL << 29;
  record.memory_predicted = 2LL << 30;
  record.eta_seconds = 102;
  return record;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> lines;
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

TEST(FormatStep, WritesHumanUnitsUnderTheHeader) {
  const auto columns = choose_columns(plain_record(), kWide);
  EXPECT_EQ(format_header(columns),
            "     step      loss  balance  grad norm        lr  tokens/s   TFLOPS  of peak     "
            "memory of predicted"
            "      ETA");
  EXPECT_EQ(format_step(columns, plain_record()),
            "  10/2000    6.5432    1.025      1.234  3.00e-04     12.3k   0.3000    61.5%        "
            "1.5 GiB of 2 GiB"
            "   1m 42s");
}

TEST(FormatStep, StaysAlignedThroughARun) {
  const SyntheticRun run{500, 3};
  const auto columns = choose_columns(run.step(1), kWide);
  const size_t width = format_header(columns).size();
  for (int64_t step = 1; step <= 500; ++step) {
    EXPECT_EQ(format_step(columns, run.step(step)).size(), width) << "step " << step;
  }
}

TEST(FormatStep, SaysTroubleInWords) {
  StepRecord record = plain_record();
  const auto columns = choose_columns(record, kWide);
  EXPECT_THAT(format_step(columns, record), Not(HasSubstr("skipped")));
  record.dropped_tokens = 12;
  record.skipped_steps = 2;
  record.repeated_steps = 3;
  record.loss = std::nan("");
  EXPECT_THAT(format_step(columns, record),
              EndsWith("12 dropped  2 skipped so far  3 repeated so far  not finite"));
  record.grad_norm = std::numeric_limits<double>::infinity();
  EXPECT_THAT(format_step(columns, record), HasSubstr("inf"));
}

/// Gradients that overflow where losses are scaled are no trouble, and the scale has a column.
TEST(FormatStep, TellsTheLossScale) {
  StepRecord record = plain_record();
  record.loss_scale = 65536;
  const auto columns = choose_columns(record, kWide);
  EXPECT_THAT(format_header(columns), HasSubstr("loss scale"));
  EXPECT_THAT(format_step(columns, record), HasSubstr("       65536"));
  record.grad_norm = std::numeric_limits<double>::infinity();
  record.skipped_steps = 1;
  EXPECT_THAT(format_step(columns, record), EndsWith("1 skipped so far  gradients overflowed"));
  record.loss = std::nan("");
  EXPECT_THAT(format_step(columns, record), EndsWith("not finite"));
}

TEST(ChooseColumns, LeavesOutWhatWouldBeEmpty) {
  StepRecord dense = plain_record();
  dense.balance_loss.reset();
  dense.utilisation.reset();
  const std::string header = format_header(choose_columns(dense, kWide));
  EXPECT_THAT(header, Not(HasSubstr("balance")));
  EXPECT_THAT(header, Not(HasSubstr("of peak")));
  EXPECT_THAT(header, HasSubstr("TFLOPS"));
}

TEST(ChooseColumns, FitsTheTerminal) {
  for (int width = 55; width < 160; ++width) {
    const std::string header = format_header(choose_columns(plain_record(), width));
    EXPECT_LT(static_cast<int>(header.size()), width);
    EXPECT_THAT(header, HasSubstr("loss"));
  }
}

TEST(FormatValidation, GivesPerplexity) {
  EXPECT_EQ(format_validation({100, 0, 4.0, 1.25}, true),
            "validation at step 100: loss 4.0000 (perplexity 54.60), best so far, 1.25s");
  EXPECT_EQ(format_validation({100, 0, 4.0, 0.0}, false),
            "validation at step 100: loss 4.0000 (perplexity 54.60)");
}

TEST(Console, WritesPlainLinesToAFile) {
  const SyntheticRun run{10, 2};
  std::ostringstream out;
  Console console(out, {.every = 4, .terminal = {}});
  for (int64_t step = 1; step <= 10; ++step) console.step(run.step(step));
  console.finish();
  const auto lines = lines_of(out.str());
  ASSERT_EQ(lines.size(), 5U);  // the header, steps 1, 4, 8 and the last
  EXPECT_THAT(lines[0], HasSubstr("grad norm"));
  EXPECT_THAT(lines[4], HasSubstr("10/10"));
  EXPECT_THAT(out.str(), Not(HasSubstr("\x1b")));
  EXPECT_THAT(out.str(), Not(HasSubstr("\r")));
}

TEST(Console, AlwaysShowsASkippedStep) {
  SyntheticRun run{100, 2};
  std::ostringstream out;
  Console console(out, {.every = 1000, .terminal = {}});
  for (int64_t step = 1; step <= 9; ++step) {
    StepRecord record = run.step(step);
    record.skipped_steps = step >= 5 ? 1 : 0;
    console.step(record);
  }
  const auto lines = lines_of(out.str());
  ASSERT_EQ(lines.size(), 3U);
  EXPECT_THAT(lines[2], HasSubstr("5/100"));
}

TEST(Console, AlwaysShowsARepeatedStep) {
  SyntheticRun run{100, 2};
  std::ostringstream out;
  Console console(out, {.every = 1000, .terminal = {}});
  for (int64_t step = 1; step <= 9; ++step) {
    StepRecord record = run.step(step);
    record.repeated_steps = step >= 5 ? 1 : 0;
    console.step(record);
  }
  const auto lines = lines_of(out.str());
  ASSERT_EQ(lines.size(), 3U);
  EXPECT_THAT(lines[2], HasSubstr("1 repeated so far"));
}

TEST(Console, KeepsALiveBarUnderTheLinesOfATerminal) {
  double clock = 0.0;
  Terminal terminal;
  terminal.interactive = true;
  terminal.width = [] { return 100; };
  terminal.now = [&] { return clock; };
  std::ostringstream out;
  Console console(out, {.every = 100, .terminal = terminal});
  const SyntheticRun run{1000, 2};
  for (int64_t step = 1; step <= 50; ++step) {
    console.step(run.step(step));
    clock += 0.2;
  }
  EXPECT_THAT(out.str(), HasSubstr("50/1000  loss "));
  EXPECT_THAT(out.str(), Not(HasSubstr("\x1b[3")));  // no colour was allowed
  out.str("");
  console.step(run.step(100));
  const std::string text = out.str();
  EXPECT_THAT(text.substr(text.rfind('\n')), HasSubstr("100/1000"))
      << "the bar is as new as the line above it";
  console.finish();
  EXPECT_THAT(out.str(), EndsWith("\r\x1b[K"));
}

TEST(Console, ColoursOnlyWhereAllowed) {
  Terminal terminal;
  terminal.colour = true;
  std::ostringstream out;
  Console console(out, {.every = 1, .terminal = terminal});
  StepRecord record = plain_record();
  record.loss = std::nan("");
  console.step(record);
  console.validation({10, 0, 4.0, 0.0}, true);
  EXPECT_THAT(out.str(), HasSubstr("\x1b[31m"));
  EXPECT_THAT(out.str(), HasSubstr("\x1b[32mvalidation"));
}

}  // namespace
}  // namespace tessera
