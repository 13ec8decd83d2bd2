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

void Optimizer::cast_weights() const {
  for (size_t group = 0; group < groups_.groups.size(); ++group) {
    if (windows_) {
      windows_->load(group);
      windows_->wait_load(group);
    }
    for (const size_t idx : groups_.groups[group]) cast_weight(idx, {});
    if (!windows_) continue;
    windows_->store(group);
    windows_->wait_store(group);
  }
  backend_.device().synchronize();
}

void Optimizer::reset_masters() const {
  for (const Slot& slot : slots_) {
    if (is_remainder(slot.beside)) {
      if (windows_) {
        std::ranges::fill_n(static_cast<std::byte*>(slot.master.data), slot.master.num_bytes(),
                            std::byte{0});
      } else {
        backend_.device().zero(slot.master.data, slot.master.num_bytes());
      }
    }
    if (slot.beside != MasterKind::kF32) continue;
    const HostTensor weight(slot.parameter.weight, HostTensor::Access::kRead);
    const HostTensor master(slot.master, HostTensor::Access::kWrite);
    std::ranges::copy(weight.get().span<Bf16>(), master.get().as<float>());
    master.store();
  }
}

}  // namespace tessera
