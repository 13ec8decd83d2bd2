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

std::string WindowChoice::attributes() const {
  return fmt::format("window={} rate={} entries={}{}", spec_.window, spec_.rate, spec_.entries,
                     chosen_ ? " chosen" : "");
}

std::vector<ValueType> WindowChoice::infer(std::span<const ValueType> inputs) const {
  const size_t expected = chosen_ ? 2 : 1;
  check_shape(*this, inputs.size() == expected, "takes {} inputs, got {}", expected, inputs.size());
  const ValueType& positions = inputs[kPositions];
  check_shape(*this, positions.dtype == DType::kI32 && positions.shape.rank() == 1,
              "positions must be i32 [T], got {}", positions.to_string());
  const int64_t num_tokens = positions.shape[0];
  if (chosen_) {
    const ValueType chosen{DType::kI32, {num_tokens, spec_.entries}};
    check_shape(*this, inputs[kChosen] == chosen, "chosen entries are {}, expected {}",
                inputs[kChosen].to_string(), chosen.to_string());
  }
  return {{DType::kI32, {num_tokens, spec_.window + spec_.entries}}};
}

OperatorPtr make_window_choice(const WindowChoiceSpec& spec, bool chosen) {
  return std::make_shared<WindowChoice>(spec, chosen);
}

}  // namespace tessera
