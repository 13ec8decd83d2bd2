#include "train/state/run_paths.h"

#include <algorithm>

#include "core/file/file.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

/// A whole path as it was named: links in it may lead to folders of other names.
fs::path whole_path(const fs::path& path) {
  return (fs::absolute(path) / "").lexically_normal().parent_path();
}

/// Where a run was started whose folder was then named so; empty: unknown.
fs::path find_start(const fs::path& named, const fs::path& run_folder) {
  fs::path start = whole_path(run_folder);
  const fs::path tail = (named / "").lexically_normal().parent_path();
  if (named.empty() || named.is_absolute() || *tail.begin() == "..") return {};
  for (auto part = tail.end(); part != tail.begin();) {
    --part;
    if (*part == ".") continue;
    if (start.filename() != *part) return {};
    start = start.parent_path();
  }
  return start;
}

}  // namespace

fs::path run_folder_of(const fs::path& checkpoint) {
  for (const fs::path& path : {whole_path(checkpoint), fs::weakly_canonical(checkpoint)}) {
    if (path.parent_path().filename() == "checkpoints") return path.parent_path().parent_path();
  }
  return {};
}

void resolve_data_paths(DataSettings& data, const std::string& named_folder,
                        const fs::path& run_folder) {
  const fs::path start = find_start(named_folder, run_folder);
  if (start.empty() || start == whole_path(".")) return;
  for (const auto& [path, ending] : {std::pair(&data.text, ""), std::pair(&data.tokenizer, ""),
                                     std::pair(&data.tokens, ".idx"), std::pair(&data.cache, "")}) {
    if (path->empty() || fs::path(*path).is_absolute()) continue;
    const fs::path whole = start / *path;
    if (path_exists(whole.string() + ending)) *path = whole.string();
  }
}

}  // namespace tessera
