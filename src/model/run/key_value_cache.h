#pragma once

#include <utility>
#include <vector>

#include "core/memory.h"
#include "model/build/ports.h"
#include "model/run/layer_binder.h"

namespace tessera {

/// Keys and values, or states, of all layers, for generation, in the memory of the device that
/// generates: of one sequence, or pages for several, whose owner keeps account of them.
class KeyValueCache {
 public:
  KeyValueCache(const ModelConfig& config, DType dtype, int64_t capacity,
                Device& device = host_device());
  KeyValueCache(const ModelConfig& config, DType dtype, const CacheShape& shape,
                Device& device = host_device());
  const CacheShape& shape() const { return shape_; }
  int64_t capacity() const { return shape_.capacity; }
  int64_t length() const { return length_; }
  void set_length(int64_t length) { length_ = length; }
  /// Sets the ports of what the cache holds for a layer.
  void set_ports(int64_t layer, PortTensors& ports) const;

 private:
  CacheShape shape_;
  int64_t length_ = 0;
  std::vector<std::vector<std::pair<Port, OwnedTensor>>> layers_;
};

/// The bytes of such a cache; the largest number where 64 bits do not hold them.
int64_t cache_bytes(const ModelConfig& config, DType dtype, const CacheShape& shape);

}  // namespace tessera
