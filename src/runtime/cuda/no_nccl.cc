#include "runtime/cuda/cuda_backend.h"

namespace tessera {

NcclInfo find_nccl() {
  return {.built = false,
          .version = 0,
          .why = "this program was built without NCCL's headers (nccl.h)"};
}

std::unique_ptr<World> make_gpu_world(World& /*host*/, const Backend& /*backend*/,
                                      const CommOptions& /*options*/) {
  throw InternalError("NCCL in a program that was built without it");
}

}  // namespace tessera
