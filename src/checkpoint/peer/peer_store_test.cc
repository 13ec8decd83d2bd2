#include "checkpoint/peer/peer_store.h"

#include <gmock/gmock.h>

#include <cstring>
#include <functional>

#include "checkpoint/layout.h"
#include "checkpoint/peer/peer_exchange.h"
#include "checkpoint/testing.h"
#include "comm/thread/thread_world.h"
#include "core/error.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// What a rank holds: rows of one tensor, of others', and nothing of a third; values by rank and
/// step.
class Held {
 public:
  Held(int64_t rank, int64_t num_ranks)
      : rank_(rank), rows_(DType::kF32, {2, 5}), whole_(DType::kBF16, {3, rank}) {
    model_ = {{"w", rows_, Slice::of_rows({2 * num_ranks, 5}, {{2 * rank, 2}})}};
    optimizer_ = {{"w.m", whole_, Slice::whole({3, rank})}};
  }
  void set(int64_t step) const {
    for (const Tensor& tensor : {rows_.get(), whole_.get()})
      std::memset(tensor.data, value(step), static_cast<size_t>(tensor.num_bytes()));
  }
  bool is(int64_t step) const {
    bool same = true;
    for (const Tensor& tensor : {rows_.get(), whole_.get()}) {
      const auto* bytes = static_cast<const unsigned char*>(tensor.data);
      for (int64_t i = 0; i < tensor.num_bytes(); ++i) same &= bytes[i] == value(step);
    }
    return same;
  }
  PeerSave request(int64_t step) const {
    return {.step = step, .model = model_, .optimizer = optimizer_, .state = R"({"a":1})"};
  }
  void load(const CheckpointReader& reader) const {
    for (const auto& slices : {model_, optimizer_}) {
      for (const NamedSlice& held : slices) reader.load_slice(held.name, held.slice, held.tensor);
    }
  }

 private:
  unsigned char value(int64_t step) const { return static_cast<unsigned char>(7 * step + rank_); }

  int64_t rank_;
  OwnedTensor rows_;
  OwnedTensor whole_;
  std::vector<NamedSlice> model_;
  std::vector<NamedSlice> optimizer_;
};

class PeerStoreTest : public FolderTest {
 protected:
  using Use = std::function<void(PeerStore&, const Held&, int64_t rank)>;

  void on_ranks(int64_t num_ranks, const Use& use) const {
    run_thread_world(num_ranks, [&](World& ranks) {
      const CommunicatorPtr world = ranks.make_world_group();
      PeerPlace place{.root = root_of(world->rank()),
                      .run = run_,
                      .shift = shift_,
                      .machines = {},
                      .layout = layout_ + static_cast<uint64_t>(world->rank())};
      for (int64_t rank = 0; rank < num_ranks; ++rank) place.machines.push_back(apart_ ? rank : 0);
      PeerStore store(place, *world);
      use(store, Held(world->rank(), num_ranks), world->rank());
    });
  }
  void save(int64_t num_ranks, int64_t step) const {
    on_ranks(num_ranks, [&](PeerStore& store, const Held& held, int64_t) {
      held.set(step);
      store.save(held.request(step));
    });
  }
  /// The step that all ranks find and load, or -1.
  int64_t find(int64_t num_ranks) const {
    std::vector<int64_t> steps(num_ranks, -1);
    on_ranks(num_ranks, [&](PeerStore& store, const Held& held, int64_t rank) {
      held.set(99);
      const auto reader = store.find();
      if (other_step_) EXPECT_EQ(store.other_step(), *other_step_);
      if (!reader) return;
      steps[rank] = reader->step();
      held.load(*reader);
      EXPECT_TRUE(held.is(reader->step())) << "rank " << rank;
    });
    for (const int64_t step : steps) EXPECT_EQ(step, steps[0]);
    return steps[0];
  }
  /// Of one machine for all ranks, or one for each.
  fs::path root_of(int64_t rank) const {
    return apart_ ? folder_ / fmt::format("machine-{}", rank) : folder_ / "machine";
  }
  fs::path folder_of(int64_t rank) const { return root_of(rank) / fmt::format("rank-{:05}", rank); }
  static std::vector<std::string> names_in(const fs::path& folder) {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder))
      names.push_back(entry.path().filename());
    std::ranges::sort(names);
    return names;
  }

  std::string run_ = "this";
  int64_t shift_ = 1;
  uint64_t layout_ = ~uint64_t{0} - 10;
  bool apart_ = false;
  std::optional<int64_t> other_step_;  ///< where all ranks are to see it
};

TEST_F(PeerStoreTest, KeepsTheNewestStateTwice) {
  for (const bool apart : {false, true}) {
    apart_ = apart;
    EXPECT_EQ(find(3), -1);
    save(3, 5);
    save(3, 8);
    EXPECT_THAT(names_in(folder_of(1)), ElementsAre("of-00000-step-00000008", "own-step-00000008"));
    EXPECT_THAT(names_in(folder_of(0)), ElementsAre("of-00002-step-00000008", "own-step-00000008"));
    EXPECT_EQ(find(3), 8);
  }
}

TEST_F(PeerStoreTest, BringsBackWhatAnyLostMachineHad) {
  apart_ = true;
  for (const int64_t num_ranks : {2, 3, 5}) {
    for (shift_ = 1; shift_ < num_ranks; ++shift_) {
      for (int64_t lost = 0; lost < num_ranks; ++lost) {
        save(num_ranks, 4);
        remove_path(root_of(lost));
        EXPECT_EQ(find(num_ranks), 4) << lost << " of " << num_ranks << ", shift " << shift_;
        EXPECT_EQ(find(num_ranks), 4);  // and what was brought stays
      }
      // A rank and its neighbour.
      save(num_ranks, 4);
      remove_path(root_of(0));
      remove_path(root_of(shift_));
      EXPECT_EQ(find(num_ranks), -1);
    }
  }
}

TEST_F(PeerStoreTest, RanksThatMovedFindTheirParts) {
  apart_ = true;
  save(3, 4);
  // Machines 0 and 2 change places.
  fs::rename(root_of(0), folder_ / "aside");
  fs::rename(root_of(2), root_of(0));
  fs::rename(folder_ / "aside", root_of(2));
  EXPECT_EQ(find(3), 4);
}

TEST_F(PeerStoreTest, DamagedPartsAreTakenFromTheNeighbour) {
  for (const bool apart : {false, true}) {
    apart_ = apart;
    save(3, 4);
    const fs::path file = folder_of(1) / "own-step-00000004" / "model-r00001-00000.safetensors";
    std::string text = read_text_file(file);
    text.back() = static_cast<char>(text.back() ^ 1);
    write_file_synced(file, text);
    EXPECT_EQ(find(3), 4);
    remove_path(folder_of(2));
    EXPECT_EQ(find(3), apart ? 4 : -1);  // apart, rank 1 was given its own again
  }
}

/// As kills leave it: some ranks have the new state, or have not yet marked it.
TEST_F(PeerStoreTest, UnfinishedCopiesAreNoState) {
  save(3, 4);
  const fs::path before = folder_ / "before";
  fs::copy(root_of(0), before, fs::copy_options::recursive);
  save(3, 9);
  for (const char* name : {"own-step-00000009", "of-00001-step-00000009"})
    remove_path(folder_of(2) / name);
  remove_path(folder_of(0) / "of-00002-step-00000009");
  EXPECT_EQ(find(3), -1);
  for (int64_t rank = 0; rank < 3; ++rank) {
    const std::string name = fmt::format("rank-{:05}", rank);
    fs::copy(before / name, root_of(0) / name, fs::copy_options::recursive);
  }
  EXPECT_EQ(find(3), 4);
  fs::create_directories(folder_of(2) / ".tmp-own-step-00000009");
  save(3, 11);
  EXPECT_THAT(names_in(folder_of(2)), ElementsAre("of-00001-step-00000011", "own-step-00000011"));
}

TEST_F(PeerStoreTest, PartsOfOtherRunsRanksAndLayoutsAreNotTaken) {
  for (const bool apart : {false, true}) {
    apart_ = apart;
    save(3, 4);
    other_step_ = 4;
    EXPECT_EQ(find(2), -1);
    other_step_ = -1;
    run_ = "other";
    EXPECT_EQ(find(3), -1);
    run_ = "this";
    layout_ += 10;
    other_step_ = 4;
    EXPECT_EQ(find(3), -1);
    layout_ -= 10;
    other_step_ = -1;
    EXPECT_EQ(find(3), 4);
  }
}

TEST_F(PeerStoreTest, AFailureOfOneRankLeavesTheEarlierState) {
  save(3, 4);
  std::vector<std::string> errors(3);
  on_ranks(3, [&](PeerStore& store, const Held& held, int64_t rank) {
    held.set(9);
    // A file where rank 1 would make a folder.
    if (rank == 1) write_file_synced(folder_of(1) / ".tmp-of-00000-step-00000009", "x");
    if (rank == 1) fs::permissions(folder_of(1), fs::perms::owner_read | fs::perms::owner_exec);
    PeerSave request = held.request(9);
    if (rank == 1) request.state = "no JSON";
    try {
      store.save(request);
    } catch (const std::exception& error) {
      errors[rank] = error.what();
    }
    if (rank == 1) fs::permissions(folder_of(1), fs::perms::owner_all);
  });
  EXPECT_THAT(errors, ElementsAre(errors[0], errors[0], errors[0]));
  EXPECT_THAT(errors[0], HasSubstr("rank 1"));
  EXPECT_EQ(find(3), 4);
}

TEST_F(PeerStoreTest, NothingIsLeftOfWhatIsRemoved) {
  for (const bool apart : {false, true}) {
    apart_ = apart;
    save(4, 4);
    fs::create_directories(root_of(0) / "rank-00017");
    on_ranks(4, [](PeerStore& store, const Held&, int64_t) { store.remove(); });
    for (int64_t rank = 0; rank < 4; ++rank) EXPECT_FALSE(path_exists(root_of(rank)));
  }
}

TEST_F(PeerStoreTest, ExchangedFilesOfAnySizeAreTheSame) {
  const auto part_of = [&](int64_t rank) { return folder_ / fmt::format("part-{}", rank); };
  // A file of several pieces, one of none, and a rank that gives nothing.
  RandomTensors large(1);
  large.add("large", DType::kU8, {(int64_t{33} << 20) + 5});
  RandomTensors small(2);
  small.add("small", DType::kU8, {3});
  for (int64_t rank = 0; rank < 2; ++rank) {
    make_folder(part_of(rank));
    Manifest manifest;
    const auto& tensors = rank == 0 ? large.named() : small.named();
    const WrittenFile file = write_safetensors(part_of(rank) / "model-0.safetensors", tensors);
    manifest.files["model-0.safetensors"] = {file.num_bytes, file.checksum};
    complete_folder(part_of(rank), manifest_text(manifest));
  }
  run_thread_world(3, [&](World& ranks) {
    const CommunicatorPtr world = ranks.make_world_group();
    const int64_t rank = world->rank();
    std::optional<GivenPart> given;
    std::optional<TakenPart> taken;
    if (rank < 2) given = {part_of(rank), rank + 1};
    if (rank > 0) taken = {folder_ / fmt::format("taken-{}", rank), rank - 1};
    exchange_parts(*world, given, taken);
  });
  for (int64_t rank = 1; rank < 3; ++rank) {
    for (const char* name : {"model-0.safetensors", "manifest.json", "COMPLETE"}) {
      EXPECT_TRUE(read_text_file(folder_ / fmt::format("taken-{}", rank) / name) ==
                  read_text_file(part_of(rank - 1) / name));
    }
  }
}

TEST_F(PeerStoreTest, APartThatCannotBeReadIsToldOnBothSides) {
  make_folder(folder_ / "part");
  Manifest manifest;
  manifest.files["model-0.safetensors"] = {(int64_t{17} << 20), 1};
  complete_folder(folder_ / "part", manifest_text(manifest));
  const auto errors_of = [&] {
    std::vector<std::string> errors(2);
    run_thread_world(2, [&](World& ranks) {
      const CommunicatorPtr world = ranks.make_world_group();
      std::optional<GivenPart> given;
      std::optional<TakenPart> taken;
      if (world->rank() == 0) given = {folder_ / "part", 1};
      if (world->rank() == 1) taken = {folder_ / "taken", 0};
      try {
        exchange_parts(*world, given, taken);
      } catch (const UserError& error) {
        errors[world->rank()] = error.what();
      }
      world->barrier();
    });
    EXPECT_FALSE(path_exists(folder_ / "taken"));
    return errors;
  };
  EXPECT_THAT(errors_of(), ElementsAre(HasSubstr("model-0.safetensors"),
                                       HasSubstr("damaged on its way from rank 0")));
  remove_path(folder_ / "part" / "COMPLETE");
  EXPECT_THAT(errors_of(),
              ElementsAre(HasSubstr("not a complete checkpoint"), HasSubstr("rank 0 cannot read")));
}

}  // namespace
}  // namespace tessera
