#include "optim/exchange/share_gatherer.h"

#include <algorithm>

namespace tessera {
namespace {

/// Where bounds of shares, in elements, are in bytes: types may differ from parameter to parameter.
std::vector<int64_t> byte_bounds(const Bucket& bucket, std::span<const Tensor> tensors) {
  std::vector<int64_t> result;
  for (const int64_t bound : bucket.bounds) {
    int64_t bytes = 0;
    for (size_t k = 0; k < tensors.size(); ++k) {
      const int64_t elements =
          std::clamp<int64_t>(bound - bucket.offsets[k], 0, tensors[k].num_elements());
      bytes += elements * dtype_size(tensors[k].dtype);
    }
    result.push_back(bytes);
  }
  return result;
}

/// What is gathered, in the order of the shares, and where these end in it.
struct ShareBytes {
  std::vector<Tensor> pieces;
  std::vector<int64_t> bounds;
};

/// The rows of each share, and behind those of a tensor with scales these.
ShareBytes cut_with_scales(const Bucket& bucket, std::span<const Tensor> rows,
                           std::span<const Tensor> scales) {
  ShareBytes result{.pieces = {}, .bounds = {0}};
  for (int64_t share = 0; share + 1 < std::ssize(bucket.bounds); ++share) {
    int64_t bytes = result.bounds.back();
    const auto add = [&](const Tensor& piece) {
      bytes += piece.num_bytes();
      result.pieces.push_back(piece);
    };
    for (size_t k = 0; k < rows.size(); ++k) {
      const IndexRange own = share_rows(bucket, k, rows[k].shape, share);
      add(take_rows(rows[k], own));
      if (scales[k].num_elements() > 0) add(take_rows(scales[k], blocks_of(own)));
    }
    result.bounds.push_back(bytes);
  }
  return result;
}

bool have_scales(std::span<const Tensor> scales) {
  return std::ranges::any_of(scales, [](const Tensor& t) { return t.num_elements() > 0; });
}

Tensor raw(std::byte* memory, IndexRange range, Device* device) {
  return {memory + range.begin, DType::kU8, {range.count}, device};
}

}  // namespace

ShareGatherer::Item ShareGatherer::make_item(const ReplicaGroup& group, const Bucket& bucket,
                                             const Tensors& tensors) {
  const auto of_bucket = [&](const std::vector<Tensor>& all) {
    return std::span(all).subspan(bucket.parameters.begin, bucket.parameters.count);
  };
  const std::span<const Tensor> rows = of_bucket(tensors.rows);
  const auto scales =
      tensors.scales.empty() ? std::span<const Tensor>() : of_bucket(tensors.scales);
  const ShareBytes shares = have_scales(scales)
                                ? cut_with_scales(bucket, rows, scales)
                                : ShareBytes{{rows.begin(), rows.end()}, byte_bounds(bucket, rows)};
  const std::vector<int64_t>& bounds = shares.bounds;
  const auto range = [&](int64_t first, int64_t count) {
    const int64_t begin = bounds[first];
    return IndexRange{begin, bounds[first + count] - begin};
  };
  const int64_t width = group.outer->size();
  const int64_t first = group.rank() / width * width;
  Item item = {.bytes = ScatteredBytes(shares.pieces),
               .inner_bytes = {},
               .outer_bytes = {},
               .part = range(first, width),
               .own = range(group.rank(), 1)};
  for (int64_t i = 0; i < group.inner_size(); ++i)
    item.inner_bytes.push_back(range(i * width, width).count);
  for (int64_t i = 0; i < width; ++i) item.outer_bytes.push_back(range(first + i, 1).count);
  return item;
}

std::vector<ShareGatherer::Item> ShareGatherer::make_items(const ReplicaGroup& group,
                                                           const std::vector<Bucket>& buckets,
                                                           const Tensors& tensors) {
  std::vector<Item> items;
  if (group.size() == 1) return items;
  for (const Bucket& bucket : buckets) items.push_back(make_item(group, bucket, tensors));
  return items;
}

int64_t ShareGatherer::slot_bytes(const std::vector<Item>& items) {
  int64_t bytes = 0;
  for (const Item& item : items) {
    if (item.packed()) bytes = std::max(bytes, item.bytes.num_bytes());
  }
  return bytes;
}

ShareGatherer::ShareGatherer(const ReplicaGroup& group, const std::vector<Bucket>& buckets,
                             const Tensors& tensors, int64_t buckets_in_flight, Device& device)
    : group_(group),
      items_(make_items(group, buckets, tensors)),
      queue_(buckets_in_flight, slot_bytes(items_), device) {
  if (items_.empty()) return;
  item_of_.resize(tensors.rows.size());
  for (size_t item = 0; item < buckets.size(); ++item) {
    const IndexRange& parameters = buckets[item].parameters;
    std::fill_n(item_of_.begin() + parameters.begin, parameters.count, item);
  }
}

int64_t ShareGatherer::count_staging(const ReplicaGroup& group, const std::vector<Bucket>& buckets,
                                     const Tensors& tensors, int64_t buckets_in_flight) {
  return TransferQueue::count_staging(buckets_in_flight,
                                      slot_bytes(make_items(group, buckets, tensors)));
}

Pending ShareGatherer::start_outer(const Item& item, std::byte* staging) const {
  std::byte* const memory = item.memory(staging);
  if (item.packed()) item.bytes.read(item.own, memory + item.own.begin);
  if (group_.outer->size() == 1) return {};
  Device* const device = item.bytes.device();
  return group_.outer->all_gather_v(raw(memory, item.own, device), raw(memory, item.part, device),
                                    item.outer_bytes);
}

Pending ShareGatherer::start_inner(const Item& item, std::byte* staging) const {
  if (group_.inner_size() == 1) return {};
  std::byte* const memory = item.memory(staging);
  Device* const device = item.bytes.device();
  return group_.inner->all_gather_v(raw(memory, item.part, device),
                                    raw(memory, {0, item.bytes.num_bytes()}, device),
                                    item.inner_bytes);
}

void ShareGatherer::start(size_t bucket) {
  if (items_.empty()) return;
  Item& item = items_[bucket];
  item.transfer =
      queue_.add({[this, &item](std::byte* staging) { return start_outer(item, staging); },
                  [this, &item](std::byte* staging) { return start_inner(item, staging); },
                  [&item](std::byte* staging) {
                    if (item.packed()) item.bytes.write({0, item.bytes.num_bytes()}, staging);
                    return Pending();
                  }});
}

void ShareGatherer::wait(size_t idx) {
  if (items_.empty()) return;
  queue_.wait(items_[item_of_[idx]].transfer);
}

void ShareGatherer::wait_all() {
  queue_.wait_all();
}

}  // namespace tessera
