#pragma once

#include <cstdint>
#include <vector>

#include "optim/exchange/scattered_bytes.h"
#include "optim/exchange/transfer_queue.h"
#include "optim/replicas.h"

namespace tessera {

/// Gives all replicas the rows that each of them has in its share: of updated weights, say. Buckets
/// are gathered in the background, over the outer group first and then over the inner one, as bytes
/// of the tensors' own types. Where a bucket's tensors lie one after the other in memory that is in
/// place, else through staging, as always where there are weights with scales (QuantizeBlocks),
/// whose rows take these along. Not thread-safe.
class ShareGatherer {
 public:
  struct Tensors {
    std::vector<Tensor> rows;
    /// Those of each, without elements where it has none; empty where no tensor has.
    std::vector<Tensor> scales = {};
  };

  /// `tensors`: those of the group's parameters, of any types, in the device's memory, for which
  /// make_buckets made `buckets` with group.size() shares. Their memory must outlive the gatherer.
  ShareGatherer(const ReplicaGroup& group, const std::vector<Bucket>& buckets,
                const Tensors& tensors, int64_t buckets_in_flight, Device& device = host_device());
  ShareGatherer(const ShareGatherer&) = delete;
  ShareGatherer& operator=(const ShareGatherer&) = delete;

  /// Starts to gather a bucket whose share is up to date. Does not wait for other ranks. All ranks
  /// start buckets in the same order.
  void start(size_t bucket);
  /// Starts what can start by now.
  void poll() { queue_.poll(); }
  /// Returns when the bucket of parameter `idx` is there; at once where it is not under way.
  void wait(size_t idx);
  void wait_all();

  int64_t staging_bytes() const { return queue_.staging_bytes(); }
  /// What such a gatherer would take. Of the group only sizes and places are read, of `tensors`
  /// addresses, types and shapes.
  static int64_t count_staging(const ReplicaGroup& group, const std::vector<Bucket>& buckets,
                               const Tensors& tensors, int64_t buckets_in_flight);

 private:
  struct Item {
    ScatteredBytes bytes;
    std::vector<int64_t> inner_bytes;  ///< of each inner rank's part
    std::vector<int64_t> outer_bytes;  ///< of each outer rank's share of this rank's part
    IndexRange part;
    IndexRange own;
    int64_t transfer = -1;  ///< its number while it is under way

    bool packed() const { return bytes.contiguous() == nullptr; }
    std::byte* memory(std::byte* staging) const { return packed() ? staging : bytes.contiguous(); }
  };

  static Item make_item(const ReplicaGroup& group, const Bucket& bucket, const Tensors& tensors);
  static std::vector<Item> make_items(const ReplicaGroup& group, const std::vector<Bucket>& buckets,
                                      const Tensors& tensors);
  static int64_t slot_bytes(const std::vector<Item>& items);
  Pending start_outer(const Item& item, std::byte* staging) const;
  Pending start_inner(const Item& item, std::byte* staging) const;

  ReplicaGroup group_;
  std::vector<Item> items_;
  std::vector<size_t> item_of_;  ///< by parameter; empty where there is nothing to gather
  TransferQueue queue_;
};

}  // namespace tessera
