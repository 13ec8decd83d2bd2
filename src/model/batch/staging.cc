#include "model/batch/staging.h"

#include <utility>

namespace tessera {

Staging::Place Staging::make_place() const {
  Place place;
  place.memory = Buffer(kAlignment + 2 * block_bytes_, "inputs of micro-batches", *device_,
                        MemoryKind::kShared);
  place.read = place.memory.data() + kAlignment;
  place.spare = place.read + block_bytes_;
  place.tell_device();
  return place;
}

Staging::Place& Staging::next_place() {
  if (num_released_ == num_staged_) clear();
  if (num_staged_ == places_.size()) places_.push_back(make_place());
  return places_[num_staged_++];
}

void Staging::next_from_spare(size_t number) {
  Place& place = next_place();
  ensure(&place == &places_.at(number), "micro-batch {} of a step was filled, {} is staged", number,
         num_staged_ - 1);
  std::swap(place.read, place.spare);
  place.tell_device();
}

void Staging::bring(std::byte* to) {
  ensure(num_brought_ < num_staged_, "a micro-batch is brought that was not staged");
  const std::byte* const word = places_[num_brought_++].memory.data();
  device_->copy_found(to, reinterpret_cast<const void* const*>(word), block_bytes_);
}

}  // namespace tessera
