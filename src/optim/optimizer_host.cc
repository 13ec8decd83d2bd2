// State in the host's memory, and updates that the host's threads make for a device.
#include <algorithm>
#include <utility>

#include "ops/adamw/adamw_factors.h"
#include "optim/host_updates.h"
#include "optim/optimizer.h"

namespace tessera {
namespace {

/// The weight as an update leaves it; ranks round alike in any case.
void round_master(const Tensor& master, const Tensor& weight) {
  std::ranges::transform(master.span<float>(), weight.as<Bf16>(),
                         [](float value) { return Bf16(value); });
}

}  // namespace

int64_t Optimizer::host_window_bytes(std::span<const Parameter> parameters,
                                     const UpdateGroups& groups) {
  return groups.updated_on_host ? HostUpdates::window_bytes(parameters, groups) : 0;
}

const Buffer& Optimizer::state_memory() const {
  if (host_) return host_->state();
  return windows_ ? windows_->host() : state_;
}

void Optimizer::update_group(size_t group, const UpdateObserver& observer) {
  if (host_) {
    store_gradients(group);
    update_on_host(group, observer);
    host_->load_weights(group);
    wait_updated(group);
    return finish_updates();
  }
  if (!windows_) return update(groups_.groups.at(group), observer);
  windows_->load(group);
  windows_->wait_load(group);
  update(groups_.groups.at(group), observer);
  windows_->store(group);
  windows_->wait_store(group);
}

/// State is where it stays; what passes is in the window.
Optimizer::Slot Optimizer::in_window(Slot slot, size_t parameter) const {
  slot.parameter.grad = host_->grad(parameter);
  const Tensor& weight = host_->weight(parameter);
  if (slot.cast) {
    slot.cast = weight;
    slot.cast_scales = host_->scales(parameter);
    return slot;
  }
  slot.parameter.weight = weight;
  if (slot.beside == MasterKind::kNone) slot.master = weight;
  return slot;
}

void Optimizer::store_gradients(size_t group) {
  host_->store_gradients(group, own_.grad_scale);
}

/// The factors are copied, since the host may prepare the next step's before the update is made.
void Optimizer::update_on_host(size_t group, const UpdateObserver& observer) {
  const auto all = shared_.factors.span<float>();
  std::shared_ptr<HostTimes> times;
  if (observer) times = std::make_shared<HostTimes>(HostTimes{.observer = observer});
  host_times_.at(group) = times;
  host_->update(group, [this, group, times, factors = std::vector(all.begin(), all.end())] {
    const Device::Time begin = std::chrono::steady_clock::now();
    update_in_window(group, factors);
    if (times) *times = {times->observer, begin, std::chrono::steady_clock::now()};
  });
}

/// Weights of a step that is left out go back as they were, since the device does not know yet that
/// nothing comes of it: those that were not brought are their masters, rounded or cast.
void Optimizer::update_in_window(size_t group, std::span<const float> factors) const {
  const std::vector<size_t>& parameters = groups_.groups[group];
  Tensor all = shared_.factors;
  all.data = const_cast<float*>(factors.data());
  const Updater updater{host_backend_, all, host_->grad_scale(group)};
  update(updater, parameters, {});
  if (updater.grad_scale.as<float>()[1] == 0) return;
  for (const size_t idx : parameters) {
    const Slot slot = at_work(idx);
    if (slot.beside == MasterKind::kF32) round_master(slot.master, slot.parameter.weight);
  }
}

/// The device comes to the mark when the host has made the update.
void Optimizer::wait_updated(size_t group) {
  host_->wait_updated(group);
  const std::shared_ptr<HostTimes> times = std::exchange(host_times_.at(group), nullptr);
  if (!times) return;
  Device& device = backend_.device();
  const Device::Mark mark = device.mark();
  device.when_known(mark, mark, [times](auto, auto) { tell(*times); });
}

void Optimizer::finish_updates() {
  if (!host_) return;
  host_->finish();
  for (std::shared_ptr<HostTimes>& times : host_times_) {
    if (const auto known = std::exchange(times, nullptr)) tell(*known);
  }
}

void Optimizer::change_in_windows(WeightUse use,
                                  const std::function<void(size_t parameter)>& change) const {
  host_->finish();
  for (size_t group = 0; group < groups_.groups.size(); ++group) {
    if (use == WeightUse::kRead) host_->bring_weights(group);
    for (const size_t idx : groups_.groups[group]) change(idx);
    if (use == WeightUse::kRead) continue;
    host_->load_weights(group);
    host_->finish();
  }
}

}  // namespace tessera
