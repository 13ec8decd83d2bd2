#pragma once

#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "sharding/shard_state.h"

namespace tessera {

/// Why an operator cannot make anything of what it reads along one axis.
struct ShardFault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// How an operator's operands hang together, dim by dim, from which follows along any axis what its
/// results are. Written as
///
///     x:th w:oh b:o -> y:to=xw+b
///
/// one letter a dim: here y[t, o] is the sum over h of x[t, h] · w[o, h], plus b[o].
///
/// - `y:to=xw+b`: y is a sum of products that are linear in each factor. Only such a factor may be
///   a partial sum. What no term of the rule names is read in any other way, by all results.
/// - `y:to`: y is any function of what is read. Of dims that it lacks a rank may have a part, then
///   the results vary.
/// - `y+:o`: a function of each part, which are added up over the dims that it lacks.
/// - `y~:o`: the same, within a micro-batch; along DP every rank has its own.
/// - A capital: nobody may have a part along this dim.
/// - `^` behind a letter: the dim may be cut by expert. Such dims of one rule are cut alike.
/// - `s!:`: must be the same on all ranks.
/// - `x:*`: is not read.
///
/// Inputs at the end that an operator has not are left out of rule and terms.
class AxisRule {
 public:
  /// Throws InternalError for what is not of this form.
  explicit AxisRule(std::string_view text);

  /// The results' states along `axis`, of those of the operands. Throws ShardFault. nullopt where
  /// the rule says nothing along the axis.
  std::optional<std::vector<ShardState>> apply(RankAxis axis,
                                               std::span<const ShardState> inputs) const;

  size_t num_inputs() const { return inputs_.size(); }
  size_t num_outputs() const { return outputs_.size(); }

 private:
  struct Operand {
    char name = 0;
    std::string letters;        ///< a dim each
    std::vector<bool> experts;  ///< whether it may be cut by expert
    bool unread = false;
    bool same = false;
  };
  enum class Form : uint8_t { kAny, kLinear, kAdded, kAddedInBatch };
  struct Output {
    Operand operand;
    Form form = Form::kAny;
    std::vector<std::string> terms;  ///< names of factors
  };
  struct Term;

  static Operand parse_operand(std::string_view text);
  void parse_output(std::string_view text);
  std::vector<Term> terms_of(const Output& output, size_t num_inputs) const;
  char cut_letter(int input, const ShardState& state) const;
  void check_read(const Term& term, std::span<const ShardState> inputs, char cut) const;
  std::optional<ShardState> apply_term(RankAxis axis, const Output& output, const Term& term,
                                       std::span<const ShardState> inputs) const;
  ShardState add(const Output& output, std::span<const Term> terms,
                 std::span<const ShardState> states) const;

  std::vector<Operand> inputs_;
  std::vector<Output> outputs_;
};

}  // namespace tessera
