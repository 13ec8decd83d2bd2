#include "ops/softcap/softcap.h"

#include <cmath>

#include "ops/storage.h"

namespace tessera {

Softcap::Softcap(double cap) : cap_(cap) {
  require(cap > 0 && std::isfinite(cap), "softcap: the cap is {}, expected a number above 0", cap);
}

std::string Softcap::attributes() const {
  return fmt::format("cap={}", cap_);
}

std::vector<ValueType> Softcap::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 1, "takes x, got {} inputs", inputs.size());
  check_shape(*this, is_storage(inputs[kX].dtype), "x is {}, expected f32 or bf16",
              dtype_name(inputs[kX].dtype));
  return {inputs[kX]};
}

Cost Softcap::cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const {
  constexpr double kEach = 10;  // of a hyperbolic tangent
  Cost cost = Operator::cost(inputs, outputs);
  cost.flops = kEach * static_cast<double>(outputs[kY].shape.num_elements());
  return cost;
}

void Softcap::differentiate(GradientBuilder& builder) const {
  ensure(!builder.grad_output(kY), "softcap: logits that are given out have no gradient");
}

OperatorPtr make_softcap(double cap) {
  return std::make_shared<Softcap>(cap);
}

}  // namespace tessera
