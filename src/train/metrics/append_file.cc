#include "train/metrics/append_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <string>

#include "core/error.h"

namespace tessera {

AppendFile::AppendFile(const std::filesystem::path& path, Start start) : path_(path) {
  // Readable too, since a file that was removed can be read only by who has it open.
  const int mode = O_RDWR | O_CREAT | O_CLOEXEC | O_APPEND | (start == Start::kEmpty ? O_TRUNC : 0);
  file_ = FileDescriptor(open(path.c_str(), mode, 0666));
  if (!file_) user_error("cannot write {}: {}", path_.string(), describe_errno(errno));
}

void AppendFile::append(std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = write(file_.get(), bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) user_error("cannot write {}: {}", path_.string(), describe_errno(errno));
    bytes.remove_prefix(written);
  }
}

bool AppendFile::in_place() const {
  struct stat there {};
  struct stat own {};
  if (stat(path_.c_str(), &there) != 0) return errno != ENOENT && errno != ENOTDIR;
  return fstat(file_.get(), &own) != 0 ||
         (there.st_dev == own.st_dev && there.st_ino == own.st_ino);
}

void AppendFile::move_to(const std::filesystem::path& path) {
  const std::string content = read_all();
  AppendFile moved(path, Start::kEmpty);
  moved.append(content);
  *this = std::move(moved);
}

std::string AppendFile::read_all() const {
  std::string content;
  std::array<char, 1 << 16> block;
  for (;;) {
    const ssize_t count =
        pread(file_.get(), block.data(), block.size(), static_cast<off_t>(content.size()));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) user_error("cannot read {}: {}", path_.string(), describe_errno(errno));
    if (count == 0) return content;
    content.append(block.data(), count);
  }
}

}  // namespace tessera
