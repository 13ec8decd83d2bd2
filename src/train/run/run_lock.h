#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <filesystem>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/file/file.h"

namespace tessera {

/// The process that holds a run's folder, as `run.lock` in that folder says it.
struct FolderOwner {
  std::string host;
  std::string machine;        ///< differs between machines, and after each start of one
  std::string pid_namespace;  ///< within which `pid` means something
  int64_t pid = 0;
  std::string process_start;  ///< tells a later process of the same number apart
  std::string since;          ///< local time
  std::string token;          ///< of this lock alone

  /// "process 4711 on node7, since 2026-01-31 12:00:00 UTC".
  std::string describe() const;
};

/// This process, with a token of its own.
FolderOwner this_process();
std::string to_json(const FolderOwner& owner);
/// Nothing where the text is no such record, e.g. since a kill cut it short.
std::optional<FolderOwner> parse_folder_owner(const std::string& text);

struct RunLockOptions {
  std::chrono::milliseconds heartbeat{2000};     ///< between two signs of life
  std::chrono::milliseconds stale_after{30000};  ///< the age of one that is believed no more
  bool kernel_lock = true;                       ///< false: as on a file system that has no locks
};

/// Where the folder of a run is now.
struct FolderPlace {
  enum class State : uint8_t {
    kInPlace,  ///< where it was; `note` says what had to be mended
    kMoved,    ///< at `path`
    kRemoved,  ///< gone; another may stand at its path
    kTaken,    ///< in place, but another process, in `note`, has taken it over
  };
  State state = State::kInPlace;
  std::filesystem::path path = {};
  std::string note = {};
};

/// The folder of a run, held from construction to destruction by one process, by whatever path
/// others come. Three things guard it, all on the file `run.lock`: a lock of the kernel, which ends
/// with the process; a record of who holds it; and its time, renewed every few seconds, which tells
/// a living owner on another machine where the kernel's locks do not travel.
///
/// What a dead process left is taken over: at once where it ran on this machine, and once its signs
/// of life have stopped for a while where it ran on another.
class RunLock {
 public:
  /// Makes the folder where it is missing. Throws UserError naming the owner, with nothing written,
  /// where another process holds it.
  explicit RunLock(const std::filesystem::path& folder, const RunLockOptions& options = {});
  /// Leaves no trace: removes run.lock, and the folders that it made where they are empty.
  ~RunLock();
  RunLock(const RunLock&) = delete;
  RunLock& operator=(const RunLock&) = delete;

  /// The folder's absolute path.
  const std::filesystem::path& folder() const { return folder_; }
  /// Whose lock was taken over, or "".
  const std::string& note() const { return note_; }

  /// Looks where the folder is. Makes run.lock anew where only that was removed. What cannot be
  /// told, e.g. for a device's error, counts as in place.
  FolderPlace find();

 private:
  void acquire();
  void release();
  bool try_acquire();
  std::string judge(bool made, int file, bool locked) const;
  bool beats() const;
  void write_record();
  FolderPlace find_lock();
  FolderPlace restore_lock();
  bool is_mine() const;
  void beat_until_stopped();

  std::filesystem::path folder_;
  RunLockOptions options_;
  std::vector<std::filesystem::path> made_;  // folders, the innermost first
  FileDescriptor directory_;
  FileDescriptor file_;
  std::string record_;
  std::string note_;
  mutable std::mutex mutex_;
  std::condition_variable stop_;
  bool stopping_ = false;
  std::thread heart_;
};

}  // namespace tessera
