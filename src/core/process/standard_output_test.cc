#include "core/process/standard_output.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <sstream>

#include "core/file/file.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

class StandardOutputTest : public ::testing::Test {
 protected:
  StandardOutputTest() : old_handler_(std::signal(SIGPIPE, SIG_IGN)) {}
  ~StandardOutputTest() override { std::signal(SIGPIPE, old_handler_); }

  /// A pipe whose reading end is closed.
  static FileDescriptor closed_pipe() {
    int ends[2];
    EXPECT_EQ(::pipe(ends), 0);
    ::close(ends[0]);
    return FileDescriptor(ends[1]);
  }
  static FileDescriptor full_disk() { return FileDescriptor(::open("/dev/full", O_WRONLY)); }

  static int count_lines(const std::string& text) {
    return static_cast<int>(std::ranges::count(text, '\n'));
  }

  std::ostringstream stream_;
  std::ostringstream errors_;

 private:
  void (*old_handler_)(int);
};

TEST_F(StandardOutputTest, WritesEverythingInOrder) {
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  const FileDescriptor reader(ends[0]);
  const FileDescriptor writer(ends[1]);
  std::string expected;
  StandardOutput output(stream_, writer.get(), errors_);
  for (int i = 0; i < 1000; ++i) {
    stream_ << i << ' ' << std::string(i % 50, 'x') << '\n';
    expected += fmt::format("{} {}\n", i, std::string(i % 50, 'x'));
  }
  EXPECT_EQ(output.finish(0), 0);
  stream_ << "after the end";
  std::string found(expected.size() + 1, '\0');
  size_t size = 0;
  while (size < expected.size()) {
    const ssize_t count = ::read(reader.get(), found.data() + size, found.size() - size);
    ASSERT_GT(count, 0);
    size += static_cast<size_t>(count);
  }
  EXPECT_EQ(found.substr(0, size), expected);
  EXPECT_EQ(errors_.str(), "");
}

TEST_F(StandardOutputTest, AFullDiskEndsTheStatementThatFlushes) {
  const FileDescriptor full = full_disk();
  StandardOutput output(stream_, full.get(), errors_);
  stream_ << "held back";
  try {
    stream_ << std::flush;
    FAIL() << "the loss was not noticed";
  } catch (const OutputLost& lost) {
    EXPECT_THAT(lost.what(), HasSubstr("standard output: No space left on device"));
    EXPECT_FALSE(lost.reader_left());
  }
  EXPECT_EQ(output.finish(0), 1);
  EXPECT_EQ(output.finish(2), 2);
  EXPECT_EQ(errors_.str(), "") << "the exception told it";
}

TEST_F(StandardOutputTest, AFullDiskIsNoticedBeforeTheEnd) {
  const FileDescriptor full = full_disk();
  const StandardOutput output(stream_, full.get(), errors_);
  const auto write_much = [&] {
    for (int i = 0; i < 100'000; ++i) stream_ << "without a flush";
  };
  EXPECT_THROW(write_much(), OutputLost);
}

TEST_F(StandardOutputTest, WhatWasHeldBackIsMissedAtTheEnd) {
  const FileDescriptor full = full_disk();
  StandardOutput output(stream_, full.get(), errors_);
  stream_ << "held back";
  EXPECT_EQ(output.finish(0), 1);
  EXPECT_THAT(errors_.str(), HasSubstr("tessera: standard output: No space left"));
}

TEST_F(StandardOutputTest, GoesOnAndTellsOnce) {
  const FileDescriptor full = full_disk();
  StandardOutput output(stream_, full.get(), errors_);
  output.keep_going("; it goes on");
  for (int i = 0; i < 5; ++i) stream_ << "text\n" << std::flush;
  EXPECT_TRUE(stream_.good());
  EXPECT_EQ(output.finish(0), 1);
  EXPECT_THAT(errors_.str(), HasSubstr("; it goes on\n"));
  EXPECT_EQ(count_lines(errors_.str()), 1);
}

TEST_F(StandardOutputTest, AReaderThatLeftIsNoFailure) {
  const FileDescriptor pipe = closed_pipe();
  {
    StandardOutput output(stream_, pipe.get(), errors_);
    try {
      stream_ << "text" << std::flush;
      FAIL() << "the loss was not noticed";
    } catch (const OutputLost& lost) {
      EXPECT_TRUE(lost.reader_left());
    }
  }
  StandardOutput output(stream_, pipe.get(), errors_);
  output.keep_going("");
  for (int i = 0; i < 5; ++i) stream_ << "text\n" << std::flush;
  EXPECT_EQ(output.finish(0), 0);
  EXPECT_THAT(errors_.str(), HasSubstr("nobody reads it"));
  EXPECT_EQ(count_lines(errors_.str()), 1);
}

TEST_F(StandardOutputTest, GivesTheStreamBack) {
  const FileDescriptor full = full_disk();
  {
    const StandardOutput output(stream_, full.get(), errors_);
    EXPECT_THROW(stream_ << "text" << std::flush, OutputLost);
  }
  stream_ << "text";
  EXPECT_EQ(stream_.str(), "text");
}

}  // namespace
}  // namespace tessera
