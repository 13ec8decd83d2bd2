#include "ops/short_conv/short_conv_batch.h"

#include "ops/batch_rows.h"
#include "ops/short_conv/short_conv.h"
#include "ops/storage.h"

namespace tessera {

std::string ShortConvBatch::attributes() const {
  return fmt::format("slots={}{}{}", num_slots_, spec_.biased ? " bias" : "",
                     spec_.silu ? "" : ", no silu");
}

std::vector<ValueType> ShortConvBatch::infer(std::span<const ValueType> inputs) const {
  const size_t count = spec_.biased ? 6 : 5;
  check_shape(*this, inputs.size() == count, "takes {} inputs, got {}", count, inputs.size());
  const ValueType& x = inputs[kX];
  check_shape(*this, is_storage(x.dtype) && x.shape.rank() == 2 && x.ragged_dim < 0,
              "x is {}, expected f32 or bf16 [T, C]", x.to_string());
  const ValueType& weight = inputs[kWeight];
  check_shape(*this,
              weight.dtype == DType::kF32 && weight.shape.rank() == 2 &&
                  weight.shape[0] == x.shape[1] && weight.shape[1] > 0 &&
                  weight.shape[1] <= ShortConv::kMaxTaps,
              "the weight is {}, expected f32 [{}, 1 to {}]", weight.to_string(), x.shape[1],
              ShortConv::kMaxTaps);
  const ValueType& bounds = inputs[kCuSeqlens];
  check_shape(*this, bounds.dtype == DType::kI32 && bounds.shape.rank() == 1 && bounds.shape[0] > 0,
              "the bounds are {}, expected i32 [S + 1]", bounds.to_string());
  check_batch_rows(*this, inputs.subspan(kCuSeqlens, 3));
  if (spec_.biased) {
    const ValueType bias{DType::kF32, {x.shape[1]}};
    check_shape(*this, inputs[kBias] == bias, "the bias is {}, expected {}",
                inputs[kBias].to_string(), bias.to_string());
  }
  return {x, {x.dtype, {num_slots_ * weight.shape[1], x.shape[1]}}};
}

Cost ShortConvBatch::cost(std::span<const ValueType> inputs,
                          std::span<const ValueType> outputs) const {
  Cost cost = Operator::cost(inputs, outputs);
  cost.flops = 2.0 * static_cast<double>(inputs[kX].shape.num_elements()) *
               static_cast<double>(inputs[kWeight].shape[1]);
  return cost;
}

OperatorPtr make_short_conv_batch(int64_t num_slots, const ShortConvSpec& spec) {
  return std::make_shared<ShortConvBatch>(num_slots, spec);
}

}  // namespace tessera
