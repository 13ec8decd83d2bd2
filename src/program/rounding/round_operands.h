#pragma once

#include <optional>
#include <string>
#include <vector>

#include "ops/round_values/recipes.h"
#include "program/differentiate.h"

namespace tessera {

/// Which products read rounded operands, and how these are rounded.
struct OperandRounding {
  const Recipe* recipe = nullptr;
  /// Weights whose products stay as they are: by name, or by the beginning of it up to a dot
  /// ("moe.experts"); "all" has none rounded.
  std::vector<std::string> plain = {};
  /// The gradients of weights are products of what was not rounded.
  bool plain_weight_gradients = false;
  /// Products that tensor cores can make of FP8 numbers are made so, unless all are to be emulated.
  bool fp8_products = false;
  /// What such products read of weights is an input of the program, made when the weights change
  /// instead of in every run.
  bool keeps_copies = false;
  /// The gradients of weights read tokens, and gradients, as the other products that read them do:
  /// rounded by their rows (and then along tokens, unless they are plain). So these may be kept,
  /// and exchanged, in FP8. REQUIRES a recipe that has_row_scales.
  bool keeps_rounded = false;
  /// What activations' gradients read, and nothing else does, is kept in FP8 too, and rows that
  /// were permuted are permuted again. REQUIRES keeps_rounded.
  bool keeps_all_rounded = false;
  /// Weights that only rounded products read (list_fp8_weights) are FP8 numbers and scales
  /// themselves, instead of BF16. REQUIRES a recipe that can_store_weights.
  bool fp8_weights = false;
  /// With delayed scales: what is beyond the largest number makes the step NaN.
  bool overflows = false;

  bool rounds(std::string_view weight) const;
};

/// Whether tokens and gradients are rounded by scales of single rows, or of parts of them, so that
/// what Quantize makes is as good as they are, whoever else reads them.
bool has_row_scales(const Recipe& recipe);

/// How weights are stored with fp8_weights: E4M3, a scale for 128 x 128. Turned, they are the same
/// numbers, so that one of them serves all products.
Format fp8_weight_format();

/// Whether weights are rounded by scales of such blocks, whatever product reads them.
bool can_store_weights(const Recipe& recipe);

/// The weights of a program that are stored so: what products alone read, rounded, and whose
/// matrices are multiples of 128 in both dims. None without fp8_weights.
std::vector<std::string> list_fp8_weights(const Program& forward, const OperandRounding& rounding);

/// An input of a program that is to hold what a Quantize makes of a weight.
struct WeightCopy {
  std::string name;    ///< of the input: "attn.q.weight e4m3 row"
  std::string weight;  ///< its name
  OperatorPtr op;
};

/// Lists the copies that a program reads, each once.
using WeightCopies = std::vector<WeightCopy>;

/// Makes the copies, its outputs, of the weights of `forward`.
Program make_copies_program(const Program& forward, const WeightCopies& copies);

/// The names of the weights whose products could be rounded.
std::vector<std::string> product_weights(const Program& forward);

/// Puts a RoundValues in front of each operand of the products of weights (Linear and
/// GroupedMatmul), each value once for all that read it rounded alike. With `fp8_products` it is a
/// Quantize, and the product a ScaledGroupedMatmul, where there is one (find_fp8_product); what
/// else the product adds is then added to its rounded result. Values keep their ids. REQUIRES
/// experts of one size, but for F16; rows that a product gathers are rounded before, so each must
/// be rounded by itself (is_of_rows). With `keeps_copies`, which are added to `copies`. Those by
/// delayed scales are DelayedRoundings. With `keeps_rounded` tokens are rounded by a Quantize
/// everywhere, and a Dequantize is in front of who wants values. Products of a recipe in F16 read
/// what a Quantize to F16 gives, on all devices, and give F32; rows are not gathered.
Program round_operands(const Program& forward, const OperandRounding& rounding,
                       WeightCopies& copies);
Program round_operands(const Program& forward, const OperandRounding& rounding);

/// The same for the products that are gradients of these; those of weights become a QuantizeTokens
/// of each operand and a ScaledGroupedWgrad (find_fp8_wgrad). What is saved stays as it was. Of
/// those by delayed scales gradients alone are tallied: the others are what forward programs tally.
Backward round_operands(const Program& forward, Backward backward, const OperandRounding& rounding,
                        WeightCopies& copies);
Backward round_operands(const Program& forward, Backward backward, const OperandRounding& rounding);

}  // namespace tessera
