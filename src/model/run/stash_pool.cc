#include "model/run/stash_pool.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <vector>

#include "core/memory.h"
#include "core/out_of_memory.h"
#include "ops/page_stash/page_pool.h"

namespace tessera {
namespace {

constexpr std::string_view kStashPurpose = "the stash of rows that came to experts";
/// A pool that has grown gets as large a part of itself besides.
constexpr int64_t kMoreShare = 8;
constexpr int64_t kStateBytes = kPoolStates * sizeof(int64_t);

ElasticMemory::Kind memory_kind(const Device& device) {
  return device.page_bytes() > 0 ? ElasticMemory::Kind::kByPage : ElasticMemory::Kind::kWhole;
}

int64_t free_bytes(int64_t most_pages) {
  return most_pages * dtype_size(DType::kI32);
}

}  // namespace

StashPool::StashPool(const StagePrograms& programs, const StashNeed& need)
    : device_(programs.backend.device()),
      page_bytes_(programs.stash_rule().value().page_bytes),
      most_pages_(need.most),
      pages_(memory_kind(device_), need.most * page_bytes_, std::string(kStashPurpose), device_),
      free_(free_bytes(need.most), kStashPurpose, device_),
      state_(kStateBytes, kStashPurpose, device_) {
  grow(need.planned);
}

int64_t StashPool::count_bytes(const StagePrograms& programs, const StashNeed& need,
                               int64_t pages) {
  if (need.most == 0) return 0;
  const Device& device = programs.backend.device();
  const int64_t page_bytes = programs.stash_rule().value().page_bytes;
  const bool by_page = memory_kind(device) == ElasticMemory::Kind::kByPage;
  const int64_t bytes =
      by_page ? align_up(pages * page_bytes, device.page_bytes()) : need.most * page_bytes;
  return bytes + align_up(free_bytes(need.most)) + align_up(kStateBytes);
}

CopyTensors StashPool::tensors() const {
  Device* const device = device_.is_host() ? nullptr : &device_;
  return {{std::string(kStashPages), {pages_.data(), DType::kU8, {page_bytes_}, device}},
          {std::string(kStashFree), free_.tensor(0, DType::kI32, {1})},
          {std::string(kStashState), state_.tensor(0, DType::kI64, {kPoolStates})}};
}

void StashPool::begin_step() {
  if (is_open_) reset();
  is_open_ = true;
}

int64_t StashPool::missing() {
  std::array<int64_t, kPoolStates> state{};
  device_.copy(state.data(), state_.data(), kStateBytes);
  is_open_ = false;
  ensure(state[kFreePages] == num_pages_ && state[kHeldPages] == 0,
         "a step left {} of {} pages of the stash free, and {} in use", state[kFreePages],
         num_pages_, state[kHeldPages]);
  return state[kMissingPages];
}

void StashPool::reset() {
  std::vector<int32_t> free(num_pages_);
  std::iota(free.begin(), free.end(), 0);
  std::array<int64_t, kPoolStates> state{};
  state[kPoolPages] = state[kFreePages] = num_pages_;
  if (num_pages_ > 0) device_.copy(free_.data(), free.data(), free_bytes(num_pages_));
  device_.copy(state_.data(), state.data(), kStateBytes);
  is_open_ = false;
}

bool StashPool::commit(int64_t pages) {
  for (const ElasticMemory::Piece& piece : pages_.need(0, pages * page_bytes_)) {
    if (!pages_.give(piece)) return false;
  }
  num_pages_ = pages;
  return true;
}

/// Routing drifts: with no more than what lacked, one step after the other would be done again.
void StashPool::grow(int64_t more_pages) {
  ensure(num_pages_ < most_pages_, "the stash has the {} pages of the worst routing, and {} lack",
         most_pages_, more_pages);
  const int64_t wanted = std::min(num_pages_ + more_pages, most_pages_);
  const int64_t ample = std::min(wanted + num_pages_ / kMoreShare, most_pages_);
  if (!commit(ample) && !commit(wanted)) refuse(wanted - num_pages_);
  reset();
}

void StashPool::refuse(int64_t pages) const {
  try {
    pages_.refuse(pages * page_bytes_);
  } catch (const OutOfMemory& error) {
    throw OutOfMemory(
        fmt::format("rows came to this rank's experts for which train.stash has no room, {} more "
                    "pages of {} are needed: {}; or a capacity (moe.capacity_factor), or a balance "
                    "loss of more weight",
                    pages, format_bytes(page_bytes_), error.what()));
  }
}

}  // namespace tessera
