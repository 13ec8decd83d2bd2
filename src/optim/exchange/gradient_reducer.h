#pragma once

#include <cstdint>
#include <vector>

#include "optim/exchange/bucket_reduction.h"
#include "optim/exchange/scattered_bytes.h"
#include "optim/exchange/transfer_queue.h"

namespace tessera {

struct ReductionOptions {
  GradientCompression compression = GradientCompression::kNone;
  /// How many buckets may be under way at once, where they need staging.
  int64_t buckets_in_flight = 2;
  /// A compressed bucket of one parameter, which may be of any size, is exchanged in pieces of
  /// about this many bytes.
  int64_t piece_bytes = int64_t{4} << 20;
};

/// Sums the gradients of a replica group's parameters, bucket by bucket, in the background of the
/// backward pass. The sum ends in the rows of this rank's share (`share_rows`) of the very tensors
/// that hold the summands; the other rows are used up.
///
/// A bucket whose gradients lie one after the other in memory, in the order of the list, is reduced
/// in place. Others are packed into staging first: then staging is as large as the largest bucket
/// of several parameters, for each bucket under way. A bucket of one parameter needs none, or, with
/// compression and for BF16, that of a piece: so staging does not grow with the parameters. Not
/// thread-safe.
class GradientReducer {
 public:
  /// `grads`: the gradients, F32 or BF16, those of a bucket alike, in the back end's memory, of the
  /// group's parameters, for which make_buckets made `buckets` with group.size() shares. Their
  /// memory must outlive the reducer.
  GradientReducer(const ReplicaGroup& group, const std::vector<Bucket>& buckets,
                  const std::vector<Tensor>& grads, const ReductionOptions& options,
                  const Backend& backend = optimizer_on_host());
  GradientReducer(const GradientReducer&) = delete;
  GradientReducer& operator=(const GradientReducer&) = delete;

  /// The gradient of parameter `idx` is complete on this rank. At most once for each parameter and
  /// step, in any order; buckets start in their own. Does not wait for other ranks.
  void ready(size_t idx);
  /// Starts what can start by now.
  void poll() { queue_.poll(); }
  /// Returns when the sums of a bucket that was started, and of all before it, are there.
  void wait(size_t bucket);
  /// Declares all that are left ready and returns when the sums are there. After it a new step
  /// begins.
  void finish();

  int64_t staging_bytes() const { return queue_.staging_bytes(); }
  /// What such a reducer would take. Of the group only sizes and places are read, of `grads`
  /// addresses and shapes.
  static int64_t count_staging(const ReplicaGroup& group, const std::vector<Bucket>& buckets,
                               const std::vector<Tensor>& grads, const ReductionOptions& options,
                               const Backend& backend);

 private:
  struct Item {
    BucketReduction reduction;
    ScatteredBytes grads;
    IndexRange own_bytes;
    std::vector<bool> ready;  ///< by parameter of the bucket
    int64_t transfer = -1;    ///< the number of the last, once started

    bool packed() const { return grads.contiguous() == nullptr; }
    int64_t packed_bytes() const { return packed() ? align_up(grads.num_bytes()) : 0; }
    int64_t staging_bytes() const { return packed_bytes() + reduction.staging_bytes(); }
    /// The gradients in flat order.
    std::byte* memory(std::byte* staging) const { return packed() ? staging : grads.contiguous(); }
  };

  static std::vector<Item> make_items(const ReplicaGroup& group, const std::vector<Bucket>& buckets,
                                      const std::vector<Tensor>& grads,
                                      const ReductionOptions& options, const GradientMath& math);
  static int64_t slot_bytes(const std::vector<Item>& items);
  static std::vector<TransferQueue::Stage> stages(const Item& item, int64_t piece);
  void start_next();

  /// Where parameters are among the items; empty where there is nothing to reduce.
  struct Place {
    size_t item = 0;
    size_t idx = 0;
  };
  std::vector<Place> places_;
  std::vector<Item> items_;
  size_t num_started_ = 0;
  TransferQueue queue_;
};

}  // namespace tessera
