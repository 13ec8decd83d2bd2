#include "program/rounding/round_operands.h"

#include <algorithm>
#include <map>
#include <set>

#include "ops/grouped_matmul/grouped_matmul.h"
#include "ops/linear/linear.h"
#include "ops/quantize/quantize_blocks.h"
#include "program/rounding/fp8_products.h"
#include "program/rounding/insert_roundings.h"
#include "program/rounding/rounded_operand.h"

namespace tessera {
namespace {

constexpr int64_t kStoredBlock = QuantizeBlocks::kBlock;

/// Whether the matrices of a product's weight are of whole blocks.
bool has_whole_blocks(const Operator& op, const ValueType& weight) {
  const auto is_whole = [](int64_t size) { return size > 0 && size % kStoredBlock == 0; };
  if (weight.dtype != DType::kBF16 || !is_whole(weight.shape[1])) return false;
  const auto* grouped = dynamic_cast<const GroupedMatmul*>(&op);
  if (grouped == nullptr) return is_whole(weight.shape[0]);
  return std::ranges::all_of(grouped->sizes().values(), is_whole);
}

Operand of_rows(int input, const CastSpec& cast, int sum_dim) {
  return {input, {.cast = cast, .sum_dim = sum_dim}};
}

std::vector<Operand> of_product(const std::string& weight, std::vector<Operand> operands) {
  for (Operand& operand : operands) operand.weight = weight;
  return operands;
}

Operand of_experts(int input, const CastSpec& cast, int sum_dim, ValueId offsets) {
  return {input, {.cast = cast, .sum_dim = sum_dim, .offsets = true}, offsets};
}

/// The weights of a program by the values that stand for them, and the products that read them.
class WeightTable {
 public:
  explicit WeightTable(const Program& forward) : forward_(forward) {
    for (const Node& node : forward.nodes()) {
      if (const auto* product = dynamic_cast<const GroupedMatmul*>(node.op.get()))
        sides_[node.inputs[GroupedMatmul::kWeight]] = product->side();
    }
  }

  const std::string* name_of(ValueId weight) const {
    const Value& value = forward_.value(weight);
    return value.kind == ValueKind::kWeight ? &value.name : nullptr;
  }
  GroupedSide side_of(ValueId weight) const { return sides_.at(weight); }

 private:
  const Program& forward_;
  std::map<ValueId, GroupedSide> sides_;
};

/// Values that are rounded one by one may lie beside what no expert reads.
void check_sizes(const ExpertSizes& sizes, const Recipe& recipe) {
  ensure(recipe.is_f16 || sizes.are_equal(),
         "operands of experts of several sizes are to be rounded");
}

/// The weight of a grouped product, `sum_dim` of which is added up.
Operand expert_weight(const GroupedMatmul& op, const CastSpec& cast) {
  Operand weight = of_rows(GroupedMatmul::kWeight, cast, op.side() == GroupedSide::kOut ? 1 : 0);
  weight.spec.group_rows = op.sizes().values();
  return weight;
}

/// Rows that the product gathers are rounded before.
std::vector<Operand> grouped_operands(const Node& node, const GroupedMatmul& op,
                                      const CastSpec& rows, const CastSpec& weight) {
  if (op.gather()) {
    ensure(is_of_rows(rows), "rows that a product gathers are to be rounded, {}", rows.to_string());
    return {of_rows(GroupedMatmul::kA, rows, 1), expert_weight(op, weight)};
  }
  const ValueId offsets = node.inputs[GroupedMatmul::kOffsets];
  return {of_experts(GroupedMatmul::kA, rows, 1, offsets), expert_weight(op, weight)};
}

class ForwardOperands {
 public:
  ForwardOperands(const Program& forward, const OperandRounding& rounding)
      : weights_(forward), rounding_(rounding) {}

  std::vector<Operand> operator()(const Node& node) const {
    const Recipe& recipe = *rounding_.recipe;
    if (dynamic_cast<const Linear*>(node.op.get()) != nullptr) {
      const std::string* weight = rounded(node.inputs[Linear::kWeight]);
      if (weight == nullptr) return {};
      return of_product(*weight, {of_rows(Linear::kX, recipe.activation, 1),
                                  of_rows(Linear::kWeight, recipe.weight, 1)});
    }
    const auto* product = dynamic_cast<const GroupedMatmul*>(node.op.get());
    if (product == nullptr) return {};
    const std::string* weight = rounded(node.inputs[GroupedMatmul::kWeight]);
    if (weight == nullptr) return {};
    check_sizes(product->sizes(), recipe);
    return of_product(*weight, grouped_operands(node, *product, recipe.activation, recipe.weight));
  }

 private:
  /// The name of a weight whose products are rounded, or null.
  const std::string* rounded(ValueId weight) const {
    const std::string* name = weights_.name_of(weight);
    return name != nullptr && rounding_.rounds(*name) ? name : nullptr;
  }

  WeightTable weights_;
  const OperandRounding& rounding_;
};

class GradientOperands {
 public:
  GradientOperands(const Program& forward, const Backward& backward,
                   const OperandRounding& rounding)
      : weights_(forward), rounding_(rounding) {
    for (const Link& link : backward.bound) forward_of_[link.backward] = link.forward;
    for (const Link& link : backward.accumulators) forward_of_[link.backward] = link.forward;
  }

  /// What a gradient of a weight reads of what other products read too.
  std::vector<ReadBefore> read_before(const Node& node) const {
    if (!rounding_.keeps_rounded) return {};
    const CastSpec& tokens = rounding_.recipe->activation;
    const CastSpec& gradient = rounding_.recipe->gradient;
    if (dynamic_cast<const LinearWgrad*>(node.op.get()) != nullptr) {
      if (rounded(node.outputs[LinearWgrad::kGradWeight]) == nullptr) return {};
      return {{LinearWgrad::kX, tokens}, {LinearWgrad::kGrad, gradient}};
    }
    const auto* grouped = dynamic_cast<const GroupedMatmulWgrad*>(node.op.get());
    if (grouped == nullptr || rounded(node.outputs[GroupedMatmulWgrad::kGradWeight]) == nullptr)
      return {};
    const bool out = is_out(node);
    return {{GroupedMatmulWgrad::kNarrow, out ? gradient : tokens},
            {GroupedMatmulWgrad::kWide, out ? tokens : gradient}};
  }

  std::vector<Operand> operator()(const Node& node) const {
    const std::string* weight = rounded_weight(node);
    return weight == nullptr ? std::vector<Operand>() : of_product(*weight, operands_of(node));
  }

 private:
  /// Of a product that is to be rounded: the name of its weight.
  const std::string* rounded_weight(const Node& node) const {
    const Operator* op = node.op.get();
    const bool gradients = !rounding_.plain_weight_gradients;
    if (dynamic_cast<const LinearDgrad*>(op) != nullptr)
      return rounded(node.inputs[LinearDgrad::kWeight]);
    if (dynamic_cast<const GroupedMatmul*>(op) != nullptr)
      return rounded(node.inputs[GroupedMatmul::kWeight]);
    if (dynamic_cast<const LinearWgrad*>(op) != nullptr && gradients)
      return rounded(node.outputs[LinearWgrad::kGradWeight]);
    if (dynamic_cast<const GroupedMatmulWgrad*>(op) != nullptr && gradients)
      return rounded(node.outputs[GroupedMatmulWgrad::kGradWeight]);
    return nullptr;
  }

  std::vector<Operand> operands_of(const Node& node) const {
    const Recipe& recipe = *rounding_.recipe;
    if (dynamic_cast<const LinearDgrad*>(node.op.get()) != nullptr) {
      return {of_rows(LinearDgrad::kGrad, recipe.gradient, 1),
              of_rows(LinearDgrad::kWeight, recipe.weight, 0)};
    }
    if (dynamic_cast<const LinearWgrad*>(node.op.get()) != nullptr) {
      return {of_rows(LinearWgrad::kX, recipe.token_activation, 0),
              of_rows(LinearWgrad::kGrad, recipe.token_gradient, 0)};
    }
    if (const auto* product = dynamic_cast<const GroupedMatmul*>(node.op.get())) {
      check_sizes(product->sizes(), recipe);
      return grouped_operands(node, *product, recipe.gradient, recipe.weight);
    }
    return weight_gradient(node, dynamic_cast<const GroupedMatmulWgrad&>(*node.op));
  }

  /// The gradient is what the product gave: narrow of FC1, wide of FC2.
  std::vector<Operand> weight_gradient(const Node& node, const GroupedMatmulWgrad& op) const {
    const Recipe& recipe = *rounding_.recipe;
    check_sizes(op.sizes(), recipe);
    const ValueId offsets = node.inputs[GroupedMatmulWgrad::kOffsets];
    const bool out = is_out(node);
    const CastSpec& narrow = out ? recipe.token_gradient : recipe.token_activation;
    const CastSpec& wide = out ? recipe.token_activation : recipe.token_gradient;
    return {of_experts(GroupedMatmulWgrad::kNarrow, narrow, 0, offsets),
            of_experts(GroupedMatmulWgrad::kWide, wide, 0, offsets)};
  }

  /// Of FC1, or a product of its kind.
  bool is_out(const Node& node) const {
    const ValueId weight = forward_of_.at(node.outputs[GroupedMatmulWgrad::kGradWeight]);
    return weights_.side_of(weight) == GroupedSide::kOut;
  }

  /// `id`: a weight of the backward program, or its accumulator.
  const std::string* rounded(ValueId id) const {
    const auto found = forward_of_.find(id);
    if (found == forward_of_.end()) return nullptr;
    const std::string* name = weights_.name_of(found->second);
    return name != nullptr && rounding_.rounds(*name) ? name : nullptr;
  }

  WeightTable weights_;
  const OperandRounding& rounding_;
  std::map<ValueId, ValueId> forward_of_;
};

}  // namespace

bool OperandRounding::rounds(std::string_view weight) const {
  return std::ranges::none_of(plain, [weight](const std::string& name) {
    const bool begins = weight.starts_with(name);
    return name == "all" ||
           (begins && (weight.size() == name.size() || weight[name.size()] == '.'));
  });
}

bool has_row_scales(const Recipe& recipe) {
  return is_by_rows(recipe.activation) && is_by_rows(recipe.gradient);
}

Format fp8_weight_format() {
  return {DType::kE4M3, ScaleLayout::block(kStoredBlock, kStoredBlock)};
}

bool can_store_weights(const Recipe& recipe) {
  return recipe.weight == CastSpec{.length = kStoredBlock, .width = kStoredBlock};
}

std::vector<std::string> list_fp8_weights(const Program& forward, const OperandRounding& rounding) {
  std::vector<std::string> names;
  if (!rounding.fp8_weights) return names;
  ensure(can_store_weights(*rounding.recipe), "weights of recipe {} are stored in FP8",
         rounding.recipe->name);
  std::set<ValueId> refused;
  std::vector<ValueId> found;
  for (const Node& node : forward.nodes()) {
    const auto product = find_product(*node.op);
    for (size_t i = 0; i < node.inputs.size(); ++i) {
      const ValueId id = node.inputs[i];
      if (forward.value(id).kind != ValueKind::kWeight) continue;
      const bool suits = product && static_cast<int>(i) == product->weight &&
                         has_whole_blocks(*node.op, forward.type(id));
      if (!suits || !rounding.rounds(forward.value(id).name)) refused.insert(id);
      if (suits && std::ranges::find(found, id) == found.end()) found.push_back(id);
    }
  }
  for (const ValueId id : found) {
    if (!refused.contains(id)) names.push_back(forward.value(id).name);
  }
  return names;
}

std::vector<std::string> product_weights(const Program& forward) {
  const WeightTable weights(forward);
  std::vector<std::string> names;
  for (const Node& node : forward.nodes()) {
    const bool dense = dynamic_cast<const Linear*>(node.op.get()) != nullptr;
    const bool grouped = dynamic_cast<const GroupedMatmul*>(node.op.get()) != nullptr;
    if (!dense && !grouped) continue;
    const ValueId weight = node.inputs[dense ? Linear::kWeight + 0 : GroupedMatmul::kWeight + 0];
    if (const std::string* name = weights.name_of(weight)) names.push_back(*name);
  }
  return names;
}

Program make_copies_program(const Program& forward, const WeightCopies& copies) {
  Program program(forward.name() + ".copies");
  std::map<std::string, ValueId> weights;
  std::vector<ValueId> outputs;
  for (const WeightCopy& copy : copies) {
    const auto [weight, is_new] = weights.try_emplace(copy.weight);
    if (is_new)
      weight->second = program.add_weight(copy.weight, forward.type(forward.find(copy.weight)));
    outputs.push_back(program.add1(copy.op, {weight->second}, copy.name));
  }
  program.set_outputs(std::move(outputs));
  return program;
}

Program round_operands(const Program& forward, const OperandRounding& rounding,
                       WeightCopies& copies) {
  const auto none = [](const Node& /*node*/) { return std::vector<ReadBefore>(); };
  DelayedRoundings delayed(operand_weights(product_weights(forward)), kScalesName,
                           {OperandKind::kActivation, OperandKind::kWeight}, rounding.overflows);
  return insert_roundings(
      forward, rounding,
      {ForwardOperands(forward, rounding), none, list_fp8_weights(forward, rounding)}, copies,
      std::move(delayed));
}

Program round_operands(const Program& forward, const OperandRounding& rounding) {
  WeightCopies none;
  ensure(!rounding.keeps_copies, "copies of weights are listed nowhere");
  return round_operands(forward, rounding, none);
}

Backward round_operands(const Program& forward, Backward backward, const OperandRounding& rounding,
                        WeightCopies& copies) {
  const GradientOperands operands(forward, backward, rounding);
  const auto read_before = [&](const Node& node) { return operands.read_before(node); };
  DelayedRoundings delayed(operand_weights(product_weights(forward)), kGradScalesName,
                           {OperandKind::kGradient}, rounding.overflows);
  backward.program = insert_roundings(backward.program, rounding,
                                      {operands, read_before, list_fp8_weights(forward, rounding)},
                                      copies, std::move(delayed));
  return backward;
}

Backward round_operands(const Program& forward, Backward backward,
                        const OperandRounding& rounding) {
  WeightCopies none;
  ensure(!rounding.keeps_copies, "copies of weights are listed nowhere");
  return round_operands(forward, std::move(backward), rounding, none);
}

}  // namespace tessera
