#pragma once

#include <filesystem>
#include <functional>
#include <future>

#include "checkpoint/snapshot.h"
#include "checkpoint/staged_save.h"

namespace tessera {

/// A save whose files a thread of its own writes while the caller goes on. That thread starts when
/// the copies are there (Snapshot::done()). It never communicates nor asks anything of a device:
/// what the ranks do together is done by the callers, at moments that are the same on all ranks. So
/// any back end will do, whatever it allows to threads.
///
/// All functions are collective; the order and the arguments of the calls are the same on all
/// ranks. Errors are those of save_checkpoint, on all ranks. What the thread throws, of whatever
/// type, is thrown by advance() or wait().
class BackgroundSave {
 public:
  /// Starts to copy what `request` names to `snapshot`, and to write the copy; the caller
  /// calls Snapshot::before_change(). `root` as for
  /// save_checkpoint. Both snapshot and world must outlive it. `before_work` is called by the
  /// thread before each of its works; it is for tests.
  BackgroundSave(const std::filesystem::path& root, const SliceSaveRequest& request,
                 Snapshot& snapshot, Communicator& world, std::function<void()> before_work = {});
  /// Not collective. Waits until the thread has ended; rank 0 removes what is unfinished.
  ~BackgroundSave() = default;
  BackgroundSave(const BackgroundSave&) = delete;
  BackgroundSave& operator=(const BackgroundSave&) = delete;

  /// Whether all ranks' threads have ended by now, so that advance() does not wait for them.
  bool ready();
  /// Waits for the threads and starts what follows. True when the checkpoint is complete on the
  /// disk.
  bool advance();
  /// Returns when the checkpoint is complete on the disk.
  void wait();
  /// REQUIRES a complete one.
  SaveResult result() const { return save_.result(); }
  /// Not collective. How long this rank's thread has worked; REQUIRES a complete checkpoint.
  double work_seconds() const { return work_seconds_; }

 private:
  void start();
  void launch();

  Communicator& world_;
  Snapshot& snapshot_;
  std::function<void()> before_work_;
  StagedSave save_;
  double work_seconds_ = 0;  ///< the thread's while there is one, as save_
  std::future<void> work_;   ///< destroyed first, which waits for its thread
};

}  // namespace tessera
