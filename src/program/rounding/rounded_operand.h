#pragma once

#include <optional>
#include <string>
#include <vector>

#include "ops/expert_sizes.h"
#include "ops/quantize/quantize.h"
#include "ops/round_values/round_values.h"
#include "program/program.h"

/// Which operands of products are rounded, as round_operands finds them and insert_roundings has it
/// done.
namespace tessera {

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

/// Whether every row has scales of its own, as Quantize and Dequantize have them.
bool is_by_rows(const CastSpec& cast);

/// The same as a Quantize has it. REQUIRES that it is_by_rows.
QuantizeSpec quantize_spec(const CastSpec& cast);

/// What the rows of a product with a weight are, and what it adds to it.
struct WeightProduct {
  int rows = 0;
  int weight = 0;
  int extra = 0;  ///< an input that there may be
  OperatorPtr add_extra;
};

std::optional<WeightProduct> find_product(const Operator& op);

/// The operands of the gradient of a weight, whose rows are as many as the first has columns.
struct WeightGradient {
  int narrow = 0;
  int wide = 0;
  ExpertSizes sizes;
  ValueId offsets = {};  ///< of the experts' tokens; not set where there is but one
};

std::optional<WeightGradient> find_gradient(const Program& program, const Node& node);

}  // namespace tessera
