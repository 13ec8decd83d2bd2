#include "ops/dispatch_rows/dispatch_rows.h"

#include <array>

#include "ops/permute/permute.h"

namespace tessera {

ValueType DispatchRows::sent_rows(std::span<const ValueType> inputs) {
  const std::array maps{inputs[kX], inputs[kSource], inputs[kRowOf]};
  return make_permute()->infer(maps)[Permute::kRows];
}

std::vector<ValueType> DispatchRows::infer(std::span<const ValueType> inputs) const {
  constexpr size_t kInputs = kRowOf + 1;
  check_shape(*this, inputs.size() == kInputs, "takes {} inputs, got {}", kInputs, inputs.size());
  check_shape(*this, !inputs[kX].scale.is_scaled(), "takes no scaled rows, got {}",
              inputs[kX].to_string());
  const std::array exchanged{sent_rows(inputs), inputs[kSendRows], inputs[kReceiveRows],
                             inputs[kExtent]};
  return {infer_rows(exchanged, kExtent - kSendRows)};
}

void DispatchRows::differentiate(GradientBuilder& /*builder*/) const {
  throw InternalError("dispatch_rows is put into programs whose gradients were derived");
}

OperatorPtr make_dispatch_rows(CommunicatorPtr comm, int64_t max_rows) {
  return std::make_shared<DispatchRows>(std::move(comm), max_rows);
}

}  // namespace tessera
