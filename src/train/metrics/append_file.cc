#include "train/metrics/append_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

#include "core/error.h"

namespace tessera {

AppendFile::AppendFile(const std::filesystem::path& path, Start start) : path_(path) {
  const int mode =
      O_WRONLY | O_CREAT | O_CLOEXEC | O_APPEND | (start == Start::kEmpty ? O_TRUNC : 0);
  file_ = FileDescriptor(open(path.c_str(), mode, 0666));
  if (!file_) user_error("cannot write {}: {}", path_.string(), describe_errno(errno));
}

void AppendFile::append(std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = write(file_.get(), bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) user_error("cannot write {}: {}", path_.string(), describe_errno(errno));
    bytes.remove_prefix(static_cast<size_t>(written));
  }
}

}  // namespace tessera
