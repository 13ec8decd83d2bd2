// Collectives between GPUs by NCCL, ranks being threads of this process with a GPU each
// (`comm_cuda_bench [GPUs]`): of each size the mean time of an operation and the bandwidth of the
// bus, that is the bytes that a rank must send, per second, beside a plain copy from one GPU to
// another; sizes are those of the larger of in and out. NCCL alone beside what goes through memory
// that the GPUs address directly (runtime/cuda/cuda_ring.h). "Dispatched" are tokens of which every
// rank gets a copy: permuted, and exchanged. And what a group takes of a GPU's memory, as its
// exchanges are used for the first time.

#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <iostream>

#include "comm/thread/thread_world.h"
#include "core/host_tensor.h"
#include "core/memory.h"
#include "ops/cuda/check.h"
#include "ops/permute/permute_kernels.h"
#include "runtime/cuda/cuda_backend.h"
#include "runtime/cuda/cuda_device.h"

namespace tessera {
namespace {

constexpr int kRounds = 20;
constexpr int64_t kMebibyte = int64_t{1} << 20;
constexpr int64_t kRowBytes = 4096;

struct Buffers {
  Buffers(int64_t bytes, int64_t num_ranks, DType dtype, Device& device)
      : part(bytes / dtype_size(dtype) / num_ranks),
        whole(dtype, {part * num_ranks}, "the benchmark", device),
        other(dtype, {part * num_ranks}, "the benchmark", device),
        own(dtype, {part}, "the benchmark", device),
        counts(DType::kI64, {num_ranks}, "the benchmark", device),
        tokens(part * dtype_size(dtype) / kRowBytes),
        row_of(DType::kI32, {tokens, num_ranks}, "the benchmark", device),
        source(DType::kI32, {num_ranks * tokens}, "the benchmark", device) {
    const HostTensor host(counts, HostTensor::Access::kWrite);
    std::fill_n(host.get().as<int64_t>(), num_ranks, tokens);
    host.store();
    const HostTensor rows(row_of, HostTensor::Access::kWrite);
    const HostTensor sources(source, HostTensor::Access::kWrite);
    for (int64_t token = 0; token < tokens; ++token) {
      for (int64_t to = 0; to < num_ranks; ++to) {
        const int64_t assignment = token * num_ranks + to;
        const int64_t row = to * tokens + token;
        rows.get().as<int32_t>()[assignment] = static_cast<int32_t>(row);
        sources.get().as<int32_t>()[row] = static_cast<int32_t>(assignment);
      }
    }
    rows.store();
    sources.store();
  }

  /// Copies of the tokens in `own`, for each rank all of them.
  void permute(cudaStream_t stream) const {
    cuda::launch_permute({.maps = {.row_of_TK = row_of.get().as<int32_t>(),
                                   .source_R = source.get().as<int32_t>(),
                                   .num_tokens = tokens,
                                   .num_rows = source.get().shape[0],
                                   .token_extent = nullptr,
                                   .row_extent = nullptr,
                                   .top_k = static_cast<int>(row_of.get().shape[1])},
                          .row_bytes = kRowBytes,
                          .x_TH = own.get().data,
                          .rows_RH = whole.get().data},
                         stream);
  }

  int64_t part;
  OwnedTensor whole;
  OwnedTensor other;
  OwnedTensor own;
  OwnedTensor counts;  ///< rows that each rank sends to each in an all-to-all of `whole`
  int64_t tokens;
  OwnedTensor row_of;  ///< permute.h
  OwnedTensor source;
};

/// The mean of some rounds, after some others.
double mean_seconds(Communicator& group, Device& device, const std::function<void()>& operation) {
  for (int i = 0; i < 3; ++i) operation();
  device.synchronize();
  group.barrier();
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < kRounds; ++i) operation();
  device.synchronize();
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
  return taken.count() / kRounds;
}

void measure(Communicator& group, Device& device, int64_t bytes, DType dtype) {
  const Buffers b(bytes, group.size(), dtype, device);
  group.barrier();  // taking memory waits for kernels, those of other ranks of a process too
  const auto mean = [&](const std::function<void()>& work) {
    return mean_seconds(group, device, work);
  };
  const auto sent = static_cast<double>(b.part * (group.size() - 1) * dtype_size(dtype));
  const auto report = [&](const char* name, double seconds, double factor) {
    if (group.rank() == 0)
      std::printf("  %-14s %-4s %5lld MiB %9.1f us %7.1f GB/s\n", name,
                  std::string(dtype_name(dtype)).c_str(), static_cast<long long>(bytes / kMebibyte),
                  seconds * 1e6, factor * sent / seconds / 1e9);
  };
  const auto exchange = [&] { group.all_to_all(b.whole, b.other).wait(); };
  report("all_to_all", mean(exchange), 1);
  const cudaStream_t stream = dynamic_cast<cuda::CudaDevice&>(device).stream();
  report("  dispatched", mean([&] {
           b.permute(stream);
           exchange();
         }),
         1);
  if (group.takes_device_counts()) {
    const auto rows = [&](const OwnedTensor& t) {
      return Tensor{
          t.get().data, DType::kU8, {t.get().num_bytes() / kRowBytes, kRowBytes}, t.get().device};
    };
    const RowMove move{rows(b.whole), rows(b.other)};
    report("  by counts", mean([&] {
             group.all_to_all_v({&move, 1}, b.counts, b.counts).wait();
           }),
           1);
  }
  report("all_gather", mean([&] { group.all_gather(b.own, b.whole).wait(); }), 1);
  report("reduce_scatter", mean([&] { group.reduce_scatter(b.whole, b.own).wait(); }), 1);
  report("all_reduce", mean([&] { group.all_reduce(b.whole, b.other).wait(); }), 2);
  group.barrier();  // nobody frees memory while another rank still needs it
}

/// What is in use of this GPU beyond what was before, step by step. Nobody else may use it.
void measure_memory(World& world, Device& device) {
  const Buffers b(8 * kMebibyte, world.size(), DType::kF32, device);
  const Buffers narrow(8 * kMebibyte, world.size(), DType::kBF16, device);
  const CommunicatorPtr group = world.make_world_group();  // as any has that trains
  int64_t before = device.used_bytes();
  const auto report = [&](const char* what) {
    device.synchronize();
    group->barrier();
    const int64_t taken = device.used_bytes() - before;
    before += taken;
    if (world.rank() == 0)
      std::printf("  %-34s %7.1f MiB\n", what, static_cast<double>(taken) / kMebibyte);
  };
  std::vector<CommunicatorPtr> kept;
  for (int round = 0; round < 3; ++round) {
    const CommunicatorPtr other =
        kept.emplace_back(world.make_group(fmt::format("measured {}", round), group->ranks()));
    report(round == 0 ? "a group" : "one more group");
    other->all_gather(b.own, b.whole).wait();
    report("its first all_gather");
    other->reduce_scatter(b.whole, b.own).wait();
    report("its first reduce_scatter");
    other->all_reduce(b.whole, b.other).wait();
    report("its first all_reduce");
    other->all_to_all(b.whole, b.other).wait();
    report("its first all_to_all");
    other->reduce_scatter(narrow.whole, narrow.own).wait();
    report("its first sum of BF16");
    other->connect_neighbours();
    report("messages between its neighbours");
  }
  group->barrier();
}

/// A copy from GPU 0 to GPU 1 by the copy engine (DMA): what one direction between them can carry.
double copy_bandwidth() {
  constexpr size_t kBytes = size_t{512} << 20;
  void* from = nullptr;
  void* to = nullptr;
  cuda::check(cudaSetDevice(1));
  cuda::check(cudaMalloc(&to, kBytes));
  cuda::check(cudaSetDevice(0));
  cuda::check(cudaMalloc(&from, kBytes));
  cudaDeviceEnablePeerAccess(1, 0);  // without it the copy goes through the host
  const auto copy = [&] { cuda::check(cudaMemcpyPeerAsync(to, 1, from, 0, kBytes)); };
  copy();
  cuda::check(cudaDeviceSynchronize());
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < kRounds; ++i) copy();
  cuda::check(cudaDeviceSynchronize());
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
  cudaFree(from);
  cudaFree(to);
  return kRounds * static_cast<double>(kBytes) / taken.count() / 1e9;
}

int run(int64_t num_ranks) {
  std::printf("copy from GPU 0 to GPU 1: %.1f GB/s\n", copy_bandwidth());
  run_thread_world(num_ranks, [](World& host) {
    const Backend gpu = make_cuda_backend(static_cast<int>(host.rank()));
    for (const bool peer_memory : {false, true}) {
      const auto world = make_gpu_world(host, gpu, {.peer_memory = peer_memory});
      const CommunicatorPtr group = world->make_world_group();
      if (host.rank() == 0)
        std::printf("%lld GPUs, %s:\n", static_cast<long long>(host.size()),
                    peer_memory ? "with memory that all address" : "NCCL alone");
      measure_memory(*world, gpu.device());
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        for (const int64_t size : {1, 8, 64, 512})
          measure(*group, gpu.device(), size * kMebibyte, dtype);
      }
    }
  });
  return 0;
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  try {
    std::setvbuf(stdout, nullptr, _IOLBF, 0);
    const auto gpus = std::ssize(tessera::list_gpus().gpus);
    if (gpus < 2) {
      std::printf("%lld GPUs can be seen; two are needed\n", static_cast<long long>(gpus));
      return 0;
    }
    return tessera::run(argc > 1 ? std::atoll(argv[1]) : gpus);
  } catch (const std::exception& error) {
    std::cerr << "comm_cuda_bench: " << error.what() << "\n";
    return 2;
  }
}
