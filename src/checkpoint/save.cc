#include <algorithm>
#include <optional>
#include <string>

#include "checkpoint/checkpoint.h"
#include "checkpoint/layout.h"
#include "checkpoint/retention.h"
#include "checkpoint/together.h"
#include "checkpoint/write_part.h"
#include "comm/error.h"
#include "core/error.h"
#include "core/file/file.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

/// Rank 0 must see what the others wrote, or no one could load it.
void check_files_seen(const fs::path& folder, const Manifest& manifest) {
  for (const auto& [name, record] : manifest.files) {
    std::error_code error;
    const auto size = fs::file_size(folder / name, error);
    require(!error && static_cast<int64_t>(size) == record.num_bytes,
            "rank 0 finds no file {} of {} bytes, which another rank wrote; the folder must lie on "
            "a file system that all ranks share",
            (folder / name).string(), record.num_bytes);
  }
}

/// Writes the manifest, and the marker when all else is on the disk.
void complete(const fs::path& folder, const Manifest& manifest) {
  const std::string text = manifest_text(manifest);
  write_file_synced(folder / kManifestFile, text);
  sync_folder(folder);
  write_file_synced(folder / kCompleteFile, complete_marker(text));
  sync_folder(folder);
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

struct SaveJob {
  PartRequest part;
  std::string state;
  int64_t keep_last = 0;
};

/// One save, seen from one rank. Rank 0 leads: it alone makes, renames and removes folders.
class Save {
 public:
  Save(const fs::path& root, const SaveJob& job, Communicator& world)
      : root_(root),
        job_(job),
        part_(job.part),
        world_(world),
        final_(root / step_folder_name(job.part.step)) {}

  SaveResult run() {
    prepare();
    write_and_publish();
    together(world_, [&] {
      if (leads()) clean_up();
    });
    return {final_, broadcast_texts(world_, warnings_)};
  }

 private:
  bool leads() const { return world_.rank() == 0; }

  void prepare() {
    std::string name;
    together(world_, [&] {
      ensure(
          part_.step >= 0 && part_.step <= kMaxStep && job_.keep_last >= 0 && part_.shard_bytes > 0,
          "save_checkpoint: step {}, keep_last {}, shard_bytes {}", part_.step, job_.keep_last,
          part_.shard_bytes);
      if (!leads()) return;
      make_folder(root_);
      lock_.emplace(root_);
      // Before writing, since leftovers may fill the disk.
      if (lock_->held()) remove_stale(root_, warnings_);
      name = unique_name(fmt::format(".tmp-{}-", final_.filename().string()));
    });
    temporary_ = root_ / broadcast_texts(world_, {name}).front();
  }

  void write_and_publish() {
    try {
      together(world_, [&] {
        if (leads()) make_folder(temporary_);
      });
      Manifest own;
      std::string text;
      together(world_, [&] {
        own = write_part(temporary_, part_);
        if (!leads()) text = manifest_text(own);
      });
      const auto others = gather_texts(world_, std::move(text));
      together(world_, [&] {
        if (leads()) finish(std::move(own), others);
      });
    } catch (const CommError&) {
      remove_temporary();
      throw;
    } catch (const UserError& error) {
      abandon();
      user_error("checkpoint of step {} not saved: {}; earlier checkpoints are as they were",
                 part_.step, error.what());
    } catch (const InternalError&) {
      abandon();
      throw;
    } catch (...) {
      remove_temporary();
      throw;
    }
    remove_temporary();  // holds the replaced checkpoint, if there was one
  }

  /// What cannot be removed now, for instance since another rank still writes there, the next save
  /// removes.
  void remove_temporary() {
    std::error_code ignored;
    if (leads()) fs::remove_all(temporary_, ignored);
  }

  /// After an error that all ranks know of: none returns before nothing is left.
  void abandon() {
    remove_temporary();
    world_.barrier();
  }

  void finish(Manifest own, const std::vector<std::string>& others) {
    own.state = job_.state;
    std::vector<Manifest> parts = {std::move(own)};
    for (size_t rank = 1; rank < others.size(); ++rank) {
      parts.push_back(parse_manifest_part(others[rank], fmt::format("the part of rank {}", rank)));
    }
    const Manifest manifest = merge_parts(std::move(parts));
    if (world_.size() > 1) check_files_seen(temporary_, manifest);
    complete(temporary_, manifest);
    publish(temporary_, final_);
  }

  void clean_up() {
    try_cleanup(warnings_,
                [&] { replace_file(root_ / kLatestFile, final_.filename().string() + "\n"); });
    if (job_.keep_last == 0) return;
    try_cleanup(warnings_, [&] { remove_old(root_, final_, job_.keep_last, warnings_); });
  }

  const fs::path& root_;
  const SaveJob& job_;
  const PartRequest& part_;
  Communicator& world_;
  const fs::path final_;
  fs::path temporary_;
  std::optional<FolderLock> lock_;
  std::vector<std::string> warnings_;
};

}  // namespace

SaveResult save_checkpoint(const fs::path& root, const SaveRequest& request) {
  const SaveJob job{.part = {.step = request.step,
                             .shard_bytes = request.shard_bytes,
                             .model = whole_tensors(request.model),
                             .optimizer = whole_tensors(request.optimizer)},
                    .state = request.state,
                    .keep_last = request.keep_last};
  const CommunicatorPtr alone = make_single_communicator("checkpoint");
  return Save(root, job, *alone).run();
}

SaveResult save_checkpoint(const fs::path& root, const SliceSaveRequest& request,
                           Communicator& world) {
  SaveJob job;
  together(world, [&] {
    job = {.part = {.rank = world.rank(),
                    .num_ranks = world.size(),
                    .step = request.step,
                    .shard_bytes = request.shard_bytes,
                    .model = sliced_tensors(request.model),
                    .optimizer = sliced_tensors(request.optimizer)},
           .state = request.state,
           .keep_last = request.keep_last};
  });
  return Save(root, job, world).run();
}

}  // namespace tessera
