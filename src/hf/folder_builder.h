#pragma once

#include <filesystem>

namespace tessera {

/// A folder that appears under its name only when it is complete: it is built beside it under a
/// temporary name, which is removed unless `publish` is called.
class FolderBuilder {
 public:
  /// Throws UserError when there is something at `target` already, other than an empty folder.
  explicit FolderBuilder(std::filesystem::path target);
  FolderBuilder(const FolderBuilder&) = delete;
  FolderBuilder& operator=(const FolderBuilder&) = delete;
  ~FolderBuilder();

  /// Where to build.
  const std::filesystem::path& path() const { return temporary_; }
  /// Refuses where the file system has less than that free.
  void require_space(int64_t num_bytes) const;
  /// Waits until the folder is on the disk, then gives it its name.
  void publish();

 private:
  std::filesystem::path target_;
  std::filesystem::path temporary_;
};

}  // namespace tessera
