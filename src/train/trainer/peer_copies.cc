#include "train/trainer/peer_copies.h"

#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <map>

#include "checkpoint/together.h"
#include "core/error.h"
#include "core/file/file.h"
#include "core/file/hash.h"
#include "core/memory.h"
#include "train/setup/machine.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kRootPrefix = "tessera-peers-";
/// In a run's folder: its mark. In its root in memory: the path of that file.
constexpr const char* kMarkFile = "peer_copies";
/// Kinds of file systems, as statfs(2) lists them.
constexpr uint64_t kTmpfs = 0x01021994;
constexpr uint64_t kRamfs = 0x858458f6;

fs::path mark_file_of(const Settings& settings) {
  return fs::weakly_canonical(settings.run.folder) / kMarkFile;
}

fs::path root_of(const Settings& settings, const fs::path& mark_file) {
  return fs::path(settings.peer.folder) /
         fmt::format("{}{:016x}", kRootPrefix, hash64(mark_file.string()));
}

void require_in_memory(const fs::path& folder) {
  struct statfs found {};
  require(::statfs(folder.c_str(), &found) == 0,
          "checkpoint.peer_folder {} cannot be used: {}; name a folder in memory, such as /dev/shm",
          folder.string(), describe_errno(errno));
  const auto kind = static_cast<uint64_t>(found.f_type) & 0xffffffffU;
  require(kind == kTmpfs || kind == kRamfs,
          "checkpoint.peer_folder {} is not in memory (tmpfs), so copies there would be no faster "
          "than checkpoints; name one that is, such as /dev/shm",
          folder.string());
}

/// Others may write to such folders.
void require_own(const fs::path& root) {
  struct stat found {};
  const bool own =
      ::lstat(root.c_str(), &found) == 0 && S_ISDIR(found.st_mode) && found.st_uid == ::geteuid();
  require(own,
          "{} is not a folder of this user; remove it, or choose another "
          "checkpoint.peer_folder",
          root.string());
}

void make_root(const fs::path& root, const fs::path& mark_file) {
  make_folder(root);
  require_own(root);
  fs::permissions(root, fs::perms::owner_all);
  replace_file(root / kMarkFile, mark_file.string());
}

/// Of killed runs that nobody goes on with: their folders are gone.
void remove_orphans(const fs::path& folder) {
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    if (!it->path().filename().string().starts_with(kRootPrefix)) continue;
    try {
      require_own(it->path());
      const fs::path mark_file = read_text_file(it->path() / kMarkFile);
      // A folder above that is not there either may only not be mounted.
      const bool gone = fs::exists(mark_file.parent_path().parent_path()) && !fs::exists(mark_file);
      if (gone) remove_path(it->path());
    } catch (const std::exception&) {  // another user's, or one that is being made or removed
    }
  }
}

int64_t free_bytes(const fs::path& folder) {
  struct statvfs found {};
  require(::statvfs(folder.c_str(), &found) == 0, "{}: {}", folder.string(), describe_errno(errno));
  return static_cast<int64_t>(found.f_bavail) * static_cast<int64_t>(found.f_frsize);
}

std::vector<int64_t> gather(Communicator& world, int64_t number) {
  std::vector<int64_t> numbers(world.size());
  world.all_gather(view(std::span(&number, 1), {1}), view(std::span(numbers), {world.size()}))
      .wait();
  return numbers;
}

/// Of names, types and parts: what a part must fit.
uint64_t hash_of(const std::vector<NamedSlice>& model, const std::vector<NamedSlice>& optimizer) {
  std::string text;
  for (const auto* slices : {&model, &optimizer}) {
    for (const NamedSlice& held : *slices) {
      text +=
          fmt::format("{} {} {}, columns {} {}\n", held.name, dtype_name(held.tensor.dtype),
                      held.slice.to_string(), held.slice.columns.begin, held.slice.columns.count);
    }
    text += "\n";
  }
  return hash64(text);
}

}  // namespace

PeerCopies::PeerCopies(const Settings& settings, const RunLayout& layout, int64_t part_bytes)
    : world_(*layout.world), mark_file_(mark_file_of(settings)) {
  require(world_.size() > 1,
          "checkpoint.peer_copy keeps copies of a rank's state in another rank's memory, but the "
          "run has one rank; start several, or set checkpoint.peer_copy = false");
  place_.root = root_of(settings, mark_file_);
  together(world_, [&] {
    require_in_memory(settings.peer.folder);
    remove_orphans(settings.peer.folder);
  });
  find_machines();
  find_shift();
  check_room(part_bytes);
  mark();
}

/// The run in its folder, and its folder in memory.
void PeerCopies::mark() {
  together(world_, [&] {
    if (world_.rank() != 0) return;
    make_folder(mark_file_.parent_path());
    if (!path_exists(mark_file_)) replace_file(mark_file_, unique_name(""));
    place_.run = read_text_file(mark_file_);
  });
  place_.run = broadcast_texts(world_, {place_.run}).front();
  together(world_, [&] { make_root(place_.root, mark_file_); });
}

void PeerCopies::find_machines() {
  constexpr int64_t kNameBytes = 64;
  std::array<char, kNameBytes> own{};
  machine_name().copy(own.data(), own.size() - 1);
  std::vector<char> all(world_.size() * kNameBytes);
  world_
      .all_gather({own.data(), DType::kU8, {kNameBytes}},
                  {all.data(), DType::kU8, {world_.size() * kNameBytes}})
      .wait();
  std::map<std::string, int64_t> numbers;
  for (int64_t rank = 0; rank < world_.size(); ++rank) {
    const std::string name = all.data() + rank * kNameBytes;
    place_.machines.push_back(numbers.emplace(name, std::ssize(numbers)).first->second);
  }
}

/// The smallest distance to a neighbour on another machine, for as many ranks as there can be.
void PeerCopies::find_shift() {
  const int64_t size = world_.size();
  int64_t most = -1;
  for (int64_t shift = 1; shift < size; ++shift) {
    int64_t apart = 0;
    for (int64_t rank = 0; rank < size; ++rank)
      apart += place_.machines[rank] != place_.machines[(rank + shift) % size] ? 1 : 0;
    if (apart <= most) continue;
    most = apart;
    place_.shift = shift;
  }
  if (most == size) return;
  notes_.push_back(
      most == 0 ? "all ranks are on one machine: copies of their states (checkpoint.peer_copy) are "
                  "lost with it"
                : fmt::format("the states of {} of {} ranks are copied to ranks of the same "
                              "machine, which are lost with it",
                              size - most, size));
}

/// While new copies are made the last ones are still there.
void PeerCopies::check_room(int64_t part_bytes) {
  const std::vector<int64_t> parts = gather(world_, part_bytes);
  const int64_t size = world_.size();
  int64_t needed = 0;
  for (int64_t rank = 0; rank < size; ++rank) {
    const int64_t bytes = count_bytes(parts[rank], parts[(rank + size - place_.shift) % size]);
    if (rank == world_.rank()) num_bytes_ = bytes;
    if (place_.machines[rank] == place_.machines[world_.rank()]) needed += bytes;
  }
  together(world_, [&] {
    const int64_t kept = PeerStore::bytes_in(place_.root);
    const int64_t free = std::min(free_bytes(place_.root.parent_path()), available_memory()) + kept;
    require(needed <= free,
            "checkpoint.peer_copy needs up to {} in {} of {}, for two states each of its ranks and "
            "of their neighbours, but {} are free; make room, use more machines, or set "
            "checkpoint.peer_copy = false",
            format_bytes(needed), place_.root.parent_path().string(), machine_name(),
            format_bytes(free));
  });
}

PeerStore& PeerCopies::open(const ModelState& state) {
  place_.layout = hash_of(state.held_model(), state.held_optimizer());
  store_ = std::make_unique<PeerStore>(place_, world_);
  return *store_;
}

std::optional<std::string> PeerCopies::describe_unused(int64_t step) const {
  if (store_->other_step() <= step) return std::nullopt;
  return fmt::format(
      "the ranks' memory has the state after step {} (checkpoint.peer_copy), which is not used: it "
      "is of another number of ranks, layout or formats. The first copies of this run replace it; "
      "to go on from it, kill the run (SIGKILL) before them and start it as it was",
      store_->other_step());
}

void PeerCopies::save(const SavedRun& run, const ModelState& state) {
  const std::vector<NamedSlice> model = state.held_model();
  const std::vector<NamedSlice> optimizer = state.held_optimizer();
  store_->save({.step = run.position.step,
                .model = model,
                .optimizer = optimizer,
                .state = state_text(run)});
}

void PeerCopies::remove() {
  store_->remove();
  together(world_, [&] {
    if (world_.rank() == 0) remove_path(mark_file_);
  });
}

bool PeerCopies::remove_left(const Settings& settings, Communicator& world) {
  const fs::path mark_file = mark_file_of(settings);
  std::string found;
  together(world, [&] {
    if (world.rank() == 0 && path_exists(mark_file)) found = "found";
  });
  found = broadcast_texts(world, {found}).front();
  if (found.empty()) return false;
  std::error_code ignored;
  fs::remove_all(root_of(settings, mark_file), ignored);
  world.barrier();  // the mark tells the next start of what is left
  together(world, [&] {
    if (world.rank() == 0) remove_path(mark_file);
  });
  return true;
}

}  // namespace tessera
