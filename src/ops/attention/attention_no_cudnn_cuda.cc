// In place of attention_cudnn_cuda.cc where cuDNN's headers were not found.
#include "ops/attention/attention_cudnn.h"

namespace tessera::cuda {

class CudnnAttention::Impl {
 public:
  std::string why_not = "the program was built without cuDNN's headers";
};

CudnnAttention::CudnnAttention(CudaContext& /*context*/) : impl_(std::make_unique<Impl>()) {}
CudnnAttention::~CudnnAttention() = default;
bool CudnnAttention::run_forward(const AttentionSpec& /*spec*/, const KernelArgs& /*args*/) {
  return false;
}
bool CudnnAttention::run_backward(const AttentionSpec& /*spec*/, const KernelArgs& /*args*/) {
  return false;
}
const std::string& CudnnAttention::why_not() const {
  return impl_->why_not;
}

}  // namespace tessera::cuda
