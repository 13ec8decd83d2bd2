#include "optim/host_updates.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "core/limits.h"
#include "core/out_of_memory.h"
#include "ops/adamw/adamw_factors.h"

namespace tessera {
namespace {

constexpr int64_t kScaleBytes = kAlignment;
static_assert(sizeof(AdamWGradScale) <= kScaleBytes);

/// A copy between pinned memory and a device needs nobody's help.
Buffer allocate_pinned(int64_t num_bytes, Device& device) {
  try {
    return {num_bytes, "gradients and weights of updates on the host", device, MemoryKind::kShared};
  } catch (const OutOfMemory& error) {
    throw OutOfMemory(fmt::format("{}, or a smaller optim.bucket_bytes; {}", error.what(),
                                  describe_lockable_memory()));
  }
}

/// Whether an update reads the weight itself, and not a master that tells all of it.
bool reads_weight(const Parameter& parameter, const StateFormats& formats) {
  return !parameter.is_fp8() && formats.master_of(parameter.weight.dtype) != MasterKind::kF32;
}

void add_part(const Tensor& to, const Tensor& from, std::vector<CopyLane::Part>& parts) {
  if (from.num_bytes() > 0) parts.push_back({to.data, from.data, from.num_bytes()});
}

}  // namespace

int64_t HostUpdates::bytes_in(const Parameter& parameter, const StateFormats& formats) {
  return parameter.grad.num_bytes() +
         (reads_weight(parameter, formats) ? parameter.weight.num_bytes() : 0);
}

int64_t HostUpdates::passing_bytes(const Parameter& parameter) {
  return align_up(parameter.grad.num_bytes()) + align_up(parameter.weight.num_bytes()) +
         (parameter.is_fp8() ? align_up(parameter.scales.num_bytes()) : 0);
}

int64_t HostUpdates::window_bytes(std::span<const Parameter> parameters,
                                  const UpdateGroups& groups) {
  std::array<int64_t, kNumWindows> windows = {};
  for (size_t group = 0; group < groups.groups.size(); ++group) {
    int64_t bytes = 0;
    for (const size_t idx : groups.groups[group]) bytes += passing_bytes(parameters[idx]);
    windows[window_of(group)] = std::max(windows[window_of(group)], bytes);
  }
  return windows[0] + windows[1] + std::ssize(groups.groups) * kScaleBytes;
}

int64_t HostUpdates::window_bytes() const {
  return windows_[0].num_bytes() + windows_[1].num_bytes() + grad_scales_.num_bytes();
}

HostUpdates::HostUpdates(std::span<const Parameter> parameters, const StateFormats& formats,
                         const UpdateGroups& groups, Device& device)
    : device_(device),
      groups_(groups),
      places_(parameters.size()),
      stored_(groups.groups.size()),
      updated_(groups.groups.size()),
      loaded_(groups.groups.size()) {
  const auto group_bytes = list_group_bytes(parameters, formats, groups);
  int64_t state_bytes = 0;
  for (const int64_t bytes : group_bytes) state_bytes += bytes;
  state_ = Buffer(state_bytes, "offloaded optimizer state");
  std::array<std::vector<std::pair<size_t, int64_t>>, kNumWindows> offsets;
  std::array<int64_t, kNumWindows> most = {};
  for (size_t group = 0; group < groups.groups.size(); ++group) {
    const size_t window = window_of(group);
    int64_t offset = 0;
    for (const size_t idx : groups.groups[group]) {
      offsets[window].emplace_back(idx, offset);
      offset += passing_bytes(parameters[idx]);
    }
    most[window] = std::max(most[window], offset);
  }
  for (size_t window = 0; window < kNumWindows; ++window) {
    windows_[window] = allocate_pinned(most[window], device);
    lanes_[window] = device.make_copy_lane();
    for (const auto& [idx, offset] : offsets[window]) {
      places_[idx] = {.own = parameters[idx],
                      .reads_weight = reads_weight(parameters[idx], formats)};
      place(idx, windows_[window], offset);
    }
  }
  grad_scales_ = allocate_pinned(std::ssize(groups.groups) * kScaleBytes, device);
}

HostUpdates::~HostUpdates() = default;

void HostUpdates::place(size_t parameter, const Buffer& window, int64_t offset) {
  Place& place = places_[parameter];
  const auto take = [&](const Tensor& like) {
    const Tensor tensor = window.tensor(offset, like.dtype, like.shape);
    offset += align_up(like.num_bytes());
    return tensor;
  };
  place.grad = take(place.own.grad);
  place.weight = take(place.own.weight);
  if (place.own.is_fp8()) place.scales = take(place.own.scales);
}

Tensor HostUpdates::grad_scale(size_t group) const {
  return grad_scales_.tensor(static_cast<int64_t>(group) * kScaleBytes, DType::kF32, {2});
}

void HostUpdates::add_weights(size_t parameter, bool to_device,
                              std::vector<CopyLane::Part>& parts) const {
  const Place& place = places_[parameter];
  const auto add = [&](const Tensor& own, const Tensor& passing) {
    add_part(to_device ? own : passing, to_device ? passing : own, parts);
  };
  add(place.own.weight, place.weight);
  if (place.own.is_fp8()) add(place.own.scales, place.scales);
}

/// The scale is copied in the device's order: where gradients are released the next group's comes
/// to the same place, perhaps before this group's gradients are on their way.
void HostUpdates::store_gradients(size_t group, const Tensor& grad_scale) {
  ensure(!stored_.at(group) && !updated_[group] && !loaded_[group],
         "optimizer: group {} is on its way to an update already", group);
  device_.copy(this->grad_scale(group).data, grad_scale.data, grad_scale.num_bytes());
  std::vector<CopyLane::Part> parts;
  for (const size_t idx : groups_.groups[group]) {
    add_part(places_[idx].grad, places_[idx].own.grad, parts);
    if (places_[idx].reads_weight) add_weights(idx, /*to_device=*/false, parts);
  }
  stored_[group] = lane(group).give_parts(parts);
}

void HostUpdates::update(size_t group, std::function<void()> work) {
  ensure(!updated_.at(group), "optimizer: group {} is updated already", group);
  updated_[group] = lane(group).give_work([this, work = std::move(work)] {
    const std::scoped_lock lock(at_work_);
    work();
  });
}

void HostUpdates::load_weights(size_t group) {
  ensure(!loaded_.at(group), "optimizer: weights of group {} are on their way already", group);
  std::vector<CopyLane::Part> parts;
  for (const size_t idx : groups_.groups[group]) add_weights(idx, /*to_device=*/true, parts);
  loaded_[group] = lane(group).give_parts(parts);
}

void HostUpdates::join(Tickets& tickets, size_t group) {
  if (tickets.at(group)) lane(group).join(*std::exchange(tickets[group], std::nullopt));
}

void HostUpdates::wait_stored(size_t group) {
  join(stored_, group);
}

void HostUpdates::wait_updated(size_t group) {
  join(updated_, group);
}

void HostUpdates::wait_loaded(size_t group) {
  join(loaded_, group);
}

void HostUpdates::finish() {
  bool waits = false;
  for (size_t group = 0; group < stored_.size(); ++group) {
    for (Tickets* const tickets : {&stored_, &updated_, &loaded_}) {
      waits = waits || (*tickets)[group];
      join(*tickets, group);
    }
  }
  if (waits) device_.synchronize();
}

void HostUpdates::bring_weights(size_t group) {
  std::vector<CopyLane::Part> parts;
  for (const size_t idx : groups_.groups.at(group)) add_weights(idx, /*to_device=*/false, parts);
  lane(group).join(lane(group).give_parts(parts));
  device_.synchronize();
}

}  // namespace tessera
