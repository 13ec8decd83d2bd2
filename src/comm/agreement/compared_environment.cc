#include "comm/agreement/compared_environment.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <vector>

namespace tessera {
namespace {

/// Names; one that ends in * stands for all that begin so.
using Names = std::span<const std::string_view>;

constexpr std::array<std::string_view, 10> kCompared = {
    "TESSERA_*",                   // the program's own
    "ONEDNN_DEFAULT_FPMATH_MODE",  // lets products round to BF16
    "DNNL_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",  // which kernels multiply
    "DNNL_MAX_CPU_ISA",
    "ONEDNN_CPU_ISA_HINTS",
    "DNNL_CPU_ISA_HINTS",
    "OMPI_MCA_pml",  // by what Open MPI moves messages
    "OMPI_MCA_mtl",
    "OMPI_MCA_btl",
};
constexpr std::array<std::string_view, 3> kComparedWithGpus = {
    "NCCL_*",
    "NVIDIA_TF32_OVERRIDE",
    "CUBLAS_WORKSPACE_CONFIG",
};
/// Of those: what a machine, or a rank, may have as its own.
constexpr std::array<std::string_view, 17> kMayDiffer = {
    "TESSERA_PORT",  // where ranks meet: they have met
    "TESSERA_HF_FIXTURES",  "NCCL_DEBUG*",
    "NCCL_SOCKET_IFNAME",   "NCCL_SOCKET_FAMILY",
    "NCCL_IB_HCA",          "NCCL_IB_GID_INDEX",
    "NCCL_IB_ADDR_*",       "NCCL_OOB_NET_IFNAME",
    "NCCL_HOSTID",          "NCCL_CONF_FILE",
    "NCCL_TOPO_FILE",       "NCCL_TOPO_DUMP_FILE",
    "NCCL_GRAPH_DUMP_FILE", "NCCL_IGNORE_CPU_AFFINITY",
    "NCCL_RAS_*",
};

bool is_among(Names names, std::string_view name) {
  return std::ranges::any_of(names, [&](std::string_view pattern) {
    if (!pattern.ends_with('*')) return name == pattern;
    return name.starts_with(pattern.substr(0, pattern.size() - 1));
  });
}

}  // namespace

std::map<std::string, std::string> compared_environment(std::span<const std::string> entries,
                                                        bool with_gpus) {
  std::map<std::string, std::string> values;
  for (const std::string& entry : entries) {
    const size_t equals = entry.find('=');
    if (equals == std::string::npos) continue;
    const std::string name = entry.substr(0, equals);
    const bool compared =
        is_among(kCompared, name) || (with_gpus && is_among(kComparedWithGpus, name));
    if (compared && !is_among(kMayDiffer, name))
      values[name] = fmt::format("\"{}\"", entry.substr(equals + 1));
  }
  return values;
}

std::map<std::string, std::string> compared_environment(bool with_gpus) {
  std::vector<std::string> entries;
  for (char** entry = environ; *entry != nullptr; ++entry) entries.emplace_back(*entry);
  return compared_environment(entries, with_gpus);
}

}  // namespace tessera
