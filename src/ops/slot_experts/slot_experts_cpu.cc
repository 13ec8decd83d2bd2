#include <algorithm>

#include "ops/slot_experts/slot_experts.h"

namespace tessera {
namespace {

void write_slot(const SlotExpertsSpec& spec, const int64_t* counts, int32_t* expert_of) {
  int64_t row = 0;
  for (int64_t expert = 0; expert < spec.num_experts; ++expert) {
    ensure(counts[expert] >= 0 && counts[expert] <= spec.slot_rows - row,
           "slot_experts: {} rows of expert {} behind {} others in a slot of {}", counts[expert],
           expert, row, spec.slot_rows);
    std::fill_n(expert_of + row, counts[expert], static_cast<int32_t>(expert));
    row += counts[expert];
  }
  std::fill(expert_of + row, expert_of + spec.slot_rows, -1);
}

void slot_experts(const SlotExperts& op, const Args<SlotExperts>& args) {
  using Op = SlotExperts;
  const SlotExpertsSpec& spec = op.spec();
  const int64_t num_slots = args.in(Op::kCounts).num_elements() / spec.num_experts;
  for (int64_t slot = 0; slot < num_slots; ++slot) {
    write_slot(spec, args.in(Op::kCounts).as<int64_t>() + slot * spec.num_experts,
               args.out(Op::kExpertIdx).as<int32_t>() + slot * spec.slot_rows);
  }
}

}  // namespace

void add_slot_experts_cpu(KernelTable& table) {
  add_kernel<SlotExperts>(table, slot_experts);
}

}  // namespace tessera
