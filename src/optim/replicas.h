#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "comm/communicator.h"
#include "core/slice.h"
#include "optim/optimizer.h"

namespace tessera {

/// All ranks of the world that hold the same slices of the same parameters, in one or two levels.
/// The communicators serve this group alone: its operations start when they can, so no others may
/// come between them.
struct ReplicaGroup {
  /// All replicas; with `inner`: those at this rank's place of their own inner group.
  CommunicatorPtr outer;
  /// The replicas that are near to one another (of a node, say). Sums are then made within the node
  /// first, and only parts of them travel between nodes (MegaScale-MoE, appendix A.1).
  CommunicatorPtr inner = nullptr;

  int64_t inner_size() const { return inner ? inner->size() : 1; }
  int64_t size() const { return inner_size() * outer->size(); }
  /// This rank's place among the replicas: the number of its share. Shares of an inner rank's part
  /// lie side by side.
  int64_t rank() const { return (inner ? inner->rank() : 0) * outer->size() + outer->rank(); }
};

/// A rank's place in a replica group, for predictions without communicators.
struct ReplicaPlace {
  int64_t size = 1;
  int64_t rank = 0;
};

/// A parameter as one rank holds it. Its gradient is the sum of `parameter.grad` over the replicas:
/// gradients are partial sums.
struct ReplicatedParameter {
  Parameter parameter;  ///< the name of the global tensor; weight and grad have slice.shape()
  Slice slice;          ///< which part of the global tensor
  size_t group = 0;     ///< index in the list of replica groups
  /// The layer that alone uses it, in the model's order; none for the model's ends.
  std::optional<int64_t> layer = std::nullopt;
};

/// Parameters of one replica group that are reduced, updated and gathered together. Their elements,
/// one parameter's after the other's, are the bucket's *flat* order; share i, which is rank i's,
/// has the flat elements [bounds[i], bounds[i + 1]). Bounds fall between rows, so a share is some
/// whole rows of each parameter.
struct Bucket {
  IndexRange parameters;         ///< in the group's list
  std::vector<int64_t> offsets;  ///< where each parameter begins, and the end of the last
  std::vector<int64_t> bounds;

  int64_t num_elements() const { return offsets.back(); }
  /// The flat elements of shares [first, first + count).
  IndexRange elements(int64_t first, int64_t count = 1) const;
};

/// What is cut into shares: between its matrices where it consists of such, else between rows.
struct CutTensor {
  Shape shape;
  std::vector<int64_t> matrix_rows = {};  ///< as Parameter's
  int64_t unit_rows = 1;                  ///< else between such multiples of rows alone
  int64_t part = 0;                       ///< no bucket has tensors of two parts
};
/// A parameter's.
CutTensor cut_tensor(const Parameter& parameter);

/// The elements that each share has of buckets with matrices, so that the next bucket can make up
/// for what whole matrices leave uneven.
using ShareLoads = std::vector<int64_t>;

/// Cuts parameters, listed in the order in which a forward pass first uses them, into buckets,
/// listed in the order in which a backward pass completes them: the last parameters first. A bucket
/// takes parameters of one part while their gradients have at most `bucket_bytes`, and at least
/// one.
///
/// Bound i is, of all places where a bucket may be cut, the one nearest to element N·i/num_shares
/// of the bucket's N (the lower of two equally near): so where rows are cut no share has more than
/// N/num_shares and a row. A bucket with matrices is cut near the places that would make the loads
/// of all shares even, which also gives matrices that are a bucket each to all shares in turn.
std::vector<Bucket> make_buckets(std::span<const CutTensor> tensors, int64_t bucket_bytes,
                                 int64_t num_shares);

/// One bucket of all these parameters. Each begins at a multiple of `alignment` elements; what is
/// between them is padding, which belongs to some share as well. `loads` are those of the buckets
/// before, of no shares where there are none, and become those with this one.
Bucket make_bucket(std::span<const CutTensor> tensors, int64_t num_shares, int64_t alignment,
                   ShareLoads& loads);

/// The rows of the bucket's k-th parameter, of this shape, that belong to a share. Rows without
/// elements belong to share 0.
IndexRange share_rows(const Bucket& bucket, size_t k, const Shape& shape, int64_t share);

/// A view of some rows (along the first dim) of a tensor.
Tensor take_rows(const Tensor& tensor, IndexRange rows);
/// The matrices among these rows, which cut none of them.
std::vector<int64_t> take_matrices(std::span<const int64_t> matrix_rows, IndexRange rows);
/// The rows of a weight's scales (QuantizeBlocks) that belong to such rows, which cut no block.
IndexRange blocks_of(IndexRange rows);
/// Those rows of weight and gradient alone.
Parameter take_rows(const Parameter& parameter, IndexRange rows);

}  // namespace tessera
