#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

namespace tessera {

// What becomes of checkpoints that are replaced, old or unfinished.

/// Runs `action`; a UserError becomes a warning.
void try_cleanup(std::vector<std::string>& warnings, const std::function<void()>& action);

/// A free name for what is about to be removed from the folder of `path`.
std::filesystem::path trash_path(const std::filesystem::path& path);

/// Removes complete checkpoints of `root` beyond the newest `keep_last`, but never `saved`.
void remove_old(const std::filesystem::path& root, const std::filesystem::path& saved,
                int64_t keep_last, std::vector<std::string>& warnings);

/// Removes what killed processes left. REQUIRES the lock of `root`: no other process is saving.
void remove_stale(const std::filesystem::path& root, std::vector<std::string>& warnings);

}  // namespace tessera
