#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/types.h>

#include <csignal>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/file/file.h"
#include "core/random.h"

namespace tessera {

using Arguments = std::vector<std::string>;
using Variables = std::map<std::string, std::string>;

/// What a process left: its exit code, or 128 + the signal that ended it.
struct Finished {
  int code = 0;
  std::string out;
  std::string err;
};

/// The program of this build in a process of its own. Its standard output is a pipe that holds few
/// lines, so that it cannot run far ahead of a test that reads line by line.
class ChildProcess {
 public:
  /// `file_limit`: the longest file that it may write, as if the disk were full; 0: no limit.
  /// `environment`: variables that it has beside this process's; TEST_FOLDER is where it runs,
  /// TEST_PROGRAM another program than this build's. `prepare` is called in the new process last of
  /// all, to set limits or other descriptors.
  explicit ChildProcess(const Arguments& arguments, int64_t file_limit = 0,
                        const Variables& environment = {},
                        const std::function<void()>& prepare = {});
  ~ChildProcess();
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  void send(int signal);
  pid_t id() const { return process_; }
  /// Leaves its standard output without a reader, as `| head` does.
  void stop_reading() { streams_[0].close(); }

  /// Reads standard output up to the first line not yet read that contains `text`, and gives it;
  /// "" where the process ends without one.
  std::string read_line_with(const std::string& text);

  /// Reads all that it still writes and waits for its end.
  Finished wait();

 private:
  struct Stream {
    int file = -1;
    std::string text = {};

    void close();
    void read();
  };

  [[noreturn]] static void execute(char** argv, int out, int err, int64_t file_limit,
                                   const std::function<void()>& prepare);
  /// Waits for output and takes it; false when both streams have ended. A process that is silent
  /// for minutes is killed.
  bool read_some();
  int reap();

  pid_t process_ = -1;
  Stream streams_[2];
  size_t next_line_ = 0;
};

Finished run_tessera(const Arguments& arguments, int64_t file_limit = 0);

std::string read_all(const std::filesystem::path& path);
void write_all(const std::filesystem::path& path, const std::string& text);

/// Sentences of real words, the same each time.
std::string make_prose(int num_words);

/// Every file below a folder with its content, so that a test can tell whether anything was written
/// or lost.
std::map<std::string, std::string> snapshot(const std::filesystem::path& folder);

/// A test with a folder of its own that holds `text.txt`.
class CliTest : public ::testing::Test {
 protected:
  CliTest();
  ~CliTest() override;

  std::string path(const std::string& name) const { return (folder_ / name).string(); }

  /// Trains a model that steps in about a millisecond on text.txt, into the folder `run`. Later
  /// options win.
  Arguments train(const std::string& run, const Arguments& options = {}) const;

  /// Runs what must succeed.
  Finished succeed(const Arguments& arguments) const;
  nlohmann::json succeed_json(const Arguments& arguments) const;

  /// Runs what must be refused: exit code 2, one line on standard error that contains all of
  /// `parts`, and no file of the test's folder changed.
  void expect_refused(const Arguments& arguments, const std::vector<std::string>& parts) const;

  /// The same for a mistake that shows only when the text has become tokens: these may stay.
  void expect_refused_after_tokens(const Arguments& arguments,
                                   const std::vector<std::string>& parts) const;

  static void expect_error(const Finished& finished, const std::vector<std::string>& parts);

  /// Names of the run's checkpoints, oldest first.
  std::vector<std::string> checkpoints(const std::string& run) const;

  /// The step records of a run's metrics.jsonl.
  std::vector<nlohmann::json> read_steps(const std::string& run) const;

  const std::filesystem::path folder_ =
      std::filesystem::path(::testing::TempDir()) / unique_name("cli_test-");

 private:
  std::string list_changes(const std::map<std::string, std::string>& before) const;
};

}  // namespace tessera
