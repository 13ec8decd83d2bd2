#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "core/memory.h"
#include "ops/backend.h"
#include "ops/muon/muon.h"

namespace tessera {

struct MuonOptions {
  double momentum = 0.95;
  bool nesterov = true;
  int64_t ns_steps = 5;  ///< of Newton and Schulz's iteration
};

/// A matrix with its state: flat tensors of rows · columns elements.
struct MuonMatrix {
  Tensor grad;
  Tensor m;
  Tensor master;  ///< or the remainder, or the weight itself: MuonUpdate::kMaster
  Tensor weight;  ///< where something is beside it
};

/// Muon on matrices of one shape that are updated with the same factors: batches of them, as large
/// as kBatchElements allow, go through the operators of a step one after the other in scratch
/// memory. A matrix comes out the same in any batch; on a GPU, to the rounding of its products.
class MuonKind {
 public:
  MuonKind(const MuonSpec& spec, const MuonOptions& options, int64_t rows, int64_t columns,
           const Backend& backend);

  bool is_of(const MuonSpec& spec, int64_t rows, int64_t columns) const;
  int64_t rows() const { return rows_; }
  int64_t elements() const { return rows_ * columns_; }
  /// How many matrices a batch has, of `count` of them.
  int64_t batch(int64_t count) const;
  /// Bytes of scratch memory for such a batch.
  int64_t workspace_bytes(int64_t count) const;
  MuonFactors factors(double lr, int64_t update) const {
    return make_muon_factors(spec_, lr, update, rows_, columns_);
  }

  using RunKernel =
      std::function<void(const Operator& op, std::span<const Tensor> inputs,
                         std::span<const Tensor> outputs, std::span<std::byte> workspace)>;
  /// Gives the device the update. `factors` and `grad_scale` are the operators' inputs, `workspace`
  /// has at least workspace_bytes() of as many matrices.
  void update(std::span<const MuonMatrix> matrices, const Tensor& factors, const Tensor& grad_scale,
              const Buffer& workspace, const RunKernel& run) const;

 private:
  int64_t update_bytes(int64_t batch) const;
  void update_batch(std::span<const MuonMatrix> matrices, const Tensor& factors,
                    const Tensor& grad_scale, const Buffer& workspace, const RunKernel& run) const;

  MuonSpec spec_;
  int64_t rows_;
  int64_t columns_;
  int64_t max_elements_;  ///< of a batch of several matrices
  Backend backend_;
  OperatorPtr momentum_;
  OperatorPtr newton_schulz_;
  OperatorPtr update_;
};

}  // namespace tessera
