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
constexpr size_t kWord = sizeof(uint4);

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

struct Copy {
  unsigned char* to;
  const unsigned char* from;
  size_t num_bytes;
  bool in_words;
};

/// What the host wrote is read past the caches, which may have it as it was.
__global__ void __launch_bounds__(kThreads) copy_bytes(const Copy copy) {
  wait_for_earlier();
  const size_t words = copy.in_words ? copy.num_bytes / kWord : 0;
  const size_t first = blockIdx.x * kThreads + threadIdx.x;
  const size_t step = size_t{gridDim.x} * kThreads;
  for (size_t i = first; i < words; i += step)
    reinterpret_cast<uint4*>(copy.to)[i] = __ldcv(reinterpret_cast<const uint4*>(copy.from) + i);
  for (size_t i = words * kWord + first; i < copy.num_bytes; i += step)
    copy.to[i] = __ldcv(copy.from + i);
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

/// A kernel of one argument, in place of a node whose neighbours know nothing but its end.
template <typename Argument>
void replace(cudaGraph_t graph, cudaGraphNode_t old, void (*function)(Argument), Argument argument,
             size_t num_threads) {
  const Neighbours before = neighbours(old, cudaGraphNodeGetDependencies);
  const Neighbours after = neighbours(old, cudaGraphNodeGetDependentNodes);
  if (!before.waits_for_all || !after.waits_for_all) return;
  void* arguments[] = {&argument};
  cudaKernelNodeParams kernel{};
  kernel.func = reinterpret_cast<void*>(function);
  kernel.gridDim =
      dim3(static_cast<unsigned>(std::min((num_threads + kThreads - 1) / kThreads, kMostBlocks)));
  kernel.blockDim = dim3(kThreads);
  kernel.kernelParams = arguments;
  cudaGraphNode_t node = nullptr;
  check(cudaGraphAddKernelNode(&node, graph, before.nodes.data(), before.nodes.size(), &kernel));
  for (const cudaGraphNode_t& next : after.nodes)
    check(cudaGraphAddDependencies(graph, &node, &next, nullptr, 1));
  check(cudaGraphDestroyNode(old));
}

void replace_fill(cudaGraph_t graph, cudaGraphNode_t old) {
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
  replace(graph, old, fill_elements, fill, count);
}

/// Where a kernel of this GPU finds memory; null: it may not reach it.
void* find_on_gpu(const void* address) {
  int device = 0;
  check(cudaGetDevice(&device));
  cudaPointerAttributes attributes{};
  check(cudaPointerGetAttributes(&attributes, address));
  const bool own = attributes.type == cudaMemoryTypeDevice && attributes.device == device;
  return own || attributes.type == cudaMemoryTypeHost ? attributes.devicePointer : nullptr;
}

void replace_copy(cudaGraph_t graph, cudaGraphNode_t old) {
  cudaMemcpy3DParms params{};
  check(cudaGraphMemcpyNodeGetParams(old, &params));
  const bool flat = params.srcArray == nullptr && params.dstArray == nullptr &&
                    params.extent.height == 1 && params.extent.depth == 1;
  const size_t num_bytes = params.extent.width;
  if (!flat || num_bytes == 0 || num_bytes >= kLeastOfRuntime) return;
  auto* const to = static_cast<unsigned char*>(find_on_gpu(params.dstPtr.ptr));
  auto* const from = static_cast<unsigned char*>(find_on_gpu(params.srcPtr.ptr));
  if (to == nullptr || from == nullptr) return;
  const bool in_words =
      ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % kWord) == 0;
  const size_t threads = in_words ? (num_bytes + kWord - 1) / kWord : num_bytes;
  replace(graph, old, copy_bytes, Copy{to, from, num_bytes, in_words}, threads);
}

}  // namespace

void replace_small_operations(cudaGraph_t graph) {
  size_t count = 0;
  check(cudaGraphGetNodes(graph, nullptr, &count));
  std::vector<cudaGraphNode_t> nodes(count);
  if (count > 0) check(cudaGraphGetNodes(graph, nodes.data(), &count));
  for (const cudaGraphNode_t node : nodes) {
    cudaGraphNodeType type{};
    check(cudaGraphNodeGetType(node, &type));
    if (type == cudaGraphNodeTypeMemset) replace_fill(graph, node);
    if (type == cudaGraphNodeTypeMemcpy) replace_copy(graph, node);
  }
}

}  // namespace tessera::cuda
