#include "optim/exchange/gradient_reducer.h"

#include <algorithm>

namespace tessera {

std::vector<GradientReducer::Item> GradientReducer::make_items(const ReplicaGroup& group,
                                                               const std::vector<Bucket>& buckets,
                                                               const std::vector<Tensor>& grads,
                                                               const ReductionOptions& options,
                                                               const GradientMath& math) {
  std::vector<Item> items;
  if (group.size() == 1) return items;
  for (const Bucket& bucket : buckets) {
    const size_t count = bucket.parameters.count;
    const IndexRange own = bucket.elements(group.rank());
    const std::span of_bucket(grads.data() + bucket.parameters.begin, count);
    const DType dtype = of_bucket.front().dtype;
    for (const Tensor& grad : of_bucket)
      ensure(grad.dtype == dtype, "a bucket of {} and {}", dtype_name(dtype),
             dtype_name(grad.dtype));
    const int64_t bytes = dtype_size(dtype);
    const int64_t piece_bytes = count == 1 ? options.piece_bytes : 0;
    items.push_back({.reduction = {group, bucket, options.compression, math, piece_bytes, dtype},
                     .grads = ScatteredBytes(of_bucket),
                     .own_bytes = {own.begin * bytes, own.count * bytes},
                     .ready = std::vector<bool>(count)});
  }
  return items;
}

int64_t GradientReducer::slot_bytes(const std::vector<Item>& items) {
  int64_t bytes = 0;
  for (const Item& item : items) bytes = std::max(bytes, item.staging_bytes());
  return bytes;
}

GradientReducer::GradientReducer(const ReplicaGroup& group, const std::vector<Bucket>& buckets,
                                 const std::vector<Tensor>& grads, const ReductionOptions& options,
                                 const Backend& backend)
    : items_(make_items(group, buckets, grads, options, GradientMath(backend))),
      queue_(options.buckets_in_flight, slot_bytes(items_), backend.device()) {
  if (items_.empty()) return;
  places_.resize(grads.size());
  for (size_t item = 0; item < buckets.size(); ++item) {
    const size_t first = buckets[item].parameters.begin;
    for (size_t i = 0; i < items_[item].ready.size(); ++i) places_[first + i] = {item, i};
  }
}

int64_t GradientReducer::count_staging(const ReplicaGroup& group,
                                       const std::vector<Bucket>& buckets,
                                       const std::vector<Tensor>& grads,
                                       const ReductionOptions& options, const Backend& backend) {
  const auto items = make_items(group, buckets, grads, options, GradientMath(backend));
  return TransferQueue::count_staging(options.buckets_in_flight, slot_bytes(items));
}

std::vector<TransferQueue::Stage> GradientReducer::stages(const Item& item, int64_t piece) {
  const auto inner = [&item, piece](std::byte* staging) {
    if (piece > 0) return Pending();  // the first piece's is all pieces'
    if (item.packed()) item.grads.read({0, item.grads.num_bytes()}, staging);
    return item.reduction.start_inner(item.memory(staging));
  };
  const auto outer = [&item, piece](std::byte* staging) {
    return item.reduction.start_outer(item.memory(staging), staging + item.packed_bytes(), piece);
  };
  const auto finish = [&item, piece](std::byte* staging) {
    std::byte* const memory = item.memory(staging);
    item.reduction.finish(memory, staging + item.packed_bytes(), piece);
    if (item.packed()) item.grads.write(item.own_bytes, memory + item.own_bytes.begin);
    return Pending();
  };
  return {inner, outer, finish};
}

void GradientReducer::start_next() {
  Item& item = items_[num_started_++];
  for (int64_t piece = 0; piece < item.reduction.num_pieces(); ++piece)
    item.transfer = queue_.add(stages(item, piece));
}

void GradientReducer::wait(size_t bucket) {
  if (!items_.empty()) queue_.wait(items_[bucket].transfer);
}

void GradientReducer::ready(size_t idx) {
  if (items_.empty()) return;
  const Place place = places_[idx];
  ensure(!items_[place.item].ready[place.idx], "gradient {} is ready twice in a step", idx);
  items_[place.item].ready[place.idx] = true;
  while (num_started_ < items_.size() &&
         std::ranges::all_of(items_[num_started_].ready, std::identity()))
    start_next();
  queue_.poll();
}

void GradientReducer::finish() {
  while (num_started_ < items_.size()) start_next();
  queue_.wait_all();
  num_started_ = 0;
  for (Item& item : items_) item.ready.assign(item.ready.size(), false);
}

}  // namespace tessera
