#include "runtime/cuda/cuda_graph_fills.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "ops/cuda/check.h"
#include "ops/cuda/dependent_launch.cuh"

namespace tessera::cuda {
namespace {

constexpr size_t kLeastOfRuntime = size_t{1} << 16;  // bytes
constexpr unsigned kThreads = 256;
constexpr size_t kMostBlocks = 16;

/// `height` rows of `width` elements, one every `pitch` bytes.
struct Fill {
  unsigned char* data;
  size_t pitch;
  size_t width;
  size_t height;
  unsigned element_bytes;
  unsigned value;

  __host__ __device__ size_t num_elements() const { return width * height; }
};

__global__ void __launch_bounds__(kThreads) fill_elements(const Fill fill) {
  wait_for_earlier();
  for (size_t i = blockIdx.x * kThreads + threadIdx.x; i < fill.num_elements();
       i += size_t{gridDim.x} * kThreads) {
    unsigned char* const at =
        fill.data + i / fill.width * fill.pitch + i % fill.width * fill.element_bytes;
    for (unsigned byte = 0; byte < fill.element_bytes; ++byte)
      at[byte] = static_cast<unsigned char>(fill.value >> (8 * byte));
  }
}

/// What a node waits for, or what waits for it.
struct Neighbours {
  std::vector<cudaGraphNode_t> nodes;
  bool waits_for_all = true;  // of what the other does
};

template <typename Get>
Neighbours neighbours(cudaGraphNode_t node, const Get& get) {
  size_t count = 0;
  check(get(node, nullptr, nullptr, &count));
  Neighbours found{.nodes = std::vector<cudaGraphNode_t>(count)};
  std::vector<cudaGraphEdgeData> edges(count);
  if (count > 0) check(get(node, found.nodes.data(), edges.data(), &count));
  found.waits_for_all = std::ranges::all_of(edges, [](const cudaGraphEdgeData& edge) {
    return edge.type == cudaGraphDependencyTypeDefault && edge.from_port == 0;
  });
  return found;
}

cudaGraphNode_t add_kernel(cudaGraph_t graph, Fill fill, const Neighbours& before) {
  const size_t blocks = std::min((fill.num_elements() + kThreads - 1) / kThreads, kMostBlocks);
  void* arguments[] = {&fill};
  cudaKernelNodeParams kernel{};
  kernel.func = reinterpret_cast<void*>(fill_elements);
  kernel.gridDim = dim3(static_cast<unsigned>(blocks));
  kernel.blockDim = dim3(kThreads);
  kernel.kernelParams = arguments;
  cudaGraphNode_t node = nullptr;
  check(cudaGraphAddKernelNode(&node, graph, before.nodes.data(), before.nodes.size(), &kernel));
  return node;
}

void replace(cudaGraph_t graph, cudaGraphNode_t old) {
  cudaMemsetParams params{};
  check(cudaGraphMemsetNodeGetParams(old, &params));
  const Fill fill = {.data = static_cast<unsigned char*>(params.dst),
                     .pitch = params.pitch,
                     .width = params.width,
                     .height = params.height,
                     .element_bytes = params.elementSize,
                     .value = params.value};
  const size_t count = fill.num_elements();
  if (count == 0 || count * fill.element_bytes >= kLeastOfRuntime) return;
  const Neighbours before = neighbours(old, cudaGraphNodeGetDependencies);
  const Neighbours after = neighbours(old, cudaGraphNodeGetDependentNodes);
  if (!before.waits_for_all || !after.waits_for_all) return;
  const cudaGraphNode_t node = add_kernel(graph, fill, before);
  for (const cudaGraphNode_t& next : after.nodes)
    check(cudaGraphAddDependencies(graph, &node, &next, nullptr, 1));
  check(cudaGraphDestroyNode(old));
}

}  // namespace

void replace_small_fills(cudaGraph_t graph) {
  size_t count = 0;
  check(cudaGraphGetNodes(graph, nullptr, &count));
  std::vector<cudaGraphNode_t> nodes(count);
  if (count > 0) check(cudaGraphGetNodes(graph, nodes.data(), &count));
  for (const cudaGraphNode_t node : nodes) {
    cudaGraphNodeType type{};
    check(cudaGraphNodeGetType(node, &type));
    if (type == cudaGraphNodeTypeMemset) replace(graph, node);
  }
}

}  // namespace tessera::cuda
