#include "runtime/cuda/cuda_graph.h"

#include <fmt/format.h>

#include "ops/cuda/check.h"
#include "runtime/cuda/cuda_graph_fills.h"

namespace tessera::cuda {
namespace {

/// What is left on the GPU takes the host less time to launch where its caches have lost the rest,
/// as after a long step: 27 us instead of 37 for 2,300 kernels. Short ones gain nothing.
constexpr size_t kLeftOnGpu = 512;

/// Also takes back the error, so that the next call does not report it.
std::string describe(const char* what, cudaError_t status) {
  cudaGetLastError();
  return fmt::format("{}: {} ({})", what, cudaGetErrorString(status), cudaGetErrorName(status));
}

size_t count_nodes(cudaGraph_t graph) {
  size_t count = 0;
  return cudaGraphGetNodes(graph, nullptr, &count) == cudaSuccess ? count : 0;
}

/// Null where the graph has what only the host can launch.
cudaGraphExec_t leave_on_gpu(cudaGraph_t graph, cudaStream_t stream) {
  cudaGraphExec_t exec = nullptr;
  if (cudaGraphInstantiate(&exec, graph, cudaGraphInstantiateFlagDeviceLaunch) == cudaSuccess) {
    if (cudaGraphUpload(exec, stream) == cudaSuccess) return exec;
    cudaGraphExecDestroy(exec);
  }
  cudaGetLastError();
  return nullptr;
}

}  // namespace

RecordedGraph::RecordedGraph(cudaGraph_t graph, cudaGraphExec_t exec, cudaStream_t stream)
    : exec_(exec), stream_(stream) {
  num_operations_ = static_cast<int64_t>(count_nodes(graph));
  cudaGraphDestroy(graph);
}

// It may still be under way.
RecordedGraph::~RecordedGraph() {
  cudaStreamSynchronize(stream_);
  cudaGraphExecDestroy(exec_);
}

void RecordedGraph::run() const {
  check(cudaGraphLaunch(exec_, stream_));
}

Recording end_stream_recording(cudaStream_t stream) {
  cudaGraph_t graph = nullptr;
  cudaError_t status = cudaStreamEndCapture(stream, &graph);
  if (status != cudaSuccess || graph == nullptr)
    return {.why_not = describe("the stream could not be recorded", status)};
  replace_small_operations(graph);
  cudaGraphExec_t exec = count_nodes(graph) >= kLeftOnGpu ? leave_on_gpu(graph, stream) : nullptr;
  if (exec == nullptr) status = cudaGraphInstantiate(&exec, graph, 0);
  if (status != cudaSuccess) {
    cudaGraphDestroy(graph);
    return {.why_not = describe("the graph could not be made", status)};
  }
  return {.work = std::make_unique<RecordedGraph>(graph, exec, stream)};
}

}  // namespace tessera::cuda
