#include "optim/state_layout.h"

#include "core/memory.h"
#include "ops/adamw/moment_blocks.h"

namespace tessera {

StateLayout layout_state(const Parameter& parameter, const StateFormats& wanted) {
  const Tensor& weight = parameter.weight;
  const StateFormats formats = parameter.kept(wanted);
  StateLayout layout;
  const auto place = [&](DType dtype, const Shape& shape) {
    const int64_t offset = layout.num_bytes;
    layout.num_bytes += align_up(shape.num_elements() * dtype_size(dtype));
    return offset;
  };
  const auto place_moment = [&](MomentKind kind, int64_t& moment, int64_t& scale) {
    moment = place(moment_dtype(kind), weight.shape);
    if (has_scales(kind)) scale = place(DType::kU8, shape_of_scales(weight.shape));
  };
  place_moment(formats.first_moment, layout.m, layout.m_scale);
  if (parameter.has_second_moment()) place_moment(formats.second_moment, layout.v, layout.v_scale);
  const MasterKind beside = formats.master_of(weight.dtype);
  if (beside != MasterKind::kNone) layout.master = place(master_dtype(beside), weight.shape);
  if (parameter.is_fp8()) layout.master = place(DType::kF32, weight.shape);
  return layout;
}

std::vector<int64_t> list_group_bytes(std::span<const Parameter> parameters,
                                      const StateFormats& formats, const UpdateGroups& groups) {
  std::vector<int64_t> bytes;
  for (const auto& group : groups.groups) {
    bytes.push_back(0);
    for (const size_t idx : group) bytes.back() += layout_state(parameters[idx], formats).num_bytes;
  }
  return bytes;
}

}  // namespace tessera
