#pragma once

#include "ops/newton_schulz/newton_schulz_factors.h"
#include "ops/operator.h"

namespace tessera {

// clang-format off
/// Brings the singular values of B matrices near 1 and keeps their singular vectors, by the iteration of Newton and Schulz
/// with a polynomial of degree 5 (Jordan and others, "Muon: An optimizer for hidden layers in neural networks", 2024, whose
/// coefficients these are):
///   X = M / (‖M‖ + 1e-7), in the norm of Frobenius; then `steps` times
///   G = X·Xᵀ, or Xᵀ·X where M has more rows than columns;   X = (a·I + b·G + c·G²)·X, or X·(...)
/// with a = 3.4445, b = -4.7750, c = 2.0315. Where the longer side is more than 1.5 times the shorter, two steps are one
/// product with X, since all that X is multiplied by are polynomials of G, which commute:
///   P = a·I + b·G + c·G²;   G = P·G·P;   Q = (a·I + b·G + c·G²)·P;   X = Q·X, or X·Q
/// So half of the products with X become products of the smaller size. More than two would let the rounding of G, which each
/// P·G·P multiplies by up to a², drown the squares of small singular values (docs/log.md). After 5 steps singular values of M / ‖M‖ above 0.01 lie between 0.65 and 1.21;
/// smaller ones grow by a in each step. A matrix of zeros stays one.
/// Input: M F32 or BF16 [B, rows, columns]. Output: X, of the same type, which may lie where M does. Matrices are kept in this type between products,
/// whose sums are F32; the norm is summed in double. Each matrix has the same bits whatever others are in the batch, on the
/// CPU; on a GPU cuBLASLt may choose other products for another B.
// clang-format on
class NewtonSchulz final : public Operator {
 public:
  static constexpr std::string_view kName = "newton_schulz";
  enum Input : int { kM };
  enum Output : int { kX };

  /// Throws UserError unless `steps` is from 1 to 100.
  explicit NewtonSchulz(int64_t steps);

  std::string_view name() const override { return kName; }
  std::string attributes() const override { return fmt::format("steps={}", steps_); }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  int64_t steps() const { return steps_; }

  /// Whether matrices of such sides take two steps at a time: where that is fewer FLOPs.
  static bool pairs_steps(int64_t rows, int64_t cols);
  /// How often X is multiplied: by one step, or by two but for the last of an odd number.
  int64_t num_products(int64_t rows, int64_t cols) const;

  /// Where a batch of this type has what in scratch memory, in bytes.
  struct Scratch {
    int64_t x = 0;  ///< a second batch: each product reads one and writes the other, in which P is
                    ///< until then
    int64_t gram =
        0;  ///< G, then the polynomial in it: [B, n, n] of the type, n = min(rows, columns)
    int64_t square = 0;  ///< G²: F32 [B, n, n]; when it is used up, P·G or Q of the type
    int64_t sums = 0;  ///< F64 [B, NewtonSchulzFactors::kSums]: parts of the sums of squares, where
                       ///< parts are summed
    int64_t num_bytes = 0;
  };
  static Scratch scratch(const ValueType& batch);

 private:
  int64_t steps_;
};

OperatorPtr make_newton_schulz(int64_t steps);

void add_newton_schulz_cpu(KernelTable& table);
void add_newton_schulz_cuda(KernelTable& table);

}  // namespace tessera
