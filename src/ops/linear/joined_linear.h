#pragma once

#include <cstdint>

#include "ops/operator.h"

namespace tessera {

/// Several products of the same rows at once: y_i = x · weight_iᵀ, (x A [T, in], N weights
/// A [out_i, in]) -> N of A [T, out_i]. No dim is ragged. What N operators Linear give; a pass
/// makes it of them (program/fusion/join_products.h) where each alone is short beside its launch.
class JoinedLinear final : public Operator {
 public:
  static constexpr std::string_view kName = "joined_linear";
  static constexpr int kMost = 4;  ///< products
  enum Input : int { kX, kFirstWeight };
  enum Output : int { kFirstY };

  /// 2 to kMost products.
  explicit JoinedLinear(int count);

  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  int count() const { return count_; }

 private:
  int count_;
};

/// The sum of N operators LinearDgrad, in order: ((grad_0 · weight_0 (+ addend)) + grad_1 ·
/// weight_1)
/// + ..., (grad_0 A [T, out_0], weight_0 A [out_0, in], grad_1, weight_1, ..., and with addend:
/// A [T, in]) -> A [T, in]. Each product is added in F32 and the sum rounded, as if each were an
/// operator with what came before as its addend. No dim is ragged.
class JoinedLinearDgrad final : public Operator {
 public:
  static constexpr std::string_view kName = "joined_linear_dgrad";
  enum Input : int { kFirstGrad, kFirstWeight };  ///< those of a product are neighbours
  enum Output : int { kGradX };

  /// 2 to JoinedLinear::kMost products.
  JoinedLinearDgrad(int count, bool addend);

  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  int count() const { return count_; }
  bool addend() const { return addend_; }

 private:
  int count_;
  bool addend_;
};

/// The gradients of several weights of the same rows: (x A [T, in], N gradients A [T, out_i]) -> N
/// of F32 [out_i, in], accumulated. What N operators LinearWgrad give. No dim is ragged.
class JoinedLinearWgrad final : public Operator {
 public:
  static constexpr std::string_view kName = "joined_linear_wgrad";
  enum Input : int { kX, kFirstGrad };
  enum Output : int { kFirstGradWeight };

  /// 2 to JoinedLinear::kMost products.
  explicit JoinedLinearWgrad(int count);

  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  bool accumulates(int /*output*/) const override { return true; }
  int count() const { return count_; }

 private:
  int count_;
};

/// Tiles of 128 rows by 64 features that these products have in all.
int64_t count_joined_tiles(int64_t num_rows, std::span<const int64_t> features);

/// Whether so many tiles are few enough that one kernel makes them at once, two on each SM of a
/// Hopper GPU. Products of more are long beside their launches, and better alone.
bool suits_joined_kernel(int64_t num_tiles);

void add_joined_linear_cpu(KernelTable& table);
void add_joined_linear_cuda(KernelTable& table);

}  // namespace tessera
