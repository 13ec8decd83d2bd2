#pragma once

#include <cuda_runtime.h>

#include "core/device.h"

namespace tessera::cuda {

/// What a stream recorded, as a CUDA graph.
class RecordedGraph final : public RecordedWork {
 public:
  /// Takes over the graph.
  RecordedGraph(cudaGraph_t graph, cudaGraphExec_t exec, cudaStream_t stream);
  ~RecordedGraph() override;

  void run() const override;
  int64_t num_operations() const override { return num_operations_; }

 private:
  cudaGraphExec_t exec_;
  cudaStream_t stream_;
  int64_t num_operations_ = 0;
};

/// Ends the recording of a stream.
Recording end_stream_recording(cudaStream_t stream);

}  // namespace tessera::cuda
