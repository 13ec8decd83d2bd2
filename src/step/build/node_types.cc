#include "step/build/node_types.h"

#include <algorithm>
#include <cmath>

#include "ops/collective/collective.h"
#include "ops/ring_attention/ring_attention.h"

namespace tessera {

const Communicator* group_of(const Operator& op) {
  if (const auto* collective = dynamic_cast<const CollectiveOperator*>(&op))
    return &collective->comm();
  if (const auto* ring = dynamic_cast<const RingAttentionOperator*>(&op)) return &ring->comm();
  return nullptr;
}

std::vector<ValueType> types_at(const Executable& executable, const std::vector<ValueId>& ids,
                                double skew) {
  const std::map<ValueId, int64_t>& balanced = executable.rows().expected();
  std::vector<ValueType> types = executable.program().types(ids);
  for (ValueType& type : types) {
    if (!type.ragged()) continue;
    const auto rows = balanced.find(type.extent.value());
    if (rows == balanced.end()) continue;
    int64_t& bound = type.shape[type.ragged_dim];
    const double wanted = skew * static_cast<double>(rows->second);
    bound = std::min(bound, static_cast<int64_t>(std::llround(wanted)));
  }
  return types;
}

std::string operand_format(const std::vector<ValueType>& inputs) {
  for (const ValueType& type : inputs) {
    const bool counts = type.dtype == DType::kI32 || type.dtype == DType::kI64;
    if (counts) continue;
    std::string name = type.format().name();
    std::ranges::replace(name, ' ', '-');
    return name;
  }
  return std::string(dtype_name(DType::kI32));
}

}  // namespace tessera
