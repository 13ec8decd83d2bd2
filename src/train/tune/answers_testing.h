#pragma once

#include <vector>

#include "core/random.h"
#include "train/tune/answers.h"

namespace tessera::testing {

/// Answers of lengths between those of a token and of a row, with a prompt of one or two.
inline std::vector<Answer> draw_answers(int64_t count, int64_t row) {
  Random random(7, 7);
  std::vector<Answer> answers;
  for (int64_t i = 0; i < count; ++i) {
    Answer answer{.first = 1 + i % 2};
    const int64_t most = i % 3 == 0 ? row + 1 : row / 2;
    const auto room = static_cast<uint64_t>(most - answer.first);
    const int64_t size = answer.first + 1 + static_cast<int64_t>(random.next_below(room));
    for (int64_t k = 0; k < size; ++k)
      answer.tokens.push_back(static_cast<int32_t>(random.next_below(250)));
    answers.push_back(std::move(answer));
  }
  return answers;
}

}  // namespace tessera::testing
