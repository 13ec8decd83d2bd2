#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "data/sampler.h"
#include "python.h"

namespace tessera::python {

/// An array of whole numbers of any type, in the host's memory.
using IntArray = nb::ndarray<nb::ro>;

/// Rows of numbers.
struct Rows {
  int64_t num_rows = 0;
  int64_t length = 0;
  std::vector<int32_t> values;  ///< [num_rows, length]

  std::span<const int32_t> row(int64_t idx) const {
    return std::span(values).subspan(idx * length, length);
  }
};

/// Reads an array of two dimensions, or of one as one row. Throws UserError for other shapes, types
/// other than whole numbers, numbers beyond I32 and memory that the host does not reach.
Rows read_rows(const IntArray& array, const char* name);

/// What a user gives a model to learn from or to judge.
struct TokenArrays {
  IntArray tokens;                    ///< [B, T]
  std::optional<IntArray> labels;     ///< [B, T] what follows each token, or -100
  std::optional<IntArray> documents;  ///< [B, T] equal numbers side by side: one document
};

/// Rows as the model takes them: T is one less than the tokens' where there are no labels, since a
/// row's last token then has no label.
struct TokenRows {
  Rows tokens;
  Rows labels;
  std::optional<Rows> documents;
};

/// Throws UserError where shapes differ and for ids outside the vocabulary.
TokenRows read_tokens(const TokenArrays& arrays, int64_t vocab_size);

/// The rows [first, first + count) one behind the other; a document that ends is the end of a
/// stretch.
Batch make_batch(const TokenRows& rows, int64_t first, int64_t count);

}  // namespace tessera::python
