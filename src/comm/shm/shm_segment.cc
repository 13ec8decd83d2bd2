#include "comm/shm/shm_segment.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "core/error.h"

namespace tessera {
namespace {

constexpr int64_t kHeaderBytes = 4096;
static_assert(sizeof(ShmSegment::Header) <= kHeaderBytes);

int64_t segment_bytes(int64_t num_ranks) {
  return kHeaderBytes + num_ranks * static_cast<int64_t>(sizeof(ShmLane));
}

}  // namespace

FileDescriptor open_of_process(int64_t pid, int descriptor) {
  const std::string path = fmt::format("/proc/{}/fd/{}", pid, descriptor);
  return FileDescriptor(::open(path.c_str(), O_RDWR | O_CLOEXEC));
}

ShmSegment::ShmSegment(int64_t num_ranks)
    : file_(memfd_create("tessera_ranks", MFD_CLOEXEC)), bytes_(segment_bytes(num_ranks)) {
  require(file_ && ftruncate(file_.get(), bytes_) == 0,
          "no memory that ranks share: {}; set run.shared_memory = \"off\"", describe_errno(errno));
  map(num_ranks);
  require(memory_ != nullptr,
          "memory that ranks share cannot be mapped: {}; set run.shared_memory = \"off\"",
          describe_errno(errno));
  const ssize_t got = getrandom(&header().token, sizeof(header().token), 0);
  ensure(got == sizeof(header().token), "getrandom: {}", describe_errno(errno));
}

ShmSegment ShmSegment::open(int64_t pid, int descriptor, int64_t num_ranks, uint64_t token) {
  ShmSegment segment;
  segment.file_ = open_of_process(pid, descriptor);
  if (!segment.file_) return {};
  // A file of another kind could be shorter, and to touch what is behind its end would be fatal.
  if (lseek(segment.file_.get(), 0, SEEK_END) != segment_bytes(num_ranks)) return {};
  segment.map(num_ranks);
  segment.close_file();
  if (!segment || segment.header().token != token) return {};
  return segment;
}

void ShmSegment::map(int64_t num_ranks) {
  bytes_ = segment_bytes(num_ranks);
  void* memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file_.get(), 0);
  memory_ = memory == MAP_FAILED ? nullptr : static_cast<std::byte*>(memory);
}

ShmSegment::~ShmSegment() {
  if (memory_ != nullptr) munmap(memory_, bytes_);
}

void ShmSegment::swap(ShmSegment& other) noexcept {
  std::swap(file_, other.file_);
  std::swap(memory_, other.memory_);
  std::swap(bytes_, other.bytes_);
}

ShmLane& ShmSegment::lane_to(int64_t rank) const {
  return reinterpret_cast<ShmLane*>(memory_ + kHeaderBytes)[rank];
}

}  // namespace tessera
