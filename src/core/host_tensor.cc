#include "core/host_tensor.h"

namespace tessera {

HostTensor::HostTensor(const Tensor& tensor, Access access) : tensor_(tensor), host_(tensor) {
  if (tensor.device == nullptr) return;
  copy_ = OwnedTensor(tensor.dtype, tensor.shape, "a copy of a tensor on the host");
  host_ = copy_;
  if (access == Access::kRead) tensor.device->copy(host_.data, tensor.data, tensor.num_bytes());
}

void HostTensor::store() const {
  if (tensor_.device != nullptr)
    tensor_.device->copy(tensor_.data, host_.data, tensor_.num_bytes());
}

}  // namespace tessera
