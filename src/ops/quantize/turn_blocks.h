#pragma once

#include "ops/operator.h"

namespace tessera {

/// Matrices of FP8 numbers with scales of 128 × 128, one after the other, each transposed with its
/// scales: (x E4M3 [N · g, C]) -> y E4M3 [N · C, g], y_n = x_nᵀ, as tensor cores want a weight that
/// is added up along its columns. g and C are multiples of 128. Moves bytes alone: y stands for the
/// same numbers.
class TurnBlocks final : public Operator {
 public:
  enum Input : int { kX };
  enum Output : int { kY };
  static constexpr std::string_view kName = "turn_blocks";
  static constexpr int64_t kBlock = 128;

  /// Throws UserError where rows of a matrix, g, are no multiple of 128.
  explicit TurnBlocks(int64_t matrix_rows);
  int64_t matrix_rows() const { return matrix_rows_; }
  std::string_view name() const override { return kName; }
  /// "turned 768".
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;

 private:
  int64_t matrix_rows_;
};

/// What its kernels take and give (KernelOptions::takes).
bool takes_block_weights(const Format& format);

OperatorPtr make_turn_blocks(int64_t matrix_rows);
void add_turn_blocks_cpu(KernelTable& table);
void add_turn_blocks_cuda(KernelTable& table);

}  // namespace tessera
