#include "program/compile/round_operands.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "ops/add/add.h"
#include "ops/add_bias/add_bias.h"
#include "ops/dequantize/dequantize.h"
#include "ops/grouped_matmul/grouped_matmul.h"
#include "ops/linear/linear.h"
#include "ops/permute/permute.h"
#include "program/compile/delayed_roundings.h"
#include "program/compile/fp8_products.h"

namespace tessera {
namespace {

/// An input of a product that is to be rounded.
struct Operand {
  int input = 0;
  RoundValuesSpec spec = {};
  ValueId offsets = {};  ///< of its groups of rows; not set where it has one group, or known ones
  std::string weight = {};  ///< of the product, by name
};

/// An input of a weight's gradient that another product reads rounded by rows.
struct ReadBefore {
  int input = 0;
  CastSpec rows = {};
};

bool is_by_rows(const CastSpec& cast) {
  return is_of_rows(cast) && !cast.rotated && cast.number != NarrowNumber::kE2M1;
}

/// The same as a Quantize has it.
QuantizeSpec quantize_spec(const CastSpec& cast) {
  ensure(is_by_rows(cast), "{} is no rounding by rows", cast.to_string());
  return {.element = cast.number == NarrowNumber::kE5M2 ? DType::kE5M2 : DType::kE4M3,
          .scale = cast.length == 0 ? ScaleLayout::row()
                                    : ScaleLayout::block(1, static_cast<int32_t>(cast.length))};
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

const ExpertSizes& equal(const ExpertSizes& sizes) {
  ensure(sizes.are_equal(), "operands of experts of several sizes are to be rounded");
  return sizes;
}

/// What the rows of a product with a weight are, and what it adds to it.
struct WeightProduct {
  int rows = 0;
  int weight = 0;
  int extra = 0;  ///< an input that there may be
  OperatorPtr add_extra;
};

std::optional<WeightProduct> find_product(const Operator& op) {
  if (const auto* linear = dynamic_cast<const Linear*>(&op)) {
    const bool has_bias = linear->extra() == Linear::Extra::kBias;
    return WeightProduct{Linear::kX, Linear::kWeight, Linear::kAddend,
                         has_bias ? make_add_bias() : make_add()};
  }
  if (dynamic_cast<const LinearDgrad*>(&op) != nullptr)
    return WeightProduct{LinearDgrad::kGrad, LinearDgrad::kWeight, LinearDgrad::kAddend,
                         make_add()};
  if (dynamic_cast<const GroupedMatmul*>(&op) != nullptr)
    return WeightProduct{.rows = GroupedMatmul::kA, .weight = GroupedMatmul::kWeight};
  return std::nullopt;
}

/// The operands of the gradient of a weight, whose rows are as many as the first has columns.
struct WeightGradient {
  int narrow = 0;
  int wide = 0;
  ExpertSizes sizes;
  ValueId offsets = {};  ///< of the experts' tokens; not set where there is but one
};

std::optional<WeightGradient> find_gradient(const Program& program, const Node& node) {
  if (dynamic_cast<const LinearWgrad*>(node.op.get()) != nullptr) {
    const int64_t rows = program.type(node.outputs[LinearWgrad::kGradWeight]).shape[0];
    return WeightGradient{LinearWgrad::kGrad, LinearWgrad::kX, ExpertSizes({rows}, "a weight")};
  }
  if (const auto* grouped = dynamic_cast<const GroupedMatmulWgrad*>(node.op.get()))
    return WeightGradient{GroupedMatmulWgrad::kNarrow, GroupedMatmulWgrad::kWide, grouped->sizes(),
                          node.inputs[GroupedMatmulWgrad::kOffsets]};
  return std::nullopt;
}

const RoundValuesSpec& rounding_of(const std::vector<Operand>& operands, int input) {
  const auto found = std::ranges::find(operands, input, &Operand::input);
  ensure(found != operands.end(), "operand {} of a gradient is not rounded", input);
  return found->spec;
}

/// Puts roundings in front of the nodes of one program.
class Inserter {
 public:
  Inserter(const Program& program, const OperandRounding& rounding, WeightCopies& copies,
           DelayedRoundings delayed)
      : program_(program), rounding_(rounding), copies_(copies), delayed_(std::move(delayed)) {}

  /// `operands_of(node)` are those to be rounded, `read_before(node)` those that are rounded by
  /// rows before that.
  template <typename OperandsOf, typename ReadBeforeOf>
  Program run(const OperandsOf& operands_of, const ReadBeforeOf& read_before) {
    const std::vector<Node> before = program_.nodes();
    for (Node node : before) {
      if (dynamic_cast<const Permute*>(node.op.get()) != nullptr)
        permuted_[node.outputs[Permute::kRows]] = node.inputs;
      const std::vector<Operand> operands = operands_of(node);
      const std::vector<ReadBefore> again = read_before(node);
      if (rounding_.fp8_products && multiply_fp8(node, operands, again)) continue;
      for (const ReadBefore& input : again) reread(node, input.input, input.rows);
      for (const Operand& operand : operands) {
        if (rounding_.keeps_rounded && is_tokens(node, operand)) {
          reread(node, operand.input, operand.spec.cast);
          continue;
        }
        ValueId& input = node.inputs[operand.input];
        input = rounded(input, operand);
      }
      nodes_.push_back(std::move(node));
    }
    return program_.with_nodes(std::move(nodes_));
  }

 private:
  /// Whether the operand is what a product with a weight reads of tokens, or their gradients.
  static bool is_tokens(const Node& node, const Operand& operand) {
    const auto product = find_product(*node.op);
    return product && product->rows == operand.input;
  }

  /// What the cast by rows makes of an input takes its place.
  void reread(Node& node, int input, const CastSpec& rows) {
    ValueId& value = node.inputs[input];
    const DType dtype = program_.type(value).dtype;
    value =
        once(make_dequantize(dtype), {quantized_rows(node, value, quantize_spec(rows))}, ".values");
  }

  /// Whether the node became a product of FP8 numbers.
  bool multiply_fp8(const Node& node, const std::vector<Operand>& operands,
                    const std::vector<ReadBefore>& again) {
    if (operands.empty()) return false;
    if (const auto gradient = find_gradient(program_, node))
      return multiply_tokens(node, operands, again, *gradient);
    const auto product = find_product(*node.op);
    if (!product) return false;
    const Operand& rows = operands[0];
    const Operand& weight = operands[1];
    ensure(rows.input == product->rows && weight.input == product->weight,
           "operands of {} are not in order", node.op->name());
    const ValueId from_rows = node.inputs[product->rows];
    const ValueId from_weight = node.inputs[product->weight];
    const auto fp8 = find_fp8_product(program_.type(from_rows), rows.spec,
                                      program_.type(from_weight), weight.spec);
    if (!fp8) return false;
    std::vector<ValueId> inputs = {quantized_rows(node, from_rows, fp8->rows),
                                   quantized(from_weight, fp8->weight)};
    if (dynamic_cast<const GroupedMatmul*>(node.op.get()) != nullptr)
      inputs.push_back(node.inputs[GroupedMatmul::kOffsets]);
    if (product->add_extra == nullptr || std::ssize(node.inputs) <= product->extra) {
      nodes_.push_back({fp8->product, std::move(inputs), node.outputs});
      return true;
    }
    const ValueId sum = add(fp8->product, inputs, program_.value(node.outputs[0]).name);
    nodes_.push_back({product->add_extra, {sum, node.inputs[product->extra]}, node.outputs});
    return true;
  }

  /// The same of the gradient of a weight.
  bool multiply_tokens(const Node& node, const std::vector<Operand>& operands,
                       const std::vector<ReadBefore>& again, const WeightGradient& gradient) {
    const ValueId narrow = node.inputs[gradient.narrow];
    const ValueId wide = node.inputs[gradient.wide];
    const auto fp8 =
        find_fp8_wgrad({program_.type(narrow), rounding_of(operands, gradient.narrow)},
                       {program_.type(wide), rounding_of(operands, gradient.wide)}, gradient.sizes);
    if (!fp8) return false;
    const auto quantize = [&](int input) {
      ValueId value = node.inputs[input];
      const auto found = std::ranges::find(again, input, &ReadBefore::input);
      if (found != again.end()) value = quantized_rows(node, value, quantize_spec(found->rows));
      std::vector<ValueId> inputs = {value};
      if (gradient.offsets.is_set()) inputs.push_back(gradient.offsets);
      return all_once(make_quantize_tokens(fp8->scales), inputs, ".fp8_tokens");
    };
    const std::vector<ValueId> left = quantize(gradient.narrow);
    const std::vector<ValueId> right = quantize(gradient.wide);
    std::vector<ValueId> inputs = {left[QuantizeTokens::kY], right[QuantizeTokens::kY],
                                   left[QuantizeTokens::kScales], right[QuantizeTokens::kScales]};
    if (gradient.offsets.is_set()) inputs.push_back(gradient.offsets);
    nodes_.push_back({fp8->product, std::move(inputs), node.outputs});
    return true;
  }

  /// Tokens are quantized before they are permuted, whether that is the product's part or not:
  /// there are fewer of them, and other products may read them.
  ValueId quantized_rows(const Node& product, ValueId rows, const QuantizeSpec& spec) {
    const auto* grouped = dynamic_cast<const GroupedMatmul*>(product.op.get());
    if (grouped != nullptr && grouped->gather()) {
      return once(make_permute(),
                  {quantized(rows, spec), product.inputs[GroupedMatmul::kSource],
                   product.inputs[GroupedMatmul::kRowOf]},
                  "");
    }
    const auto permuted = permuted_.find(rows);
    if (permuted == permuted_.end()) return quantized(rows, spec);
    const std::vector<ValueId>& from = permuted->second;
    return once(make_permute(),
                {quantized(from[Permute::kX], spec), from[Permute::kSource], from[Permute::kRowOf]},
                "", rounding_.keeps_rounded ? program_.value(rows).name : "");
  }

  ValueId quantized(ValueId value, const QuantizeSpec& spec) {
    const OperatorPtr op = make_quantize(spec);
    if (rounding_.keeps_copies && program_.value(value).kind == ValueKind::kWeight)
      return copy_of(value, op);
    // What may be kept in its place has the name by which it is recomputed or offloaded.
    return once(op, {value}, rounding_.keeps_rounded ? "" : ".fp8");
  }

  /// An input of the program, which is listed.
  ValueId copy_of(ValueId weight, const OperatorPtr& op) {
    const std::string of = program_.value(weight).name;
    const std::string name = fmt::format("{} {}", of, op->attributes());
    const auto [place, is_new] = read_copies_.try_emplace(name);
    if (is_new)
      place->second = program_.add_input(name, op->infer(program_.types({weight})).front());
    if (std::ranges::find(copies_, name, &WeightCopy::name) == copies_.end())
      copies_.push_back({name, of, op});
    return place->second;
  }

  ValueId rounded(ValueId value, const Operand& operand) {
    if (operand.spec.cast.delayed) {
      return delayed_.round({value, operand.offsets, operand.weight, operand.spec.cast}, program_,
                            nodes_);
    }
    std::vector<ValueId> inputs = {value};
    if (operand.offsets.is_set()) inputs.push_back(operand.offsets);
    return once(make_round_values(operand.spec), inputs, ".rounded");
  }

  /// What the operator makes of these values, made once. It is named after the first and a suffix,
  /// unless it has a name of its own.
  ValueId once(const OperatorPtr& op, const std::vector<ValueId>& inputs, std::string_view suffix,
               const std::string& name = "") {
    return all_once(op, inputs, suffix, name).front();
  }

  std::vector<ValueId> all_once(const OperatorPtr& op, const std::vector<ValueId>& inputs,
                                std::string_view suffix, const std::string& name = "") {
    const auto key = std::tuple(inputs, std::string(op->name()), op->attributes());
    const auto [place, is_new] = made_.try_emplace(key);
    if (is_new) {
      const std::string after_first = fmt::format("{}{}", program_.value(inputs[0]).name, suffix);
      place->second = add_all(op, inputs, name.empty() ? after_first : name);
    }
    return place->second;
  }

  ValueId add(const OperatorPtr& op, const std::vector<ValueId>& inputs, const std::string& name) {
    return add_all(op, inputs, name).front();
  }

  /// Outputs behind the first are named after it.
  std::vector<ValueId> add_all(const OperatorPtr& op, const std::vector<ValueId>& inputs,
                               const std::string& name) {
    std::vector<std::string> names = {name};
    const size_t num_outputs = op->infer(program_.types(inputs)).size();
    for (size_t i = 1; i < num_outputs; ++i) names.push_back(fmt::format("{}.{}", name, i));
    std::vector<ValueId> made = program_.add(op, inputs, names);
    nodes_.push_back(program_.nodes().back());
    return made;
  }

  Program program_;
  const OperandRounding& rounding_;
  WeightCopies& copies_;
  DelayedRoundings delayed_;
  std::map<std::string, ValueId> read_copies_;
  std::map<ValueId, std::vector<ValueId>> permuted_;  ///< what a Permute read, by its rows
  std::vector<Node> nodes_;
  std::map<std::tuple<std::vector<ValueId>, std::string, std::string>, std::vector<ValueId>> made_;
};

/// The weight of a grouped product, `sum_dim` of which is added up.
Operand expert_weight(const GroupedMatmul& op, const CastSpec& cast) {
  Operand weight = of_rows(GroupedMatmul::kWeight, cast, op.side() == GroupedSide::kOut ? 1 : 0);
  weight.spec.group_rows = equal(op.sizes()).values();
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
    if (const auto* product = dynamic_cast<const GroupedMatmul*>(node.op.get()))
      return grouped_operands(node, *product, recipe.gradient, recipe.weight);
    return weight_gradient(node, dynamic_cast<const GroupedMatmulWgrad&>(*node.op));
  }

  /// The gradient is what the product gave: narrow of FC1, wide of FC2.
  std::vector<Operand> weight_gradient(const Node& node, const GroupedMatmulWgrad& op) const {
    ensure(!op.gather(), "rows that a product gathers are to be rounded");
    equal(op.sizes());
    const Recipe& recipe = *rounding_.recipe;
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
  return Inserter(forward, rounding, copies, std::move(delayed))
      .run(ForwardOperands(forward, rounding), none);
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
  backward.program =
      Inserter(backward.program, rounding, copies, std::move(delayed)).run(operands, read_before);
  return backward;
}

Backward round_operands(const Program& forward, Backward backward,
                        const OperandRounding& rounding) {
  WeightCopies none;
  ensure(!rounding.keeps_copies, "copies of weights are listed nowhere");
  return round_operands(forward, std::move(backward), rounding, none);
}

}  // namespace tessera
