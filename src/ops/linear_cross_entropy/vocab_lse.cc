#include "ops/linear_cross_entropy/vocab_lse.h"

#include <cmath>

#include "ops/storage.h"

namespace tessera {
namespace {

/// One element of type `dtype` for each row of x.
ValueType per_token(const ValueType& x, DType dtype) {
  ValueType type = x;
  type.dtype = dtype;
  type.shape = {x.shape[0]};
  return type;
}

}  // namespace

VocabLseOperator::VocabLseOperator(const VocabLseSpec& spec) : spec_(spec) {
  require(spec.vocab_size >= 1 && spec.first_row >= 0 && spec.first_row <= spec.vocab_size,
          "vocab_lse: rows from {} on of a vocabulary of {}", spec.first_row, spec.vocab_size);
  require(spec.cut.chunk_tokens >= 1 && spec.cut.block_vocab >= 1,
          "vocab_lse: chunk_tokens {} and block_vocab {} must be at least 1", spec.cut.chunk_tokens,
          spec.cut.block_vocab);
  require(spec.cut.softcap >= 0 && std::isfinite(spec.cut.softcap),
          "vocab_lse: softcap must be at least 0, got {}", spec.cut.softcap);
}

std::string VocabLseOperator::attributes() const {
  return fmt::format("first_row={} vocab={} chunk_tokens={} block_vocab={}{}{}", spec_.first_row,
                     spec_.vocab_size, spec_.cut.chunk_tokens, spec_.cut.block_vocab,
                     spec_.cut.softcap > 0 ? fmt::format(" softcap={}", spec_.cut.softcap) : "",
                     spec_.cut.biased ? " biased" : "");
}

void VocabLseOperator::check_inputs(std::span<const ValueType> inputs, size_t num_inputs) const {
  const size_t all_inputs = num_inputs + (spec_.cut.biased ? 1 : 0);
  check_shape(*this, inputs.size() == all_inputs, "takes {} inputs, got {}", all_inputs,
              inputs.size());
  const ValueType& x = inputs[kX];
  const ValueType& weight = inputs[kWeight];
  check_shape(*this, is_storage(x.dtype) && x.shape.rank() == 2 && x.ragged_dim <= 0,
              "x must be f32 or bf16 [T, H], got {}", x.to_string());
  check_shape(*this,
              weight.dtype == x.dtype && weight.shape.rank() == 2 && !weight.ragged() &&
                  weight.shape[1] == x.shape[1],
              "weight must be {} [V, {}], got {}", dtype_name(x.dtype), x.shape[1],
              weight.to_string());
  check_shape(*this, spec_.first_row + weight.shape[0] <= spec_.vocab_size,
              "rows from {} on of weight {} go past the vocabulary of {}", spec_.first_row,
              weight.to_string(), spec_.vocab_size);
  check_shape(*this, inputs[kLabels] == per_token(x, DType::kI32), "labels must be {}, got {}",
              per_token(x, DType::kI32).to_string(), inputs[kLabels].to_string());
  if (!spec_.cut.biased) return;
  check_shape(*this, inputs.back() == head_bias_type(weight), "the bias must be {}, got {}",
              head_bias_type(weight).to_string(), inputs.back().to_string());
}

Cost VocabLseOperator::product_cost(int num_products, std::span<const ValueType> inputs,
                                    std::span<const ValueType> outputs) const {
  Cost cost = Operator::cost(inputs, outputs);
  cost.flops = 2.0 * num_products * static_cast<double>(inputs[kX].shape.num_elements()) *
               static_cast<double>(inputs[kWeight].shape[0]);
  return cost;
}

std::vector<ValueType> VocabLse::infer(std::span<const ValueType> inputs) const {
  check_inputs(inputs, 3);
  const ValueType result = per_token(inputs[kX], DType::kF32);
  return {result, result};
}

Cost VocabLse::cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const {
  return product_cost(1, inputs, outputs);
}

void VocabLse::differentiate(GradientBuilder& builder) const {
  const auto grad_lse = builder.grad_output(kLse);
  const auto grad_label_logit = builder.grad_output(kLabelLogit);
  ensure(grad_lse && grad_label_logit, "vocab_lse: a gradient must reach both outputs");
  std::vector<ValueId> inputs = {
      builder.input(kX), builder.input(kWeight), builder.input(kLabels), builder.output(kLse),
      *grad_lse,         *grad_label_logit};
  std::vector<int> accumulators = {kWeight};
  if (spec().cut.biased) {
    inputs.push_back(builder.input(kBias));
    accumulators.push_back(kBias);
  }
  const std::vector<ValueId> grads =
      builder.emit(std::make_shared<VocabLseBackward>(spec()), inputs, accumulators);
  if (builder.needs_grad(kX)) builder.set_grad_input(kX, grads[VocabLseBackward::kGradX]);
}

std::vector<ValueType> VocabLseBackward::infer(std::span<const ValueType> inputs) const {
  check_inputs(inputs, 6);
  const ValueType per_row = per_token(inputs[kX], DType::kF32);
  for (int i = kForwardLse; i <= kGradLabelLogit; ++i) {
    check_shape(*this, inputs[i] == per_row, "input {} must be {}, got {}", i, per_row.to_string(),
                inputs[i].to_string());
  }
  std::vector<ValueType> outputs = {inputs[kX], with_dtype(inputs[kWeight], DType::kF32)};
  if (spec().cut.biased) outputs.push_back(head_bias_type(inputs[kWeight]));
  return outputs;
}

Cost VocabLseBackward::cost(std::span<const ValueType> inputs,
                            std::span<const ValueType> outputs) const {
  return product_cost(2, inputs, outputs);
}

OperatorPtr make_vocab_lse(const VocabLseSpec& spec) {
  return std::make_shared<VocabLse>(spec);
}

}  // namespace tessera
