#pragma once

#include <memory>

#include "comm/communicator.h"
#include "comm/options.h"
#include "runtime/cuda/cuda_device.h"

namespace tessera::cuda {

/// Ranks with a GPU each: tensors in the GPUs' memory travel by NCCL, those of the host, such as
/// sizes and sums of losses, through `host`, which must outlive it and also tells NCCL's
/// communicators apart and who is lost. Waiting for an operation on the GPU holds back the device's
/// later work, not the host; a failure is thrown when the device is next synchronised.
///
/// BF16 is summed in F32 in the order of the ranks and rounded once, as by other back ends; other
/// types in NCCL's order, which is the same in every run on the same machines. Messages go between
/// neighbours of a group (its first and last are neighbours) that called connect_neighbours().
std::unique_ptr<World> make_nccl_world(World& host, std::shared_ptr<CudaDevice> device,
                                       const CommOptions& options);

}  // namespace tessera::cuda
