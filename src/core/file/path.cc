#include "core/file/path.h"

#include <string>
#include <system_error>
#include <vector>

#include "core/error.h"
#include "core/text/names.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

std::vector<std::string> names_in(const fs::path& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator at(folder, error), end; !error && at != end; at.increment(error)) {
    names.push_back(at->path().filename().string());
  }
  return names;
}

}  // namespace

void require_exists(const fs::path& path, std::string_view what) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (fs::exists(status)) return;
  require(status.type() == fs::file_type::not_found, "{} {} cannot be read: {}", what,
          path.string(), error.message());
  require(!fs::is_symlink(fs::symlink_status(path, error)),
          "{} {} does not exist: it is a link to {}, which is not there", what, path.string(),
          fs::read_symlink(path, error).string());
  const fs::path folder = path.has_parent_path() ? path.parent_path() : fs::path(".");
  require(fs::is_directory(folder, error), "{} {} does not exist, nor does the folder {}", what,
          path.string(), folder.string());
  user_error("{} {} does not exist{}", what, path.string(),
             did_you_mean(path.filename().string(), names_in(folder)));
}

}  // namespace tessera
