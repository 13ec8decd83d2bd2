#pragma once

#include <cstdint>

namespace tessera::cuda {

/// The 32-bit address of shared memory that PTX instructions take.
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

/// A barrier in shared memory that counts arrivals and bytes (mbarrier). One thread initialises it.
struct Barrier {
  uint64_t state;

  __device__ __forceinline__ void init(uint32_t num_arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(this)),
                 "r"(num_arrivals));
  }
  __device__ __forceinline__ void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(this)) : "memory");
  }
  /// Arrives, and makes the phase wait for `num_bytes` that TMA will bring.
  __device__ __forceinline__ void arrive_and_expect(uint32_t num_bytes) {
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(this)),
        "r"(num_bytes)
        : "memory");
  }
  /// Arrives at the barrier that lies at the same place in another block of the cluster.
  __device__ __forceinline__ void arrive_at(uint32_t cluster_rank) {
    asm volatile(
        "{\n"
        ".reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
        "}\n" ::"r"(shared_address(this)),
        "r"(cluster_rank)
        : "memory");
  }
  /// arrive_and_expect at the barrier that lies at the same place in another block of the cluster.
  __device__ __forceinline__ void arrive_and_expect_at(uint32_t cluster_rank, uint32_t num_bytes) {
    asm volatile(
        "{\n"
        ".reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.expect_tx.shared::cluster.b64 _, [remote], %2;\n"
        "}\n" ::"r"(shared_address(this)),
        "r"(cluster_rank), "r"(num_bytes)
        : "memory");
  }
  /// Whether the phase of this parity has ended; does not wait.
  __device__ __forceinline__ bool has_ended(uint32_t parity) const {
    uint32_t ended;
    asm volatile(
        "{\n"
        ".reg .pred ended;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 ended, [%1], %2;\n"
        "selp.u32 %0, 1, 0, ended;\n"
        "}\n"
        : "=r"(ended)
        : "r"(shared_address(this)), "r"(parity)
        : "memory");
    return ended != 0;
  }
  /// Waits for the end of the phase of this parity.
  __device__ __forceinline__ void wait(uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra end;\n"
        "bra again;\n"
        "end:\n"
        "}\n" ::"r"(shared_address(this)),
        "r"(parity)
        : "memory");
  }
};

/// Writes 16 bytes to the same place in shared memory of a block of the cluster; completes on that
/// block's `full`.
__device__ __forceinline__ void send(void* to, int4 value, Barrier* full, uint32_t cluster_rank) {
  asm volatile(
      "{\n"
      ".reg .b32 place, barrier;\n"
      "mapa.shared::cluster.u32 place, %0, %6;\n"
      "mapa.shared::cluster.u32 barrier, %1, %6;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.s32 [place], {%2, %3, %4, %5}, "
      "[barrier];\n"
      "}\n" ::"r"(shared_address(to)),
      "r"(shared_address(full)), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w),
      "r"(cluster_rank)
      : "memory");
}

/// Makes initialised barriers visible to TMA and to the cluster.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/// A barrier among `num_threads` threads of a block; identity 0 is __syncthreads.
__device__ __forceinline__ void sync_threads(uint32_t identity, uint32_t num_threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(identity), "r"(num_threads) : "memory");
}

/// Counts as `num_threads`' calls of sync_threads do, without waiting; by all threads of a warp.
__device__ __forceinline__ void arrive_threads(uint32_t identity, uint32_t num_threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(identity), "r"(num_threads) : "memory");
}

__device__ __forceinline__ void spend_cycles(int count) {
  const long long begin = clock64();
  while (clock64() - begin < count) {
  }
}

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ void sync_cluster() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}

template <uint32_t kRegisters>
__device__ __forceinline__ void give_registers_back() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <uint32_t kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace tessera::cuda
