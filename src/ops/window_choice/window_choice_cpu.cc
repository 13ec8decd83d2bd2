#include <algorithm>

#include "ops/window_choice/window_choice.h"

namespace tessera {
namespace {

void check_choice_positions(const WindowChoice& op, std::span<const int32_t> positions) {
  for (int64_t token = 0; token < std::ssize(positions); ++token) {
    const int32_t position = positions[token];
    check_shape(op, position >= 0 && position <= token,
                "token {} has position {}; sequences begin with position 0", token, position);
    check_shape(op, op.chosen() || (position + 1) / op.spec().rate <= op.spec().entries,
                "token {} sees {} entries of {} tokens, more than {}", token,
                (position + 1) / op.spec().rate, op.spec().rate, op.spec().entries);
  }
}

void window_choice(const WindowChoice& op, const Args<WindowChoice>& args) {
  const WindowChoiceSpec& spec = op.spec();
  const auto positions = args.in(WindowChoice::kPositions).span<int32_t>();
  check_choice_positions(op, positions);
  const int64_t num_tokens = std::ssize(positions);
  const int32_t* const chosen =
      op.chosen() ? args.in(WindowChoice::kChosen).as<int32_t>() : nullptr;
  int32_t* const rows = args.out(WindowChoice::kRows).as<int32_t>();
  const int64_t width = spec.window + spec.entries;
#pragma omp parallel for schedule(static)
  for (int64_t token = 0; token < num_tokens; ++token) {
    int32_t* to = rows + token * width;
    int32_t* const end = to + width;
    const int64_t position = positions[token];
    for (int64_t row = token - std::min(position, spec.window - 1); row <= token; ++row)
      *to++ = static_cast<int32_t>(row);
    const int64_t first_entry = num_tokens + (token - position) / spec.rate;
    if (chosen == nullptr) {
      for (int64_t i = 0; i < (position + 1) / spec.rate; ++i)
        *to++ = static_cast<int32_t>(first_entry + i);
    } else {
      const int32_t* const own = chosen + token * spec.entries;
      for (int64_t i = 0; i < spec.entries && own[i] >= 0; ++i)
        *to++ = static_cast<int32_t>(num_tokens) + own[i];
    }
    std::fill(to, end, -1);
  }
}

}  // namespace

void add_window_choice_cpu(KernelTable& table) {
  add_kernel<WindowChoice>(table, window_choice);
}

}  // namespace tessera
