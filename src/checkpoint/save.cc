#include <algorithm>
#include <string>

#include "checkpoint/checkpoint.h"
#include "checkpoint/layout.h"
#include "core/error.h"
#include "core/file.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

/// How many tensors from the start fit into one file; at least one.
size_t num_in_shard(std::span<const NamedTensor> tensors, int64_t shard_bytes) {
  int64_t num_bytes = 0;
  size_t count = 0;
  for (const NamedTensor& named : tensors) {
    num_bytes += named.tensor.num_bytes();
    if (count > 0 && num_bytes > shard_bytes) break;
    ++count;
  }
  return count;
}

void record_tensors(Manifest& manifest, TensorGroup group, std::span<const NamedTensor> tensors,
                    const std::string& file) {
  for (const NamedTensor& named : tensors) {
    const Tensor& tensor = named.tensor;
    const TensorRecord record{
        group, tensor.dtype, tensor.shape, {{file, named.name, whole(tensor.shape)}}};
    ensure(manifest.tensors.emplace(named.name, record).second,
           "two tensors of a checkpoint are named '{}'", named.name);
  }
}

void write_group(const fs::path& folder, const SaveRequest& request, TensorGroup group,
                 Manifest& manifest) {
  auto rest = group == TensorGroup::kModel ? request.model : request.optimizer;
  for (int index = 0; !rest.empty(); ++index) {
    const auto shard = rest.first(num_in_shard(rest, request.shard_bytes));
    const std::string file = fmt::format("{}-{:05}.safetensors", group_name(group), index);
    record_tensors(manifest, group, shard, file);
    const WrittenFile written = write_safetensors(folder / file, shard);
    manifest.files[file] = {written.num_bytes, written.checksum};
    rest = rest.subspan(shard.size());
  }
}

/// Writes all files of a checkpoint, the marker last and only when the others are on the disk.
void write_checkpoint(const fs::path& folder, const SaveRequest& request) {
  Manifest manifest;
  manifest.step = request.step;
  manifest.state = request.state;
  write_group(folder, request, TensorGroup::kModel, manifest);
  write_group(folder, request, TensorGroup::kOptimizer, manifest);
  const std::string text = manifest_text(manifest);
  write_file_synced(folder / kManifestFile, text);
  sync_folder(folder);
  write_file_synced(folder / kCompleteFile, complete_marker(text));
  sync_folder(folder);
}

fs::path trash_path(const fs::path& path) {
  return path.parent_path() /
         unique_name(fmt::format("{}{}-", kTrashPrefix, path.filename().string()));
}

/// Renamed first, so that a kill leaves nothing half-removed that looks complete.
void discard(const fs::path& path) {
  const fs::path trash = trash_path(path);
  rename_path(path, trash);
  remove_path(trash);
}

/// Gives a finished folder its final name; one of the same step takes the temporary name.
void publish(const fs::path& temporary, const fs::path& final_path) {
  if (!path_exists(final_path)) {
    rename_path(temporary, final_path);
  } else if (!try_exchange_paths(temporary, final_path)) {
    // A kill between these two loses the old checkpoint of this step; file systems without a swap
    // allow no better.
    rename_path(final_path, trash_path(final_path));
    rename_path(temporary, final_path);
  }
  sync_folder(final_path.parent_path());
}

void remove_quietly(const fs::path& path) {
  std::error_code ignored;
  fs::remove_all(path, ignored);
}

void write_and_publish(const fs::path& root, const fs::path& final_path,
                       const SaveRequest& request) {
  const fs::path temporary =
      root / unique_name(fmt::format(".tmp-{}-", final_path.filename().string()));
  try {
    make_folder(temporary);
    write_checkpoint(temporary, request);
    publish(temporary, final_path);
  } catch (const UserError& error) {
    remove_quietly(temporary);
    user_error("checkpoint of step {} not saved: {}; earlier checkpoints are as they were",
               request.step, error.what());
  } catch (...) {
    remove_quietly(temporary);
    throw;
  }
  remove_quietly(temporary);  // holds the replaced checkpoint, if there was one
}

template <typename Action>
void try_cleanup(SaveResult& result, Action action) {
  try {
    action();
  } catch (const UserError& error) {
    result.warnings.emplace_back(error.what());
  }
}

bool marked_complete(const fs::path& folder) {
  try {
    read_complete_manifest(folder);
    return true;
  } catch (const UserError&) {
    return false;
  }
}

/// Removes complete checkpoints beyond the newest `keep_last`, but never the one just saved.
void remove_old(const fs::path& root, const fs::path& saved, int64_t keep_last,
                SaveResult& result) {
  int64_t num_kept = 1;
  for (const StepFolder& folder : list_step_folders(root)) {
    if (folder.path == saved || !marked_complete(folder.path)) continue;
    if (++num_kept > keep_last) try_cleanup(result, [&] { discard(folder.path); });
  }
}

/// Removes what killed processes left. REQUIRES the lock of `root`: no other process is saving.
void remove_stale(const fs::path& root, SaveResult& result) {
  for (const char* prefix : {kTemporaryPrefix, kTrashPrefix}) {
    for (const fs::path& path : list_prefixed(root, prefix)) {
      try_cleanup(result, [&] { remove_path(path); });
    }
  }
}

}  // namespace

SaveResult save_checkpoint(const fs::path& root, const SaveRequest& request) {
  ensure(request.step >= 0 && request.keep_last >= 0 && request.shard_bytes > 0,
         "save_checkpoint: step {}, keep_last {}, shard_bytes {}", request.step, request.keep_last,
         request.shard_bytes);
  make_folder(root);
  const FolderLock lock(root);
  SaveResult result;
  // Before writing, since leftovers may fill the disk.
  if (lock.held()) remove_stale(root, result);
  result.path = root / step_folder_name(request.step);
  write_and_publish(root, result.path, request);
  try_cleanup(result,
              [&] { replace_file(root / kLatestFile, result.path.filename().string() + "\n"); });
  if (request.keep_last > 0) {
    try_cleanup(result, [&] { remove_old(root, result.path, request.keep_last, result); });
  }
  return result;
}

}  // namespace tessera
