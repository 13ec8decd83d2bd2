#include "checkpoint/checkpoint.h"
#include "checkpoint/files.h"
#include "checkpoint/layout.h"
#include "checkpoint/together.h"
#include "core/error.h"
#include "core/file.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

/// Why a folder cannot be resumed from, or "" when it can.
std::string defect(const StepFolder& folder) {
  try {
    const std::string text = read_complete_manifest(folder.path);
    const fs::path manifest_path = folder.path / kManifestFile;
    const Manifest manifest = parse_manifest(text, manifest_path.string());
    require(manifest.step == folder.step,
            "{} is damaged: it is of step {}, its folder's name says {}", manifest_path.string(),
            manifest.step, folder.step);
    check_files_exist(folder.path, manifest);
    return "";
  } catch (const UserError& error) {
    return error.what();
  }
}

}  // namespace

FoundCheckpoint find_latest(const fs::path& root) {
  FoundCheckpoint found;
  if (!path_exists(root)) return found;
  for (const fs::path& path : list_prefixed(root, kTemporaryPrefix)) {
    found.ignored.push_back(fmt::format("{}: an unfinished save", path.string()));
  }
  for (const StepFolder& folder : list_step_folders(root)) {
    const std::string reason = defect(folder);
    if (reason.empty()) {
      found.path = folder.path;
      found.step = folder.step;
      return found;
    }
    found.ignored.push_back(reason);
  }
  return found;
}

FoundCheckpoint find_latest(const fs::path& root, Communicator& world) {
  FoundCheckpoint found;
  together(world, [&] {
    if (world.rank() == 0) found = find_latest(root);
  });
  // The folder's name, "" for none, then what was ignored.
  std::vector<std::string> texts = {found.path ? found.path->filename().string() : ""};
  texts.insert(texts.end(), found.ignored.begin(), found.ignored.end());
  texts = broadcast_texts(world, texts);
  FoundCheckpoint agreed;
  if (!texts[0].empty()) {
    agreed.path = root / texts[0];
    agreed.step = parse_step_folder(texts[0]).value();
  }
  agreed.ignored.assign(texts.begin() + 1, texts.end());
  return agreed;
}

}  // namespace tessera
