#include "ops/muon/muon.h"

#include <algorithm>
#include <cmath>

namespace tessera {
namespace {

void check_spec(const MuonSpec& spec) {
  require(spec.momentum >= 0.0 && spec.momentum < 1.0,
          "muon: momentum must be at least 0 and below 1, got {}", spec.momentum);
  require(spec.weight_decay >= 0.0 && std::isfinite(spec.weight_decay),
          "muon: weight_decay must be finite and at least 0, got {}", spec.weight_decay);
}

void check_trailing(const Operator& op, std::span<const ValueType> trailing) {
  check_shape(op, trailing[0] == ValueType{.dtype = DType::kF32, .shape = {8}},
              "factors must be f32 [8], got {}", trailing[0].to_string());
  check_shape(op, trailing[1] == ValueType{.dtype = DType::kF32, .shape = {2}},
              "grad_scale must be f32 [2], got {}", trailing[1].to_string());
}

}  // namespace

MuonMomentum::MuonMomentum(const MuonSpec& spec) : spec_(spec) {
  check_spec(spec);
}

std::string MuonMomentum::attributes() const {
  return fmt::format("momentum={} nesterov={} m={}", spec_.momentum, spec_.nesterov,
                     moment_name(spec_.formats.first_moment));
}

std::vector<ValueType> MuonMomentum::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() > kNumTrailing,
              "takes at least 3 inputs (grad of each matrix, factors, grad_scale), got {}",
              inputs.size());
  check_trailing(*this, inputs.last(kNumTrailing));
  const auto grads = inputs.first(inputs.size() - kNumTrailing);
  std::vector<ValueType> outputs;
  for (const ValueType& grad : grads) {
    check_shape(
        *this,
        grad.dtype == DType::kF32 && grad.shape.rank() == (scaled() ? 2 : 1) && !grad.ragged(),
        "grad must be f32 {}, got {}", scaled() ? "[rows, columns]" : "[n]", grad.to_string());
    check_shape(*this, grad == grads[0], "matrices of {} and {}", grads[0].to_string(),
                grad.to_string());
    outputs.push_back(with_dtype(grad, moment_dtype(spec_.formats.first_moment)));
    if (scaled())
      outputs.push_back({DType::kU8, {grad.shape[0], count_moment_blocks(grad.shape[1])}});
  }
  outputs.push_back({spec_.weight_dtype(), {std::ssize(grads), grads[0].shape.num_elements()}});
  return outputs;
}

Cost MuonMomentum::cost(std::span<const ValueType> inputs,
                        std::span<const ValueType> outputs) const {
  Cost cost = Operator::cost(inputs, outputs);
  const auto n = static_cast<double>(outputs.back().shape.num_elements());
  cost.flops = 6 * n;
  // The averages and their scales are read as well.
  for (const ValueType& kept : outputs.first(outputs.size() - 1))
    cost.bytes += static_cast<double>(kept.num_bytes());
  return cost;
}

MuonUpdate::MuonUpdate(const MuonSpec& spec) : spec_(spec) {
  check_spec(spec);
}

std::string MuonUpdate::attributes() const {
  const std::string_view beside = master_suffix(spec_.master());
  return fmt::format("weight_decay={} beside={}", spec_.weight_decay,
                     beside.empty() ? "nothing" : beside);
}

/// The type of what an update starts from.
DType MuonUpdate::master_type() const {
  const MasterKind master = spec_.master();
  return master == MasterKind::kNone ? spec_.weight_dtype() : master_dtype(master);
}

std::vector<ValueType> MuonUpdate::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == kNumInputs,
              "takes 3 inputs (orthogonal matrices, factors, grad_scale), got {}", inputs.size());
  check_trailing(*this, inputs.last(2));
  const ValueType& o = inputs[kOrthogonal];
  check_shape(*this, o.dtype == spec_.weight_dtype() && o.shape.rank() == 2 && !o.ragged(),
              "orthogonal matrices must be {} [batch, n], got {}", dtype_name(spec_.weight_dtype()),
              o.to_string());
  std::vector<ValueType> outputs;
  for (int64_t i = 0; i < o.shape[0]; ++i) {
    outputs.push_back({master_type(), {o.shape[1]}});
    if (num_outputs() == 2) outputs.push_back({DType::kBF16, {o.shape[1]}});
  }
  return outputs;
}

Cost MuonUpdate::cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const {
  Cost cost = Operator::cost(inputs, outputs);
  const auto n = static_cast<double>(inputs[kOrthogonal].shape.num_elements());
  cost.flops = 3 * n;
  cost.bytes += n * static_cast<double>(dtype_size(master_type()));
  return cost;
}

OperatorPtr make_muon_momentum(const MuonSpec& spec) {
  return std::make_shared<MuonMomentum>(spec);
}

OperatorPtr make_muon_update(const MuonSpec& spec) {
  return std::make_shared<MuonUpdate>(spec);
}

MuonFactors make_muon_factors(const MuonSpec& spec, double lr, int64_t update, int64_t rows,
                              int64_t columns) {
  ensure(update >= 1, "muon: updates are counted from 1, got {}", update);
  const double rate = static_cast<float>(lr);
  // Moonlight, section 2.2: the update's root mean square is sqrt(1 / max(rows, columns)) without.
  const double scale = 0.2 * std::sqrt(static_cast<double>(std::max(rows, columns)));
  return {.decay = static_cast<float>(1.0 - rate * spec.weight_decay),
          .step_size = static_cast<float>(rate * scale),
          .new_m = static_cast<float>(1.0 - spec.momentum),
          .averaged = static_cast<float>(spec.nesterov ? spec.momentum : 1.0),
          .update = static_cast<uint32_t>(update),
          .unused = {}};
}

Tensor view_of(MuonFactors& factors) {
  return {&factors, DType::kF32, {sizeof(factors) / sizeof(float)}};
}

}  // namespace tessera
