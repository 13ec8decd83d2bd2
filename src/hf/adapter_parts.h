#pragma once

#include <optional>
#include <string>
#include <vector>

#include "hf/tensors/tensor_map.h"
#include "model/config/config.h"

namespace tessera {

/// The adapter of a weight, whose rows are blocks: those of experts, or all. Row i of what it adds
/// is scale times row i of `rows` [rows, r] times the r rows of `columns` [blocks · r, columns]
/// that belong to i's block.
struct AdapterParts {
  std::string rows;
  std::string columns;
  std::vector<int64_t> block_begin;  ///< first row by block, and the number of rows
  /// Whether Tessera keeps the weight as [in, out]: `rows` is A's transpose then, `columns` B's.
  bool transposed = false;

  int64_t num_blocks() const { return std::ssize(block_begin) - 1; }
  /// The block that a row is of.
  int64_t block_of(int64_t row) const;
};

/// Of a tensor of a model without adapters; nothing where `model` has none for it.
std::optional<AdapterParts> find_adapter(const ModelConfig& model, const MappedTensor& tensor);

}  // namespace tessera
