#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "runtime/cuda/cuda_backend.h"

namespace tessera {

/// What one rank can compute with.
struct RankGpus {
  std::string machine;
  bool can_communicate = false;  ///< NCCL is there
  std::vector<uint64_t> gpus;    ///< those that the kernels run on, by GpuInfo::id
  std::vector<int> indices;      ///< their places in the rank's own list
};

/// This process's.
RankGpus find_own_gpus();
/// All ranks', who all call it.
std::vector<RankGpus> exchange_gpus(const RankGpus& own, World& world);

/// Which GPU each rank takes, as a place in its own list: the first that no lower rank has, so
/// ranks that see the same GPUs take them in turn, and a rank that sees one alone takes that.
/// `why` says why that cannot be, naming ranks and GPUs; then there is nothing in `indices`.
struct GpuAssignment {
  std::vector<int> indices;  ///< by rank
  std::string why;
};
GpuAssignment assign_gpus(std::span<const RankGpus> ranks);

}  // namespace tessera
