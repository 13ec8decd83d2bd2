#pragma once

#include <filesystem>
#include <string_view>

#include "core/file/file.h"

namespace tessera {

/// A file that only grows; each append reaches the kernel before it returns, so that a killed
/// process loses nothing that was recorded. Failures (full disk, no permission) throw UserError
/// naming the file and the cause.
class AppendFile {
 public:
  enum class Start { kEmpty, kAtEnd };

  AppendFile(const std::filesystem::path& path, Start start);
  void append(std::string_view bytes);

  /// Whether its path leads to it still. What cannot be told counts as yes.
  bool in_place() const;
  /// Puts a file with the same content at `path`, whatever has become of this one, and goes on
  /// there.
  void move_to(const std::filesystem::path& path);
  const std::filesystem::path& path() const { return path_; }

 private:
  std::string read_all() const;

  std::filesystem::path path_;
  FileDescriptor file_;
};

}  // namespace tessera
