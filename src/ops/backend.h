#pragma once

#include <memory>

#include "core/device.h"
#include "ops/operator.h"

namespace tessera {

/// Where programs run: a device, the kernels of the operators on it, and what these share. Copies
/// are cheap and share all of it.
class Backend {
 public:
  /// The host with these kernels.
  Backend(KernelTable kernels);
  Backend(std::shared_ptr<Device> device, std::shared_ptr<KernelContext> context,
          KernelTable kernels);

  Device& device() const { return *device_; }
  bool is_host() const { return device_->is_host(); }
  KernelContext* context() const { return context_.get(); }
  /// Throws InternalError where there is none.
  const Kernel& kernel(const Operator& op) const;
  /// Scratch memory of the operator's kernel.
  int64_t workspace_bytes(const Operator& op, std::span<const ValueType> inputs) const;

 private:
  std::shared_ptr<Device> device_;
  std::shared_ptr<KernelContext> context_;
  std::shared_ptr<const KernelTable> kernels_;
};

}  // namespace tessera
