#include "core/mirrored_tensor.h"

namespace tessera {

MirroredTensor::MirroredTensor(DType dtype, const Shape& shape, Device& device,
                               std::string_view purpose)
    : device_(device.is_host() ? nullptr : &device), host_(dtype, shape, purpose) {
  if (device_ != nullptr) on_device_ = OwnedTensor(dtype, shape, purpose, device);
}

void MirroredTensor::upload() const {
  if (device_ == nullptr) return;
  const Tensor& host = host_.get();
  device_->upload(on_device_.get().data, host.data, host.num_bytes());
}

}  // namespace tessera
