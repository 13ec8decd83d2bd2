#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <utility>

namespace tessera {

/// An owned file descriptor. Move-only.
class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept;
  FileDescriptor& operator=(FileDescriptor&& other) noexcept;
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  ~FileDescriptor() { reset(); }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void reset() noexcept;
  /// Gives the descriptor up without closing it.
  int release() noexcept { return std::exchange(fd_, -1); }

 private:
  int fd_ = -1;
};

/// A whole file mapped read-only. Move-only; views of its bytes live as long as it does. Throws
/// UserError when the path is missing, unreadable or not a regular file. The file must not be
/// shortened while it is mapped.
class MappedFile {
 public:
  MappedFile() = default;
  explicit MappedFile(const std::filesystem::path& path);
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile() { release(); }

  std::span<const std::byte> bytes() const { return bytes_; }
  int64_t num_bytes() const { return static_cast<int64_t>(bytes_.size()); }
  const std::filesystem::path& path() const { return path_; }

 private:
  void release() noexcept;

  std::filesystem::path path_;
  std::span<const std::byte> bytes_;
};

/// A regular file read from start to end. Throws UserError when it is missing, unreadable or not a
/// regular file. Unlike a map, it stays safe when the file is shortened meanwhile.
class InputFile {
 public:
  explicit InputFile(const std::filesystem::path& path);

  /// Reads up to bytes.size() bytes; fewer only at the end of the file, where it is 0.
  size_t read(std::span<std::byte> bytes);
  /// Goes on from that byte.
  void seek(int64_t offset);
  int64_t num_bytes() const { return num_bytes_; }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
  FileDescriptor file_;
  int64_t num_bytes_ = 0;
};

/// A new file written from start to end; an existing file of that name is emptied. `close` must be
/// called for the content to count: it reports the errors that a destructor cannot. Every error is
/// a UserError with path and reason; a full disk is named as such.
class OutputFile {
 public:
  explicit OutputFile(const std::filesystem::path& path);
  /// Goes on with an existing file: keeps its first `kept_bytes` bytes, which it must have, and
  /// drops the rest.
  OutputFile(const std::filesystem::path& path, int64_t kept_bytes);

  /// Drops what lies behind the first `num_bytes` bytes written.
  void truncate(int64_t num_bytes);
  void write(std::span<const std::byte> bytes);
  void write(std::string_view text) { write(std::as_bytes(std::span(text))); }
  /// Waits until the content is on the disk.
  void sync();
  void close();
  /// Bytes written so far.
  int64_t num_bytes() const { return num_bytes_; }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
  FileDescriptor file_;
  int64_t num_bytes_ = 0;
};

/// Holds an advisory lock on a folder until destroyed; the system drops it when the process dies.
/// Throws UserError when another process holds it. `held` is false where the file system has no
/// such locks.
class FolderLock {
 public:
  explicit FolderLock(const std::filesystem::path& folder);
  bool held() const { return static_cast<bool>(file_); }

 private:
  FileDescriptor file_;
};

/// The whole file as text. Throws UserError when it is missing, unreadable or longer than
/// `max_bytes`.
std::string read_text_file(const std::filesystem::path& path, int64_t max_bytes = int64_t{1} << 30);

/// Writes a new file and waits until it is on the disk.
void write_file_synced(const std::filesystem::path& path, std::string_view text);

/// Replaces a file so that readers and crashes see the old content or the new, never a mixture: a
/// temporary file in the same folder, fsync, rename, fsync of the folder.
void replace_file(const std::filesystem::path& path, std::string_view text);

/// Waits until the names in a folder are on the disk.
void sync_folder(const std::filesystem::path& folder);

/// Makes a folder and its parents; fine when it exists already.
void make_folder(const std::filesystem::path& folder);

/// Whether there is anything at a path. Throws UserError where that cannot be told, e.g. in a
/// closed folder.
bool path_exists(const std::filesystem::path& path);

/// Removes a file, or a folder with all in it; fine when it does not exist. Links are removed, not
/// followed.
void remove_path(const std::filesystem::path& path);

void rename_path(const std::filesystem::path& from, const std::filesystem::path& to);

/// Swaps two paths in one step. False where the file system cannot do that; nothing has changed
/// then.
bool try_exchange_paths(const std::filesystem::path& a, const std::filesystem::path& b);

/// `prefix` followed by a suffix that no other call of any process gives:
/// "<prefix><process>-<random>".
std::string unique_name(std::string_view prefix);

/// The text of an errno and what can be done about it, e.g. for a full disk.
std::string describe_errno(int error);

}  // namespace tessera
