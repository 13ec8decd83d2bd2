#include "ops/embedding/embedding.h"

#include "ops/storage.h"

namespace tessera {
namespace {

void check_tokens(const Operator& op, const ValueType& tokens) {
  check_shape(op, tokens.dtype == DType::kI32 && tokens.shape.rank() == 1,
              "tokens must be i32 [T], got {}", tokens.to_string());
}

std::string describe(const EmbeddingSpec& spec) {
  std::string text;
  if (spec.padding_token >= 0) text = fmt::format("padding_token={}", spec.padding_token);
  if (spec.vocab_size > 0) {
    text += fmt::format("{}first_row={} vocab={}", text.empty() ? "" : " ", spec.first_row,
                        spec.vocab_size);
  }
  return text;
}

}  // namespace

Embedding::Embedding(const EmbeddingSpec& spec) : spec_(spec) {
  require(spec.first_row >= 0 && spec.first_row <= spec.vocab_size,
          "embedding: rows from {} on of a vocabulary of {}", spec.first_row, spec.vocab_size);
}

std::string Embedding::attributes() const {
  return describe(spec_);
}

std::vector<ValueType> Embedding::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 2, "takes tokens and table, got {} inputs", inputs.size());
  const ValueType& tokens = inputs[kTokens];
  const ValueType& table = inputs[kTable];
  check_tokens(*this, tokens);
  check_shape(*this, is_storage(table.dtype) && table.shape.rank() == 2 && !table.ragged(),
              "table must be f32 or bf16 [V, H], got {}", table.to_string());
  check_shape(*this, spec_.vocab_size == 0 || spec_.first_row + table.shape[0] <= spec_.vocab_size,
              "rows from {} on of table {} go past the vocabulary of {}", spec_.first_row,
              table.to_string(), spec_.vocab_size);
  ValueType result = tokens;
  result.dtype = table.dtype;
  result.shape = {tokens.shape[0], table.shape[1]};
  return {result};
}

/// The rows that are read and written, not the whole table.
Cost Embedding::cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const {
  return {.bytes =
              static_cast<double>(inputs[kTokens].num_bytes() + 2 * outputs[kRows].num_bytes())};
}

void Embedding::differentiate(GradientBuilder& builder) const {
  const auto grad = builder.grad_output(kRows);
  if (!grad || !builder.needs_grad(kTable)) return;
  const auto backward =
      std::make_shared<EmbeddingBackward>(builder.input_type(kTable).shape[0], spec_);
  builder.emit(backward, {builder.input(kTokens), *grad}, {kTable});
}

std::string EmbeddingBackward::attributes() const {
  return describe(spec_);
}

std::vector<ValueType> EmbeddingBackward::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 2, "takes tokens and gradient, got {} inputs", inputs.size());
  const ValueType& grad = inputs[kGrad];
  check_tokens(*this, inputs[kTokens]);
  check_shape(*this,
              is_storage(grad.dtype) && grad.shape.rank() == 2 &&
                  grad.shape[0] == inputs[kTokens].shape[0] && grad.ragged_dim <= 0,
              "the gradient must be f32 or bf16 [{}, H], got {}", inputs[kTokens].shape[0],
              grad.to_string());
  return {{.dtype = DType::kF32, .shape = {num_rows_, grad.shape[1]}}};
}

Cost EmbeddingBackward::cost(std::span<const ValueType> inputs,
                             std::span<const ValueType> /*outputs*/) const {
  const double accumulated =
      2.0 * static_cast<double>(with_dtype(inputs[kGrad], DType::kF32).num_bytes());
  return {.bytes = static_cast<double>(inputs[kTokens].num_bytes() + inputs[kGrad].num_bytes()) +
                   accumulated};
}

OperatorPtr make_embedding(const EmbeddingSpec& spec) {
  return std::make_shared<Embedding>(spec);
}
OperatorPtr make_embedding(int64_t padding_token) {
  return make_embedding(EmbeddingSpec{.padding_token = padding_token});
}

}  // namespace tessera
