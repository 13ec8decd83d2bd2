#include <sys/stat.h>

#include <thread>

#include "cli/tests/cli_testing.h"
#include "core/file/hash.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

/// Runs that do not end by themselves, and whose folders others use, move and remove.
class CliRunFolder : public CliTest {
 protected:
  Arguments endless(const std::string& run, const Arguments& options = {}) const {
    Arguments all = steps(run, 100'000'000);
    all.insert(all.end(), options.begin(), options.end());
    return all;
  }
  Arguments steps(const std::string& run, int64_t count) const {
    return train(run, {"--optim.schedule=constant", "--train.validation_interval=0",
                       "--run.checkpoint_interval=0", "--train.steps=" + std::to_string(count)});
  }
  int64_t owner(const std::string& run) const {
    return Json::parse(read_all(path(run + "/run.lock")))["pid"].get<int64_t>();
  }
  /// Holds a process still, so that what it writes does not change.
  static void stop(ChildProcess& child, int64_t pid) {
    child.send(SIGSTOP);
    const std::string status = "/proc/" + std::to_string(pid) + "/status";
    while (read_all(status).find("State:\tT") == std::string::npos) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }
  int64_t last_step(const std::string& run) const {
    const auto names = checkpoints(run);
    return names.empty() ? -1 : std::atoll(names.back().substr(5).c_str());
  }
  void expect_each_step_once(const std::string& run, int64_t first, int64_t last) const {
    const auto records = read_steps(run);
    ASSERT_EQ(static_cast<int64_t>(records.size()), last - first + 1);
    for (size_t i = 0; i < records.size(); ++i) {
      EXPECT_EQ(records[i]["step"], first + static_cast<int64_t>(i));
    }
  }
};

TEST_F(CliRunFolder, ASecondRunIsRefusedByNameByAnyPath) {
  fs::create_symlink(path("run"), path("link"));
  ChildProcess first(endless("run", {"--run.checkpoint_interval=5"}));
  ASSERT_NE(first.read_line_with("saved "), "");
  const int64_t pid = owner("run");
  stop(first, pid);
  for (const std::string& name :
       {std::string("run"), std::string("link"), "../" + folder_.filename().string() + "/run"}) {
    expect_refused(steps(name, 10), {"in use by another run", "process " + std::to_string(pid),
                                     "since 2", "choose another run.folder"});
  }
  first.send(SIGCONT);
  first.send(SIGTERM);
  const Finished finished = first.wait();
  EXPECT_EQ(finished.code, 0) << finished.err;
  const int64_t step = last_step("run");
  EXPECT_THAT(succeed(steps("run", step + 3)).out,
              HasSubstr("continuing after step " + std::to_string(step)));
  expect_each_step_once("run", 1, step + 3);
  EXPECT_FALSE(fs::exists(path("run/run.lock")));
}

/// Relative paths of a run count from where it was started, and nothing is written elsewhere.
TEST_F(CliRunFolder, ARunIsUsedFromAnotherFolder) {
  fs::create_directories(path("work"));
  fs::create_directories(path("elsewhere"));
  fs::rename(path("text.txt"), path("work/text.txt"));
  const auto in = [&](const char* folder, const Arguments& arguments) {
    return ChildProcess(arguments, 0, {{"TEST_FOLDER", path(folder)}}).wait();
  };
  const Finished made =
      in("work", {"tokenize", "text.txt", "--train", "own.json", "--vocab-size", "300"});
  ASSERT_EQ(made.code, 0) << made.err;
  const Finished trained = in(
      "work",
      train("", {"--data.text=text.txt", "--data.tokenizer=own.json", "--run.folder=runs/first"}));
  ASSERT_EQ(trained.code, 0) << trained.err;
  for (const Arguments& arguments :
       {Arguments{"eval", "../work/runs/first"},
        Arguments{"eval", path("work/runs/first/checkpoints/step-00000010"), "--text",
                  path("work/text.txt")},
        Arguments{"generate", "../work/runs/first", "--prompt", "a", "--max-tokens", "2"}}) {
    const Finished used = in("elsewhere", arguments);
    EXPECT_EQ(used.code, 0) << used.err;
  }
  EXPECT_TRUE(fs::is_empty(path("elsewhere")));
  // Where it was started is not known of a copy; what is there to be evaluated can be named.
  fs::copy(path("work/runs/first"), path("elsewhere/copy"), fs::copy_options::recursive);
  expect_error(in("elsewhere", {"generate", "copy"}),
               {"its tokenizer (data.tokenizer) is own.json, which is not there"});
  fs::copy(path("work/own.json"), path("elsewhere/own.json"));
  expect_error(in("elsewhere", {"eval", "copy"}),
               {"text.txt does not exist", "evaluate in the folder that it was started in"});
  EXPECT_EQ(in("elsewhere", {"eval", "copy", "--text", "../work/text.txt"}).code, 0);
}

TEST_F(CliRunFolder, TheLockOfAKilledRunDoesNotBlock) {
  ChildProcess first(endless("run", {"--run.checkpoint_interval=5"}));
  ASSERT_NE(first.read_line_with("saved "), "");
  const int64_t pid = owner("run");
  first.send(SIGKILL);
  first.wait();
  ASSERT_TRUE(fs::exists(path("run/run.lock")));
  const int64_t step = last_step("run");
  // It may have been killed in its next save, which is then noted.
  const Finished next = run_tessera(steps("run", step + 3));
  EXPECT_EQ(next.code, 0) << next.err;
  EXPECT_THAT(next.out, AllOf(HasSubstr("took over the folder from process " + std::to_string(pid)),
                              HasSubstr("continuing after step " + std::to_string(step))));
}

TEST_F(CliRunFolder, ARunOnAnotherMachineIsBelievedWhileItIsFresh) {
  succeed(steps("run", 3));
  const Json record = {{"pid", 4711},          {"host", "node7"},
                       {"machine", "another"}, {"pid_namespace", "pid:[1]"},
                       {"process_start", "1"}, {"since", "2026-01-31 12:00:00 UTC"},
                       {"token", "run-1"}};
  write_all(path("run/run.lock"), record.dump());
  expect_refused(steps("run", 6), {"process 4711 on node7, since 2026-01-31 12:00:00 UTC",
                                   "last sign of life", "stop it there"});
  fs::last_write_time(path("run/run.lock"),
                      fs::file_time_type::clock::now() - std::chrono::minutes(2));
  EXPECT_THAT(succeed(steps("run", 6)).out,
              AllOf(HasSubstr("took over the folder from process 4711 on node7"),
                    HasSubstr("continuing after step 3 of 6")));
}

TEST_F(CliRunFolder, WhatARemovedFolderHeldIsSavedBesideIt) {
  ChildProcess child(endless("run"));
  ASSERT_NE(child.read_line_with("  7/"), "");
  fs::remove_all(path("run"));
  const Finished finished = child.wait();
  expect_error(finished, {path("run") + " was removed", "saved in " + path("run.rescued")});
  EXPECT_FALSE(fs::exists(path("run"))) << "created again without its history";
  const int64_t step = last_step("run.rescued");
  ASSERT_GE(step, 7);
  expect_each_step_once("run.rescued", 1, step);
  EXPECT_THAT(succeed(steps("run.rescued", step + 2)).out,
              AllOf(HasSubstr("continuing after step " + std::to_string(step)),
                    Not(HasSubstr("does not fit"))));
  expect_each_step_once("run.rescued", 1, step + 2);
}

TEST_F(CliRunFolder, AMovedFolderGetsWhatIsInMemory) {
  ChildProcess child(endless("run"));
  ASSERT_NE(child.read_line_with("  7/"), "");
  fs::rename(path("run"), path("moved"));
  expect_error(child.wait(), {path("run") + " was moved to " + path("moved")});
  EXPECT_FALSE(fs::exists(path("run")));
  const int64_t step = last_step("moved");
  ASSERT_GE(step, 7);
  expect_each_step_once("moved", 1, step);
  EXPECT_FALSE(fs::exists(path("moved/run.lock")));
}

TEST_F(CliRunFolder, NothingIsWrittenToAFolderThatTookItsPlace) {
  ChildProcess child(endless("run", {"--run.report=true"}));
  ASSERT_NE(child.read_line_with("  7/"), "");
  fs::remove_all(path("run"));
  fs::create_directories(path("run"));
  write_all(path("run/of another"), "x");
  expect_error(child.wait(), {path("run") + " was removed", "saved in " + path("run.rescued")});
  EXPECT_EQ(snapshot(path("run")).size(), 1);
  EXPECT_GE(last_step("run.rescued"), 7);
}

TEST_F(CliRunFolder, FilesThatOthersRemoveComeBack) {
  ChildProcess child(endless("run", {"--run.checkpoint_interval=5"}));
  ASSERT_NE(child.read_line_with("saved "), "");
  fs::remove(path("run/metrics.jsonl"));
  ASSERT_NE(child.read_line_with("metrics.jsonl was removed while the run went on"), "");
  write_all(path("other"), "of another program\n");
  fs::rename(path("other"), path("run/metrics.jsonl"));
  ASSERT_NE(child.read_line_with("metrics.jsonl was replaced"), "");
  fs::remove_all(path("run/tensorboard"));
  ASSERT_NE(child.read_line_with("tfevents"), "");
  fs::remove(path("run/run.lock"));
  ASSERT_NE(child.read_line_with("run.lock was removed"), "");
  const int64_t pid = owner("run");
  child.send(SIGTERM);
  EXPECT_EQ(child.wait().code, 0);
  EXPECT_GT(pid, 0);
  EXPECT_EQ(read_all(path("run/metrics.jsonl.1")), "of another program\n");
  expect_each_step_once("run", 1, last_step("run"));
}

TEST_F(CliRunFolder, RemovedCheckpointsAreWrittenAgainAtOnce) {
  succeed(steps("run", 3));
  ChildProcess child(endless("run"));
  ASSERT_NE(child.read_line_with("  7/"), "");
  fs::rename(path("run/checkpoints"), path("gone"));
  ASSERT_NE(child.read_line_with("checkpoints was removed"), "");
  ASSERT_NE(child.read_line_with("saved "), "");
  child.send(SIGKILL);
  child.wait();
  EXPECT_GE(last_step("run"), 7);
}

TEST_F(CliRunFolder, MetricsThatDoNotFitAreSetAside) {
  const std::string seen = "\"tokens_seen\":320";
  for (int kind = 0; kind < 3; ++kind) {
    const std::string run = "run" + std::to_string(kind);
    succeed(steps(run, 10));
    std::string bad = read_all(path(run + "/metrics.jsonl"));
    ASSERT_NE(bad.find(seen), std::string::npos);
    if (kind == 0) bad.insert(0, bad, bad.find('\n') + 1);  // as two runs in turns leave it
    if (kind == 1) bad.insert(bad.find('\n') + 1, "\xff no json\n");
    if (kind == 2) bad.replace(bad.find(seen), seen.size(), "\"tokens_seen\":640");
    write_all(path(run + "/metrics.jsonl"), bad);
    const std::string aside = path(run + "/metrics.jsonl.1");
    EXPECT_THAT(succeed(steps(run, 12)).out,
                AllOf(HasSubstr("does not fit the checkpoint"), HasSubstr("kept as " + aside),
                      HasSubstr("continuing after step 10 of 12")));
    EXPECT_EQ(read_all(aside), bad);
    EXPECT_THAT(succeed(steps(run, 14)).out, Not(HasSubstr("does not fit")));
    expect_each_step_once(run, 11, 14);
    succeed({"inspect", "--report", path(run)});
  }
}

TEST_F(CliRunFolder, TextThatChangedWithItsSizeAndTimeIsNoticed) {
  succeed(steps("run", 3));
  EXPECT_THAT(succeed(steps("run", 5)).out, Not(HasSubstr("the data has changed")));
  std::string text = read_all(path("text.txt"));
  const auto time = fs::last_write_time(path("text.txt"));
  std::reverse(text.begin(), text.end());
  write_all(path("text.txt"), text);
  fs::last_write_time(path("text.txt"), time);
  EXPECT_THAT(succeed(steps("run", 7)).out,
              AllOf(HasSubstr("the data has changed since the checkpoint was written"),
                    HasSubstr("continuing after step 5 of 7")));
  EXPECT_THAT(succeed(steps("run", 9)).out, Not(HasSubstr("the data has changed")));
}

TEST_F(CliRunFolder, FewerStepsThanDoneAreRefused) {
  succeed(steps("run", 5));
  expect_refused(steps("run", 4), {"after step 5", "train.steps is 4", "more than 5"});
  EXPECT_THAT(succeed(steps("run", 5)).out, HasSubstr("nothing to train: all 5 steps are done"));
}

TEST_F(CliRunFolder, ImpossibleNumbersOfACheckpointAreRefused) {
  succeed(steps("run", 5));
  const std::string folder = path("run/checkpoints/step-00000005");
  const std::string good = read_all(folder + "/manifest.json");
  const auto refuse = [&](const std::string& from, const std::string& to, const std::string& part) {
    std::string bad = good;
    ASSERT_NE(bad.find(from), std::string::npos) << from;
    bad.replace(bad.find(from), from.size(), to);
    write_all(folder + "/manifest.json", bad);
    write_all(folder + "/COMPLETE", fmt::format("manifest xxh64 {:016x}\n", hash64(bad)));
    expect_refused(steps("run", 8), {folder.substr(0, folder.rfind('/')), part});
    EXPECT_NE(run_tessera({"inspect", "--checkpoint", folder}).code, 1);
  };
  for (const std::string step : {"9223372036854775807", "-1", "6", "5.0", "1e30"}) {
    refuse("\"step\":5,\n\"files\"", "\"step\":" + step + ",\n\"files\"", "damaged");
  }
  for (const std::string number :
       {"9223372036854775807", "9223372036854775808", "-1", "160.5", "1e30", "null", "\"160\""}) {
    refuse("\"tokens_seen\":160", "\"tokens_seen\":" + number, "'tokens_seen'");
    refuse("\"skipped_steps\":0", "\"skipped_steps\":" + number, "'skipped_steps'");
  }
  refuse("\"tokens_seen\":160", "\"tokens_seen\":4", "has seen 4 tokens");
  refuse("\"skipped_steps\":0", "\"skipped_steps\":6", "skipped 6 steps");
  refuse("\"step\":5,\"tokens", "\"step\":4,\"tokens", "its state is of step 4");
}

}  // namespace
}  // namespace tessera
