#include "ops/backend.h"

namespace tessera {

Backend::Backend(KernelTable kernels)
    : Backend(std::shared_ptr<Device>(std::shared_ptr<Device>(), &host_device()), nullptr,
              std::move(kernels)) {}

Backend::Backend(std::shared_ptr<Device> device, std::shared_ptr<KernelContext> context,
                 KernelTable kernels)
    : device_(std::move(device)),
      context_(std::move(context)),
      kernels_(std::make_shared<const KernelTable>(std::move(kernels))),
      control_(std::make_shared<RunControl>()) {}

const Kernel& Backend::kernel(const Operator& op) const {
  const auto found = kernels_->find(op.name());
  ensure(found != kernels_->end() || !is_host(), "operator '{}' has no kernel", op.name());
  require(found != kernels_->end(),
          "operator '{}' does not run on {}; leave out what needs it, or set run.device = \"cpu\"",
          op.name(), device_->name());
  return found->second;
}

void Backend::check_formats(const Operator& op, std::span<const ValueType> types) const {
  const Kernel& found = kernel(op);
  for (const ValueType& type : types)
    require(found.takes(type.format()), "operator '{}' has no kernel for {} on {}", op.name(),
            type.format().name(), device_->name());
}

int64_t Backend::workspace_bytes(const Operator& op, std::span<const ValueType> inputs) const {
  return kernel(op).workspace_bytes(op, inputs);
}

}  // namespace tessera
