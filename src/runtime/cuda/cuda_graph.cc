#include "runtime/cuda/cuda_graph.h"

#include <fmt/format.h>

#include "ops/cuda/check.h"
#include "runtime/cuda/cuda_graph_fills.h"

namespace tessera::cuda {
namespace {

/// Also takes back the error, so that the next call does not report it.
std::string describe(const char* what, cudaError_t status) {
  cudaGetLastError();
  return fmt::format("{}: {} ({})", what, cudaGetErrorString(status), cudaGetErrorName(status));
}

}  // namespace

RecordedGraph::RecordedGraph(cudaGraph_t graph, cudaGraphExec_t exec, cudaStream_t stream)
    : exec_(exec), stream_(stream) {
  size_t num_nodes = 0;
  if (cudaGraphGetNodes(graph, nullptr, &num_nodes) == cudaSuccess)
    num_operations_ = static_cast<int64_t>(num_nodes);
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
  cudaGraphExec_t exec = nullptr;
  status = cudaGraphInstantiate(&exec, graph, 0);
  if (status != cudaSuccess) {
    cudaGraphDestroy(graph);
    return {.why_not = describe("the graph could not be made", status)};
  }
  return {.work = std::make_unique<RecordedGraph>(graph, exec, stream)};
}

}  // namespace tessera::cuda
