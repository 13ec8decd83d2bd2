#pragma once

#include <map>
#include <span>
#include <string>

namespace tessera {

/// The variables of an environment (entries "NAME=VALUE") that change results or how ranks
/// communicate, and so must be the same on all ranks, with their values in quotes; those of NCCL
/// and CUDA's libraries `with_gpus`. What may differ from rank to rank is left out: numbers of
/// threads, which GPUs a rank sees, network interfaces of a machine, what is logged, ports.
std::map<std::string, std::string> compared_environment(std::span<const std::string> entries,
                                                        bool with_gpus);
/// The same of this process.
std::map<std::string, std::string> compared_environment(bool with_gpus);

}  // namespace tessera
