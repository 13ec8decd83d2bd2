// What runs on a GPU keep where: predicted, chosen, in the host's memory.
#include <gtest/gtest.h>

#include <array>
#include <filesystem>
#include <map>
#include <string>

#include "core/file/file.h"
#include "ops/testing/gpu_test.h"
#include "train/memory/choose_policy.h"
#include "train/testing/layout_runs.h"
#include "train/testing/memory_check.h"
#include "train/testing/option_families.h"
#include "train/testing/tiny_run.h"

namespace tessera::testing {
namespace {

Settings on_gpu(Settings settings) {
  settings.run.device = DeviceChoice::kCuda;
  return settings;
}

class GpuMemory : public GpuTest {
 protected:
  const TemporaryFolder folder_;
};

/// State in the host's memory, and gradients that are released, in steps that are repeated.
TEST_F(GpuMemory, StreamedStateGivesTheSameBits) {
  for (const Precision precision : {Precision::kF32, Precision::kBF16}) {
    Settings settings = on_gpu(settings_of(option_families()[0]));
    settings.run.folder = folder_.file("run");
    settings.run.resume = ResumeMode::kNever;
    settings.data.tokens = folder_.file("tokens");
    settings.train.precision = precision;
    settings.train.steps = settings.schedule.num_steps = 6;
    settings.train.max_grad_norm = 0;
    settings.parallel.schedule = PipelineKind::kGpipe;
    write_tokens(settings);
    const auto kept = make_trainer(settings);
    settings.shard.state_on_host = true;
    const auto on_host = make_trainer(settings);
    settings.shard.release_gradients = true;
    const auto released = make_trainer(settings);
    for (int i = 0; i < 6; ++i) {
      const StepOutcome expected = kept->step();
      for (Trainer* trainer : {on_host.get(), released.get()}) {
        const StepOutcome found = trainer->step();
        EXPECT_EQ(found.loss, expected.loss) << "step " << i;
        EXPECT_NEAR(found.update.grad_norm, expected.update.grad_norm,
                    1e-12 * expected.update.grad_norm);
      }
    }
    expect_same_state(*kept, *on_host);
    expect_same_state(*kept, *released);
  }
}

/// What the host's threads update, beside what the GPU does: in every format that they keep, with
/// clipping, and released.
TEST_F(GpuMemory, HostUpdatesGiveTheSameBits) {
  const std::array formats = {
      StateFormats{}, StateFormats{.master = MasterKind::kRemainder},
      StateFormats{MomentKind::kBF16, MomentKind::kBF16, MasterKind::kNone},
      StateFormats{MomentKind::kFp8, MomentKind::kF16, MasterKind::kRemainder8}};
  for (const Precision precision : {Precision::kF32, Precision::kBF16}) {
    for (const StateFormats& kept_as : formats) {
      if (precision == Precision::kF32 && kept_as.master != MasterKind::kF32) continue;
      for (const bool releases : {false, true}) {
        Settings settings = on_gpu(settings_of(option_families()[0]));
        settings.run.folder = folder_.file("run");
        settings.run.resume = ResumeMode::kNever;
        settings.data.tokens = folder_.file("tokens");
        settings.train.precision = precision;
        settings.train.steps = settings.schedule.num_steps = 6;
        settings.train.max_grad_norm = releases ? 0 : 0.1;
        settings.parallel.schedule = PipelineKind::kGpipe;
        settings.optimizer.formats = kept_as;
        settings.shard.bucket_bytes = 1 << 14;
        settings.shard.release_gradients = releases;
        SCOPED_TRACE(fmt::format("{} {} {} {}", precision_name(precision),
                                 moment_name(kept_as.first_moment), master_suffix(kept_as.master),
                                 releases ? "released" : "kept"));
        write_tokens(settings);
        const auto on_device = make_trainer(settings);
        settings.shard.state_on_host = settings.shard.updates_on_host = true;
        const auto by_host = make_trainer(settings);
        for (int i = 0; i < 6; ++i) {
          const StepOutcome expected = on_device->step();
          const StepOutcome found = by_host->step();
          ASSERT_EQ(found.loss, expected.loss) << "step " << i;
          ASSERT_EQ(found.update.grad_norm, expected.update.grad_norm) << "step " << i;
        }
        expect_same_state(*on_device, *by_host);
      }
    }
  }
}

/// Overflows that the host's scale of losses causes leave all of it as it was.
TEST_F(GpuMemory, HostUpdatesLeaveOutStepsThatOverflow) {
  Settings settings = on_gpu(tiny_settings(folder_));
  settings.run.resume = ResumeMode::kNever;
  settings.train.precision = Precision::kFp16;
  settings.train.steps = settings.schedule.num_steps = 40;
  settings.precision.loss_scaling.initial = 0x1p36;
  settings.shard.bucket_bytes = 1 << 14;
  const auto on_device = make_trainer(settings);
  settings.shard.state_on_host = settings.shard.updates_on_host = true;
  const auto by_host = make_trainer(settings);
  int64_t num_skipped = 0;
  for (int i = 0; i < 20; ++i) {
    const StepOutcome expected = on_device->step();
    const StepOutcome found = by_host->step();
    ASSERT_EQ(found.loss, expected.loss) << "step " << i;
    ASSERT_EQ(found.skipped(), expected.skipped()) << "step " << i;
    num_skipped += found.skipped() ? 1 : 0;
  }
  EXPECT_GT(num_skipped, 0);
  EXPECT_LT(num_skipped, 20);
  expect_same_state(*on_device, *by_host);
}

/// The files of a checkpoint's tensors, by name.
std::map<std::string, std::string> files_of(const std::string& run, const char* step) {
  std::map<std::string, std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(checkpoint_folder(run) / step)) {
    if (entry.path().extension() == ".safetensors")
      files[entry.path().filename()] = read_text_file(entry.path());
  }
  return files;
}

/// Copies that take longer than a step's passes, beside steps that are repeated, and that change
/// what is copied.
TEST_F(GpuMemory, SavesBesideStepsAreOfTheirMoment) {
  for (const std::string home : {"device", "host", "updates"}) {
    Settings settings = on_gpu(tiny_settings(folder_));
    settings.model.hidden_size = 512;
    settings.model.moe.num_experts = 16;
    settings.model.moe.inner_size = 1024;
    settings.train.steps = settings.schedule.num_steps = 20;
    settings.run.checkpoint_interval = 1;
    settings.run.keep_last = 0;
    settings.shard.state_on_host = home != "device";
    settings.shard.updates_on_host = home == "updates";
    Settings own = settings;
    own.run.folder = folder_.file("beside-" + home);
    const auto beside = make_trainer(own);
    ASSERT_TRUE(beside->saves_in_background());
    const std::string beside_folder = own.run.folder;
    own.run.folder = folder_.file("waiting-" + home);
    own.run.background_save = false;
    const auto waiting = make_trainer(own);
    for (int i = 0; i < 3; ++i) EXPECT_EQ(beside->step().loss, waiting->step().loss);
    waiting->save("");
    const auto save = beside->begin_save("");
    for (int i = 0; i < 4; ++i) {
      EXPECT_EQ(beside->step().loss, waiting->step().loss);
      save->ready();
    }
    save->wait();
    EXPECT_GE(beside->copy_stall_seconds(), 0);
    const auto expected = files_of(own.run.folder, "step-00000003");
    EXPECT_GE(expected.size(), 2);
    EXPECT_TRUE(files_of(beside_folder, "step-00000003") == expected) << home;
    expect_same_state(*beside, *waiting);
  }
}

TEST_F(GpuMemory, MemoryIsPredictedWithinThreePercent) {
  for (const char* precision : {"f32", "bf16"}) {
    expect_memory_as_predicted({"--model.preset=laptop", "--model.vocab_size=512",
                                "--run.device=cuda",
                                fmt::format("--train.precision={}", precision)});
  }
  expect_memory_as_predicted({"--model.preset=laptop", "--model.vocab_size=512",
                              "--run.device=cuda", "--train.offload=all"});
  expect_memory_as_predicted({"--model.preset=laptop", "--model.vocab_size=512",
                              "--run.device=cuda", "--train.precision=bf16", "--lora.rank=16"});
}

/// What is chosen for a limit gives the bits of what stays, within the limit.
TEST_F(GpuMemory, MemoryLimitsGiveTheBitsOfWhatStays) {
  Settings settings = on_gpu(tiny_settings(folder_));
  settings.model.num_layers = 8;
  settings.data.sequence_length = 256;  // so that what layers keep is more than what graphs take
  settings.run.resume = ResumeMode::kNever;
  const auto kept = make_trainer(settings);
  settings.model.vocab_size = kept->settings().model.vocab_size;
  const auto bytes_of = [&](const std::vector<std::string>& recompute) {
    Settings own = settings;
    own.train.recompute = recompute;
    own.train.memory_limit = "1000TiB";
    const auto choice = plan_policy(own, 1, kept->backend(), batch_shape(own));
    return choice->stages.at(0).kept.bytes();
  };
  const int64_t limit = (bytes_of({}) + bytes_of({"all"})) / 2;
  ASSERT_LT(limit, bytes_of({}));
  settings.train.memory_limit = fmt::format("{}B", limit);
  const auto limited = make_trainer(settings);
  EXPECT_GT(limited->policy_choice()->entries.size(), 0);
  const MemoryPrediction& memory = limited->prediction();
  EXPECT_LE(memory.total() - memory.program, limit);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(limited->step().loss, kept->step().loss);
  expect_same_state(*limited, *kept);
}

/// The same without being asked, for a GPU that has no room for everything.
TEST_F(GpuMemory, WhatDoesNotFitTheGpuIsChosen) {
  Settings settings = on_gpu(tiny_settings(folder_));
  settings.model.num_layers = 8;
  settings.data.sequence_length = 256;
  settings.run.resume = ResumeMode::kNever;
  const auto kept = make_trainer(settings);
  EXPECT_FALSE(kept->policy_choice().has_value());
  const auto world = make_single_world();
  const auto make = [&](int64_t room, const std::vector<std::string>& recompute) {
    Settings own = settings;
    own.train.recompute = recompute;
    TrainingData data = open_training_data(own);
    auto trainer = std::make_unique<Trainer>(
        own, std::move(data), *world, [room](const Settings& chosen, World& host) {
          RankDevice device = choose_device(chosen, host);
          EXPECT_GT(device.memory, int64_t{1} << 33);
          if (room > 0) device.memory = device.backend.device().used_bytes() + room;
          return device;
        });
    trainer->resume("");
    return trainer;
  };
  const auto bytes_of = [](const Trainer& trainer) {
    return trainer.prediction().total() - trainer.prediction().program;
  };
  const int64_t least = bytes_of(*make(0, {"all"}));
  ASSERT_LT(least, bytes_of(*kept));
  const int64_t room = (least + bytes_of(*kept)) / 2;
  const auto chosen = make(room, {});
  ASSERT_TRUE(chosen->policy_choice().has_value());
  EXPECT_TRUE(chosen->policy_choice()->limit.is_of_device());
  EXPECT_LE(bytes_of(*chosen), room);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(chosen->step().loss, kept->step().loss);
  expect_same_state(*chosen, *kept);
}

}  // namespace
}  // namespace tessera::testing
