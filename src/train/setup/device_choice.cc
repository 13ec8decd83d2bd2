#include "train/setup/device_choice.h"

#include <algorithm>

#include "comm/launch/launch.h"
#include "ops/registry/cpu_kernels.h"
#include "runtime/cuda/cuda_backend.h"
#include "train/setup/gpu_assignment.h"
#include "train/setup/machine.h"
#include "train/setup/rank_binding.h"
#include "train/setup/size_check.h"

namespace tessera {
namespace {

constexpr int kGpu = 0;
constexpr int kNoGpu = -1;

bool has_usable_gpu() {
  if (!built_with_cuda()) return false;
  const GpuList list = list_gpus();
  return !list.gpus.empty() && list.gpus[kGpu].is_supported();
}

int64_t count_usable_gpus() {
  return std::ranges::count_if(list_gpus().gpus, &GpuInfo::is_supported);
}

/// Ranks of a run of `num_ranks` ranks that will share this machine, where this process starts
/// them; 1 where a launcher has started it, and may have given each rank a GPU of its own to see.
int64_t count_ranks_here(int64_t num_ranks) {
  const bool launched = detect_launch(process_environment()).launcher != Launcher::kNone;
  return launched ? 1 : num_ranks;
}

bool has_usable_gpus(int64_t num_ranks) {
  if (num_ranks == 1) return has_usable_gpu();
  return built_with_cuda() && count_usable_gpus() >= count_ranks_here(num_ranks) &&
         find_nccl().version > 0;
}

bool takes_gpu(const Settings& settings, int64_t num_ranks) {
  const DeviceChoice choice = settings.run.device;
  if (choice != DeviceChoice::kAuto) return choice == DeviceChoice::kCuda;
  return has_usable_gpus(num_ranks);
}

[[noreturn]] void refuse(const std::string& why) {
  user_error(
      "run.device = \"cuda\" takes a GPU for each rank, but {}; start one rank for each GPU (see "
      "CUDA_VISIBLE_DEVICES), or set run.device = \"cpu\"",
      why);
}

void check_several(int64_t num_ranks) {
  const int64_t here = count_ranks_here(num_ranks);
  const int64_t gpus = count_usable_gpus();
  if (gpus < here)
    refuse(fmt::format("{} ranks are asked for and {} GPU{} can be used here", here, gpus,
                       gpus == 1 ? "" : "s"));
  const NcclInfo nccl = find_nccl();
  require(nccl.version > 0, "run.device = \"cuda\" on {} ranks: {}; or set run.device = \"cpu\"",
          num_ranks, nccl.why);
}

/// Which GPU each rank takes; nothing where all compute on the host.
std::vector<int> assign_devices(const Settings& settings, World& world) {
  const DeviceChoice choice = settings.run.device;
  if (choice == DeviceChoice::kCpu || (choice == DeviceChoice::kAuto && !built_with_cuda()))
    return {};
  GpuAssignment assignment = assign_gpus(exchange_gpus(find_own_gpus(), world));
  if (assignment.indices.empty() && choice == DeviceChoice::kCuda) refuse(assignment.why);
  return std::move(assignment.indices);
}

void check_host(const Settings& settings) {
  require(settings.run.cuda_graphs != GraphMode::kOn,
          "run.cuda_graphs = \"on\" needs a GPU, but this run computes on the CPU; leave it at "
          "\"auto\", which uses them where there is one");
}

RankDevice on_device(const Settings& settings, Backend backend, int gpu) {
  const double peak = backend.is_host() ? 0 : measure_matrix_peak(backend, settings.train.dtype());
  const int64_t memory = backend.is_host() ? 0 : gpu_memory(gpu);
  return {.backend = std::move(backend), .world = nullptr, .peak = peak, .memory = memory};
}

}  // namespace

void check_device(const Settings& settings, int64_t num_ranks) {
  const bool gpu = takes_gpu(settings, num_ranks);
  if (!gpu) return check_host(settings);
  check_gpu(kGpu);
  if (num_ranks == 1) return;
  check_several(num_ranks);
}

void check_devices(const Settings& settings, World& world) {
  if (world.size() > 1 && settings.run.device == DeviceChoice::kCuda)
    assign_devices(settings, world);
}

Backend choose_backend(const Settings& settings) {
  check_device(settings, 1);
  if (!takes_gpu(settings, 1)) return make_cpu_kernels();
  Backend backend = make_cuda_backend(kGpu);
  backend.control().graphs = settings.run.cuda_graphs;
  return backend;
}

Backend plan_backend(const Settings& settings, int64_t num_ranks) {
  if (!takes_gpu(settings, num_ranks)) return make_cpu_kernels();
  return make_planned_cuda_backend();
}

RankDevice choose_device(const Settings& settings, World& host) {
  if (host.size() == 1) {
    Backend backend = choose_backend(settings);
    std::string processors = bind_rank(settings, host, backend.is_host() ? kNoGpu : kGpu);
    RankDevice device = on_device(settings, std::move(backend), kGpu);
    device.processors = std::move(processors);
    return device;
  }
  const std::vector<int> gpus = assign_devices(settings, host);
  if (gpus.empty()) {
    check_host(settings);
    std::string processors = bind_rank(settings, host, kNoGpu);
    return {.backend = make_cpu_kernels(), .world = nullptr, .processors = std::move(processors)};
  }
  const int gpu = gpus[host.rank()];
  // Before the GPU's memory of the host is taken, which is near who takes it.
  std::string processors = bind_rank(settings, host, gpu);
  RankDevice device = on_device(settings, make_cuda_backend(gpu), gpu);
  device.processors = std::move(processors);
  device.backend.control().graphs = settings.run.cuda_graphs;
  device.world = make_gpu_world(
      host, device.backend,
      {.timeout_seconds = settings.run.comm_timeout, .peer_memory = settings.run.peer_memory});
  return device;
}

RankDevice choose_host(const Settings& /*settings*/, World& /*host*/) {
  return {.backend = make_cpu_kernels(), .world = nullptr};
}

bool finds_gpu() {
  return built_with_cuda() && count_usable_gpus() > 0 && find_nccl().version > 0;
}

int64_t gpu_memory(int index) {
  const GpuList list = list_gpus();
  return index < std::ssize(list.gpus) ? list.gpus[index].memory : 0;
}

void require_device_memory(int64_t num_bytes, const Device& device, std::string_view what) {
  if (device.is_host()) return require_host_memory(num_bytes, machine_memory(), what);
  const int64_t all = gpu_memory();
  const int64_t free = std::max<int64_t>(all - device.used_bytes(), 0);
  require(all == 0 || num_bytes <= free,
          "out of memory: {} would take {}, and {} has {} free of {}; --device=cpu works", what,
          format_bytes(num_bytes), device.name(), format_bytes(free), format_bytes(all));
}

}  // namespace tessera
