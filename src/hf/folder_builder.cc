#include "hf/folder_builder.h"

#include "core/error.h"
#include "core/file/file.h"
#include "core/memory.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

/// Without a slash at its end, which would leave no file name.
fs::path plain_path(const fs::path& path) {
  const fs::path absolute = fs::absolute(path).lexically_normal();
  return absolute.has_filename() ? absolute : absolute.parent_path();
}

}  // namespace

FolderBuilder::FolderBuilder(fs::path target) : target_(plain_path(target)) {
  require(!path_exists(target_) || (fs::is_directory(target_) && fs::is_empty(target_)),
          "{} exists already; choose another name or remove it", target_.string());
  make_folder(target_.parent_path());
  temporary_ =
      target_.parent_path() / unique_name(fmt::format(".tmp-{}-", target_.filename().string()));
  make_folder(temporary_);
}

FolderBuilder::~FolderBuilder() {
  std::error_code ignored;
  if (!temporary_.empty()) fs::remove_all(temporary_, ignored);
}

void FolderBuilder::require_space(int64_t num_bytes) const {
  std::error_code error;
  const fs::space_info space = fs::space(temporary_, error);
  if (error) return;  // then a full disk shows when writing
  require(std::cmp_greater_equal(space.available, num_bytes),
          "{} needs {}, and its file system has {} free; free space there or choose another folder",
          target_.string(), format_bytes(num_bytes),
          format_bytes(static_cast<int64_t>(space.available)));
}

void FolderBuilder::publish() {
  sync_folder(temporary_);
  rename_path(temporary_, target_);
  temporary_.clear();
  sync_folder(target_.parent_path());
}

}  // namespace tessera
