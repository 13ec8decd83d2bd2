#pragma once

#include <cuda_runtime.h>

#include <map>
#include <memory>
#include <typeindex>

#include "ops/operator.h"

namespace tessera::cuda {

/// What the kernels of one GPU share: the stream that all are given to, in order, and whatever else
/// each keeps (handles of libraries, plans), made when it is first asked for.
class CudaContext final : public KernelContext {
 public:
  CudaContext(cudaStream_t stream, int num_sms) : stream_(stream), num_sms_(num_sms) {}

  cudaStream_t stream() const { return stream_; }
  int num_sms() const { return num_sms_; }
  /// The context's one T, made from the context.
  template <typename T>
  T& get() {
    std::shared_ptr<void>& kept = kept_[typeid(T)];
    if (!kept) kept = std::make_shared<T>(*this);
    return *static_cast<T*>(kept.get());
  }
  int64_t version() const override { return version_; }
  /// Without a wait for more than what writes it, where HostCounts keeps it.
  int64_t read_count(const Tensor& count) override;
  /// To be called by kernels that replace memory that their recorded work uses, and by whoever
  /// changes how kernels run.
  void change_version() { ++version_; }

 private:
  cudaStream_t stream_;
  int num_sms_;
  std::map<std::type_index, std::shared_ptr<void>> kept_;
  int64_t version_ = 0;
};

/// The context of a call to a CUDA kernel.
inline CudaContext& context_of(const KernelArgs& args) {
  ensure(args.context != nullptr, "a CUDA kernel was called without a context");
  return static_cast<CudaContext&>(*args.context);
}
inline cudaStream_t stream_of(const KernelArgs& args) {
  return context_of(args).stream();
}

}  // namespace tessera::cuda
