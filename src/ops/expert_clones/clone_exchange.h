#pragma once

#include <algorithm>
#include <vector>

#include "core/device.h"
#include "ops/expert_clones/clone_weights.h"
#include "ops/workspace.h"

/// The exchanges of clones in all back ends: communicators need counts on the host, and back ends
/// differ in how these get there.
namespace tessera::clones {

/// What such an input has.
using ReadNumbers = std::vector<int64_t> (*)(const KernelArgs& args, const Tensor& numbers);

/// Rows that a rank sends to each other one, and gets from it, as clones are made.
struct CloneCounts {
  std::vector<int64_t> sent;
  std::vector<int64_t> received;
};

inline CloneCounts count_rows(const CloneSlots& spec, std::span<const int64_t> slots,
                              int64_t block_rows) {
  CloneCounts counts{.sent = std::vector<int64_t>(spec.num_ranks, 0),
                     .received = std::vector<int64_t>(spec.num_ranks, 0)};
  for (int64_t slot = 0; slot < spec.num_slots(); ++slot) {
    if (slots[slot] < 0) continue;
    const int64_t from = spec.home_of(slots[slot]);
    const int64_t to = slot / spec.slots_per_rank;
    if (from == spec.rank) counts.sent[to] += block_rows;
    if (to == spec.rank) counts.received[from] += block_rows;
  }
  return counts;
}

inline bool has_clones(std::span<const int64_t> slots) {
  return std::ranges::any_of(slots, [](int64_t expert) { return expert >= 0; });
}

inline int64_t bytes_of_clones(const CloneSlots& spec, const ValueType& weight) {
  return align_up(weight.num_bytes() / spec.num_local() * spec.max_clones());
}

/// The experts that are cloned from here, in the order of their slots.
inline void pack_clones(const CloneSlots& spec, std::span<const int64_t> slots,
                        const Tensor& experts, const Tensor& packed) {
  Device& device = experts.device == nullptr ? host_device() : *experts.device;
  const int64_t bytes = experts.num_bytes() / spec.num_local();
  auto* to = static_cast<std::byte*>(packed.data);
  for (const int64_t expert : slots) {
    if (expert < 0 || spec.home_of(expert) != spec.rank) continue;
    const int64_t local = expert - spec.rank * spec.num_local();
    device.copy(to, static_cast<const std::byte*>(experts.data) + local * bytes, bytes);
    to += bytes;
  }
}

template <ReadNumbers kRead>
Pending clone_weights(const CloneWeights& op, const Args<CloneWeights>& args) {
  const CloneSlots& spec = op.slots();
  const std::vector<int64_t> slots = kRead(args, args.in(CloneWeights::kSlots));
  if (!has_clones(slots)) return {};
  const Tensor& experts = args.in(CloneWeights::kWeight);
  const int64_t block_rows = experts.shape[0] / spec.num_local();
  Tensor packed = experts;
  packed.data = args.workspace.data();
  packed.shape[0] = spec.max_clones() * block_rows;
  pack_clones(spec, slots, experts, packed);
  const CloneCounts counts = count_rows(spec, slots, block_rows);
  return op.comm().all_to_all_v(packed, args.out(CloneWeights::kY), counts.sent, counts.received);
}

/// The filled slots of a rank come first, and rise by expert, so by home.
template <ReadNumbers kRead>
Pending return_clones(const ReturnClones& op, const Args<ReturnClones>& args) {
  const CloneSlots& spec = op.slots();
  const std::vector<int64_t> slots = kRead(args, args.in(ReturnClones::kSlots));
  if (!has_clones(slots)) return {};
  const Tensor& grad = args.in(ReturnClones::kGrad);
  const CloneCounts counts = count_rows(spec, slots, grad.shape[0] / spec.slots_per_rank);
  return op.comm().all_to_all_v(grad, args.out(ReturnClones::kY), counts.received, counts.sent);
}

template <ReadNumbers kRead>
void add_exchanges(KernelTable& table) {
  add_kernel<CloneWeights>(
      table, clone_weights<kRead>,
      {.workspace = [](const CloneWeights& op, std::span<const ValueType> inputs) {
        return bytes_of_clones(op.slots(), inputs[CloneWeights::kWeight]);
      }});
  add_kernel<ReturnClones>(table, return_clones<kRead>);
}

}  // namespace tessera::clones
