#include "core/process/progress.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <sstream>

namespace tessera {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

Terminal test_terminal(double* clock, int width = 60) {
  Terminal terminal;
  terminal.interactive = true;
  terminal.width = [width] { return width; };
  terminal.now = [clock] { return *clock; };
  return terminal;
}

TEST(FormatCount, KeepsThreeDigitsAndCarriesRounding) {
  EXPECT_EQ(format_count(0), "0");
  EXPECT_EQ(format_count(999), "999");
  EXPECT_EQ(format_count(999.7), "1.00k");
  EXPECT_EQ(format_count(12345), "12.3k");
  EXPECT_EQ(format_count(123456), "123k");
  EXPECT_EQ(format_count(999999), "1.00M");
  EXPECT_EQ(format_count(-1500), "-1.50k");
  EXPECT_EQ(format_count(std::nan("")), "nan");
}

TEST(FormatDuration, PicksUnits) {
  EXPECT_EQ(format_duration(0), "0s");
  EXPECT_EQ(format_duration(0.854), "0.85s");
  EXPECT_EQ(format_duration(42.4), "42s");
  EXPECT_EQ(format_duration(59.7), "1m 00s");
  EXPECT_EQ(format_duration(102), "1m 42s");
  EXPECT_EQ(format_duration(7500), "2h 05m");
  EXPECT_EQ(format_duration(273600), "3d 04h");
  EXPECT_EQ(format_duration(-1), "-");
  EXPECT_EQ(format_duration(std::numeric_limits<double>::infinity()), "-");
}

TEST(FormatProgress, FillsTheBarInProportion) {
  const Terminal plain;
  EXPECT_EQ(format_progress("save", 0.5, "1/2", 32, plain), "save  [======      ]   50%  1/2");
  EXPECT_THAT(format_progress("save", 1.0, "", 30, plain), HasSubstr("100%"));
  EXPECT_THAT(format_progress("save", 0.999, "", 30, plain), HasSubstr(" 99%"));
}

TEST(FormatProgress, NeverExceedsTheWidth) {
  const Terminal plain;
  for (int width = 0; width < 120; ++width) {
    for (const double fraction : {-1.0, 0.0, 0.37, 1.0, 7.0, std::nan("")}) {
      const std::string line =
          format_progress("tokenize", fraction, "12.3 MiB of 40 MiB", width, plain);
      EXPECT_LT(static_cast<int>(line.size()), std::max(width, 1));
    }
  }
}

TEST(FormatProgress, UsesColourAndUnicodeOnlyWhenTold) {
  Terminal rich;
  rich.unicode = true;
  EXPECT_THAT(format_progress("x", 0.5, "", 40, rich), HasSubstr("━"));
  EXPECT_THAT(format_progress("x", 0.5, "", 40, rich), Not(HasSubstr("\x1b")));
  rich.colour = true;
  EXPECT_THAT(format_progress("x", 0.5, "", 40, rich), HasSubstr("\x1b[36m"));
}

TEST(ProgressBar, RedrawsAtMostTenTimesASecond) {
  double clock = 0.0;
  std::ostringstream out;
  ProgressBar bar(out, test_terminal(&clock), "work");
  for (int i = 0; i < 1000; ++i) {
    bar.update(i / 1000.0, "");
    clock += 0.001;
  }
  const std::string text = out.str();
  const auto drawings = std::count(text.begin(), text.end(), '\r');
  EXPECT_GE(drawings, 9);
  EXPECT_LE(drawings, 11);
}

TEST(ProgressBar, PrintsLinesAboveAndErasesItself) {
  double clock = 0.0;
  std::ostringstream out;
  {
    ProgressBar bar(out, test_terminal(&clock), "work");
    bar.update(0.5, "half");
    out.str("");
    bar.print("a line");
    EXPECT_THAT(out.str(), ::testing::StartsWith("\ra line\x1b[K\n\rwork"));
    out.str("");
  }
  EXPECT_EQ(out.str(), "\r\x1b[K");
}

TEST(ProgressBar, WritesOnlyLinesToAFile) {
  std::ostringstream out;
  ProgressBar bar(out, Terminal(), "work");
  bar.update(0.5, "half");
  bar.print("a line");
  bar.clear();
  EXPECT_EQ(out.str(), "a line\n");
}

}  // namespace
}  // namespace tessera
