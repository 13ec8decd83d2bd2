#include "checkpoint/checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <map>

#include "checkpoint/layout.h"
#include "checkpoint/testing.h"
#include "core/error.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::ThrowsMessage;

class CheckpointTest : public FolderTest {
 protected:
  CheckpointTest() {
    model_.add("embed", DType::kF32, {11, 3});
    model_.add("layers.0.w", DType::kBF16, {5, 7});
    model_.add("layers.0.empty", DType::kF32, {0, 7});
    optimizer_.add("embed.m", DType::kF32, {11, 3});
    optimizer_.add("count", DType::kI64, {});
  }

  SaveResult save(int64_t step, int64_t keep_last = 0) const {
    return save_checkpoint(root_, {.step = step,
                                   .model = model_.named(),
                                   .optimizer = optimizer_.named(),
                                   .state = fmt::format("{{\"step\":{}}}", step),
                                   .keep_last = keep_last,
                                   .shard_bytes = 100});
  }

  void expect_loads(const fs::path& path) const {
    const CheckpointReader reader(path);
    for (const auto& [name, tensor] : model_.named()) {
      const OwnedTensor loaded(tensor.dtype, tensor.shape);
      reader.load_into(name, loaded);
      EXPECT_TRUE(same_bits(loaded, tensor)) << name;
    }
  }

  std::vector<std::string> root_names() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(root_))
      names.push_back(entry.path().filename());
    std::ranges::sort(names);
    return names;
  }

  /// Changes one byte of a file.
  static void flip(const fs::path& path, int64_t at) {
    std::string text = read_text_file(path);
    text[static_cast<size_t>(at)] = static_cast<char>(text[static_cast<size_t>(at)] ^ 1);
    write_file_synced(path, text);
  }

  const fs::path root_ = folder_ / "runs" / "checkpoints";
  RandomTensors model_{1};
  RandomTensors optimizer_{2};
};

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

class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t num_bytes) : handler_(::signal(SIGXFSZ, SIG_IGN)) {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limit{num_bytes, before_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    ::signal(SIGXFSZ, handler_);
  }

 private:
  rlimit before_{};
  sighandler_t handler_;
};

TEST_F(CheckpointTest, AFailedWriteAtAnySizeLeavesTheOthers) {
  save(1);
  // The largest file is the manifest; a limit below its size fails the save in one file or another.
  const auto largest =
      static_cast<rlim_t>(fs::file_size(root_ / "step-00000001" / "manifest.json"));
  for (rlim_t limit = 0; limit < largest; limit += 37) {
    const FileSizeLimit limited(limit);
    EXPECT_THAT([&] { save(2); },
                ThrowsMessage<UserError>(AllOf(HasSubstr("step 2 not saved"), HasSubstr("write"),
                                               HasSubstr("limit on the size"))));
    ASSERT_THAT(root_names(), ElementsAre("latest", "step-00000001"));
  }
  expect_loads(*find_latest(root_).path);
}

/// Mounts a file system of 1 MiB in a mount namespace of this process. False where that is not
/// allowed.
bool mount_small_disk(const fs::path& folder) {
  if (::unshare(CLONE_NEWNS) != 0 && ::unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) return false;
  if (::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0) return false;
  return ::mount("none", folder.c_str(), "tmpfs", 0, "size=1m") == 0;
}

constexpr int kNotAllowed = 77;

/// Runs in a process of its own: saves on a small disk until it is full. The exit code: 0 when the
/// message is right and the earlier checkpoint loads.
int fill_small_disk(const fs::path& root) {
  if (!mount_small_disk(root)) return kNotAllowed;
  RandomTensors tensors(1);
  tensors.add("w", DType::kU8, {600'000});
  save_checkpoint(root, {.step = 1, .model = tensors.named()});
  try {
    save_checkpoint(root, {.step = 2, .model = tensors.named()});
    return 2;
  } catch (const UserError& error) {
    const std::string message = error.what();
    if (message.find("disk or quota is full") == std::string::npos) return 3;
  }
  const OwnedTensor loaded(DType::kU8, {600'000});
  CheckpointReader(*find_latest(root).path).load_into("w", loaded);
  if (!same_bits(loaded, tensors.named()[0].tensor)) return 4;
  return list_prefixed(root, ".tmp").empty() ? 0 : 5;
}

TEST_F(CheckpointTest, AFullDiskLeavesTheOthers) {
  make_folder(root_);
  const pid_t child = ::fork();
  if (child == 0) ::_exit(fill_small_disk(root_));
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  if (WEXITSTATUS(status) == kNotAllowed) GTEST_SKIP() << "mounting is not allowed here";
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

/// Cuts `rectangle` at random until pieces are small, so that they cover it exactly.
void random_partition(Random& random, const Rectangle& rectangle, std::vector<Rectangle>& pieces) {
  const int rank = rectangle.shape.rank();
  const int dim = rank == 0 ? 0 : static_cast<int>(random.next_below(static_cast<uint64_t>(rank)));
  if (rank == 0 || rectangle.shape[dim] < 2 || random.next_below(5) == 0) {
    pieces.push_back(rectangle);
    return;
  }
  const auto cut =
      1 + static_cast<int64_t>(random.next_below(static_cast<uint64_t>(rectangle.shape[dim] - 1)));
  Rectangle first = rectangle;
  Rectangle second = rectangle;
  first.shape[dim] = cut;
  second.offset[dim] += cut;
  second.shape[dim] -= cut;
  random_partition(random, first, pieces);
  random_partition(random, second, pieces);
}

/// The elements of a part of a dense I32 tensor, by index arithmetic alone.
std::vector<int32_t> plain_part(const Tensor& tensor, const Rectangle& part) {
  std::vector<int32_t> elements;
  const auto all = tensor.span<int32_t>();
  for (int64_t i = 0; i < part.shape.num_elements(); ++i) {
    int64_t rest = i;
    int64_t at = 0;
    int64_t stride = 1;
    for (int dim = part.shape.rank() - 1; dim >= 0; --dim) {
      at += (part.offset[dim] + rest % part.shape[dim]) * stride;
      rest /= part.shape[dim];
      stride *= tensor.shape[dim];
    }
    elements.push_back(all[static_cast<size_t>(at)]);
  }
  return elements;
}

/// Writes a checkpoint of one tensor in pieces, spread over several files as several processes
/// would.
void write_in_pieces(const fs::path& path, const Tensor& tensor,
                     const std::vector<Rectangle>& pieces, Random& random) {
  Manifest manifest;
  TensorRecord record{TensorGroup::kModel, tensor.dtype, tensor.shape, {}};
  std::map<std::string, std::vector<NamedTensor>> files;
  std::vector<std::vector<int32_t>> storage;
  for (const Rectangle& piece : pieces) {
    const std::string file = fmt::format("model-{:05}.safetensors", random.next_below(3));
    const std::string key = fmt::format("w.{}", storage.size());
    storage.push_back(plain_part(tensor, piece));
    files[file].push_back({key, view(std::span(storage.back()), piece.shape)});
    record.pieces.push_back({file, key, piece});
  }
  make_folder(path);
  for (const auto& [file, tensors] : files) {
    const WrittenFile written = write_safetensors(path / file, tensors);
    manifest.files[file] = {written.num_bytes, written.checksum};
  }
  manifest.tensors["w"] = record;
  const std::string text = manifest_text(manifest);
  write_file_synced(path / "manifest.json", text);
  write_file_synced(path / "COMPLETE", complete_marker(text));
}

Shape random_shape(Random& random) {
  std::vector<int64_t> dims;
  for (uint64_t rank = random.next_below(5); rank > 0; --rank) {
    dims.push_back(static_cast<int64_t>(random.next_below(7)));
  }
  return Shape(dims);
}

TEST_F(CheckpointTest, LoadsAnyPartFromAnyPartition) {
  Random random(6, 0);
  for (int trial = 0; trial < 40; ++trial) {
    RandomTensors tensors(static_cast<uint64_t>(trial));
    tensors.add("w", DType::kI32, random_shape(random));
    const Tensor& tensor = tensors.named()[0].tensor;
    std::vector<Rectangle> pieces;
    random_partition(random, whole(tensor.shape), pieces);
    const fs::path path = root_ / fmt::format("partition-{}", trial);
    write_in_pieces(path, tensor, pieces, random);
    const CheckpointReader reader(path);
    const OwnedTensor all(DType::kI32, tensor.shape);
    reader.load_into("w", all);
    EXPECT_TRUE(same_bits(all, tensor));
    // Another partition, as another layout would read it.
    std::vector<Rectangle> wanted;
    random_partition(random, whole(tensor.shape), wanted);
    for (const Rectangle& part : wanted) {
      const OwnedTensor loaded(DType::kI32, part.shape);
      reader.load_part("w", part.offset, loaded);
      const auto found = loaded.get().span<int32_t>();
      EXPECT_EQ(std::vector<int32_t>(found.begin(), found.end()), plain_part(tensor, part));
    }
  }
}

}  // namespace
}  // namespace tessera
