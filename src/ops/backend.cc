#include "ops/backend.h"

namespace tessera {

Backend::Backend(KernelTable kernels)
    : Backend(std::shared_ptr<Device>(std::shared_ptr<Device>(), &host_device()), nullptr,
              std::move(kernels)) {}

Backend::Backend(std::shared_ptr<Device> device, std::shared_ptr<KernelContext> context,
                 KernelTable kernels, std::shared_ptr<SideLane> side)
    : device_(std::move(device)),
      context_(std::move(context)),
      side_(std::move(side)),
      kernels_(std::make_shared<const KernelTable>(std::move(kernels))),
      control_(std::make_shared<RunControl>()) {}

int64_t Backend::kernel_version() const {
  const auto of = [](const KernelContext* context) {
    return context != nullptr ? context->version() : 0;
  };
  return of(context_.get()) + (side_ ? of(side_->context()) : 0);
}

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
