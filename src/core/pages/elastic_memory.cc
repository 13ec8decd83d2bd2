#include "core/pages/elastic_memory.h"

#include <limits>
#include <utility>

#include "core/memory.h"
#include "core/out_of_memory.h"

namespace tessera {
namespace {

/// As a rule one call of a driver takes as long for a page as for many; few of them, so that what
/// one value needs and another does not rarely share a piece.
constexpr int64_t kPiecePages = 8;

[[noreturn]] void refuse_memory(int64_t num_bytes, const std::string& purpose,
                                const Device& device) {
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
  if (data == nullptr) refuse_memory(num_bytes, purpose_, device);
  addresses_ = std::unique_ptr<std::byte, Release>(data, release);
  if (page > 0) pages_ = std::make_unique<PageLedger>(num_bytes, page);
}

int64_t ElasticMemory::committed_bytes() const {
  return pages_ ? pages_->num_bytes() : num_bytes_;
}

void ElasticMemory::commit(int64_t begin, int64_t end) {
  for (const Piece& piece : need(begin, end)) {
    if (!give(piece)) refuse(piece.num_bytes());
  }
}

std::vector<ElasticMemory::Piece> ElasticMemory::need(int64_t begin, int64_t end) {
  constexpr int64_t kAny = std::numeric_limits<int64_t>::max();
  return pages_ ? pages_->need(begin, end, kept_ ? kPiecePages : kAny) : std::vector<Piece>();
}

bool ElasticMemory::give(const Piece& piece) {
  if (!addresses_.get_deleter().device->commit(data() + piece.begin, piece.num_bytes()))
    return false;
  pages_->add(piece);
  return true;
}

void ElasticMemory::keep() {
  if (pages_) pages_->keep();
  kept_ = true;
}

void ElasticMemory::leave(int64_t begin, int64_t end, int64_t now) {
  if (pages_) pages_->leave(begin, end, now);
}

std::vector<ElasticMemory::Piece> ElasticMemory::idle() const {
  return pages_ ? pages_->idle() : std::vector<Piece>();
}

void ElasticMemory::take_back(const Piece& idle) {
  pages_->remove(idle);
  addresses_.get_deleter().device->decommit(data() + idle.begin, idle.num_bytes());
}

void ElasticMemory::refuse(int64_t num_bytes) const {
  refuse_memory(num_bytes, purpose_, *addresses_.get_deleter().device);
}

void ElasticMemory::Release::operator()(std::byte* data) const noexcept {
  if (by_page) {
    device->release_reserved(data, num_bytes);
  } else {
    device->release(data, num_bytes);
  }
}

}  // namespace tessera
