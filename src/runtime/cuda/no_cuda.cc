#include "runtime/cuda/cuda_backend.h"

namespace tessera {

bool built_with_cuda() {
  return false;
}

GpuList list_gpus() {
  return {.gpus = {}, .why = "this program was built without CUDA"};
}

Backend make_cuda_backend(int /*index*/) {
  user_error(
      "this program was built without CUDA, so it cannot run on a GPU; build it where nvcc 13 is, "
      "or set run.device = \"cpu\"");
}

}  // namespace tessera
