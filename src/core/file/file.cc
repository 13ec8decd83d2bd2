#include "core/file/file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <random>
#include <system_error>
#include <utility>

#include "core/error.h"
#include "core/limits.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void file_error(std::string_view action, const fs::path& path, int error) {
  user_error("cannot {} {}: {}", action, path.string(), describe_errno(error));
}

FileDescriptor open_file(const fs::path& path, int flags, std::string_view action) {
  int fd = -1;
  do {
    fd = ::open(path.c_str(), flags | O_CLOEXEC, 0666);
  } while (fd < 0 && errno == EINTR);
  if (fd < 0) file_error(action, path, errno);
  return FileDescriptor(fd);
}

void sync_descriptor(int fd, const fs::path& path) {
  int error = 0;
  do {
    error = ::fsync(fd) == 0 ? 0 : errno;
  } while (error == EINTR);  // of network file systems
  // EINVAL: a terminal, pipe or device has nothing to wait for.
  if (error != 0 && error != EINVAL) file_error("write to disk", path, error);
}

int64_t regular_file_size(int fd, const fs::path& path) {
  struct stat status {};
  if (::fstat(fd, &status) != 0) file_error("read", path, errno);
  require(!S_ISDIR(status.st_mode), "cannot read {}: it is a folder, a file is expected",
          path.string());
  require(S_ISREG(status.st_mode), "cannot read {}: it is not a regular file", path.string());
  return status.st_size;
}

}  // namespace

FileDescriptor::FileDescriptor(FileDescriptor&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)) {}

FileDescriptor& FileDescriptor::operator=(FileDescriptor&& other) noexcept {
  if (this != &other) {
    reset();
    fd_ = std::exchange(other.fd_, -1);
  }
  return *this;
}

void FileDescriptor::reset() noexcept {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

MappedFile::MappedFile(const fs::path& path) : path_(path) {
  // O_NONBLOCK: a pipe must be refused, not waited for.
  const FileDescriptor file = open_file(path, O_RDONLY | O_NONBLOCK, "read");
  const size_t size = regular_file_size(file.get(), path);
  if (size == 0) return;
  void* memory = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.get(), 0);
  if (memory == MAP_FAILED) file_error("map", path, errno);
  bytes_ = {static_cast<const std::byte*>(memory), size};
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)), bytes_(std::exchange(other.bytes_, {})) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  if (this != &other) {
    release();
    path_ = std::move(other.path_);
    bytes_ = std::exchange(other.bytes_, {});
  }
  return *this;
}

void MappedFile::release() noexcept {
  if (!bytes_.empty()) ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
  bytes_ = {};
}

InputFile::InputFile(const fs::path& path)
    // O_NONBLOCK: a pipe must be refused, not waited for.
    : path_(path),
      file_(open_file(path, O_RDONLY | O_NONBLOCK, "read")),
      num_bytes_(regular_file_size(file_.get(), path)) {}

size_t InputFile::read(std::span<std::byte> bytes) {
  size_t total = 0;
  while (total < bytes.size()) {
    const ssize_t count = ::read(file_.get(), bytes.data() + total, bytes.size() - total);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) file_error("read", path_, errno);
    if (count == 0) break;
    total += static_cast<size_t>(count);
  }
  return total;
}

void InputFile::seek(int64_t offset) {
  if (::lseek(file_.get(), offset, SEEK_SET) < 0) file_error("read", path_, errno);
}

OutputFile::OutputFile(const fs::path& path)
    : path_(path), file_(open_file(path, O_WRONLY | O_CREAT | O_TRUNC, "create")) {}

OutputFile::OutputFile(const fs::path& path, int64_t kept_bytes)
    : path_(path), file_(open_file(path, O_WRONLY, "open")) {
  const int64_t found = regular_file_size(file_.get(), path);
  require(found >= kept_bytes, "{} is {} bytes long; expected at least {}", path.string(), found,
          kept_bytes);
  num_bytes_ = found;
  truncate(kept_bytes);
}

void OutputFile::truncate(int64_t num_bytes) {
  ensure(num_bytes <= num_bytes_, "{} of {} bytes kept", num_bytes, num_bytes_);
  if (::ftruncate(file_.get(), num_bytes) != 0 || ::lseek(file_.get(), num_bytes, SEEK_SET) < 0) {
    file_error("write", path_, errno);
  }
  num_bytes_ = num_bytes;
}

void OutputFile::write(std::span<const std::byte> bytes) {
  // Linux writes at most 2 GiB at once.
  constexpr size_t kMaxWrite = size_t{1} << 30;
  while (!bytes.empty()) {
    const ssize_t written = ::write(file_.get(), bytes.data(), std::min(bytes.size(), kMaxWrite));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) file_error("write", path_, errno);
    bytes = bytes.subspan(written);
    num_bytes_ += written;
  }
}

void OutputFile::sync() {
  sync_descriptor(file_.get(), path_);
}

void OutputFile::close() {
  const int fd = file_.release();
  if (::close(fd) != 0 && errno != EINTR) file_error("close", path_, errno);
}

FolderLock::FolderLock(const fs::path& folder)
    : file_(open_file(folder, O_RDONLY | O_DIRECTORY, "open folder")) {
  if (::flock(file_.get(), LOCK_EX | LOCK_NB) == 0) return;
  require(errno != EWOULDBLOCK,
          "{} is in use: another process is writing there; wait for it or choose another folder",
          folder.string());
  file_.reset();
}

std::string read_text_file(const fs::path& path, int64_t max_bytes) {
  const MappedFile file(path);
  require(file.num_bytes() <= max_bytes, "{} is {} bytes long, at most {} are expected",
          path.string(), file.num_bytes(), max_bytes);
  return {reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()};
}

void write_file_synced(const fs::path& path, std::string_view text) {
  OutputFile file(path);
  file.write(text);
  file.sync();
  file.close();
}

void replace_file(const fs::path& path, std::string_view text) {
  std::error_code unknown;
  // A device or pipe takes what is written to it; in its place there would be a file.
  if (fs::is_other(path, unknown)) return write_file_synced(path, text);
  const fs::path folder = path.has_parent_path() ? path.parent_path() : fs::path(".");
  const fs::path temporary =
      folder / unique_name(fmt::format(".tmp-{}-", path.filename().string()));
  try {
    write_file_synced(temporary, text);
    rename_path(temporary, path);
  } catch (...) {
    ::unlink(temporary.c_str());
    throw;
  }
  sync_folder(folder);
}

void sync_folder(const fs::path& folder) {
  const FileDescriptor file = open_file(folder, O_RDONLY | O_DIRECTORY, "open folder");
  sync_descriptor(file.get(), folder);
}

void make_folder(const fs::path& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) file_error("make folder", folder, error.value());
}

bool path_exists(const fs::path& path) {
  std::error_code error;
  const bool exists = fs::exists(path, error);
  if (error) file_error("look at", path, error.value());
  return exists;
}

void remove_path(const fs::path& path) {
  std::error_code error;
  fs::remove_all(path, error);
  if (error) file_error("remove", path, error.value());
}

void rename_path(const fs::path& from, const fs::path& to) {
  if (::rename(from.c_str(), to.c_str()) != 0) {
    const int error = errno;
    user_error("cannot rename {} to {}: {}", from.string(), to.string(), describe_errno(error));
  }
}

bool try_exchange_paths(const fs::path& a, const fs::path& b) {
  if (::renameat2(AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), RENAME_EXCHANGE) == 0) return true;
  const int error = errno;
  require(error == EINVAL || error == ENOSYS, "cannot swap {} and {}: {}", a.string(), b.string(),
          describe_errno(error));
  return false;
}

std::string unique_name(std::string_view prefix) {
  std::random_device random;
  return fmt::format("{}{}-{:08x}{:08x}", prefix, ::getpid(), random(), random());
}

std::string describe_errno(int error) {
  const std::string text = std::generic_category().message(error);
  switch (error) {
    case ENOSPC:
    case EDQUOT:
      return text + " (the disk or quota is full; free space there or choose another folder)";
    case EFBIG:
      return fmt::format("{}: the limit on the size of files is {}", text,
                         describe_file_size_limit());
    case EMFILE:
      return fmt::format("{}: the limit is {}; 256 suit a run, and more one of many ranks", text,
                         describe_open_file_limit());
    case ENOMEM: {
      const std::string limit = describe_memory_limit();
      return limit.empty() ? text : fmt::format("{}: {}", text, limit);
    }
    case EROFS:
    case EACCES:
    case EPERM:
      return text + " (check the permissions or choose another folder)";
    default:
      return text;
  }
}

}  // namespace tessera
