#include "ops/cuda/check.h"
#include "ops/cuda/context.h"
#include "ops/join_rows/join_rows.h"

namespace tessera {
namespace {

void copy_on_gpu(void* to, const void* from, int64_t bytes, cudaStream_t stream) {
  if (bytes > 0) cuda::check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream));
}

void join_rows(const JoinRows& /*op*/, const Args<JoinRows>& args) {
  const Tensor& a = args.in(JoinRows::kA);
  const Tensor& b = args.in(JoinRows::kB);
  auto* const to = static_cast<std::byte*>(args.out(JoinRows::kY).data);
  const cudaStream_t stream = cuda::stream_of(args);
  copy_on_gpu(to, a.data, a.num_bytes(), stream);
  copy_on_gpu(to + a.num_bytes(), b.data, b.num_bytes(), stream);
}

void split_rows(const SplitRows& /*op*/, const Args<SplitRows>& args) {
  const auto* const from = static_cast<const std::byte*>(args.in(SplitRows::kX).data);
  const Tensor& a = args.out(SplitRows::kA);
  const Tensor& b = args.out(SplitRows::kB);
  const cudaStream_t stream = cuda::stream_of(args);
  copy_on_gpu(a.data, from, a.num_bytes(), stream);
  copy_on_gpu(b.data, from + a.num_bytes(), b.num_bytes(), stream);
}

}  // namespace

void add_join_rows_cuda(KernelTable& table) {
  add_kernel<JoinRows>(table, join_rows);
  add_kernel<SplitRows>(table, split_rows);
}

}  // namespace tessera
