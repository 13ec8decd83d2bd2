#pragma once

#include <memory>
#include <string>

#include "ops/attention/attention.h"
#include "ops/cuda/context.h"

namespace tessera::cuda {

/// When the backward keeps the pairs of queries and keys; memory is planned with these.
struct PairLimits {
  /// Of scratch memory. Key-value heads are taken as many at a time as that has room for.
  int64_t most_bytes = int64_t{5} << 28;
  /// Blocks of keys times heads that are taken at a time, where that is not all: fewer leave the
  /// GPU idle at the end of each part.
  int64_t least_tasks = 200;
  /// Of a query's head: with less, keeping pairs takes longer than computing them again.
  int64_t least_size = 65;
};

/// How attention runs on a GPU, for all its operators; kept in the context. Whoever changes it
/// after programs ran calls CudaContext::change_version().
struct AttentionOptions {
  explicit AttentionOptions(CudaContext& /*context*/) {}

  /// Whether cuDNN runs what it takes, rather than our own kernels. Worth it for heads beyond
  /// tensor_fits, which our own run without tensor cores.
  bool cudnn = false;
  /// cuDNN's backward adds up the queries' gradients in no fixed order; our own kernels run in
  /// its place where this is true.
  bool deterministic = true;
  /// Such that no more are kept than memory was planned for.
  PairLimits pairs = {};
  /// After the first call: why cuDNN is not used; "" where it is, or was not asked for.
  std::string why_not_cudnn;
};

/// Attention in BF16 by cuDNN, which is loaded when it is first needed. Plans are kept by shape;
/// their scratch memory belongs to this object and grows when a plan that needs more is made, in
/// the first call of its shape.
class CudnnAttention {
 public:
  explicit CudnnAttention(CudaContext& context);
  CudnnAttention(const CudnnAttention&) = delete;
  CudnnAttention& operator=(const CudnnAttention&) = delete;
  ~CudnnAttention();

  /// Runs make_attention or make_attention_backward. False where cuDNN does not take the operator:
  /// then nothing has been launched, and why_not() says why.
  bool run_forward(const AttentionSpec& spec, const KernelArgs& args);
  bool run_backward(const AttentionSpec& spec, const KernelArgs& args);
  const std::string& why_not() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera::cuda
