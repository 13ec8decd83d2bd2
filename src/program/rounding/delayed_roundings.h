#pragma once

#include <map>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "ops/round_values/cast_spec.h"
#include "program/program.h"

namespace tessera {

/// What a product reads, for which a recipe of delayed scales keeps one.
enum class OperandKind : uint8_t { kActivation, kWeight, kGradient };
inline constexpr int64_t kOperandKinds = 3;

/// With delayed scales, forward programs have an input and an accumulator of these names, F32 and
/// I64 (ops/round_values/tally.h) with a row for each operand of each weight's products. Backward
/// programs have the accumulator and, for the same scales, an input of the third name.
inline constexpr std::string_view kScalesName = "rounding.scales";
inline constexpr std::string_view kTallyName = "rounding.tally";
inline constexpr std::string_view kGradScalesName = "grad.rounding.scales";

/// The weights whose operands have rows there, in order: product_weights, sorted, so that neither
/// layout nor recomputation changes it.
std::vector<std::string> operand_weights(std::vector<std::string> product_weights);
/// The row of an operand of the weight of that number.
inline int64_t operand_row(int64_t weight, OperandKind kind) {
  return weight * kOperandKinds + static_cast<int64_t>(kind);
}

/// An operand of a weight's product.
struct DelayedOperand {
  ValueId value;
  ValueId offsets;            ///< where rows are some of the value's; else not set
  const std::string& weight;  ///< its name
  const CastSpec& cast;
};

/// The roundings of one program by delayed scales. A value is rounded once for all operands of its
/// kind that it is, whose scales are the same since they have always been the same values.
class DelayedRoundings {
 public:
  /// `weights` are operand_weights(); operands of the `tallied` kinds are counted.
  DelayedRoundings(std::vector<std::string> weights, std::string_view scales,
                   std::vector<OperandKind> tallied, bool overflows)
      : weights_(std::move(weights)),
        scales_name_(scales),
        tallied_(std::move(tallied)),
        overflows_(overflows) {}

  /// The rounded value. `program` gets what it lacks, and `nodes`, its new ones, the node.
  ValueId round(const DelayedOperand& operand, Program& program, std::vector<Node>& nodes);

 private:
  int place_of(const std::string& weight, OperandKind kind) const;
  bool is_tallied(OperandKind kind) const;
  void add(const DelayedOperand& operand, int place, bool tallied, Program& program);

  std::vector<std::string> weights_;
  std::string_view scales_name_;
  std::vector<OperandKind> tallied_;
  bool overflows_;
  ValueId scales_ = {};
  ValueId tally_ = {};
  std::map<std::tuple<ValueId, ValueId, OperandKind>, size_t> made_;  ///< the nodes' numbers
};

}  // namespace tessera
