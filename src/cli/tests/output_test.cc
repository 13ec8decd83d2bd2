#include <fcntl.h>
#include <unistd.h>

#include "cli/tests/cli_testing.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr int kEndedByClosedPipe = 128 + SIGPIPE;

void fill_disk() {
  ::dup2(::open("/dev/full", O_WRONLY), STDOUT_FILENO);
}
void close_output() {
  ::close(STDOUT_FILENO);
}

/// Standard output on a full disk, closed, or without a reader.
class CliOutput : public CliTest {
 protected:
  void SetUp() override { succeed(train("run")); }

  static Finished run_with(const Arguments& arguments, const std::function<void()>& prepare) {
    return ChildProcess(arguments, 0, {}, prepare).wait();
  }

  std::vector<Arguments> commands() const {
    return {
        {"--help"},
        {"--version"},
        {"generate", "--help"},
        {"train", "--print-config"},
        {"generate", path("run"), "--max-tokens", "3"},
        {"generate", path("run"), "--max-tokens", "3", "--json"},
        {"eval", path("run")},
        {"inspect", "--presets"},
        {"inspect", "--checkpoint", path("run")},
        {"inspect", "--report", path("run")},
        {"doctor"},
        {"bench", "--layer=moe", "--model.preset=tiny", "--data.sequence_length=16", "--steps=1"},
        {"verify", "--model.preset=tiny", "--steps=1"},
        {"tokenize", path("text.txt"), "--tokenizer=byte", "-o", path("tokens")},
        {"tokenize", path("text.txt"), "--train", path("bpe.json"), "--vocab-size=300"},
        {"convert", path("run"), path("hf")}};
  }
};

TEST_F(CliOutput, AFullDiskFailsEveryCommand) {
  for (const Arguments& arguments : commands()) {
    SCOPED_TRACE(::testing::PrintToString(arguments));
    const Finished finished = run_with(arguments, fill_disk);
    EXPECT_EQ(finished.code, 1);
    EXPECT_THAT(finished.err, StartsWith("tessera: standard output: No space left on device"));
    EXPECT_EQ(std::ranges::count(finished.err, '\n'), 1) << finished.err;
  }
}

TEST_F(CliOutput, WhatIsClosedFailsAndNoFileTakesItsPlace) {
  for (const Arguments& arguments :
       {Arguments{"--help"}, Arguments{"generate", path("run"), "--max-tokens", "3"},
        Arguments{"tokenize", path("text.txt"), "--tokenizer=byte", "-o", path("tokens")}}) {
    const Finished finished = run_with(arguments, close_output);
    EXPECT_EQ(finished.code, 1);
    EXPECT_THAT(finished.err, StartsWith("tessera: standard output is closed"));
  }
  const auto all_closed = [] {
    for (const int descriptor : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) ::close(descriptor);
  };
  EXPECT_EQ(run_with(train("closed"), all_closed).code, 1);
  EXPECT_EQ(read_steps("closed").size(), 10);
  EXPECT_EQ(run_with({"eval", path("closed"), "--text", path("none")}, all_closed).code, 2);
}

TEST_F(CliOutput, TrainingGoesOnWithAFullDiskBehindItsOutput) {
  const Finished finished = run_with(train("full"), fill_disk);
  EXPECT_EQ(finished.code, 1);
  EXPECT_THAT(finished.err, StartsWith("tessera: standard output: No space left on device"));
  EXPECT_THAT(finished.err, HasSubstr("; training goes on"));
  EXPECT_EQ(std::ranges::count(finished.err, '\n'), 1) << finished.err;
  EXPECT_EQ(checkpoints("full"), checkpoints("run"));
  EXPECT_EQ(read_steps("full").size(), 10);
}

TEST_F(CliOutput, TrainingGoesOnWithoutAReader) {
  ChildProcess process(train("head", {"--train.steps=200"}));
  process.read_line_with("1/200");
  process.stop_reading();
  const Finished finished = process.wait();
  EXPECT_EQ(finished.code, 0);
  EXPECT_THAT(finished.err, HasSubstr("nobody reads it any more; training goes on"));
  EXPECT_EQ(std::ranges::count(finished.err, '\n'), 1) << finished.err;
  EXPECT_THAT(checkpoints("head"), ::testing::Contains("step-00000200"));
}

TEST_F(CliOutput, OtherCommandsEndQuietlyWithoutAReader) {
  const auto leave = [](const Arguments& arguments, const std::function<void()>& prepare) {
    ChildProcess process(arguments, 0, {}, prepare);
    process.stop_reading();
    return process.wait();
  };
  for (const Arguments& arguments :
       {Arguments{"train", "--help"}, Arguments{"generate", path("run"), "--max-tokens", "300"},
        Arguments{"convert", path("run"), path("hf")}}) {
    const Finished finished = leave(arguments, {});
    EXPECT_EQ(finished.code, kEndedByClosedPipe);
    EXPECT_EQ(finished.err, "");
  }
  const Finished told = leave({"train", "--help"}, [] { std::signal(SIGPIPE, SIG_IGN); });
  EXPECT_EQ(told.code, 1);
  EXPECT_THAT(told.err, StartsWith("tessera: standard output: Broken pipe"));
}

TEST_F(CliOutput, FilesThatCannotBeWrittenAreRefusedBeforeTheWork) {
  const Arguments bench = {"bench", "--model.preset=tiny", "--model.vocab_size=64"};
  // A search of hours, were it begun.
  const Arguments plan = {"plan", "--hardware=h100-ib", "--gpus=256", "--model.preset=deepseek-v3",
                          "--model.vocab_size=64"};
  const Arguments step = {"inspect", "--model.preset=tiny"};
  const Arguments tokenize = {"tokenize", path("text.txt"), "--vocab-size=300"};
  const std::vector<std::pair<Arguments, std::string>> cases = {
      {bench, "--calibrate"}, {bench, "--trace"},       {plan, "--write"},
      {plan, "--html"},       {plan, "--trace"},        {step, "--step-html"},
      {tokenize, "--train"},  {train("new"), "--trace"}};
  for (const auto& [command, option] : cases) {
    for (const auto& [where, why] : {std::pair(folder_.string(), "it is a folder"),
                                     std::pair(path("none/file"), "there is no folder")}) {
      Arguments all = command;
      all.push_back(fmt::format("{}={}", option, where));
      expect_refused(all, {fmt::format("{}: cannot write {}", option, where), why});
    }
  }
  expect_refused({"eval", path("none"), "--input-ids=ids", "--logits=" + path("none/logits")},
                 {"--logits: cannot write"});
  Arguments chakra = plan;
  chakra.push_back("--chakra=" + path("none/step"));
  expect_refused(chakra, {"--chakra: cannot write", "there is no folder"});
  Arguments both = tokenize;
  both.insert(both.end(),
              {"--train=" + path("learned.json"), "--output=" + path("text.txt/tokens")});
  expect_refused(both, {"text.txt"});
}

TEST_F(CliOutput, FilesOnAFullDiskAreNamed) {
  const Finished trace = run_tessera(train("traced", {"--trace=/dev/full"}));
  EXPECT_EQ(trace.code, 2);
  EXPECT_THAT(trace.err, HasSubstr("/dev/full: No space left on device"));
  const Finished logits = run_tessera({"bench", "--model.preset=tiny", "--data.sequence_length=16",
                                       "--model.vocab_size=64", "--steps=1", "--trace=/dev/full"});
  EXPECT_EQ(logits.code, 2);
  EXPECT_THAT(logits.err, HasSubstr("/dev/full: No space left on device"));
}

}  // namespace
}  // namespace tessera
