#include "ops/latent_cache/latent_cache.h"

#include <algorithm>

#include "ops/storage.h"

namespace tessera {
namespace {

bool is_matrix(const ValueType& type) {
  return is_storage(type.dtype) && type.shape.rank() == 2 && !type.ragged();
}

/// The product's rows and the weight.
void check_operands(const Operator& op, const LatentCacheSpec& spec,
                    std::span<const ValueType> inputs, int64_t width) {
  check_shape(op, inputs.size() == 2, "takes rows and a weight, found {} inputs", inputs.size());
  const ValueType& rows = inputs[0];
  check_shape(op, is_matrix(rows) && rows.shape[1] == width,
              "rows are {}, expected f32 or bf16 [T, {}]", rows.to_string(), width);
  const ValueType weight{rows.dtype, {spec.up_rows(), spec.rank}};
  check_shape(op, inputs[1] == weight, "the weight is {}, expected {}", inputs[1].to_string(),
              weight.to_string());
}

double product_flops(const LatentCacheSpec& spec, int64_t rows, int64_t size) {
  return 2.0 * static_cast<double>(rows * spec.num_heads) * static_cast<double>(size * spec.rank);
}

void check(const LatentCacheSpec& spec) {
  require(
      std::min({spec.num_heads, spec.nope_size, spec.rope_size, spec.value_size, spec.rank}) > 0,
      "latent attention: {} heads of {} + {} and {} from latents of {}; all must be positive",
      spec.num_heads, spec.nope_size, spec.rope_size, spec.value_size, spec.rank);
}

}  // namespace

std::vector<ValueType> LatentKeys::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 2, "takes latents and shared keys, found {} inputs",
              inputs.size());
  const ValueType& latent = inputs[kLatent];
  const ValueType& shared = inputs[kShared];
  check_shape(*this,
              is_matrix(latent) && is_matrix(shared) && latent.dtype == shared.dtype &&
                  latent.shape[0] == shared.shape[0],
              "latents are {} and shared keys {}; expected as many rows of one type, f32 or bf16",
              latent.to_string(), shared.to_string());
  return {{latent.dtype, {latent.shape[0], latent.shape[1] + shared.shape[1]}}};
}

std::vector<ValueType> LatentQueries::infer(std::span<const ValueType> inputs) const {
  check_operands(*this, spec_, inputs, spec_.num_heads * (spec_.nope_size + spec_.rope_size));
  return {
      {inputs[kQ].dtype, {inputs[kQ].shape[0], spec_.num_heads * (spec_.rank + spec_.rope_size)}}};
}

Cost LatentQueries::cost(std::span<const ValueType> inputs,
                         std::span<const ValueType> outputs) const {
  Cost cost = Operator::cost(inputs, outputs);
  cost.flops = product_flops(spec_, inputs[kQ].shape[0], spec_.nope_size);
  return cost;
}

std::vector<ValueType> LatentOutputs::infer(std::span<const ValueType> inputs) const {
  check_operands(*this, spec_, inputs, spec_.num_heads * spec_.rank);
  return {
      {inputs[kAttended].dtype, {inputs[kAttended].shape[0], spec_.num_heads * spec_.value_size}}};
}

Cost LatentOutputs::cost(std::span<const ValueType> inputs,
                         std::span<const ValueType> outputs) const {
  Cost cost = Operator::cost(inputs, outputs);
  cost.flops = product_flops(spec_, inputs[kAttended].shape[0], spec_.value_size);
  return cost;
}

OperatorPtr make_latent_keys() {
  return std::make_shared<LatentKeys>();
}

OperatorPtr make_latent_queries(const LatentCacheSpec& spec) {
  check(spec);
  return std::make_shared<LatentQueries>(spec);
}

OperatorPtr make_latent_outputs(const LatentCacheSpec& spec) {
  check(spec);
  return std::make_shared<LatentOutputs>(spec);
}

}  // namespace tessera
