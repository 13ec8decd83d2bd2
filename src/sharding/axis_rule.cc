#include "sharding/axis_rule.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>

#include "core/error.h"

namespace tessera {
namespace {

/// Stands for the dims that are cut by expert.
constexpr char kExpertLetter = '^';

template <typename... Parts>
[[noreturn]] void fault(fmt::format_string<Parts...> format, Parts&&... parts) {
  throw ShardFault(fmt::format(format, std::forward<Parts>(parts)...));
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  while (!text.empty()) {
    const size_t end = std::min(text.find(separator), text.size());
    if (end > 0) parts.push_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return parts;
}

}  // namespace

/// The inputs of one product: its factors, and what is read beside.
struct AxisRule::Term {
  std::vector<int> factors;
  std::vector<int> read;
};

AxisRule::Operand AxisRule::parse_operand(std::string_view text) {
  const size_t colon = text.find(':');
  ensure(colon != std::string_view::npos && colon > 0, "rule of axes: '{}' has no dims", text);
  Operand operand{.name = text[0], .same = text[colon - 1] == '!'};
  for (const char c : text.substr(colon + 1)) {
    if (c == '*') {
      operand.unread = true;
    } else if (c == kExpertLetter) {
      ensure(!operand.experts.empty(), "rule of axes: no dim before '^' in '{}'", text);
      operand.experts.back() = true;
    } else {
      operand.letters.push_back(c);
      operand.experts.push_back(false);
    }
  }
  return operand;
}

void AxisRule::parse_output(std::string_view text) {
  Output output;
  const size_t equals = text.find('=');
  if (equals != std::string_view::npos) {
    output.form = Form::kLinear;
    for (const std::string_view term : split(text.substr(equals + 1), '+'))
      output.terms.emplace_back(term);
    text = text.substr(0, equals);
  }
  const size_t colon = std::min(text.find(':'), text.size());
  if (colon > 0 && text[colon - 1] == '+') output.form = Form::kAdded;
  if (colon > 0 && text[colon - 1] == '~') output.form = Form::kAddedInBatch;
  output.operand = parse_operand(text);
  outputs_.push_back(std::move(output));
}

AxisRule::AxisRule(std::string_view text) {
  bool after_arrow = false;
  for (const std::string_view word : split(text, ' ')) {
    if (word == "->") {
      after_arrow = true;
    } else if (after_arrow) {
      parse_output(word);
    } else {
      inputs_.push_back(parse_operand(word));
    }
  }
  ensure(after_arrow, "rule of axes: no '->' in '{}'", text);
}

std::vector<AxisRule::Term> AxisRule::terms_of(const Output& output, size_t num_inputs) const {
  const auto position = [&](char name) {
    const auto found = std::ranges::find(inputs_, name, &Operand::name);
    ensure(found != inputs_.end(), "rule of axes: no operand '{}'", name);
    return static_cast<int>(found - inputs_.begin());
  };
  std::vector<bool> is_factor(inputs_.size(), false);
  for (const Output& other : outputs_) {
    for (const std::string& term : other.terms)
      for (const char name : term) is_factor[position(name)] = true;
  }
  std::vector<int> read;
  for (size_t i = 0; i < num_inputs; ++i) {
    const bool beside = !is_factor[i] || output.form != Form::kLinear;
    if (beside && !inputs_[i].unread) read.push_back(static_cast<int>(i));
  }
  if (output.form != Form::kLinear) return {Term{.factors = {}, .read = read}};
  std::vector<Term> terms;
  for (const std::string& names : output.terms) {
    Term term{.factors = {}, .read = read};
    for (const char name : names) term.factors.push_back(position(name));
    const bool is_there = std::ranges::all_of(
        term.factors, [&](int input) { return static_cast<size_t>(input) < num_inputs; });
    if (is_there) terms.push_back(std::move(term));
  }
  return terms;
}

char AxisRule::cut_letter(int input, const ShardState& state) const {
  if (!state.is_cut()) return 0;
  const Operand& operand = inputs_[input];
  if (static_cast<size_t>(state.dim) >= operand.letters.size())
    fault("operand {} is cut along dim {}, which it has not", input, state.dim);
  if (state.is(ShardState::Kind::kSharded)) return operand.letters[state.dim];
  if (!operand.experts[state.dim])
    fault("operand {} has the rows of each rank's own experts", input);
  return kExpertLetter;
}

/// All that have the dim along which something is cut must be cut along it.
void AxisRule::check_read(const Term& term, std::span<const ShardState> inputs, char cut) const {
  const auto has_cut_dim = [&](int input) {
    const Operand& operand = inputs_[input];
    if (cut == kExpertLetter)
      return std::ranges::find(operand.experts, true) != operand.experts.end();
    return operand.letters.find(cut) != std::string::npos;
  };
  const auto check = [&](int input) {
    const ShardState& state = inputs[input];
    if (state.is(ShardState::Kind::kPartial))
      fault("operand {} is a partial sum where another is cut", input);
    if (!state.is_cut() && has_cut_dim(input))
      fault("operand {} is {} along a dim of which another operand has a part", input,
            state.is(ShardState::Kind::kVarying) ? "each rank's own" : "whole");
  };
  if (std::isupper(static_cast<unsigned char>(cut)) != 0)
    fault("the whole of a dim is needed, of which each rank has a part");
  std::ranges::for_each(term.factors, check);
  std::ranges::for_each(term.read, check);
}

std::optional<ShardState> AxisRule::apply_term(RankAxis axis, const Output& output,
                                               const Term& term,
                                               std::span<const ShardState> inputs) const {
  using Kind = ShardState::Kind;
  char cut = 0;
  bool varies = false;
  int num_partial = 0;
  const auto look_at = [&](int input, bool is_factor) {
    const ShardState& state = inputs[input];
    varies = varies || state.is(Kind::kVarying);
    if (state.is(Kind::kPartial)) {
      if (!is_factor)
        fault("operand {} is a partial sum, of which only the total may be used so", input);
      ++num_partial;
    }
    const char letter = cut_letter(input, state);
    if (letter == 0) return;
    if (cut != 0 && letter != cut)
      fault("operand {} is cut along another dim than another operand", input);
    cut = letter;
  };
  for (const int input : term.factors) look_at(input, true);
  for (const int input : term.read) look_at(input, false);
  if (num_partial > 1) fault("partial sums are multiplied");
  if (cut == 0) {
    if (num_partial > 0) return ShardState::partial();
    return varies ? ShardState::varying() : ShardState::replicated();
  }
  check_read(term, inputs, cut);
  for (size_t dim = 0; dim < output.operand.letters.size(); ++dim) {
    if (cut == kExpertLetter && output.operand.experts[dim])
      return ShardState::by_expert(static_cast<int>(dim));
    if (cut != kExpertLetter && output.operand.letters[dim] == cut)
      return ShardState::sharded(static_cast<int>(dim));
  }
  if (output.form == Form::kAny) return ShardState::varying();
  if (output.form == Form::kAddedInBatch) {
    if (factoring_of(axis) == Factoring::kExperts) return std::nullopt;
    if (axis == RankAxis::kDp) return ShardState::varying();
  }
  return ShardState::partial();
}

ShardState AxisRule::add(const Output& output, std::span<const Term> terms,
                         std::span<const ShardState> states) const {
  using Kind = ShardState::Kind;
  ShardState sum = states[0];
  for (size_t i = 1; i < states.size(); ++i) {
    const ShardState& state = states[i];
    if (state == sum) continue;
    if (sum.is(Kind::kPartial) || state.is(Kind::kPartial))
      fault(
          "a partial sum and a value that is none are added: their sum over the ranks would count "
          "the latter once for each");
    if (sum.is_cut() && state.is_cut()) fault("parts along different dims are added");
    if (state.is_cut() || (state.is(Kind::kVarying) && !sum.is_cut())) sum = state;
  }
  if (!sum.is_cut()) return sum;
  // What is not cut may lack the dim, not have the whole of it.
  const char letter = output.operand.letters[sum.dim];
  for (size_t i = 0; i < states.size(); ++i) {
    if (!states[i].is(Kind::kReplicated)) continue;
    for (const int input : terms[i].factors) {
      if (inputs_[input].letters.find(letter) != std::string::npos)
        fault("operand {} is whole along a dim of which another operand has a part", input);
    }
  }
  return sum;
}

std::optional<std::vector<ShardState>> AxisRule::apply(RankAxis axis,
                                                       std::span<const ShardState> inputs) const {
  ensure(inputs.size() <= inputs_.size(), "rule of axes: {} operands for {}", inputs.size(),
         inputs_.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (inputs_[i].same && !inputs[i].is(ShardState::Kind::kReplicated))
      fault("operand {} must be the same on all ranks", i);
  }
  std::vector<ShardState> results;
  for (const Output& output : outputs_) {
    const std::vector<Term> terms = terms_of(output, inputs.size());
    ensure(!terms.empty(), "rule of axes: nothing is left of a sum");
    std::vector<ShardState> states;
    for (const Term& term : terms) {
      const auto state = apply_term(axis, output, term, inputs);
      if (!state) return std::nullopt;
      states.push_back(*state);
    }
    results.push_back(add(output, terms, states));
  }
  return results;
}

}  // namespace tessera
