#include "checkpoint/staged_save.h"

#include <utility>

#include "checkpoint/layout.h"
#include "checkpoint/retention.h"
#include "checkpoint/together.h"
#include "comm/error.h"
#include "core/error.h"

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

/// Gives a finished folder its final name; one of the same step takes the temporary name.
void rename_finished(const fs::path& temporary, const fs::path& final_path) {
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

}  // namespace

SaveJob make_job(const SliceSaveRequest& request, const Communicator& world) {
  return {.part = {.rank = world.rank(),
                   .num_ranks = world.size(),
                   .step = request.step,
                   .shard_bytes = request.shard_bytes,
                   .model = sliced_tensors(request.model),
                   .optimizer = sliced_tensors(request.optimizer)},
          .state = request.state,
          .keep_last = request.keep_last};
}

StagedSave::StagedSave(fs::path root, SaveJob job, Communicator& world)
    : root_(std::move(root)),
      job_(std::move(job)),
      world_(world),
      final_(root_ / step_folder_name(job_.part.step)) {}

StagedSave::~StagedSave() {
  if (!finished()) remove_temporary();
}

void StagedSave::begin() {
  prepare();
  abandoning([&] {
    together(world_, [&] {
      if (leads()) make_folder(temporary_);
    });
  });
}

void StagedSave::prepare() {
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

void StagedSave::work() {
  if (stage_ == Stage::kWrite) write();
  // A rank that is alone need not tell anybody before it goes on.
  if (leads() && (stage_ == Stage::kPublish || world_.size() == 1)) publish();
}

void StagedSave::end_stage(const std::function<void()>& worked) {
  abandoning([&] {
    together(world_, worked);
    go_on();
  });
}

void StagedSave::go_on() {
  if (world_.size() == 1 || stage_ == Stage::kPublish) {
    warnings_ = broadcast_texts(world_, warnings_);
    const Tensor all = view(std::span(&num_bytes_, 1), {1});
    world_.broadcast(all, 0).wait();
    lock_.reset();
    stage_ = Stage::kDone;
  } else {
    others_ = gather_texts(world_, std::move(text_));
    stage_ = Stage::kPublish;
  }
}

void StagedSave::write() {
  own_ = write_part(temporary_, part_);
  if (!leads()) text_ = manifest_text(own_);
}

void StagedSave::publish() {
  finish();
  remove_temporary();  // holds the replaced checkpoint, if there was one
  clean_up();
}

void StagedSave::finish() {
  own_.state = job_.state;
  std::vector<Manifest> parts = {std::move(own_)};
  for (size_t rank = 1; rank < others_.size(); ++rank) {
    parts.push_back(parse_manifest_part(others_[rank], fmt::format("the part of rank {}", rank)));
  }
  const Manifest manifest = merge_parts(std::move(parts));
  if (world_.size() > 1) check_files_seen(temporary_, manifest);
  for (const auto& [name, file] : manifest.files) num_bytes_ += file.num_bytes;
  complete_folder(temporary_, manifest_text(manifest));
  rename_finished(temporary_, final_);
}

void StagedSave::clean_up() {
  try_cleanup(warnings_,
              [&] { replace_file(root_ / kLatestFile, final_.filename().string() + "\n"); });
  if (job_.keep_last == 0) return;
  try_cleanup(warnings_, [&] { remove_old(root_, final_, job_.keep_last, warnings_); });
}

void StagedSave::abandoning(const std::function<void()>& action) {
  try {
    action();
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
}

/// What cannot be removed now, for instance since another rank still writes there, the next save
/// removes.
void StagedSave::remove_temporary() {
  std::error_code ignored;
  if (leads() && !temporary_.empty()) fs::remove_all(temporary_, ignored);
}

/// After an error that all ranks know of: none returns before nothing is left.
void StagedSave::abandon() {
  remove_temporary();
  world_.barrier();
}

}  // namespace tessera
