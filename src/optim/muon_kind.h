#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "comm/communicator.h"
#include "core/memory.h"
#include "ops/backend.h"
#include "ops/muon/muon.h"

namespace tessera {

struct MuonOptions {
  double momentum = 0.95;
  bool nesterov = true;
  int64_t ns_steps = 5;  ///< of Newton and Schulz's iteration
};

/// How matrices are cut of which ranks hold a part each: into equal parts, in the order of the
/// ranks of a group, which all list the same matrices in the same order and update them together.
struct MatrixCut {
  CommunicatorPtr parts = nullptr;  ///< the group; null: matrices are whole
  bool by_columns = false;          ///< or by rows

  int64_t num_parts() const { return parts ? parts->size() : 1; }
  /// The shape of a matrix of whose parts each has so many rows and columns.
  Shape whole(int64_t rows, int64_t columns) const {
    return by_columns ? Shape{rows, columns * num_parts()} : Shape{rows * num_parts(), columns};
  }
  bool operator==(const MatrixCut&) const = default;
};

/// A matrix, or a rank's part of one, with its state: flat tensors of rows · columns elements.
struct MuonMatrix {
  Tensor grad;
  Tensor m;
  Tensor m_scale;  ///< where m has scales: [rows, blocks of a row]
  Tensor master;   ///< or the remainder, or the weight itself: MuonUpdate::kMaster
  Tensor weight;   ///< where something is beside it
};

/// Muon on matrices of one shape that are updated with the same factors: batches of them, as large
/// as kBatchElements allow, go through the operators of a step one after the other in scratch
/// memory. Of a batch of matrices that are cut, each rank orthogonalizes an equal share: all ranks'
/// parts of these are exchanged before, and given back behind it. A matrix comes out the same in
/// any batch; on a GPU, to the rounding of its products.
class MuonKind {
 public:
  /// `rows` and `columns` are those of a part where matrices are cut.
  MuonKind(const MuonSpec& spec, const MuonOptions& options, int64_t rows, int64_t columns,
           const MatrixCut& cut, const Backend& backend);

  bool is_of(const MuonSpec& spec, int64_t rows, int64_t columns, const MatrixCut& cut) const;
  /// How many matrices a batch has, of `count` of them.
  int64_t batch(int64_t count) const;
  /// Bytes of scratch memory for such a batch.
  int64_t workspace_bytes(int64_t count) const;
  MuonFactors factors(double lr, int64_t update) const {
    return make_muon_factors(spec_, lr, update, whole_[0], whole_[1]);
  }

  using RunKernel =
      std::function<void(const Operator& op, std::span<const Tensor> inputs,
                         std::span<const Tensor> outputs, std::span<std::byte> workspace)>;
  /// Gives the device the update. `factors` and `grad_scale` are the operators' inputs, `workspace`
  /// has at least workspace_bytes() of as many matrices.
  void update(std::span<const MuonMatrix> matrices, const Tensor& factors, const Tensor& grad_scale,
              const Buffer& workspace, const RunKernel& run) const;

 private:
  /// Where a batch has what in scratch memory, in bytes; whole matrices are its parts where they
  /// are not cut.
  struct Scratch {
    int64_t num_parts = 0;  ///< as many of each rank, of which the last may be none
    int64_t num_whole = 0;  ///< matrices that this rank orthogonalizes
    int64_t whole = 0;      ///< of the weight's type, behind the parts
    int64_t kernels = 0;    ///< what operators need, one after the other
    int64_t num_bytes = 0;
  };
  int64_t elements() const { return rows_ * columns_; }
  /// As the exchanges take parts and whole matrices: rows, one below the other where columns are
  /// cut, else one of a matrix.
  Shape parts_shape(const Scratch& scratch) const;
  Shape whole_shape(const Scratch& scratch) const;
  Scratch scratch(int64_t count) const;
  void orthogonalize(const Scratch& scratch, const Buffer& workspace, const RunKernel& run) const;
  void update_batch(std::span<const MuonMatrix> matrices, const Tensor& factors,
                    const Tensor& grad_scale, const Buffer& workspace, const RunKernel& run) const;

  MuonSpec spec_;
  int64_t rows_;
  int64_t columns_;
  MatrixCut cut_;
  Shape whole_;           ///< [rows, columns] of a whole matrix
  int64_t max_elements_;  ///< of a batch of several matrices, by rank
  Backend backend_;
  OperatorPtr momentum_;
  OperatorPtr join_;  ///< exchanges parts for whole matrices, where they are cut; null elsewhere
  OperatorPtr part_;  ///< the way back
  OperatorPtr newton_schulz_;
  OperatorPtr update_;
};

}  // namespace tessera
