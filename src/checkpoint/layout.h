#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/format/manifest.h"

namespace tessera {

// Names within a folder of checkpoints, shared by saving and loading.

inline constexpr const char* kManifestFile = "manifest.json";
inline constexpr const char* kCompleteFile = "COMPLETE";
inline constexpr const char* kLatestFile = "latest";
inline constexpr const char* kTemporaryPrefix = ".tmp-step-";
inline constexpr const char* kTrashPrefix = ".trash-";
inline constexpr const char* kDamagedPrefix = "damaged-";

/// "step-00000120".
std::string step_folder_name(int64_t step);
/// The step of such a name, or nothing for any other name.
std::optional<int64_t> parse_step_folder(std::string_view name);

/// The step of a checkpoint that is being written, from the name of its temporary folder.
std::optional<int64_t> parse_temporary_folder(std::string_view name);

struct StepFolder {
  int64_t step = 0;
  std::filesystem::path path;
};

/// The folders of `root` named as checkpoints, complete or not, highest step first.
std::vector<StepFolder> list_step_folders(const std::filesystem::path& root);

/// The paths in `root` whose names start with `prefix`, sorted.
std::vector<std::filesystem::path> list_prefixed(const std::filesystem::path& root,
                                                 std::string_view prefix);

/// What the completeness marker of a manifest holds.
std::string complete_marker(std::string_view manifest_text);

/// Writes the manifest, and the marker when all else is on the disk.
void complete_folder(const std::filesystem::path& folder, std::string_view manifest_text);

/// The text of the manifest of a folder. Throws UserError when the marker is missing or does not
/// fit the manifest.
std::string read_complete_manifest(const std::filesystem::path& folder);

}  // namespace tessera
