#include "runtime/cuda/cuda_backend.h"

namespace tessera {

bool built_with_cuda() {
  return false;
}

GpuList list_gpus() {
  return {.gpus = {}, .why = "this program was built without CUDA"};
}

void check_gpu(int /*index*/) {
  user_error(
      "this program was built without CUDA, so it cannot run on a GPU; build it where nvcc 13 is, "
      "or compute on the CPU: run.device = \"cpu\", or --device=cpu of eval and generate");
}

Backend make_cuda_backend(int index) {
  check_gpu(index);
  throw InternalError("a GPU in a program without CUDA");
}

NcclInfo find_nccl() {
  return {.built = false, .version = 0, .why = "this program was built without CUDA"};
}

std::unique_ptr<World> make_gpu_world(World& /*host*/, const Backend& /*backend*/,
                                      const CommOptions& /*options*/) {
  throw InternalError("GPUs in a program without CUDA");
}

std::string gpu_pci_address(int /*index*/) {
  return "";
}

Backend make_planned_cuda_backend() {
  user_error(
      "this program was built without CUDA, so it does not know what a GPU would need; build it "
      "where nvcc 13 is, or set run.device = \"cpu\"");
}

}  // namespace tessera
