#include "checkpoint/checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>

#include "checkpoint/checkpoint_testing.h"
#include "checkpoint/layout.h"
#include "core/error.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::ThrowsMessage;

TEST_F(CheckpointTest, RoundTripIsBitwise) {
  const SaveResult result = save(120);
  EXPECT_THAT(result.warnings, IsEmpty());
  EXPECT_EQ(result.path, root_ / "step-00000120");
  EXPECT_THAT(root_names(), ElementsAre("latest", "step-00000120"));
  EXPECT_EQ(read_text_file(root_ / "latest"), "step-00000120\n");
  const FoundCheckpoint found = find_latest(root_);
  EXPECT_EQ(found.path, result.path);
  EXPECT_EQ(found.step, 120);
  EXPECT_THAT(found.ignored, IsEmpty());

  const CheckpointReader reader(*found.path);
  EXPECT_EQ(reader.step(), 120);
  EXPECT_EQ(reader.state(), "{\"step\":120}");
  EXPECT_THAT(reader.names(TensorGroup::kOptimizer), ElementsAre("count", "embed.m"));
  for (const auto group : {TensorGroup::kModel, TensorGroup::kOptimizer}) {
    const auto& saved = group == TensorGroup::kModel ? model_ : optimizer_;
    RandomTensors loaded(99);
    for (const auto& [name, tensor] : saved.named()) loaded.add(name, tensor.dtype, tensor.shape);
    reader.load_group(group, loaded.named());
    for (size_t i = 0; i < saved.named().size(); ++i) {
      EXPECT_TRUE(same_bits(loaded.named()[i].tensor, saved.named()[i].tensor));
    }
  }
}

TEST_F(CheckpointTest, SplitsIntoFilesOfTheShardSize) {
  const CheckpointReader reader(save(1).path);
  // 132 bytes are more than a shard; the two that follow fit together.
  EXPECT_TRUE(reader.manifest().files.contains("model-00000.safetensors"));
  EXPECT_EQ(reader.manifest().tensors.at("layers.0.w").pieces[0].file, "model-00001.safetensors");
  EXPECT_EQ(reader.manifest().tensors.at("layers.0.empty").pieces[0].file,
            "model-00001.safetensors");
  EXPECT_EQ(reader.manifest().files.size(), 4U);
}

TEST_F(CheckpointTest, ConvertsOnlyWhenAsked) {
  const CheckpointReader reader(save(1).path);
  const OwnedTensor narrow(DType::kBF16, {11, 3});
  EXPECT_THAT([&] { reader.load_into("embed", narrow); },
              ThrowsMessage<UserError>(HasSubstr("'embed' is f32, expected bf16")));
  reader.load_into("embed", narrow, Conversion::kFloats);
  const auto saved = model_.named()[0].tensor.span<float>();
  for (size_t i = 0; i < saved.size(); ++i) {
    EXPECT_EQ(narrow.get().span<Bf16>()[i].bits, Bf16(saved[i]).bits);
  }
  EXPECT_THROW(reader.load_into("embed", OwnedTensor(DType::kI32, {11, 3}), Conversion::kFloats),
               UserError);
}

TEST_F(CheckpointTest, NothingIsDroppedSilently) {
  const CheckpointReader reader(save(1).path);
  RandomTensors other(5);
  other.add("embed", DType::kF32, {11, 3});
  other.add("layers.1.w", DType::kBF16, {5, 7});
  EXPECT_THAT(
      [&] { reader.load_group(TensorGroup::kModel, other.named()); },
      ThrowsMessage<UserError>(AllOf(HasSubstr("missing in the checkpoint: layers.1.w"),
                                     HasSubstr("unknown here: layers.0.empty, layers.0.w"))));
  EXPECT_THAT(
      [&] {
        reader.load_into("embed", OwnedTensor(DType::kF32, {3, 11}));
      },
      ThrowsMessage<UserError>(HasSubstr("has shape [11, 3], expected [3, 11]")));
  EXPECT_THAT(
      [&] {
        reader.load_into("embad", OwnedTensor(DType::kF32, {11, 3}));
      },
      ThrowsMessage<UserError>(HasSubstr("did you mean 'embed'")));
  EXPECT_THROW(reader.load_part("embed", Shape{10, 0}, OwnedTensor(DType::kF32, {2, 3})),
               UserError);
}

TEST_F(CheckpointTest, FindsNothingWhereThereIsNothing) {
  EXPECT_FALSE(find_latest(root_).path);
  make_folder(root_);
  EXPECT_FALSE(find_latest(root_).path);
  EXPECT_THAT([&] { CheckpointReader(root_ / "step-00000001"); },
              ThrowsMessage<UserError>(HasSubstr("not a complete checkpoint")));
}

TEST_F(CheckpointTest, StepsBeyondEightDigitsAreNewest) {
  save(99'999'999);
  save(100'000'000);
  EXPECT_EQ(find_latest(root_).step, 100'000'000);
  EXPECT_EQ(parse_step_folder("step-100000000"), 100'000'000);
  for (const char* name : {"step-1", "step-", "step--0000001", "step-0000000x", "step-000000001",
                           "step-00000001x", "step-99999999999999999999", "xstep-00000001"}) {
    EXPECT_FALSE(parse_step_folder(name)) << name;
  }
}

TEST_F(CheckpointTest, AFolderWithAnotherStepsManifestIsPassedOver) {
  save(3);
  save(4);
  rename_path(root_ / "step-00000004", root_ / "step-00000009");
  const FoundCheckpoint found = find_latest(root_);
  EXPECT_EQ(found.step, 3);
  EXPECT_THAT(found.ignored, ElementsAre(HasSubstr("it is of step 4, its folder's name says 9")));
}

TEST_F(CheckpointTest, KeepsTheNewest) {
  for (int64_t step = 1; step <= 5; ++step) EXPECT_THAT(save(step, 2).warnings, IsEmpty());
  EXPECT_THAT(root_names(), ElementsAre("latest", "step-00000004", "step-00000005"));
  // An older step that is saved now stays, and what is not complete is no one's to remove.
  make_folder(root_ / "step-00000001");
  save(2, 2);
  EXPECT_THAT(root_names(),
              ElementsAre("latest", "step-00000001", "step-00000002", "step-00000005"));
}

TEST_F(CheckpointTest, SavingAStepAgainReplacesIt) {
  save(7);
  model_.add("more", DType::kF32, {2});
  save(7);
  EXPECT_THAT(root_names(), ElementsAre("latest", "step-00000007"));
  expect_loads(root_ / "step-00000007");
}

TEST_F(CheckpointTest, RemovesWhatKilledProcessesLeft) {
  make_folder(root_ / ".tmp-step-00000009-1-a");
  write_file_synced(root_ / ".tmp-step-00000009-1-a" / "model-00000.safetensors", "x");
  make_folder(root_ / ".trash-step-00000001-1-a");
  const FoundCheckpoint found = find_latest(root_);
  EXPECT_FALSE(found.path);
  EXPECT_THAT(found.ignored, ElementsAre(HasSubstr("unfinished save")));
  save(10);
  EXPECT_THAT(root_names(), ElementsAre("latest", "step-00000010"));
}

TEST_F(CheckpointTest, TwoProcessesMayNotSaveAtOnce) {
  save(1);
  const FolderLock lock(root_);
  EXPECT_THAT([&] { save(2); }, ThrowsMessage<UserError>(HasSubstr("another process is writing")));
  EXPECT_EQ(find_latest(root_).step, 1);
}

TEST_F(CheckpointTest, DamagedOnesAreIgnoredWithTheReason) {
  save(1);
  const auto expect_ignored = [&](const std::string& reason) {
    const FoundCheckpoint found = find_latest(root_);
    EXPECT_EQ(found.step, 1);
    EXPECT_THAT(found.ignored, ElementsAre(AllOf(HasSubstr("step-00000002"), HasSubstr(reason))));
  };
  const fs::path path = save(2).path;
  remove_path(path / "COMPLETE");
  expect_ignored("not a complete checkpoint");
  flip(save(2).path / "manifest.json", 50);
  expect_ignored("manifest.json has not the hash");
  flip(save(2).path / "COMPLETE", 20);
  expect_ignored("manifest.json has not the hash");
  save(2);
  fs::resize_file(path / "model-00000.safetensors", 40);
  expect_ignored("40 bytes long, its manifest says");
  save(2);
  remove_path(path / "optimizer-00000.safetensors");
  expect_ignored("optimizer-00000.safetensors cannot be read");
  save(2);
  remove_path(path / "manifest.json");
  expect_ignored("manifest.json: No such file");
}

TEST_F(CheckpointTest, ChecksumsFindAChangedElement) {
  const fs::path path = save(1).path;
  const fs::path file = path / "model-00000.safetensors";
  flip(file, static_cast<int64_t>(fs::file_size(file)) - 1);
  EXPECT_THAT([&] { CheckpointReader{path}; },
              ThrowsMessage<UserError>(AllOf(HasSubstr("model-00000"), HasSubstr("checksum"))));
  EXPECT_NO_THROW(CheckpointReader(path, Verify::kSizes));
}

TEST_F(CheckpointTest, TheNewestOfWhichAllBytesAreRightIsOpened) {
  save(1);
  save(2);
  const fs::path damaged = save(3).path;
  const fs::path file = damaged / "model-00000.safetensors";
  flip(file, static_cast<int64_t>(fs::file_size(file)) - 1);
  make_folder(root_ / ".tmp-step-00000002-1-a");  // of a save that was done again
  make_folder(root_ / ".tmp-step-00000004-1-a");
  const auto world = make_single_communicator("a test");
  const LatestCheckpoint latest = open_latest(root_, *world);
  ASSERT_TRUE(latest.reader);
  EXPECT_EQ(latest.reader->step(), 2);
  EXPECT_THAT(latest.damaged, ElementsAre(damaged));
  EXPECT_THAT(latest.ignored,
              ElementsAre(AllOf(HasSubstr("step-00000003"), HasSubstr("checksum")),
                          AllOf(HasSubstr("step-00000004"), HasSubstr("unfinished save"))));
  EXPECT_EQ(open_latest(root_, *world, Verify::kSizes).reader->step(), 3);
  EXPECT_FALSE(open_latest(root_ / "none", *world).reader);
}

TEST_F(CheckpointTest, WhatIsSetAsideIsNeitherFoundNorRemoved) {
  save(1);
  EXPECT_EQ(set_aside(save(2).path), root_ / "damaged-step-00000002");
  EXPECT_EQ(set_aside(save(2).path), root_ / "damaged-step-00000002-2");
  EXPECT_EQ(find_latest(root_).step, 1);
  save(3, /*keep_last=*/1);
  EXPECT_THAT(root_names(), ElementsAre("damaged-step-00000002", "damaged-step-00000002-2",
                                        "latest", "step-00000003"));
}

TEST_F(CheckpointTest, ReadingCountsWhatIsNotFinite) {
  std::vector<float> values(33, 1.0F);
  values[4] = std::numeric_limits<float>::infinity();
  values[9] = std::numeric_limits<float>::quiet_NaN();
  const NamedTensor bad{"bad", view(std::span(values), {11, 3})};
  const fs::path path = save_checkpoint(root_, {.step = 1, .model = std::span(&bad, 1)}).path;
  const CheckpointReader reader(path);
  const OwnedTensor loaded(DType::kF32, {11, 3});
  EXPECT_TRUE(reader.nonfinite().empty());
  reader.load_into("bad", loaded);
  EXPECT_THAT(reader.nonfinite().describe(), HasSubstr("'bad' has 2 elements"));
}

/// Changes the manifest of a checkpoint and marks it complete again: what only a faulty or hostile
/// writer makes.
void edit_manifest(const fs::path& path, const std::function<void(Manifest&)>& edit) {
  Manifest manifest = parse_manifest(read_text_file(path / "manifest.json"), "m");
  edit(manifest);
  const std::string text = manifest_text(manifest);
  write_file_synced(path / "manifest.json", text);
  write_file_synced(path / "COMPLETE", complete_marker(text));
}

TEST_F(CheckpointTest, FilesMustHoldWhatTheManifestSays) {
  const auto expect_refused = [&](const std::string& message, auto edit) {
    const fs::path path = save(1).path;
    edit_manifest(path, edit);
    EXPECT_THAT([&] { CheckpointReader{path}; }, ThrowsMessage<UserError>(HasSubstr(message)));
  };
  expect_refused("'embed' is f32 [11, 3], the manifest says i32 [11, 3]",
                 [](Manifest& m) { m.tensors["embed"].dtype = DType::kI32; });
  expect_refused("the manifest says f32 [3, 11]", [](Manifest& m) {
    m.tensors["embed"].shape = Shape{3, 11};
    m.tensors["embed"].pieces[0].rectangle = whole(Shape{3, 11});
  });
  expect_refused("no tensor 'other'",
                 [](Manifest& m) { m.tensors["embed"].pieces[0].key = "other"; });
  expect_refused("tensor 'embed' is not in the manifest",
                 [](Manifest& m) { m.tensors.erase("embed"); });
}

TEST_F(CheckpointTest, AReaderOutlivesTheRemovalOfItsFolder) {
  const CheckpointReader reader(save(1).path);
  save(2, 1);
  EXPECT_FALSE(fs::exists(root_ / "step-00000001"));
  const OwnedTensor loaded(DType::kF32, {11, 3});
  reader.load_into("embed", loaded);
  EXPECT_TRUE(same_bits(loaded, model_.named()[0].tensor));
}

}  // namespace
}  // namespace tessera
