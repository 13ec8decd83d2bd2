#pragma once

#include <functional>

#include "comm/staged_world.h"
#include "comm/thread/thread_world.h"
#include "ops/registry/cpu_kernels.h"
#include "ops/testing/gpu_test.h"

namespace tessera::testing {

/// What a rank of a test does, with its world and where its programs run.
using RankBody = std::function<void(World&, const Backend&)>;

/// Ranks as threads that share the GPUs there are, one after the other. Communicators take tensors
/// of both the host and the GPUs, so CPU and GPU can be compared within a rank.
inline void run_gpu_ranks(int64_t num_ranks, const RankBody& body) {
  const int64_t num_gpus = std::ssize(list_gpus().gpus);
  run_thread_world(num_ranks, [&](World& host) {
    const auto world = make_staged_world(host);
    body(*world, make_cuda_backend(static_cast<int>(host.rank() % num_gpus)));
  });
}

}  // namespace tessera::testing
