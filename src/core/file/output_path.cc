#include "core/file/output_path.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "core/error.h"
#include "core/file/file.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

/// Only a new file tells for sure: of the folder's permissions, a read-only disk, a name too long.
void try_new_file(std::string_view option, const fs::path& folder, const fs::path& path) {
  const fs::path probe = folder / unique_name(fmt::format(".tmp-{}-", path.filename().string()));
  const int fd = ::open(probe.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  const int error = errno;
  require(fd >= 0, "{}: cannot write {}: {}", option, path.string(), describe_errno(error));
  ::close(fd);
  ::unlink(probe.c_str());
}

}  // namespace

void check_output_path(std::string_view option, const fs::path& path) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  require(!fs::is_directory(status) && path.has_filename(),
          "{}: cannot write {}: it is a folder; name a file in it", option, path.string());
  const fs::path folder = path.has_parent_path() ? path.parent_path() : fs::path(".");
  require(fs::exists(folder, error),
          "{}: cannot write {}: there is no folder {}; make it or choose another", option,
          path.string(), folder.string());
  require(fs::is_directory(folder, error), "{}: cannot write {}: {} is not a folder", option,
          path.string(), folder.string());
  if (fs::exists(status) && ::access(path.c_str(), W_OK) != 0) {
    const int closed = errno;
    user_error("{}: cannot write {}: {}", option, path.string(), describe_errno(closed));
  }
  // A device is written to where it is.
  if (!fs::exists(status) || fs::is_regular_file(status)) try_new_file(option, folder, path);
}

}  // namespace tessera
