#pragma once

#include <cstdint>

#include "ops/cuda/barrier.cuh"

namespace tessera::cuda {

/// How an operand's tile lies in shared memory, swizzled over 128 bytes: rows of 64 values along
/// the reduction (kReduction), or along the operand's other dim (kOther).
enum class TileMajor { kReduction, kOther };

/// Describes a tile of 64 by 64 BF16 values to the tensor cores; further tiles of an operand follow
/// `next_tile_bytes` apart (kOther only: with kReduction rows simply go on).
/// Source: PTX ISA, "Asynchronous warpgroup level matrix shared memory layout".
template <TileMajor kMajor>
__device__ __forceinline__ uint64_t describe_tile(const void* tile, uint32_t next_tile_bytes) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  constexpr uint64_t kEightRows = uint64_t{1024 >> 4} << 32;
  const uint64_t leading = kMajor == TileMajor::kOther ? next_tile_bytes >> 4 : 1;
  const uint64_t address = (shared_address(tile) & 0x3FFFF) >> 4;
  return kSwizzle128 | kEightRows | leading << 16 | address;
}

/// What a descriptor grows by for the next 16 values of the reduction.
template <TileMajor kMajor>
constexpr uint64_t kNextReduction = (kMajor == TileMajor::kOther ? 16 * 128 : 16 * 2) >> 4;

__device__ __forceinline__ void begin_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int kPending>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

/// d [64, kColumns] = a [64, 16] b [16, kColumns] + d (or 0), BF16 in, F32 out, asynchronous.
/// Thread t of the warpgroup holds, in d[4 j + 2 h + i], row 16 (t / 32) + 8 h + t % 32 / 4 and
/// column 8 j + 2 (t % 4) + i.
template <int kColumns, TileMajor kMajorA, TileMajor kMajorB>
struct WarpgroupProduct;

// clang-format off
#define TESSERA_REGS_0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define TESSERA_REGS_16 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define TESSERA_REGS_32 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define TESSERA_REGS_48 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define TESSERA_REGS_64 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define TESSERA_REGS_80 "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define TESSERA_REGS_96 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define TESSERA_REGS_112 "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define TESSERA_ACC_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define TESSERA_ACC_16(i) TESSERA_ACC_4(i), TESSERA_ACC_4(i + 4), TESSERA_ACC_4(i + 8), TESSERA_ACC_4(i + 12)
#define TESSERA_LIST_32 TESSERA_REGS_0
#define TESSERA_ACC_32 TESSERA_ACC_16(0)
#define TESSERA_LIST_64 TESSERA_REGS_0 ", " TESSERA_REGS_16
#define TESSERA_ACC_64 TESSERA_ACC_16(0), TESSERA_ACC_16(16)
#define TESSERA_LIST_96 TESSERA_REGS_0 ", " TESSERA_REGS_16 ", " TESSERA_REGS_32
#define TESSERA_ACC_96 TESSERA_ACC_16(0), TESSERA_ACC_16(16), TESSERA_ACC_16(32)
#define TESSERA_LIST_128 TESSERA_REGS_0 ", " TESSERA_REGS_16 ", " TESSERA_REGS_32 ", " TESSERA_REGS_48
#define TESSERA_ACC_128 TESSERA_ACC_16(0), TESSERA_ACC_16(16), TESSERA_ACC_16(32), TESSERA_ACC_16(48)
#define TESSERA_LIST_160 TESSERA_REGS_0 ", " TESSERA_REGS_16 ", " TESSERA_REGS_32 ", " TESSERA_REGS_48 ", " TESSERA_REGS_64
#define TESSERA_ACC_160 TESSERA_ACC_16(0), TESSERA_ACC_16(16), TESSERA_ACC_16(32), TESSERA_ACC_16(48), TESSERA_ACC_16(64)
#define TESSERA_LIST_192 TESSERA_REGS_0 ", " TESSERA_REGS_16 ", " TESSERA_REGS_32 ", " TESSERA_REGS_48 ", " TESSERA_REGS_64 ", " TESSERA_REGS_80
#define TESSERA_ACC_192 TESSERA_ACC_16(0), TESSERA_ACC_16(16), TESSERA_ACC_16(32), TESSERA_ACC_16(48), TESSERA_ACC_16(64), TESSERA_ACC_16(80)
#define TESSERA_LIST_224 TESSERA_REGS_0 ", " TESSERA_REGS_16 ", " TESSERA_REGS_32 ", " TESSERA_REGS_48 ", " TESSERA_REGS_64 ", " TESSERA_REGS_80 ", " TESSERA_REGS_96
#define TESSERA_ACC_224 TESSERA_ACC_16(0), TESSERA_ACC_16(16), TESSERA_ACC_16(32), TESSERA_ACC_16(48), TESSERA_ACC_16(64), TESSERA_ACC_16(80), TESSERA_ACC_16(96)
#define TESSERA_LIST_256 TESSERA_REGS_0 ", " TESSERA_REGS_16 ", " TESSERA_REGS_32 ", " TESSERA_REGS_48 ", " TESSERA_REGS_64 ", " TESSERA_REGS_80 ", " TESSERA_REGS_96 ", " TESSERA_REGS_112
#define TESSERA_ACC_256 TESSERA_ACC_16(0), TESSERA_ACC_16(16), TESSERA_ACC_16(32), TESSERA_ACC_16(48), TESSERA_ACC_16(64), TESSERA_ACC_16(80), TESSERA_ACC_16(96), TESSERA_ACC_16(112)

#define TESSERA_WARPGROUP_PRODUCT(columns, a_idx, b_idx, flag_idx, transpose_a, transpose_b)                                    \
  template <TileMajor kMajorA, TileMajor kMajorB>                                                     \
  struct WarpgroupProduct<columns, kMajorA, kMajorB> {                                                \
    static __device__ __forceinline__ void run(float (&d)[columns / 2], uint64_t a, uint64_t b,       \
                                               bool accumulate) {                                     \
      asm volatile(                                                                                   \
          "{\n.reg .pred p;\nsetp.ne.b32 p, " flag_idx ", 0;\n"                                       \
          "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32.bf16.bf16 "                           \
          "{" TESSERA_LIST_##columns "}, " a_idx ", " b_idx ", p, 1, 1, " transpose_a ", " transpose_b ";\n}\n"             \
          : TESSERA_ACC_##columns                                                                     \
          : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)),                                        \
            "n"(kMajorA == TileMajor::kOther), "n"(kMajorB == TileMajor::kOther));                    \
    }                                                                                                 \
  }
TESSERA_WARPGROUP_PRODUCT(32, "%16", "%17", "%18", "%19", "%20");
TESSERA_WARPGROUP_PRODUCT(64, "%32", "%33", "%34", "%35", "%36");
TESSERA_WARPGROUP_PRODUCT(96, "%48", "%49", "%50", "%51", "%52");
TESSERA_WARPGROUP_PRODUCT(128, "%64", "%65", "%66", "%67", "%68");
TESSERA_WARPGROUP_PRODUCT(160, "%80", "%81", "%82", "%83", "%84");
TESSERA_WARPGROUP_PRODUCT(192, "%96", "%97", "%98", "%99", "%100");
TESSERA_WARPGROUP_PRODUCT(224, "%112", "%113", "%114", "%115", "%116");
TESSERA_WARPGROUP_PRODUCT(256, "%128", "%129", "%130", "%131", "%132");

#undef TESSERA_WARPGROUP_PRODUCT
#undef TESSERA_ACC_4
#undef TESSERA_ACC_16
#undef TESSERA_REGS_0
#undef TESSERA_REGS_16
#undef TESSERA_REGS_32
#undef TESSERA_REGS_48
#undef TESSERA_REGS_64
#undef TESSERA_REGS_80
#undef TESSERA_REGS_96
#undef TESSERA_REGS_112
#undef TESSERA_LIST_32
#undef TESSERA_ACC_32
#undef TESSERA_LIST_64
#undef TESSERA_ACC_64
#undef TESSERA_LIST_96
#undef TESSERA_ACC_96
#undef TESSERA_LIST_128
#undef TESSERA_ACC_128
#undef TESSERA_LIST_160
#undef TESSERA_ACC_160
#undef TESSERA_LIST_192
#undef TESSERA_ACC_192
#undef TESSERA_LIST_224
#undef TESSERA_ACC_224
#undef TESSERA_LIST_256
#undef TESSERA_ACC_256
// clang-format on

}  // namespace tessera::cuda
