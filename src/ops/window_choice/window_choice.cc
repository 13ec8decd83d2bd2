#include "ops/window_choice/window_choice.h"

#include <memory>

namespace tessera {

WindowChoice::WindowChoice(const WindowChoiceSpec& spec, bool chosen)
    : spec_(spec), chosen_(chosen) {
  require(spec.window >= 1 && spec.rate >= 1 && spec.entries >= 1,
          "window_choice: a window of {} tokens and {} entries of {} tokens: expected at least 1 "
          "of each",
          spec.window, spec.entries, spec.rate);
}

std::string_view WindowChoice::name_of(KeptRows kept) {
  switch (kept) {
    case KeptRows::kPacked:
      return "window_choice";
    case KeptRows::kCached:
      return "window_choice_cached";
    case KeptRows::kPaged:
      return "window_choice_paged";
  }
  throw InternalError("window_choice: unknown rows");
}

std::string WindowChoice::attributes() const {
  return fmt::format("window={} rate={} entries={}{}", spec_.window, spec_.rate, spec_.entries,
                     chosen_ ? " chosen" : "");
}

std::vector<ValueType> WindowChoice::infer(std::span<const ValueType> inputs) const {
  const int expected = chosen_input() + (chosen_ ? 1 : 0);
  check_shape(*this, std::ssize(inputs) == expected, "takes {} inputs, got {}", expected,
              inputs.size());
  check_kept_inputs(*this, spec_.kept, inputs, kFirstKept);
  const ValueType& positions = inputs[kPositions];
  check_shape(*this, positions.dtype == DType::kI32 && positions.shape.rank() == 1,
              "positions must be i32 [T], got {}", positions.to_string());
  const int64_t num_tokens = positions.shape[0];
  if (chosen_) {
    const ValueType chosen{DType::kI32, {num_tokens, spec_.entries}};
    check_shape(*this, inputs[chosen_input()] == chosen, "chosen entries are {}, expected {}",
                inputs[chosen_input()].to_string(), chosen.to_string());
  }
  return {{DType::kI32, {num_tokens, spec_.window + spec_.entries}}};
}

OperatorPtr make_window_choice(const WindowChoiceSpec& spec, bool chosen) {
  return std::make_shared<WindowChoice>(spec, chosen);
}

}  // namespace tessera
