#include "program/rounding/insert_roundings.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "ops/dequantize/dequantize.h"
#include "ops/grouped_matmul/grouped_matmul.h"
#include "ops/permute/permute.h"
#include "ops/quantize/turn_blocks.h"
#include "ops/scaled_grouped_matmul/scaled_grouped_matmul.h"
#include "program/rounding/fp8_products.h"

namespace tessera {
namespace {

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

  Program run(const RoundingChoice& choice) {
    store_in_fp8(choice.fp8_weights);
    const std::vector<Node> before = program_.nodes();
    for (Node node : before) {
      if (dynamic_cast<const Permute*>(node.op.get()) != nullptr)
        permuted_[node.outputs[Permute::kRows]] = node.inputs;
      const std::vector<Operand> operands = choice.operands(node);
      if (rounding_.recipe->is_f16) {
        for (const Operand& operand : operands) read_half(node, operand.input);
        nodes_.push_back(std::move(node));
        continue;
      }
      const std::vector<ReadBefore> again = choice.read_before(node);
      if (!operands.empty()) permute_before(node);
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
    check_fp8_readers();
    return program_.with_nodes(std::move(nodes_));
  }

 private:
  /// Weights of these names that the program has are stored in FP8.
  void store_in_fp8(const std::vector<std::string>& names) {
    for (ValueId id = 0; id < program_.num_values(); ++id) {
      const Value& value = program_.value(id);
      const bool stored = value.kind == ValueKind::kWeight && std::ranges::count(names, value.name);
      if (!stored) continue;
      ValueType type = value.type;
      type.dtype = fp8_weight_format().element;
      type.scale = fp8_weight_format().scale;
      program_ = program_.with_weight_type(id, type);
    }
  }

  bool is_fp8_weight(ValueId id) const {
    const Value& value = program_.value(id);
    return value.kind == ValueKind::kWeight && value.type.scale.is_scaled();
  }

  /// The type of the values that a weight stands for.
  ValueType values_type(ValueId id) const {
    ValueType type = program_.type(id);
    if (!is_fp8_weight(id)) return type;
    type.dtype = DType::kBF16;
    type.scale = {};
    return type;
  }

  /// A weight in FP8 as values.
  ValueId values_of(ValueId weight) {
    return once(make_dequantize(DType::kBF16), {weight}, ".values");
  }

  void check_fp8_readers() const {
    for (const Node& node : nodes_) {
      const std::string_view name = node.op->name();
      const bool reads_fp8 = name == Dequantize::kName || name == TurnBlocks::kName ||
                             name == ScaledGroupedMatmul::kName;
      for (const ValueId id : node.inputs) {
        ensure(reads_fp8 || !is_fp8_weight(id), "{} reads the weight '{}', which is stored in FP8",
               name, program_.value(id).name);
      }
    }
  }

  /// Whether the operand is what a product with a weight reads of tokens, or their gradients.
  static bool is_tokens(const Node& node, const Operand& operand) {
    const auto product = find_product(*node.op);
    return product && product->rows == operand.input;
  }

  /// Rows that the gradient of a weight gathers, and that are rounded along tokens, are made first;
  /// whoever quantizes them may gather them in turn (program/fusion/fuse_gathers.h).
  void permute_before(Node& node) {
    const auto* op = dynamic_cast<const GroupedMatmulWgrad*>(node.op.get());
    if (op == nullptr || !op->gather()) return;
    using Op = GroupedMatmulWgrad;
    ValueId& wide = node.inputs[Op::kWide];
    wide = once(make_permute(), {wide, node.inputs[Op::kSource], node.inputs[Op::kRowOf]}, ".rows");
    node.inputs.resize(Op::kSource);
    node.op = std::make_shared<Op>(op->sizes(), false, op->of_value());
  }

  /// The input's values in F16 take its place.
  void read_half(Node& node, int input) {
    ValueId& value = node.inputs[input];
    const bool is_weight = program_.value(value).kind == ValueKind::kWeight;
    value =
        is_weight ? quantized_weight(value, half_spec()) : quantized_rows(node, value, half_spec());
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
    RoundValuesSpec of_rows = rows.spec;
    of_rows.offsets = of_rows.offsets || gathers(*node.op);  // the product has those
    const auto fp8 =
        find_fp8_product(program_.type(from_rows), of_rows, values_type(from_weight), weight.spec);
    if (!fp8) return false;
    std::vector<ValueId> inputs = {quantized_rows(node, from_rows, fp8->rows),
                                   quantized_weight(from_weight, fp8->weight)};
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

  static bool gathers(const Operator& op) {
    const auto* grouped = dynamic_cast<const GroupedMatmul*>(&op);
    return grouped != nullptr && grouped->gather();
  }

  /// Tokens are quantized before they are permuted, whether that is the product's part or not:
  /// there are fewer of them, and other products may read them.
  ValueId quantized_rows(const Node& product, ValueId rows, const QuantizeSpec& spec) {
    if (gathers(*product.op)) {
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

  /// What a product reads of a weight. Blocks that are turned hold the same numbers.
  ValueId quantized_weight(ValueId weight, const QuantizeSpec& spec) {
    const bool is_fp8 = is_fp8_weight(weight);
    if (is_fp8 && spec.turned_rows == 0) return weight;
    const OperatorPtr op = is_fp8 ? make_turn_blocks(spec.turned_rows) : make_quantize(spec);
    if (rounding_.keeps_copies && program_.value(weight).kind == ValueKind::kWeight)
      return copy_of(weight, op);
    return is_fp8 ? once(op, {weight}, ".turned") : quantized(weight, spec);
  }

  ValueId quantized(ValueId value, const QuantizeSpec& spec) {
    const OperatorPtr op = make_quantize(spec);
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
    if (is_fp8_weight(value)) return values_of(value);
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

}  // namespace

Program insert_roundings(const Program& program, const OperandRounding& rounding,
                         const RoundingChoice& choice, WeightCopies& copies,
                         DelayedRoundings delayed) {
  return Inserter(program, rounding, copies, std::move(delayed)).run(choice);
}

}  // namespace tessera
