#include "cli/tests/cli_testing.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

/// A run with the checkpoints of steps 5 and 10, which the tests damage.
class CliCheckpointError : public CliTest {
 protected:
  CliCheckpointError() { succeed(train("run", {"--run.checkpoint_interval=5"})); }

  std::filesystem::path file(const std::string& step, const std::string& name) const {
    return folder_ / "run" / "checkpoints" / step / name;
  }
  Arguments longer(const Arguments& options = {}) const {
    Arguments all = train("run", {"--train.steps=12"});
    all.insert(all.end(), options.begin(), options.end());
    return all;
  }
  void flip_last_byte(const std::filesystem::path& victim) const {
    std::string bytes = read_all(victim);
    bytes.back() = static_cast<char>(bytes.back() ^ 1);
    write_all(victim, bytes);
  }
};

/// Runs what must succeed with a note on standard error about the newest checkpoint.
Finished succeed_with_note(const Arguments& arguments) {
  Finished finished = run_tessera(arguments);
  EXPECT_EQ(finished.code, 0) << finished.err;
  EXPECT_THAT(finished.err, ::testing::StartsWith("tessera: note: "));
  EXPECT_THAT(finished.err, HasSubstr("step-00000005 is not the newest checkpoint"));
  EXPECT_EQ(std::ranges::count(finished.err, '\n'), 1) << finished.err;
  return finished;
}

TEST_F(CliCheckpointError, TruncatedFallsBackToTheOneBefore) {
  const auto victim = file("step-00000010", "optimizer-00000.safetensors");
  std::filesystem::resize_file(victim, std::filesystem::file_size(victim) - 1);
  const Finished finished = succeed_with_note(longer());
  EXPECT_THAT(finished.out, HasSubstr("continuing after step 5 of 12"));
  EXPECT_THAT(finished.out, HasSubstr(victim.string() + " is damaged"));
  EXPECT_THAT(finished.err, HasSubstr(victim.string() + " is damaged"));
  EXPECT_EQ(read_steps("run").size(), 12);
}

TEST_F(CliCheckpointError, AllDamagedIsNoReasonToStartAnew) {
  for (const std::string step : {"step-00000005", "step-00000010"}) {
    std::filesystem::resize_file(file(step, "model-00000.safetensors"), 100);
  }
  expect_refused(longer(), {path("run/checkpoints"), "damaged"});
  expect_refused(longer({"--run.resume=required"}), {"run.resume", path("run/checkpoints")});
  for (const char* command : {"generate", "eval"}) {
    expect_refused({command, path("run")}, {path("run"), "no complete checkpoint"});
    expect_refused({command, path("run/checkpoints/step-00000010")}, {"model-00000", "damaged"});
  }
}

/// One rule for all that read a checkpoint: of a folder the newest that is whole, with a note; one
/// that is named must be whole.
TEST_F(CliCheckpointError, DamagedBytesAreSteppedOverWithANoteOrRefusedByName) {
  const auto model = file("step-00000010", "model-00000.safetensors");
  flip_last_byte(model);
  const std::string named = path("run/checkpoints/step-00000010");
  const auto from = [this](const std::string& source, const std::string& name) {
    return train(path(name), {"--run.init_from=" + source, "--run.folder=" + path(name)});
  };
  int count = 0;
  for (const std::string& source : {path("run"), path("run/checkpoints"), named}) {
    const std::string target = path("target" + std::to_string(count++));
    for (const Arguments& arguments :
         {Arguments{"generate", source, "--max-tokens=2"}, Arguments{"eval", source},
          Arguments{"inspect", "--checkpoint", source}, Arguments{"convert", source, target},
          from(source, "started" + std::to_string(count))}) {
      SCOPED_TRACE(::testing::PrintToString(arguments));
      if (source == named) {
        if (arguments[0] == "train") continue;  // the shape is read before the weights
        expect_refused(arguments, {model.string(), "checksum"});
        continue;
      }
      const Finished finished = succeed_with_note(arguments);
      EXPECT_THAT(finished.err, HasSubstr(model.string() + " is damaged: its checksum"));
    }
  }
  expect_refused_after_tokens(from(named, "named"), {"run.init_from", model.string(), "checksum"});
}

/// The steps after the older checkpoint are done again, and end in the same bits; the damaged
/// checkpoint stays, out of the way of those that follow.
TEST_F(CliCheckpointError, ResumingSetsDamagedOnesAside) {
  std::filesystem::copy(path("run"), path("other"), std::filesystem::copy_options::recursive);
  std::filesystem::remove_all(path("other/checkpoints/step-00000010"));
  succeed(train("other", {"--train.steps=12"}));
  flip_last_byte(file("step-00000010", "optimizer-00000.safetensors"));
  const std::string damaged = read_all(file("step-00000010", "optimizer-00000.safetensors"));
  const Finished finished = succeed_with_note(longer({"--run.keep_last=1"}));
  EXPECT_THAT(finished.out, HasSubstr("continuing after step 5 of 12"));
  EXPECT_TRUE(read_all(file("damaged-step-00000010", "optimizer-00000.safetensors")) == damaged);
  EXPECT_THAT(checkpoints("run"), ::testing::ElementsAre("step-00000012"));
  EXPECT_TRUE(read_all(file("step-00000012", "model-00000.safetensors")) ==
              read_all(path("other/checkpoints/step-00000012/model-00000.safetensors")));
  EXPECT_EQ(succeed(longer({"--train.steps=13"})).err, "");
}

TEST_F(CliCheckpointError, DamagedManifest) {
  const std::string step = "step-00000010";
  flip_last_byte(file(step, "manifest.json"));
  expect_refused({"inspect", "--checkpoint", path("run/checkpoints/" + step)}, {"manifest.json"});
  EXPECT_THAT(succeed_with_note(longer()).out, HasSubstr("continuing after step 5 of 12"));
}

TEST_F(CliCheckpointError, HostileHeaderLength) {
  const auto model = file("step-00000010", "model-00000.safetensors");
  std::string bytes = read_all(model);
  bytes.replace(0, 8, "\xFF\xFF\xFF\xFF\xFF\xFF\xFF\x7F");
  write_all(model, bytes);
  expect_refused({"eval", path("run/checkpoints/step-00000010")}, {model.string()});
  const Finished finished = succeed_with_note(longer());
  EXPECT_THAT(finished.err, HasSubstr(model.string()));
  EXPECT_THAT(finished.out, HasSubstr("continuing after step 5 of 12"));
}

TEST_F(CliCheckpointError, OfAnotherShapeOrPrecision) {
  expect_refused(longer({"--model.hidden_size=32"}), {"step-00000010", "[320, 16]", "[320, 32]"});
  expect_refused(longer({"--model.num_layers=3"}), {"step-00000010", "layers.2."});
  expect_refused(longer({"--model.num_layers=1"}), {"step-00000010", "layers.1."});
  expect_refused(longer({"--train.precision=bf16"}), {"step-00000010", "bf16", "f32"});
  succeed(longer());
}

TEST_F(CliCheckpointError, NeverResumingDoesNotMixRuns) {
  expect_refused(longer({"--run.resume=never"}), {"run.resume", path("run/checkpoints")});
}

TEST_F(CliCheckpointError, MissingCheckpoint) {
  std::filesystem::create_directories(path("nothing"));
  for (const char* command : {"generate", "eval"}) {
    expect_refused({command, path("none")}, {path("none"), "does not exist"});
    expect_refused({command, path("nothing")}, {path("nothing"), "no complete checkpoint"});
    expect_refused({command, path("text.txt")}, {path("text.txt")});
  }
  expect_refused({"inspect", "--checkpoint", path("none")}, {path("none")});
  expect_refused({"inspect", "--report", path("none")}, {path("none")});
}

TEST_F(CliCheckpointError, FullDiskKeepsEarlierCheckpoints) {
  const auto before = snapshot(folder_ / "run" / "checkpoints");
  const auto size = std::filesystem::file_size(file("step-00000010", "model-00000.safetensors"));
  const auto limit = static_cast<int64_t>(size) - 1;
  ASSERT_GT(limit, 2 * static_cast<int64_t>(std::filesystem::file_size(path("run/metrics.jsonl"))));
  const Finished failed = run_tessera(longer({"--run.tensorboard=false"}), limit);
  expect_error(failed, {"checkpoint of step 12 not saved", "earlier checkpoints"});
  EXPECT_EQ(snapshot(folder_ / "run" / "checkpoints"), before);
  EXPECT_THAT(succeed(longer()).out, HasSubstr("continuing after step 10 of 12"));
}

TEST_F(CliCheckpointError, FullDiskWhileTokenizing) {
  const Finished failed = run_tessera(train("other"), 4000);
  expect_error(failed, {path("other/tokens")});
  EXPECT_EQ(snapshot(folder_ / "other" / "tokens").size(), 0) << "half a token file stayed";
  succeed(train("other"));
}

}  // namespace
}  // namespace tessera
