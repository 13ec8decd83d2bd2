#include "ops/attention/attention.h"

#include <algorithm>
#include <cmath>

#include "ops/storage.h"

namespace tessera {

using namespace attention;

namespace {

AttentionSpec with_defaults(AttentionSpec spec) {
  if (spec.head_size_v == 0) spec.head_size_v = spec.head_size;
  if (spec.scale == 0) spec.scale = 1.0 / std::sqrt(static_cast<double>(spec.head_size));
  return spec;
}

void check_spec(const AttentionSpec& spec) {
  require(spec.num_heads > 0 && spec.num_kv_heads > 0 && spec.num_heads % spec.num_kv_heads == 0,
          "attention: num_heads = {} must be a positive multiple of num_kv_heads = {}",
          spec.num_heads, spec.num_kv_heads);
  require(spec.head_size > 0 && spec.head_size_v >= 0,
          "attention: head_size = {} and head_size_v = {}: head sizes must be positive",
          spec.head_size, spec.head_size_v);
  require(std::isfinite(spec.scale) && spec.scale >= 0,
          "attention: scale = {} must be positive (or 0 for 1/sqrt(head_size))", spec.scale);
  require(spec.window >= 0, "attention: window = {} must not be negative (0 for none)",
          spec.window);
  require(spec.chunk >= 0 && (spec.chunk == 0 || spec.window == 0),
          "attention: chunk = {} must not be negative (0 for none), nor be beside window = {}",
          spec.chunk, spec.window);
  require(spec.sequence_length >= 0, "attention: sequence_length = {} must not be negative",
          spec.sequence_length);
}

bool is_matrix(const ValueType& type, int64_t columns) {
  return type.shape.rank() == 2 && type.shape[1] == columns;
}

/// [N, T], ragged as the tokens of `q` are.
ValueType lse_type(const ValueType& q, int64_t num_heads) {
  return {DType::kF32, {num_heads, q.shape[0]}, q.ragged() ? 1 : -1, q.extent};
}

}  // namespace

AttentionOperator::AttentionOperator(const AttentionSpec& spec) : spec_(spec) {
  check_spec(spec);
  spec_ = with_defaults(spec);
}

std::string AttentionOperator::attributes() const {
  std::string text = fmt::format("heads={} kv_heads={} head_size={}", spec_.num_heads,
                                 spec_.num_kv_heads, spec_.head_size);
  if (spec_.head_size_v != spec_.head_size)
    text += fmt::format(" head_size_v={}", spec_.head_size_v);
  text += fmt::format(" scale={:.6g}", spec_.scale);
  if (spec_.window > 0) text += fmt::format(" window={}", spec_.window);
  if (spec_.chunk > 0) text += fmt::format(" chunk={}", spec_.chunk);
  return text;
}

void AttentionOperator::check_qkv(const ValueType& q, const ValueType& k,
                                  const ValueType& v) const {
  check_shape(*this, is_storage(q.dtype), "queries must be f32 or bf16, found {}", q.to_string());
  check_shape(*this, k.dtype == q.dtype && v.dtype == q.dtype,
              "keys ({}) and values ({}) must have the type of the queries ({})", k.to_string(),
              v.to_string(), q.to_string());
  check_shape(*this, is_matrix(q, spec_.num_heads * spec_.head_size),
              "queries are {}, expected [T, {} heads x {}]", q.to_string(), spec_.num_heads,
              spec_.head_size);
  check_shape(*this, is_matrix(k, spec_.num_kv_heads * spec_.head_size),
              "keys are {}, expected [T, {} heads x {}]", k.to_string(), spec_.num_kv_heads,
              spec_.head_size);
  check_shape(*this, is_matrix(v, spec_.num_kv_heads * spec_.head_size_v),
              "values are {}, expected [T, {} heads x {}]", v.to_string(), spec_.num_kv_heads,
              spec_.head_size_v);
  check_shape(*this, k.shape[0] == v.shape[0], "{} keys but {} values", k.shape[0], v.shape[0]);
}

double AttentionOperator::sequence_flops(double num_queries, double num_keys) const {
  const double queries = std::min(num_queries, num_keys);
  const auto pairs_up_to = [&](double length) {
    if (spec_.chunk > 0) {
      const auto chunk = static_cast<double>(spec_.chunk);
      const double last = std::fmod(length, chunk);
      return (length - last) * (chunk + 1) / 2 + last * (last + 1) / 2;
    }
    const double full =
        spec_.window > 0 ? std::min<double>(length, static_cast<double>(spec_.window)) : length;
    return full * (full + 1) / 2 + (length - full) * full;
  };
  const double pairs = pairs_up_to(num_keys) - pairs_up_to(num_keys - queries);
  return 2.0 * static_cast<double>((spec_.head_size + spec_.head_size_v) * spec_.num_heads) * pairs;
}

double AttentionOperator::packed_flops(int64_t num_tokens) const {
  if (num_tokens == 0) return 0;
  const int64_t hint = spec_.sequence_length;
  const auto length = static_cast<double>(hint > 0 ? std::min(hint, num_tokens) : num_tokens);
  return static_cast<double>(num_tokens) / length * sequence_flops(length, length);
}

std::vector<ValueType> AttentionOperator::infer_forward(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 4, "takes q, k, v and cu_seqlens, found {} inputs",
              inputs.size());
  const ValueType& q = inputs[kQ];
  check_qkv(q, inputs[kK], inputs[kV]);
  check_shape(*this, spec().chunk == 0, "packed sequences are given as their chunks of {} tokens",
              spec().chunk);
  check_shape(*this, inputs[kK].shape[0] == q.shape[0], "{} queries but {} keys", q.shape[0],
              inputs[kK].shape[0]);
  const ValueType& ends = inputs[kForwardCuSeqlens];
  check_shape(*this, ends.dtype == DType::kI32 && ends.shape.rank() == 1 && ends.shape[0] >= 1,
              "cu_seqlens is {}, expected i32 [num_seqs + 1]", ends.to_string());
  return {with_last_dim(q, spec().num_heads * spec().head_size_v), lse_type(q, spec().num_heads)};
}

std::vector<ValueType> AttentionOperator::infer_backward(std::span<const ValueType> inputs,
                                                         bool with_grad_lse) const {
  const int expected = with_grad_lse ? kGradLse + 1 : kBackwardCuSeqlens + 1;
  check_shape(*this, std::ssize(inputs) == expected, "takes {} inputs, found {}", expected,
              inputs.size());
  const std::vector<ValueType> forward =
      infer_forward(std::vector{inputs[kQ], inputs[kK], inputs[kV], inputs[kBackwardCuSeqlens]});
  check_shape(*this, inputs[kSavedO] == forward[kO] && inputs[kGradO] == forward[kO],
              "o is {} and its gradient {}, expected {}", inputs[kSavedO].to_string(),
              inputs[kGradO].to_string(), forward[kO].to_string());
  check_shape(
      *this,
      inputs[kSavedLse] == forward[kLse] && (!with_grad_lse || inputs[kGradLse] == forward[kLse]),
      "lse is {}, expected {}", inputs[kSavedLse].to_string(), forward[kLse].to_string());
  return {inputs[kQ], inputs[kK], inputs[kV]};
}

void AttentionOperator::differentiate_by(
    GradientBuilder& builder,
    const std::function<OperatorPtr(bool with_grad_lse)>& make_backward) const {
  const std::optional<ValueId> grad_o = builder.grad_output(kO);
  const std::optional<ValueId> grad_lse = builder.grad_output(kLse);
  ensure(grad_o.has_value(), "{}: a gradient of lse without one of the output", name());
  std::vector<ValueId> inputs = {builder.input(kQ),
                                 builder.input(kK),
                                 builder.input(kV),
                                 builder.output(kO),
                                 builder.output(kLse),
                                 *grad_o,
                                 builder.input(kForwardCuSeqlens)};
  if (grad_lse) inputs.push_back(*grad_lse);
  const std::vector<ValueId> grads = builder.emit(make_backward(grad_lse.has_value()), inputs);
  // Gradients stand as q, k and v do.
  for (const int operand : {kQ, kK, kV}) {
    if (builder.needs_grad(operand)) builder.set_grad_input(operand, grads[operand]);
  }
}

std::vector<ValueType> Attention::infer(std::span<const ValueType> inputs) const {
  return infer_forward(inputs);
}

Cost Attention::cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const {
  Cost cost = Operator::cost(inputs, outputs);
  cost.flops = packed_flops(inputs[kQ].shape[0]);
  return cost;
}

void Attention::differentiate(GradientBuilder& builder) const {
  differentiate_by(builder, [this](bool with_grad_lse) {
    return make_attention_backward(spec(), with_grad_lse);
  });
}

AttentionBackward::AttentionBackward(const AttentionSpec& spec, bool with_grad_lse)
    : AttentionOperator(spec), with_grad_lse_(with_grad_lse) {}

std::vector<ValueType> AttentionBackward::infer(std::span<const ValueType> inputs) const {
  return infer_backward(inputs, with_grad_lse_);
}

Cost AttentionBackward::cost(std::span<const ValueType> inputs,
                             std::span<const ValueType> outputs) const {
  Cost cost = Operator::cost(inputs, outputs);
  cost.flops = 2 * packed_flops(inputs[kQ].shape[0]);
  return cost;
}

std::string AttentionCached::attributes() const {
  return AttentionOperator::attributes() + (gives_lse_ ? " gives_lse" : "");
}

std::vector<ValueType> AttentionCached::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 4,
              "takes q, k_cache, v_cache and cache_length, found {} inputs", inputs.size());
  check_qkv(inputs[kQ], inputs[kK], inputs[kV]);
  const ValueType& length = inputs[kCacheLength];
  check_shape(*this, length.dtype == DType::kI32 && length.shape.num_elements() == 1,
              "cache_length is {}, expected i32 [1]", length.to_string());
  std::vector<ValueType> outputs = {
      with_last_dim(inputs[kQ], spec().num_heads * spec().head_size_v)};
  if (gives_lse_) outputs.push_back(lse_type(inputs[kQ], spec().num_heads));
  return outputs;
}

Cost AttentionCached::cost(std::span<const ValueType> inputs,
                           std::span<const ValueType> outputs) const {
  Cost cost = Operator::cost(inputs, outputs);
  const int64_t capacity = inputs[kK].shape[0];
  const int64_t hint = spec().sequence_length;
  const int64_t keys = hint > 0 ? std::min(hint, capacity) : capacity;
  cost.flops = sequence_flops(static_cast<double>(inputs[kQ].shape[0]), static_cast<double>(keys));
  return cost;
}

OperatorPtr make_attention(const AttentionSpec& spec) {
  return std::make_shared<Attention>(spec);
}

OperatorPtr make_attention_backward(const AttentionSpec& spec, bool with_grad_lse) {
  return std::make_shared<AttentionBackward>(spec, with_grad_lse);
}

OperatorPtr make_attention_cached(const AttentionSpec& spec, bool gives_lse) {
  return std::make_shared<AttentionCached>(spec, gives_lse);
}

}  // namespace tessera
