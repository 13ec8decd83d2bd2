#include "model/run/key_value_cache.h"

#include "core/saturating.h"

namespace tessera {
namespace {

/// Those of compressed attention, whose keys are the values.
std::vector<Port> compressed_ports(const PortContext& context) {
  const LayerKind kind = context.kind;
  if (kind.compression == Compression::kNone) return {Port::kKeyCache};
  if (!chooses_entries(context.config, kind, context.shape, context.cache))
    return {Port::kKeyCache, Port::kCompressState};
  return {Port::kKeyCache, Port::kCompressState, Port::kIndexCache, Port::kIndexState};
}

/// Whether each sequence has one in a slot, where several are written at once.
bool is_in_slots(Port port, LayerKind kind) {
  return kind.keeps_state() || port == Port::kCompressState || port == Port::kIndexState;
}

/// The ports of what a layer keeps of tokens.
std::vector<Port> cache_ports(const PortContext& context) {
  const LayerKind kind = context.kind;
  if (kind.no_mixer) return {};
  if (kind.attends() && chooses_keys(context.config, context.shape, context.cache))
    return {Port::kKeyCache, Port::kValueCache, Port::kIndexCache};
  if (kind.attends() && context.config.is_compressed()) return compressed_ports(context);
  if (kind.attends()) return {Port::kKeyCache, Port::kValueCache};
  if (kind.conv) return {Port::kValueConvState};
  return {Port::kQueryConvState, Port::kKeyConvState, Port::kValueConvState,
          kind.mamba ? Port::kScanStates : Port::kDeltaStates};
}

Saturating bytes_of(const ValueType& type) {
  Saturating bytes = dtype_size(type.dtype);
  for (const int64_t size : type.shape.dims()) bytes = bytes * size;
  return bytes;
}

}  // namespace

int64_t cache_bytes(const ModelConfig& config, DType dtype, const CacheShape& cache) {
  CacheShape of_one = cache;
  of_one.num_slots = 1;
  const BatchShape shape{.dtype = dtype};
  const StageGroups groups = single_rank_groups();
  PortContext context{.config = config, .shape = shape, .groups = groups, .cache = of_one};
  Saturating bytes = 0;
  for (int64_t layer = 0; layer < config.num_layers; ++layer) {
    context.kind = config.layer_kind(layer);
    for (const Port port : cache_ports(context)) {
      const bool in_slots = cache.is_paged() && is_in_slots(port, context.kind);
      bytes += bytes_of(port_type(port, context)) * (in_slots ? cache.num_slots : 1);
    }
  }
  return bytes.value();
}

KeyValueCache::KeyValueCache(const ModelConfig& config, DType dtype, int64_t capacity,
                             Device& device)
    : KeyValueCache(config, dtype, CacheShape{capacity}, device) {}

KeyValueCache::KeyValueCache(const ModelConfig& config, DType dtype, const CacheShape& cache,
                             Device& device)
    : shape_(cache) {
  const BatchShape shape{.dtype = dtype};
  const StageGroups groups = single_rank_groups();
  PortContext context{.config = config, .shape = shape, .groups = groups, .cache = cache};
  layers_.resize(config.num_layers);
  for (int64_t layer = 0; layer < config.num_layers; ++layer) {
    context.kind = config.layer_kind(layer);
    for (const Port port : cache_ports(context)) {
      const ValueType type = port_type(port, context);
      layers_[layer].emplace_back(
          port, OwnedTensor(type.dtype, type.shape, "what a layer keeps of tokens", device));
    }
  }
}

void KeyValueCache::set_ports(int64_t layer, PortTensors& ports) const {
  for (const auto& [port, kept] : layers_[layer]) ports.set(port, kept);
}

}  // namespace tessera
