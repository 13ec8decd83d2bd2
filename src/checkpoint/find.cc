#include <algorithm>

#include "checkpoint/checkpoint.h"
#include "checkpoint/layout.h"
#include "checkpoint/together.h"
#include "core/error.h"
#include "core/file/file.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

/// Names in a folder of checkpoints, as rank 0 sees them.
struct Listing {
  std::vector<std::string> steps;      ///< from the newest on
  std::vector<std::string> temporary;  ///< of saves that were cut short, or go on
};

Listing list_checkpoints(const fs::path& root, Communicator& world) {
  std::vector<std::string> names;
  together(world, [&] {
    if (world.rank() != 0 || !path_exists(root)) return;
    for (const StepFolder& folder : list_step_folders(root))
      names.push_back(folder.path.filename().string());
    for (const fs::path& path : list_prefixed(root, kTemporaryPrefix))
      names.push_back(path.filename().string());
  });
  Listing listing;
  for (std::string& name : broadcast_texts(world, names)) {
    const bool step = parse_step_folder(name).has_value();
    (step ? listing.steps : listing.temporary).push_back(std::move(name));
  }
  return listing;
}

/// Whether rank 0 does not see the folder any more: a run removes old checkpoints.
bool is_gone(const fs::path& folder, Communicator& world) {
  std::string gone;
  if (world.rank() == 0 && !path_exists(folder)) gone = "gone";
  return !broadcast_texts(world, {gone}).front().empty();
}

void ignore_unfinished(const fs::path& root, const Listing& listing, LatestCheckpoint& latest) {
  const int64_t found = latest.reader ? latest.reader->step() : -1;
  for (const std::string& name : listing.temporary) {
    if (parse_temporary_folder(name).value_or(found + 1) > found)
      latest.ignored.push_back(fmt::format("{}: an unfinished save", (root / name).string()));
  }
}

/// Opens the first whole one of a listing. False where one is gone, so that the listing is old.
bool open_first(const fs::path& root, const Listing& listing, Communicator& world, Verify verify,
                LatestCheckpoint& latest) {
  for (const std::string& name : listing.steps) {
    const fs::path folder = root / name;
    try {
      latest.reader.emplace(folder, world, verify);
      return true;
    } catch (const UserError& error) {
      if (is_gone(folder, world)) return false;
      latest.ignored.emplace_back(error.what());
      latest.damaged.push_back(folder);
    }
  }
  return true;
}

}  // namespace

LatestCheckpoint open_latest(const fs::path& root, Communicator& world, Verify verify) {
  constexpr int kMostListings = 10;
  for (int i = 0;; ++i) {
    LatestCheckpoint latest;
    const Listing listing = list_checkpoints(root, world);
    const bool whole = open_first(root, listing, world, verify, latest);
    if (!whole && i < kMostListings) continue;
    require(whole, "{}: its checkpoints change faster than they can be opened", root.string());
    ignore_unfinished(root, listing, latest);
    return latest;
  }
}

FoundCheckpoint find_latest(const fs::path& root) {
  return find_latest(root, *make_single_communicator("checkpoint"));
}

FoundCheckpoint find_latest(const fs::path& root, Communicator& world) {
  LatestCheckpoint latest = open_latest(root, world, Verify::kSizes);
  FoundCheckpoint found{.path = {}, .step = 0, .ignored = std::move(latest.ignored)};
  if (latest.reader) {
    found.path = latest.reader->path();
    found.step = latest.reader->step();
  }
  return found;
}

fs::path set_aside(const fs::path& checkpoint) {
  const fs::path root = checkpoint.parent_path();
  const std::string name = kDamagedPrefix + checkpoint.filename().string();
  fs::path aside = root / name;
  for (int i = 2; path_exists(aside); ++i) aside = root / fmt::format("{}-{}", name, i);
  rename_path(checkpoint, aside);
  return aside;
}

}  // namespace tessera
