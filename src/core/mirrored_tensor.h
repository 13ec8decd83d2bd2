#pragma once

#include "core/memory.h"

namespace tessera {

/// A tensor that the host writes and a device's programs read: one memory on the host, two
/// otherwise. The device's part is as the host's was at the last upload().
class MirroredTensor {
 public:
  MirroredTensor() = default;
  MirroredTensor(DType dtype, const Shape& shape, Device& device = host_device(),
                 std::string_view purpose = "a tensor");

  /// The host's part, which may be written at any time.
  const Tensor& get() const { return host_.get(); }
  /// The device's part, which programs are bound to.
  operator Tensor() const { return device_ == nullptr ? host_.get() : on_device_.get(); }
  /// Gives the device the host's part as it is now, in the order of the device's work.
  void upload() const;

 private:
  Device* device_ = nullptr;  // null: the host
  OwnedTensor host_;
  OwnedTensor on_device_;
};

}  // namespace tessera
