#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "comm/communicator.h"
#include "ops/backend.h"
#include "train/setup/settings.h"

namespace tessera {

/// Refuses settings that ask for GPUs that a run of `num_ranks` ranks cannot have, as far as this
/// process sees. Takes nothing of a GPU, so it may be called before anything else is done.
void check_device(const Settings& settings, int64_t num_ranks);
/// The same for the ranks of a world, each of which takes a GPU of its own; all ranks call, and all
/// throw alike.
void check_devices(const Settings& settings, World& world);

/// Where a run on one rank computes: the GPU where the settings say so, or where they leave it open
/// and one can be used; else the host. Throws as check_device.
Backend choose_backend(const Settings& settings);
/// The back end to plan a run of `num_ranks` ranks with: nothing can run on it where it is a GPU's.
/// Settings that ask for a GPU give one that need not be there.
Backend plan_backend(const Settings& settings, int64_t num_ranks);

/// Where one rank computes, and by what its tensors reach other ranks.
struct RankDevice {
  Backend backend;
  std::unique_ptr<World> world;  ///< null: the world of the host serves its device too
  /// The rate of a large matrix product on a GPU, measured while its memory was free; else 0.
  double peak = 0;
  int64_t memory = 0;           ///< bytes of a GPU's memory; 0: not known, or the host's
  std::string processors = {};  ///< what bind_rank says
};
using DeviceChooser = std::function<RankDevice(const Settings&, World& host)>;
/// A GPU for each rank and NCCL between them where the settings say so, or where they leave it open
/// and that can be had; else the host. All ranks call. Throws as check_devices. The result must not
/// outlive `host`.
RankDevice choose_device(const Settings& settings, World& host);
/// The host, whatever the settings say.
RankDevice choose_host(const Settings& settings, World& host);

/// Whether this process sees a GPU that one of several ranks can compute on, and NCCL.
bool finds_gpu();

/// Bytes of memory of a GPU that this process sees; 0 where there is none.
int64_t gpu_memory(int index = 0);

/// Throws UserError where `what` needs more memory than this machine has, or on a GPU more than is
/// free there.
void require_device_memory(int64_t num_bytes, const Device& device, std::string_view what);

}  // namespace tessera
