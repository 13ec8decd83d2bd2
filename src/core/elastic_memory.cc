#include "core/elastic_memory.h"

#include <algorithm>
#include <utility>

#include "core/memory.h"
#include "core/out_of_memory.h"

namespace tessera {
namespace {

[[noreturn]] void refuse(int64_t num_bytes, const std::string& purpose, const Device& device) {
  const std::string state = device.describe_memory();
  throw OutOfMemory(fmt::format(
      "out of memory: {} more for {} cannot be had on {}{}{}; use a smaller micro-batch, model or "
      "more recomputation",
      format_bytes(num_bytes), purpose, device.name(), state.empty() ? "" : ": ", state));
}

}  // namespace

ElasticMemory::ElasticMemory(Kind kind, int64_t num_bytes, std::string purpose, Device& device)
    : num_bytes_(num_bytes), purpose_(std::move(purpose)) {
  ensure(num_bytes >= 0, "negative size {} for {}", num_bytes, purpose_);
  if (num_bytes == 0) return;
  const int64_t page = kind == Kind::kByPage ? device.page_bytes() : 0;
  ensure(kind == Kind::kWhole || page > 0, "{} has no memory by pages", device.name());
  Release release{&device, page > 0 ? align_up(num_bytes, page) : num_bytes, page > 0};
  std::byte* const data = page > 0 ? device.reserve(release.num_bytes) : device.allocate(num_bytes);
  if (data == nullptr) refuse(num_bytes, purpose_, device);
  addresses_ = std::unique_ptr<std::byte, Release>(data, release);
  if (page > 0) pages_ = std::make_unique<PageSet>(num_bytes, page);
}

int64_t ElasticMemory::committed_bytes() const {
  return pages_ ? pages_->num_bytes() : num_bytes_;
}

void ElasticMemory::commit(int64_t begin, int64_t end) {
  if (!pages_) return;
  Device& device = *addresses_.get_deleter().device;
  pages_->add(begin, end, [&](int64_t first, int64_t behind) {
    if (!device.commit(data() + first, behind - first)) refuse(behind - first, purpose_, device);
  });
}

void ElasticMemory::Release::operator()(std::byte* data) const noexcept {
  if (by_page) {
    device->release_reserved(data, num_bytes);
  } else {
    device->release(data, num_bytes);
  }
}

}  // namespace tessera
