#include "checkpoint/layout.h"

#include <algorithm>
#include <charconv>
#include <system_error>

#include "core/error.h"
#include "core/file/file.h"
#include "core/file/hash.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kStepPrefix = "step-";

std::vector<fs::path> list_folder(const fs::path& root) {
  std::error_code error;
  std::vector<fs::path> paths;
  for (fs::directory_iterator it(root, error), end; !error && it != end; it.increment(error)) {
    paths.push_back(it->path());
  }
  require(!error, "cannot list folder {}: {}", root.string(), describe_errno(error.value()));
  std::ranges::sort(paths);
  return paths;
}

}  // namespace

std::string step_folder_name(int64_t step) {
  return fmt::format("{}{:08}", kStepPrefix, step);
}

std::optional<int64_t> parse_step_folder(std::string_view name) {
  if (!name.starts_with(kStepPrefix)) return std::nullopt;
  const std::string_view digits = name.substr(kStepPrefix.size());
  int64_t step = 0;
  const auto result = std::from_chars(digits.data(), digits.data() + digits.size(), step);
  if (result.ec != std::errc() || step < 0 || step_folder_name(step) != name) return std::nullopt;
  return step;
}

std::optional<int64_t> parse_temporary_folder(std::string_view name) {
  constexpr std::string_view kMark = ".tmp-";
  if (!name.starts_with(kMark)) return std::nullopt;
  name.remove_prefix(kMark.size());
  const size_t digits = name.find('-') + 1;
  return digits == 0 ? std::nullopt : parse_step_folder(name.substr(0, name.find('-', digits)));
}

std::vector<StepFolder> list_step_folders(const fs::path& root) {
  std::vector<StepFolder> folders;
  for (const fs::path& path : list_folder(root)) {
    if (const auto step = parse_step_folder(path.filename().string())) {
      folders.push_back({*step, path});
    }
  }
  std::ranges::sort(folders, std::greater<>(), &StepFolder::step);
  return folders;
}

std::vector<fs::path> list_prefixed(const fs::path& root, std::string_view prefix) {
  std::vector<fs::path> paths = list_folder(root);
  std::erase_if(paths, [prefix](const fs::path& path) {
    return !path.filename().string().starts_with(prefix);
  });
  return paths;
}

std::string complete_marker(std::string_view manifest_text) {
  return fmt::format("manifest xxh64 {:016x}\n", hash64(manifest_text));
}

void complete_folder(const fs::path& folder, std::string_view manifest_text) {
  write_file_synced(folder / kManifestFile, manifest_text);
  sync_folder(folder);
  write_file_synced(folder / kCompleteFile, complete_marker(manifest_text));
  sync_folder(folder);
}

std::string read_complete_manifest(const fs::path& folder) {
  constexpr int64_t kMaxMarkerBytes = 1024;
  require(
      fs::exists(folder / kCompleteFile),
      "{} is not a complete checkpoint: it has no file {}; its saving was interrupted, or it is "
      "no checkpoint",
      folder.string(), kCompleteFile);
  const std::string marker = read_text_file(folder / kCompleteFile, kMaxMarkerBytes);
  std::string text = read_text_file(folder / kManifestFile);
  require(marker == complete_marker(text),
          "{} is damaged: {} has not the hash that {} holds; load another checkpoint",
          folder.string(), kManifestFile, kCompleteFile);
  return text;
}

}  // namespace tessera
