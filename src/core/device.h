#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace tessera {

/// Work that a device recorded instead of doing it, to be done as often as wanted. The memory that
/// it reads and writes must still be there then.
class RecordedWork {
 public:
  RecordedWork() = default;
  RecordedWork(const RecordedWork&) = delete;
  RecordedWork& operator=(const RecordedWork&) = delete;
  virtual ~RecordedWork() = default;

  /// Gives the device the work, after all work given before.
  virtual void run() const = 0;
  /// How many operations of the device it is: kernels, copies and the like.
  virtual int64_t num_operations() const = 0;
};

/// What came of recording: work, or why there is none.
struct Recording {
  std::unique_ptr<RecordedWork> work;
  std::string why_not;
};

/// A place in the order of a device's work, for which the host waits. It must not outlive the
/// device. This one is of devices that have done work when it was given.
class DeviceEvent {
 public:
  DeviceEvent() = default;
  DeviceEvent(const DeviceEvent&) = delete;
  DeviceEvent& operator=(const DeviceEvent&) = delete;
  virtual ~DeviceEvent() = default;

  /// Puts it behind all work given so far. Not while the device records.
  virtual void record() {}
  /// Returns when the device has come to it, at once where it was never recorded. Throws as
  /// Device::synchronize().
  virtual void synchronize() {}
};

/// Copies, and work of the host on what was copied, beside a device's other work, done in the order
/// in which they are given. One side of a copy is the device's memory, the other what
/// Device::allocate_shared gave. Not thread-safe. It must not outlive the device.
class CopyLane {
 public:
  CopyLane() = default;
  CopyLane(const CopyLane&) = delete;
  CopyLane& operator=(const CopyLane&) = delete;
  virtual ~CopyLane() = default;

  /// A copy that was given.
  using Ticket = int64_t;
  struct Part {
    void* to = nullptr;
    const void* from = nullptr;
    int64_t num_bytes = 0;
  };
  /// Copies after all work that the device was given before. Until join(), nobody may change either
  /// side or read the bytes at `to`.
  virtual Ticket give_parts(std::span<const Part> parts) = 0;
  Ticket give(void* to, const void* from, int64_t num_bytes) {
    const Part part{to, from, num_bytes};
    return give_parts({&part, 1});
  }
  /// Has the host's threads work on memory that they reach, after what was given here before and
  /// all work that the device was given before. The call may return before that is done. The work
  /// must neither use the device nor throw, and its memory is used until join(). Not while the
  /// device records.
  virtual Ticket give_work(std::function<void()> work) = 0;
  /// What the device is given from now on comes after that copy or work. To be called once for
  /// each.
  virtual void join(Ticket copy) = 0;
};

/// A processor's memory, and the work that it does in the order in which it is given. Work on a GPU
/// goes on after the call that gave it; what the host reads or writes must be synchronised with it.
class Device {
 public:
  Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  virtual ~Device() = default;

  /// "cpu", or "cuda:0".
  virtual std::string name() const = 0;
  /// Whether the host may read and write its memory, and work is done when the call returns.
  virtual bool is_host() const = 0;

  /// Zeroed memory, aligned for any value; null where it cannot be had. num_bytes > 0.
  virtual std::byte* allocate(int64_t num_bytes) = 0;
  virtual void release(std::byte* data, int64_t num_bytes) noexcept = 0;
  /// The same where the host and the device both reach it, slowly from one of them: for scalars.
  virtual std::byte* allocate_shared(int64_t num_bytes) { return allocate(num_bytes); }
  virtual void release_shared(std::byte* data, int64_t num_bytes) noexcept {
    release(data, num_bytes);
  }

  /// Memory that comes page by page to addresses that are reserved before: the size of a page, 0
  /// where the device has no such memory.
  virtual int64_t page_bytes() const { return 0; }
  /// Addresses without memory, aligned to pages; null where there are not as many. num_bytes is a
  /// positive multiple of page_bytes().
  virtual std::byte* reserve(int64_t /*num_bytes*/) { return nullptr; }
  /// Gives memory of undefined content to reserved pages that have none, beside the work that goes
  /// on; false where it cannot be had.
  virtual bool commit(std::byte* /*pages*/, int64_t /*num_bytes*/) { return false; }
  /// Takes back what one call of commit() gave; the addresses stay reserved. REQUIRES that all work
  /// that uses the memory is done.
  virtual void decommit(std::byte* /*pages*/, int64_t /*num_bytes*/) {}
  /// Takes reserved addresses back, and what memory they have.
  virtual void release_reserved(std::byte* /*data*/, int64_t /*num_bytes*/) noexcept {}
  /// Kernels may read, and not use, so many rows behind the last of a ragged value.
  virtual int64_t rows_read_behind() const { return 0; }

  /// Copies after all work given before; either side may be the host's memory. The bytes are there,
  /// or taken, when it returns, unless both are the device's, own or shared.
  virtual void copy(void* to, const void* from, int64_t num_bytes) = 0;
  /// The same from the host's memory, for bytes that the host may change as soon as this returns,
  /// and without a wait for the device where they are few.
  virtual void upload(void* to, const void* from, int64_t num_bytes) { copy(to, from, num_bytes); }
  /// Copies shared memory to the device's own, from the address that the device finds in `from`,
  /// shared too, when it comes to it: so recorded work reads now one place, now another. The host
  /// may change neither until then.
  virtual void copy_found(void* to, const void* const* from, int64_t num_bytes) {
    copy(to, *from, num_bytes);
  }
  /// Zeroes memory of the device, after all work given before.
  virtual void zero(void* data, int64_t num_bytes) = 0;
  /// Returns when all work is done. Throws InternalError where some of it failed.
  virtual void synchronize() = 0;
  /// An event that was not recorded yet.
  virtual std::unique_ptr<DeviceEvent> make_event() { return std::make_unique<DeviceEvent>(); }

  /// Of a device that does its work at once, a lane that does so too.
  virtual std::unique_ptr<CopyLane> make_copy_lane();

  /// How often the host has waited for its work.
  virtual int64_t num_waits() const { return 0; }
  /// How long it has, all these waits together.
  virtual double waited_seconds() const { return 0; }

  /// Makes the device record the work that this thread gives it, up to end_recording(), and do none
  /// of it; the host may neither wait for the device meanwhile nor upload. False where it cannot
  /// record.
  virtual bool begin_recording() { return false; }
  /// Whether it records now.
  virtual bool is_recording() const { return false; }
  /// REQUIRES that begin_recording() returned true.
  virtual Recording end_recording() { return {}; }

  using Time = std::chrono::steady_clock::time_point;
  /// A place in the order of the device's work.
  using Mark = size_t;
  virtual Mark mark() = 0;
  /// When the device came to the marks `begin` and `end` is known after the next synchronize(),
  /// which then calls `use` with both; on the host at once.
  virtual void when_known(Mark begin, Mark end, std::function<void(Time, Time)> use) = 0;
  /// Bytes of its memory that are in use; of the host, what this process holds (ProcessMemory).
  virtual int64_t used_bytes() const = 0;
  /// What to advise where memory cannot be had, with what is in use, e.g. "12 of 140 GiB are free".
  virtual std::string describe_memory() const { return ""; }
};

/// The host's memory; its work is done at once.
Device& host_device();

}  // namespace tessera
