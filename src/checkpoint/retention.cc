#include "checkpoint/retention.h"

#include <fmt/format.h>

#include "checkpoint/layout.h"
#include "core/error.h"
#include "core/file/file.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

/// Renamed first, so that a kill leaves nothing half-removed that looks complete.
void discard(const fs::path& path) {
  const fs::path trash = trash_path(path);
  rename_path(path, trash);
  remove_path(trash);
}

bool marked_complete(const fs::path& folder) {
  try {
    read_complete_manifest(folder);
    return true;
  } catch (const UserError&) {
    return false;
  }
}

}  // namespace

void try_cleanup(std::vector<std::string>& warnings, const std::function<void()>& action) {
  try {
    action();
  } catch (const UserError& error) {
    warnings.emplace_back(error.what());
  }
}

fs::path trash_path(const fs::path& path) {
  return path.parent_path() /
         unique_name(fmt::format("{}{}-", kTrashPrefix, path.filename().string()));
}

void remove_old(const fs::path& root, const fs::path& saved, int64_t keep_last,
                std::vector<std::string>& warnings) {
  int64_t num_kept = 1;
  for (const StepFolder& folder : list_step_folders(root)) {
    if (folder.path == saved || !marked_complete(folder.path)) continue;
    if (++num_kept > keep_last) try_cleanup(warnings, [&] { discard(folder.path); });
  }
}

void remove_stale(const fs::path& root, std::vector<std::string>& warnings) {
  for (const char* prefix : {kTemporaryPrefix, kTrashPrefix}) {
    for (const fs::path& path : list_prefixed(root, prefix)) {
      try_cleanup(warnings, [&] { remove_path(path); });
    }
  }
}

}  // namespace tessera
