#include "runtime/prepared_run.h"

#include <algorithm>
#include <set>

namespace tessera {
namespace {

size_t hash(const Bindings& bindings) {
  size_t value = bindings.unset.size();
  const auto mix = [&](const void* address) {
    constexpr size_t kOdd = 0x9E3779B97F4A7C15;
    value = (value ^ reinterpret_cast<size_t>(address)) * kOdd;
    value ^= value >> 32U;
  };
  for (const Tensor& tensor : bindings.tensors) mix(tensor.data);
  mix(bindings.saved);
  mix(bindings.offloaded);
  mix(bindings.transient);
  return value;
}

bool same_tensor(const Tensor& a, const Tensor& b) {
  return a.data == b.data && a.dtype == b.dtype && a.shape == b.shape;
}

bool same_bindings(const Bindings& a, const Bindings& b) {
  return a.saved == b.saved && a.offloaded == b.offloaded && a.transient == b.transient &&
         a.unset == b.unset && std::ranges::equal(a.tensors, b.tensors, same_tensor);
}

}  // namespace

std::vector<Segment> cut_segments(const std::vector<bool>& apart, const std::vector<int>& waits) {
  std::set<size_t> cuts;
  for (size_t i = 0; i < apart.size(); ++i) {
    if (!apart[i]) continue;
    cuts.insert({i, i + 1});
    cuts.insert(waits[i]);
  }
  cuts.insert(apart.size());
  std::vector<Segment> segments;
  size_t begin = 0;
  for (const size_t end : cuts) {
    if (end == begin) continue;
    segments.push_back({begin, end, !apart[begin]});
    begin = end;
  }
  return segments;
}

PreparedRun* PreparedRuns::find(const Bindings& bindings) {
  const auto [first, last] = runs_.equal_range(hash(bindings));
  for (auto run = first; run != last; ++run) {
    if (!same_bindings(run->second->bindings, bindings)) continue;
    run->second->last_use = ++num_uses_;
    return run->second.get();
  }
  return nullptr;
}

PreparedRun& PreparedRuns::add(std::unique_ptr<PreparedRun> run) {
  if (runs_.size() == kCapacity) drop_oldest();
  run->last_use = ++num_uses_;
  return *runs_.emplace(hash(run->bindings), std::move(run))->second;
}

void PreparedRuns::drop_oldest() {
  runs_.erase(std::ranges::min_element(runs_, {},
                                       [](const auto& entry) { return entry.second->last_use; }));
}

}  // namespace tessera
