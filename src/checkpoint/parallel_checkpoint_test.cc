#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>

#include <functional>

#include "checkpoint/checkpoint.h"
#include "checkpoint/files.h"
#include "checkpoint/layout.h"
#include "checkpoint/slicing_testing.h"
#include "comm/thread/thread_world.h"
#include "core/error.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

/// Global tensors of a model and its optimizer, which any number of ranks saves and loads.
class ParallelCheckpoint : public FolderTest {
 protected:
  ParallelCheckpoint() {
    model_.add("embedding", DType::kF32, {37, 12});
    model_.add("norm", DType::kF32, {29});
    model_.add("attention", DType::kBF16, {48, 17});
    model_.add("experts", DType::kBF16, {64, 9});
    model_.add("bias", DType::kF32, {1});
    model_.add("column", DType::kF32, {5, 1});
    model_.add("empty", DType::kF32, {0, 6});
    for (const auto& [name, tensor] : model_.named()) {
      optimizer_.add(name + ".m", DType::kF32, tensor.shape);
    }
  }

  Slicing slicing(int64_t num_ranks, uint64_t seed) const {
    std::vector<NamedTensor> all = model_.named();
    all.insert(all.end(), optimizer_.named().begin(), optimizer_.named().end());
    return {num_ranks, all, seed};
  }

  /// One rank's part of a save.
  SaveResult save(Communicator& world, const Slicing& slicing, int64_t step) const {
    const LocalSlices model(select(slicing.owned(world.rank()), model_.named()), model_.named());
    const LocalSlices optimizer(select(slicing.owned(world.rank()), optimizer_.named()),
                                optimizer_.named());
    model.fill();
    optimizer.fill();
    return save_checkpoint(root_,
                           {.step = step,
                            .model = model.named(),
                            .optimizer = optimizer.named(),
                            .state = fmt::format("{{\"step\":{}}}", step),
                            .shard_bytes = 900},
                           world);
  }
  void save_by_all(const Slicing& slicing, int64_t step) const {
    run_thread_world(slicing.num_ranks(), [&](World& world) {
      const SaveResult result = save(*world.make_world_group(), slicing, step);
      EXPECT_EQ(result.path, root_ / step_folder_name(step));
      EXPECT_THAT(result.warnings, IsEmpty());
    });
  }

  /// One rank's part of a load: weights as it holds them, of the optimizer what it owns.
  void expect_loads(Communicator& world, const Slicing& slicing, const fs::path& folder) const {
    const CheckpointReader reader(folder, world);
    EXPECT_EQ(step_folder_name(reader.step()), folder.filename());
    const LocalSlices model(select(slicing.held(world.rank()), model_.named()), model_.named());
    const LocalSlices optimizer(select(slicing.owned(world.rank()), optimizer_.named()),
                                optimizer_.named());
    reader.load_group(TensorGroup::kModel, model.named(), list_global(model_.named()));
    reader.load_group(TensorGroup::kOptimizer, optimizer.named(), list_global(optimizer_.named()));
    model.expect_filled();
    optimizer.expect_filled();
  }
  void expect_all_load(const Slicing& slicing, const fs::path& folder) const {
    run_thread_world(slicing.num_ranks(), [&](World& world) {
      expect_loads(*world.make_world_group(), slicing, folder);
    });
  }

  std::vector<std::string> root_names() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(root_)) {
      names.push_back(entry.path().filename());
    }
    std::ranges::sort(names);
    return names;
  }

  const fs::path root_ = folder_ / "checkpoints";
  RandomTensors model_{1};
  RandomTensors optimizer_{2};
};

/// The error of each rank, "" where there was none. No rank may wait for ever.
std::vector<std::string> errors_of(int64_t num_ranks,
                                   const std::function<void(Communicator&)>& action) {
  std::vector<std::string> errors(num_ranks);
  run_thread_world(num_ranks,
                   [&](World& world) {
                     const CommunicatorPtr all = world.make_world_group();
                     try {
                       action(*all);
                     } catch (const std::exception& error) {
                       errors[world.rank()] = error.what();
                     }
                     all->barrier();  // the ranks are still in step
                   },
                   {.timeout_seconds = 60});
  EXPECT_THAT(errors, Each(errors[0])) << "all ranks say the same";
  return errors;
}

TEST_F(ParallelCheckpoint, AnySlicingLoadsAnyOther) {
  std::vector<Slicing> slicings;
  for (const int64_t num_ranks : {1, 2, 3, 4, 5, 6, 7, 8, 2, 4, 6, 8, 8}) {
    slicings.push_back(slicing(num_ranks, slicings.size()));
  }
  for (size_t i = 0; i < slicings.size(); ++i) save_by_all(slicings[i], static_cast<int64_t>(i));
  for (size_t saved = 0; saved < slicings.size(); ++saved) {
    for (size_t loaded = 0; loaded < slicings.size(); ++loaded) {
      SCOPED_TRACE(fmt::format("saved by slicing {}, loaded by {}", saved, loaded));
      expect_all_load(slicings[loaded], root_ / step_folder_name(static_cast<int64_t>(saved)));
    }
  }
}

TEST_F(ParallelCheckpoint, OneProcessLoadsWhatManySavedAndTheOtherWayRound) {
  save_by_all(slicing(5, 3), 1);
  const CheckpointReader reader(root_ / step_folder_name(1));
  for (const auto& [name, tensor] : model_.named()) {
    const OwnedTensor loaded(tensor.dtype, tensor.shape);
    reader.load_into(name, loaded);
    EXPECT_TRUE(same_bits(loaded, tensor)) << name;
  }
  const SaveResult alone =
      save_checkpoint(root_, {.step = 2, .model = model_.named(), .optimizer = optimizer_.named()});
  expect_all_load(slicing(6, 4), alone.path);
}

TEST_F(ParallelCheckpoint, OneRankWritesTheBytesOfOneProcess) {
  RandomTensors tensors(1);
  tensors.add("vector", DType::kF32, {29});
  tensors.add("matrix", DType::kBF16, {48, 17});
  std::vector<NamedSlice> slices;
  for (const auto& [name, tensor] : tensors.named()) {
    slices.push_back({name, tensor, Slice::whole(tensor.shape)});
  }
  const CommunicatorPtr single = make_single_communicator("world");
  const fs::path alone =
      save_checkpoint(folder_ / "alone", {.step = 1, .model = tensors.named()}).path;
  const fs::path sliced = save_checkpoint(root_, {.step = 1, .model = slices}, *single).path;
  for (const auto& entry : fs::directory_iterator(alone)) {
    const std::string name = entry.path().filename();
    EXPECT_TRUE(read_text_file(entry.path()) == read_text_file(sliced / name)) << name;
  }
}

TEST_F(ParallelCheckpoint, FileNamesCarryTheRankAndKeysTheRange) {
  run_thread_world(2, [&](World& world) {
    const Slice slice = Slice::of_rows({37, 12}, {{20 * world.rank(), 20 - 3 * world.rank()}});
    const LocalSlices local({{"embedding", slice}}, model_.named());
    save_checkpoint(root_, {.step = 1, .model = local.named()}, *world.make_world_group());
  });
  const CheckpointReader reader(root_ / step_folder_name(1));
  const auto& pieces = reader.manifest().tensors.at("embedding").pieces;
  ASSERT_EQ(pieces.size(), 2U);
  EXPECT_EQ(pieces[0].file, "model-r00000-00000.safetensors");
  EXPECT_EQ(pieces[0].key, "embedding[0:20, 0:12]");
  EXPECT_EQ(pieces[1].file, "model-r00001-00000.safetensors");
  EXPECT_EQ(pieces[1].key, "embedding[20:37, 0:12]");
}

TEST_F(ParallelCheckpoint, KeepsTheNewestAndReplacesAStep) {
  for (const int64_t step : {1, 2, 3, 3}) {
    run_thread_world(3, [&](World& world) {
      const LocalSlices local(world.rank() == 1
                                  ? std::vector<Slicing::Item>{{"norm", Slice::whole({29})}}
                                  : std::vector<Slicing::Item>{},
                              model_.named());
      save_checkpoint(root_, {.step = step, .model = local.named(), .keep_last = 2},
                      *world.make_world_group());
    });
  }
  EXPECT_THAT(root_names(), ElementsAre("latest", "step-00000002", "step-00000003"));
}

/// What is wrong with a save by three ranks, of which each gives what `items` says.
class FaultySave : public ParallelCheckpoint {
 protected:
  using Items = std::vector<Slicing::Item>;

  void SetUp() override { save_by_all(slicing(3, 1), 1); }
  void TearDown() override {
    EXPECT_THAT(root_names(), ElementsAre("latest", "step-00000001")) << "nothing left behind";
    expect_all_load(slicing(2, 2), root_ / step_folder_name(1));
  }

  std::string error_of(const std::function<Items(int64_t rank)>& items) const {
    return errors_of(3, [&](Communicator& world) {
      const LocalSlices local(items(world.rank()), model_.named());
      local.fill();
      save_checkpoint(root_, {.step = 2, .model = local.named()}, world);
    })[0];
  }
};

TEST_F(FaultySave, AMissingPieceIsNamed) {
  const std::string error = error_of([](int64_t rank) {
    return Items{{"embedding", Slice::of_rows({37, 12}, {{12 * rank, 12}})}};
  });
  EXPECT_THAT(error, AllOf(HasSubstr("tensor 'embedding' [37, 12]"), HasSubstr("432 of 444"),
                           HasSubstr("no rank gives element [36, 0]")));
}

TEST_F(FaultySave, OverlappingPiecesAreNamed) {
  const std::string error = error_of([](int64_t rank) {
    return Items{{"norm", Slice::of_rows({29}, {{10 * rank, rank == 0 ? 11 : 29 - 10 * rank}})}};
  });
  EXPECT_THAT(error, AllOf(HasSubstr("'norm'"), HasSubstr("overlap"),
                           HasSubstr("[0] of shape [11] in model-r00000-00000.safetensors"),
                           HasSubstr("model-r00001-00000.safetensors")));
}

TEST_F(FaultySave, ATensorThatNoRankGivesIsMissing) {
  EXPECT_THAT(error_of([](int64_t) {
                return Items{{"norm", Slice::of_rows({29}, {})}};
              }),
              HasSubstr("0 of 29"));
}

TEST_F(FaultySave, RanksThatDisagreeAreNamed) {
  std::vector<std::string> errors = errors_of(3, [&](Communicator& world) {
    const auto dtype = world.rank() == 2 ? DType::kBF16 : DType::kF32;
    const OwnedTensor tensor(dtype, {1});
    const std::vector<NamedSlice> own = {{"w", tensor, Slice::of_rows({3}, {{world.rank(), 1}})}};
    save_checkpoint(root_, {.step = 2, .model = own}, world);
  });
  EXPECT_THAT(errors[0], AllOf(HasSubstr("'w' is model bf16 [3] on rank 2"),
                               HasSubstr("model f32 [3] on one before it")));
  errors = errors_of(3, [&](Communicator& world) {
    save_checkpoint(root_, SliceSaveRequest{.step = 2 + world.rank()}, world);
  });
  EXPECT_THAT(errors[0], HasSubstr("rank 1 saves step 3, rank 0 step 2"));
}

TEST_F(FaultySave, ARankThatThrowsEndsTheSaveOnAll) {
  for (int64_t bad = 0; bad < 3; ++bad) {
    const std::string expected = fmt::format("rank {}: tensor 'norm' has no data", bad);
    const auto errors = errors_of(3, [&](Communicator& world) {
      const bool is_bad = world.rank() == bad;
      const Slice slice = Slice::of_rows({29}, {{0, is_bad ? 29 : 0}});
      const std::vector<NamedSlice> own = {{"norm", {nullptr, DType::kF32, slice.shape()}, slice}};
      save_checkpoint(root_, {.step = 2, .model = own}, world);
    });
    EXPECT_THAT(errors[0], HasSubstr(expected));
  }
}

TEST_F(FaultySave, AFullDiskOfOneRankEndsTheSaveOnAll) {
  rlimit before{};
  ::getrlimit(RLIMIT_FSIZE, &before);
  const auto handler = ::signal(SIGXFSZ, SIG_IGN);
  const rlimit limit{20'000, before.rlim_max};
  ::setrlimit(RLIMIT_FSIZE, &limit);
  RandomTensors large(1);
  large.add("large", DType::kU8, {3 * 19'000});
  const auto errors = errors_of(3, [&](Communicator& world) {
    // 21000 bytes on rank 1, less on the others.
    const std::vector<IndexRange> rows = {{0, 18'000}, {18'000, 21'000}, {39'000, 18'000}};
    const LocalSlices local({{"large", Slice::of_rows({57'000}, {rows[world.rank()]})}},
                            large.named());
    save_checkpoint(root_, {.step = 2, .model = local.named()}, world);
  });
  ::setrlimit(RLIMIT_FSIZE, &before);
  ::signal(SIGXFSZ, handler);
  EXPECT_THAT(errors[0],
              AllOf(HasSubstr("step 2 not saved: rank 1: cannot write"),
                    HasSubstr("limit on the size"), HasSubstr("earlier checkpoints are")));
}

TEST_F(FaultySave, ALockedFolderEndsTheSaveOnAll) {
  const FolderLock lock(root_);
  EXPECT_THAT(error_of([](int64_t) { return Items{}; }),
              HasSubstr("rank 0: " + root_.string() + " is in use"));
}

class ParallelLoad : public ParallelCheckpoint {
 protected:
  void SetUp() override { save_by_all(slicing(4, 5), 1); }
  fs::path folder() const { return root_ / step_folder_name(1); }
};

TEST_F(ParallelLoad, ADamagedFileIsFoundByOneRankAndReportedByAll) {
  const Manifest manifest = CheckpointReader(folder()).manifest();
  int64_t num_found_elsewhere = 0;
  for (const auto& [name, record] : manifest.files) {
    const std::string good = read_text_file(folder() / name);
    std::string bad = good;
    bad.back() = static_cast<char>(bad.back() ^ 1);
    write_file_synced(folder() / name, bad);
    const std::string error =
        errors_of(3, [&](Communicator& world) { CheckpointReader(folder(), world); })[0];
    EXPECT_THAT(error, AllOf(HasSubstr(name + " is damaged"), HasSubstr("checksum")));
    num_found_elsewhere += error.starts_with("rank 0:") ? 0 : 1;
    EXPECT_THAT(
        errors_of(3,
                  [&](Communicator& world) { CheckpointReader(folder(), world, Verify::kSizes); }),
        Each(""));
    write_file_synced(folder() / name, good);
  }
  EXPECT_GT(num_found_elsewhere, 0);
}

TEST_F(ParallelLoad, EachFileIsVerifiedByOneRank) {
  const Manifest manifest = CheckpointReader(folder()).manifest();
  for (const int64_t num_ranks : {1, 2, 3, 4, 50}) {
    std::vector<std::string> all;
    for (int64_t rank = 0; rank < num_ranks; ++rank) {
      const auto own = files_of_rank(manifest, rank, num_ranks);
      all.insert(all.end(), own.begin(), own.end());
    }
    EXPECT_EQ(all.size(), manifest.files.size());
    for (const auto& [name, record] : manifest.files) EXPECT_THAT(all, Contains(name));
  }
  Manifest equal;
  for (int64_t i = 0; i < 12; ++i) equal.files[fmt::format("f{:02}", i)] = {100, 0};
  EXPECT_THAT(files_of_rank(equal, 1, 4), ElementsAre("f01", "f05", "f09"));
}

TEST_F(ParallelLoad, AMissingOrShortenedFileIsReportedByAll) {
  const std::string name = CheckpointReader(folder()).manifest().files.begin()->first;
  fs::resize_file(folder() / name, 30);
  const auto open = [&](Communicator& world) { CheckpointReader(folder(), world); };
  EXPECT_THAT(errors_of(3, open)[0], HasSubstr("30 bytes long, its manifest says"));
  remove_path(folder() / name);
  EXPECT_THAT(errors_of(3, open)[0], HasSubstr(name + " cannot be read"));
  remove_path(folder() / "COMPLETE");
  EXPECT_THAT(errors_of(3, open)[0], HasSubstr("not a complete checkpoint"));
}

TEST_F(ParallelLoad, AllRanksFindTheSameCheckpoint) {
  save_by_all(slicing(2, 6), 7);
  save_by_all(slicing(2, 7), 9);
  remove_path(root_ / step_folder_name(9) / "COMPLETE");
  run_thread_world(3, [&](World& world) {
    const CommunicatorPtr all = world.make_world_group();
    const FoundCheckpoint found = find_latest(root_, *all);
    EXPECT_EQ(found.path, root_ / step_folder_name(7));
    EXPECT_EQ(found.step, 7);
    EXPECT_THAT(found.ignored, ElementsAre(HasSubstr("step-00000009")));
    EXPECT_FALSE(find_latest(folder_ / "nothing", *all).path);
  });
}

TEST_F(ParallelLoad, NothingIsDroppedSilently) {
  const CheckpointReader reader(folder());
  const LocalSlices local({{"norm", Slice::of_rows({29}, {{3, 4}})}}, model_.named());
  const auto error_of = [&](std::vector<GlobalTensor> all) -> std::string {
    try {
      reader.load_group(TensorGroup::kModel, local.named(), all);
    } catch (const UserError& error) {
      return error.what();
    }
    return "";
  };
  std::vector<GlobalTensor> all = list_global(model_.named());
  EXPECT_EQ(error_of(all), "");
  all[1].shape = {30};
  EXPECT_THAT(error_of(all), HasSubstr("'norm' has shape [29], expected [30]"));
  all = list_global(model_.named());
  all[0].name = "other";
  EXPECT_THAT(error_of(all), AllOf(HasSubstr("missing in the checkpoint: other"),
                                   HasSubstr("unknown here: embedding")));
  EXPECT_THROW(reader.load_slice("norm", Slice::whole({30}), OwnedTensor(DType::kF32, {30})),
               UserError);
}

TEST_F(ParallelLoad, SlicesAreConvertedWhenAsked) {
  const CheckpointReader reader(folder());
  const Slice slice = Slice::of_columns({37, 12}, {3, 5});
  const OwnedTensor exact(DType::kF32, slice.shape());
  const OwnedTensor narrow(DType::kBF16, slice.shape());
  reader.load_slice("embedding", slice, exact);
  EXPECT_THROW(reader.load_slice("embedding", slice, narrow), UserError);
  reader.load_slice("embedding", slice, narrow, Conversion::kFloats);
  for (int64_t i = 0; i < slice.shape().num_elements(); ++i) {
    EXPECT_EQ(narrow.get().as<Bf16>()[i].bits, Bf16(exact.get().as<float>()[i]).bits);
  }
}

/// A rank opens what it validates and what it needs, no more.
TEST_F(ParallelLoad, OtherFilesAreOpenedWhenTheyAreNeeded) {
  run_thread_world(2, [&](World& world) {
    const CommunicatorPtr all = world.make_world_group();
    const CheckpointReader reader(folder(), *all);
    all->barrier();
    if (world.rank() == 0) remove_path(folder());
    all->barrier();
    int64_t num_loaded = 0;
    for (const auto& [name, tensor] : model_.named()) {
      try {
        reader.load_into(name, OwnedTensor(tensor.dtype, tensor.shape));
        ++num_loaded;
      } catch (const UserError& error) {
        EXPECT_THAT(error.what(), HasSubstr("No such file"));
      }
    }
    EXPECT_LT(num_loaded, std::ssize(model_.named()));
  });
}

}  // namespace
}  // namespace tessera
