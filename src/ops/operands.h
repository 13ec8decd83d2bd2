#pragma once

#include <bit>
#include <cstdint>
#include <initializer_list>

#include "core/error.h"

namespace tessera {

/// Which of the operands that its class names an operator has, where some depend on its attributes.
/// They stand in the order of the enumerators of `Operand` (an operator's Input or Output), so an
/// operand's position is the number of those before it. Shape rule, gradient rule and kernels read
/// positions from the one set that the operator makes: Operator::input_set(), where it has one.
template <typename Operand>
class OperandSet {
 public:
  constexpr OperandSet() = default;
  constexpr OperandSet(std::initializer_list<Operand> operands) {
    for (const Operand operand : operands) add(operand);
  }

  constexpr OperandSet& add(Operand operand, bool present = true) {
    if (present) bits_ |= bit(operand);
    return *this;
  }
  constexpr bool has(Operand operand) const { return (bits_ & bit(operand)) != 0; }
  constexpr int size() const { return std::popcount(bits_); }
  /// Throws InternalError where it is not there.
  constexpr int position(Operand operand) const {
    if (!has(operand))
      throw_internal_error("an operand that this operator has not was asked for", {});
    return std::popcount(bits_ & (bit(operand) - 1));
  }
  bool operator==(const OperandSet&) const = default;

 private:
  static constexpr uint64_t bit(Operand operand) { return uint64_t{1} << operand; }

  uint64_t bits_ = 0;
};

/// Where input `input` of `op` stands: its number, or its position among those that `op` has.
template <typename Op>
constexpr int input_position(const Op& op, typename Op::Input input) {
  if constexpr (requires { op.input_set(); }) {
    return op.input_set().position(input);
  } else {
    return input;
  }
}

/// The same for outputs, by Op::output_set().
template <typename Op>
constexpr int output_position(const Op& op, typename Op::Output output) {
  if constexpr (requires { op.output_set(); }) {
    return op.output_set().position(output);
  } else {
    return output;
  }
}

}  // namespace tessera
