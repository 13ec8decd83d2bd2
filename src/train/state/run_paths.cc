#include "train/state/run_paths.h"

#include <algorithm>

#include "core/file/file.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

/// Where a run was started whose folder was then named so; empty: unknown.
fs::path find_start(const fs::path& named, const fs::path& run_folder) {
  fs::path start = fs::weakly_canonical(run_folder);
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
  const fs::path parent = fs::weakly_canonical(checkpoint).parent_path();
  return parent.filename() == "checkpoints" ? parent.parent_path() : fs::path();
}

void resolve_data_paths(DataSettings& data, const std::string& named_folder,
                        const fs::path& run_folder) {
  const fs::path start = find_start(named_folder, run_folder);
  if (start.empty() || start == fs::weakly_canonical(".")) return;
  for (const auto& [path, ending] : {std::pair(&data.text, ""), std::pair(&data.tokenizer, ""),
                                     std::pair(&data.tokens, ".idx"), std::pair(&data.cache, "")}) {
    if (path->empty() || fs::path(*path).is_absolute()) continue;
    const fs::path whole = start / *path;
    if (path_exists(whole.string() + ending)) *path = whole.string();
  }
}

}  // namespace tessera
