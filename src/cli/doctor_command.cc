#include <omp.h>

#include <iostream>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "comm/launch/mpi_world.h"
#include "comm/shm/memory_access.h"
#include "core/memory.h"
#include "core/process/cpu_level.h"
#include "core/process/processors.h"
#include "ops/gemm/gemm.h"
#include "runtime/cuda/cuda_backend.h"
#include "train/setup/machine.h"

namespace tessera {
namespace {

bool is_used(CpuLevel level) {
  return level <= cpu_level() && is_cpu_level_built(level);
}

/// What becomes of a level on this processor.
std::string describe_level(CpuLevel level) {
  const CpuLevels& levels = cpu_levels();
  if (level > levels.present) return "not present";
  if (!is_cpu_level_built(level)) {
    return "present, but this program was built without it (TESSERA_CPU_LEVELS)";
  }
  if (level > levels.in_use()) {
    return fmt::format("present, masked by TESSERA_CPU={}", cpu_level_name(*levels.limit));
  }
  return level == CpuLevel::kAmx ? "used by oneDNN's products" : "used";
}

nlohmann::json describe_levels() {
  nlohmann::json all;
  for (const CpuLevel level : kCpuLevels) {
    all[std::string(cpu_level_name(level))] = {{"present", level <= cpu_levels().present},
                                               {"compiled", is_cpu_level_built(level)},
                                               {"used", is_used(level)}};
  }
  return all;
}

void print_levels() {
  for (const CpuLevel level : kCpuLevels) {
    std::cout << fmt::format("{:<11} {}\n", cpu_level_name(level), describe_level(level));
  }
  std::cout << fmt::format("onednn      {} in matrix products\n", matrix_instructions());
}

nlohmann::json describe_gpus(const GpuList& list) {
  auto gpus = nlohmann::json::array();
  for (const GpuInfo& gpu : list.gpus) {
    gpus.push_back(
        {{"name", gpu.name},
         {"memory", gpu.memory},
         {"compute_capability", fmt::format("{}.{}", gpu.compute_major, gpu.compute_minor)},
         {"supported", gpu.is_supported()}});
  }
  return {{"built", built_with_cuda()}, {"gpus", gpus}, {"why_none", list.why}};
}

void print_gpus(const GpuList& list) {
  if (list.gpus.empty())
    std::cout << fmt::format("cuda        {}no GPU: {}\n",
                             built_with_cuda() ? "in this program; " : "", list.why);
  for (size_t i = 0; i < list.gpus.size(); ++i) {
    const GpuInfo& gpu = list.gpus[i];
    std::cout << fmt::format("cuda:{}      {}, {}, compute capability {}.{}{}\n", i, gpu.name,
                             format_bytes(gpu.memory), gpu.compute_major, gpu.compute_minor,
                             gpu.is_supported() ? "" : "; the kernels need 9.0 (Hopper)");
  }
}

nlohmann::json describe_nodes(const std::vector<NumaNode>& nodes) {
  nlohmann::json all = nlohmann::json::array();
  for (const NumaNode& node : nodes)
    all.push_back({{"node", node.number}, {"processors", format_ranges(node.processors())}});
  return all;
}

void print_nodes(const std::vector<NumaNode>& nodes) {
  std::string text;
  for (const NumaNode& node : nodes) {
    text += fmt::format("{}node {} with processors {}", text.empty() ? "" : "; ", node.number,
                        format_ranges(node.processors()));
  }
  std::cout << "numa        " << text << "\n";
}

nlohmann::json describe_nccl(const NcclInfo& nccl) {
  return {{"built", nccl.built}, {"version", nccl.version}, {"why_none", nccl.why}};
}

std::string describe_text(const NcclInfo& nccl) {
  if (nccl.version == 0) return "none: " + nccl.why;
  return fmt::format("{}.{}.{}, for ranks with a GPU each", nccl.version / 10000,
                     nccl.version / 100 % 100, nccl.version % 100);
}

std::string describe_shared_memory() {
  const std::string why = why_memory_is_not_shared();
  return why.empty() ? "ranks of this machine read large tensors in each other's memory"
                     : "none: " + why;
}

}  // namespace

int run_doctor(const DoctorArguments& arguments) {
  const double f32 = measure_matrix_peak(DType::kF32);
  const double bf16 = measure_matrix_peak(DType::kBF16);
  const GpuList gpus = list_gpus();
  if (arguments.json) {
    std::cout << nlohmann::json{{"machine", describe_machine()},
                                {"threads", omp_get_max_threads()},
                                {"numa", describe_nodes(find_numa_nodes())},
                                {"features", describe_levels()},
                                {"onednn", matrix_instructions()},
                                {"matrix_gflops", {{"f32", f32 / 1e9}, {"bf16", bf16 / 1e9}}},
                                {"cuda", describe_gpus(gpus)},
                                {"nccl", describe_nccl(find_nccl())},
                                {"mpi", mpi_library_version()},
                                {"tcp", true},
                                {"shared_memory", describe_shared_memory()}}
                     .dump(2)
              << "\n";
    return 0;
  }
  std::cout << describe_machine() << "\n";
  std::cout << fmt::format("large matrix products: {:.0f} GFLOPS f32, {:.0f} GFLOPS bf16\n",
                           f32 / 1e9, bf16 / 1e9);
  print_nodes(find_numa_nodes());
  print_levels();
  print_gpus(gpus);
  std::cout << fmt::format("nccl        {}\n", describe_text(find_nccl()));
  std::cout << fmt::format("mpi         {}\n", mpi_library_version())
            << "tcp         in this program, for ranks that torchrun starts\n"
            << "shared      " + describe_shared_memory() + "\n";
  return 0;
}

}  // namespace tessera
