#include "program/rounding/delayed_roundings.h"

#include <algorithm>

#include "ops/round_values/round_values.h"
#include "ops/round_values/tally.h"

namespace tessera {
namespace {

OperandKind kind_of(const Value& value, const CastSpec& cast) {
  if (value.kind == ValueKind::kWeight) return OperandKind::kWeight;
  return cast.number == NarrowNumber::kE5M2 ? OperandKind::kGradient : OperandKind::kActivation;
}

void add_place(Node& node, int place) {
  RoundValuesSpec spec = dynamic_cast<const RoundValues&>(*node.op).spec();
  if (std::ranges::find(spec.places, place) != spec.places.end()) return;
  spec.places.push_back(place);
  node.op = make_round_values(spec);
}

}  // namespace

std::vector<std::string> operand_weights(std::vector<std::string> product_weights) {
  std::ranges::sort(product_weights);
  const auto repeated = std::unique(product_weights.begin(), product_weights.end());
  product_weights.erase(repeated, product_weights.end());
  return product_weights;
}

int DelayedRoundings::place_of(const std::string& weight, OperandKind kind) const {
  const auto found = std::ranges::find(weights_, weight);
  ensure(found != weights_.end(), "no product has the weight '{}'", weight);
  return static_cast<int>(operand_row(found - weights_.begin(), kind));
}

bool DelayedRoundings::is_tallied(OperandKind kind) const {
  return std::ranges::find(tallied_, kind) != tallied_.end();
}

ValueId DelayedRoundings::round(const DelayedOperand& operand, Program& program,
                                std::vector<Node>& nodes) {
  const OperandKind kind = kind_of(program.value(operand.value), operand.cast);
  const int place = place_of(operand.weight, kind);
  const auto [found, is_new] =
      made_.try_emplace(std::tuple(operand.value, operand.offsets, kind), nodes.size());
  if (is_new) {
    add(operand, place, is_tallied(kind), program);
    nodes.push_back(program.nodes().back());
  } else if (is_tallied(kind)) {
    add_place(nodes[found->second], place);
  }
  return nodes[found->second].outputs[RoundValues::kY];
}

void DelayedRoundings::add(const DelayedOperand& operand, int place, bool tallied,
                           Program& program) {
  const int64_t num_rows = std::ssize(weights_) * kOperandKinds;
  if (!scales_.is_set())
    scales_ = program.add_input(std::string(scales_name_), {DType::kF32, {num_rows}});
  std::vector<ValueId> accumulators;
  if (tallied) {
    if (!tally_.is_set()) {
      tally_ = program.add_accumulator(std::string(kTallyName),
                                       {DType::kI64, {num_rows, kTallyColumns}});
    }
    accumulators.push_back(tally_);
  }
  const RoundValuesSpec spec{.cast = operand.cast,
                             .offsets = operand.offsets.is_set(),
                             .places = {place},
                             .tallies = tallied,
                             .overflows = overflows_};
  std::vector<ValueId> inputs = {operand.value};
  if (spec.offsets) inputs.push_back(operand.offsets);
  inputs.push_back(scales_);
  program.add(make_round_values(spec), inputs,
              {fmt::format("{}.rounded", program.value(operand.value).name)}, accumulators);
}

}  // namespace tessera
