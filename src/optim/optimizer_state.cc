// What an optimizer keeps beside the weights, as checkpoints and loaders see it.
#include <algorithm>

#include "core/host_tensor.h"
#include "ops/adamw/state_rounding.h"
#include "optim/optimizer.h"

namespace tessera {

int Optimizer::num_state_tensors(size_t parameter) const {
  const Slot& slot = slots_[parameter];
  const auto count = [](MomentKind kind) { return has_scales(kind) ? 2 : 1; };
  return count(slot.formats.first_moment) +
         (slot.parameter.has_second_moment() ? count(slot.formats.second_moment) : 0) +
         (slot.beside != MasterKind::kNone ? 1 : 0);
}

std::vector<NamedTensor> Optimizer::state() const {
  std::vector<NamedTensor> result;
  for (const Slot& slot : slots_) {
    const auto add = [&](std::string_view suffix, const Tensor& tensor) {
      result.push_back({fmt::format("{}.{}", slot.parameter.name, suffix), tensor});
    };
    add("m", slot.m);
    if (has_scales(slot.formats.first_moment)) add("m_scale", slot.m_scale);
    if (slot.parameter.has_second_moment()) {
      add("v", slot.v);
      if (has_scales(slot.formats.second_moment)) add("v_scale", slot.v_scale);
    }
    if (slot.beside != MasterKind::kNone) add(master_suffix(slot.beside), slot.master);
  }
  return result;
}

/// Weight and remainder become those that tell what `change` makes of their number.
template <typename Remainder>
void Optimizer::Slot::change_remainder(
    const std::function<void(const Tensor& master)>& change) const {
  const HostTensor weight(parameter.weight, HostTensor::Access::kRead);
  const HostTensor remainder(master, HostTensor::Access::kRead);
  const auto upper = weight.get().span<Bf16>();
  const auto lower = remainder.get().span<Remainder>();
  const OwnedTensor whole(DType::kF32, parameter.weight.shape);
  const auto values = whole.get().span<float>();
  join_masters<Remainder>(upper, lower, values);
  change(whole.get());
  split_masters<Remainder>(values, upper, lower);
  weight.store();
  remainder.store();
}

void Optimizer::change_masters(
    const std::function<void(size_t parameter, const Tensor& master)>& change) const {
  for (size_t i = 0; i < slots_.size(); ++i) {
    const Slot& slot = slots_[i];
    if (slot.beside == MasterKind::kF32) {
      const HostTensor master(slot.master, HostTensor::Access::kRead);
      change(i, master.get());
      master.store();
    } else if (slot.beside == MasterKind::kRemainder) {
      slot.change_remainder<uint16_t>([&](const Tensor& master) { change(i, master); });
    } else if (slot.beside == MasterKind::kRemainder8) {
      slot.change_remainder<uint8_t>([&](const Tensor& master) { change(i, master); });
    }
  }
}

void Optimizer::round_masters() const {
  for (const Slot& slot : slots_) {
    if (slot.beside != MasterKind::kF32) continue;
    const HostTensor master(slot.master, HostTensor::Access::kRead);
    const HostTensor weight(slot.parameter.weight, HostTensor::Access::kWrite);
    std::ranges::transform(master.get().span<float>(), weight.get().as<Bf16>(),
                           [](float value) { return Bf16(value); });
    weight.store();
  }
}

void Optimizer::change_state(WeightUse use,
                             const std::function<void(size_t parameter)>& change) const {
  if (host_) return change_in_windows(use, change);
  for (size_t group = 0; group < groups_.groups.size(); ++group) {
    if (windows_) {
      windows_->load(group);
      windows_->wait_load(group);
    }
    for (const size_t idx : groups_.groups[group]) change(idx);
    if (!windows_) continue;
    windows_->store(group);
    windows_->wait_store(group);
  }
  backend_.device().synchronize();
}

void Optimizer::cast_weights() const {
  change_state(WeightUse::kWrite, [&](size_t parameter) { cast_weight(parameter, {}); });
}

void Optimizer::reset_masters() const {
  change_state(WeightUse::kRead, [&](size_t parameter) { reset_master(parameter); });
}

/// Where updates are made: through the host that of some billion weights takes several seconds.
void Optimizer::reset_master(size_t parameter) const {
  const Slot slot = at_work(parameter);
  if (slot.beside == MasterKind::kNone || slot.master.num_bytes() == 0) return;
  worker().device().zero(slot.master.data, slot.master.num_bytes());
  if (slot.beside != MasterKind::kF32) return;
  Tensor weight = slot.parameter.weight;
  weight.shape = {1, weight.num_elements()};
  const Tensor inputs[] = {weight, flat(slot.master)};
  run_kernel(worker(), *widen_, inputs, std::span(&inputs[1], 1), {}, {});
}

}  // namespace tessera
