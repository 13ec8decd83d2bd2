#include "hf/load_weights.h"

#include <cstring>
#include <unordered_map>

#include "core/error.h"
#include "hf/tensors/tensor_map.h"
#include "hf/transfer/elements.h"
#include "hf/transfer/scaled_matrices.h"

namespace tessera {
namespace {

/// The tensors in the order of the map.
std::vector<Tensor> order_tensors(const TensorMap& map, std::span<const NamedTensor> tensors) {
  std::unordered_map<std::string_view, const Tensor*> by_name;
  for (const NamedTensor& named : tensors) by_name[named.name] = &named.tensor;
  std::vector<Tensor> ordered;
  for (const MappedTensor& own : map.own) {
    const auto found = by_name.find(own.name);
    ensure(found != by_name.end() && found->second->shape == own.shape,
           "load_hf_tensors: no tensor '{}' of shape {}", own.name, own.shape.to_string());
    ordered.push_back(*found->second);
  }
  ensure(ordered.size() == by_name.size(), "load_hf_tensors: {} tensors, the model has {}",
         by_name.size(), ordered.size());
  return ordered;
}

void load_link(const TensorLink& link, const HfTensor& source, const Tensor& target) {
  const DType from = source.entry->dtype;
  const std::byte* data = source.bytes().data() + link.hf_begin * dtype_size(from);
  std::vector<std::byte> split;
  if (link.alternating) {
    split.resize(link.num_elements() * dtype_size(from));
    split_alternating(data, link.num_elements() / link.hf_cols(), link.hf_cols(), from,
                      split.data());
    data = split.data();
  }
  std::byte* to = static_cast<std::byte*>(target.data) + link.own_begin * dtype_size(target.dtype);
  if (link.offset != 0) {
    add_offset(data, from, to, target.dtype, link.num_elements(), link.offset);
  } else if (link.transposed) {
    transpose_columns({data, link.cols, link.rows, from}, 0, link.rows, to, target.dtype);
  } else {
    convert_elements(data, from, to, target.dtype, link.num_elements());
  }
}

}  // namespace

void load_hf_tensors(const ImportedConfig& config, const HfTensors& source,
                     std::span<const NamedTensor> tensors) {
  const HfLayout layout = detect_layout(*config.family, config.model, source);
  const TensorMap map = map_tensors(*config.family, config.model, DType::kF32, layout);
  check_tensors(map, source, {});
  check_stored_types(map, source, std::nullopt);
  const std::vector<Tensor> own = order_tensors(map, tensors);
  for (const Tensor& tensor : own) {
    if (tensor.num_bytes() > 0) std::memset(tensor.data, 0, tensor.num_bytes());
  }
  for (const TensorLink& link : map.links) {
    load_link(link, *source.find(map.hf[link.hf].name), own[link.own]);
  }
}

}  // namespace tessera
