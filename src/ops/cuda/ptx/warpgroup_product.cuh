#pragma once

#include <cstdint>

#include "ops/cuda/ptx/barrier.cuh"

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

/// Keeps reads of accumulators behind the wait for the products that write them.
template <int kCount>
__device__ __forceinline__ void fence_values(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

/// d [64, kColumns] = a [64, 16] b [16, kColumns] + d (or 0), BF16 in, F32 out, asynchronous.
/// Thread t of the warpgroup holds, in d[4 j + 2 h + i], row 16 (t / 32) + 8 h + t % 32 / 4 and
/// column 8 j + 2 (t % 4) + i.
template <int kColumns, TileMajor kMajorA, TileMajor kMajorB>
struct WarpgroupProduct;

/// The same of E4M3 values, 32 of the reduction at once, of tiles whose rows lie along it: their
/// 128 bytes are 128 values. Tensor cores add FP8's products up with fewer digits than F32 has.
template <int kColumns>
struct WarpgroupProductE4m3;

// clang-format off
#define TESSERA_ACC_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define TESSERA_LIST_8 "%0, %1, %2, %3"
#define TESSERA_ACC_8 TESSERA_ACC_4(0)
#define TESSERA_LIST_16 TESSERA_LIST_8 ", %4, %5, %6, %7"
#define TESSERA_ACC_16 TESSERA_ACC_8, TESSERA_ACC_4(4)
#define TESSERA_LIST_24 TESSERA_LIST_16 ", %8, %9, %10, %11"
#define TESSERA_ACC_24 TESSERA_ACC_16, TESSERA_ACC_4(8)
#define TESSERA_LIST_32 TESSERA_LIST_24 ", %12, %13, %14, %15"
#define TESSERA_ACC_32 TESSERA_ACC_24, TESSERA_ACC_4(12)
#define TESSERA_LIST_40 TESSERA_LIST_32 ", %16, %17, %18, %19"
#define TESSERA_ACC_40 TESSERA_ACC_32, TESSERA_ACC_4(16)
#define TESSERA_LIST_48 TESSERA_LIST_40 ", %20, %21, %22, %23"
#define TESSERA_ACC_48 TESSERA_ACC_40, TESSERA_ACC_4(20)
#define TESSERA_LIST_56 TESSERA_LIST_48 ", %24, %25, %26, %27"
#define TESSERA_ACC_56 TESSERA_ACC_48, TESSERA_ACC_4(24)
#define TESSERA_LIST_64 TESSERA_LIST_56 ", %28, %29, %30, %31"
#define TESSERA_ACC_64 TESSERA_ACC_56, TESSERA_ACC_4(28)
#define TESSERA_LIST_72 TESSERA_LIST_64 ", %32, %33, %34, %35"
#define TESSERA_ACC_72 TESSERA_ACC_64, TESSERA_ACC_4(32)
#define TESSERA_LIST_80 TESSERA_LIST_72 ", %36, %37, %38, %39"
#define TESSERA_ACC_80 TESSERA_ACC_72, TESSERA_ACC_4(36)
#define TESSERA_LIST_88 TESSERA_LIST_80 ", %40, %41, %42, %43"
#define TESSERA_ACC_88 TESSERA_ACC_80, TESSERA_ACC_4(40)
#define TESSERA_LIST_96 TESSERA_LIST_88 ", %44, %45, %46, %47"
#define TESSERA_ACC_96 TESSERA_ACC_88, TESSERA_ACC_4(44)
#define TESSERA_LIST_104 TESSERA_LIST_96 ", %48, %49, %50, %51"
#define TESSERA_ACC_104 TESSERA_ACC_96, TESSERA_ACC_4(48)
#define TESSERA_LIST_112 TESSERA_LIST_104 ", %52, %53, %54, %55"
#define TESSERA_ACC_112 TESSERA_ACC_104, TESSERA_ACC_4(52)
#define TESSERA_LIST_120 TESSERA_LIST_112 ", %56, %57, %58, %59"
#define TESSERA_ACC_120 TESSERA_ACC_112, TESSERA_ACC_4(56)
#define TESSERA_LIST_128 TESSERA_LIST_120 ", %60, %61, %62, %63"
#define TESSERA_ACC_128 TESSERA_ACC_120, TESSERA_ACC_4(60)
#define TESSERA_LIST_136 TESSERA_LIST_128 ", %64, %65, %66, %67"
#define TESSERA_ACC_136 TESSERA_ACC_128, TESSERA_ACC_4(64)
#define TESSERA_LIST_144 TESSERA_LIST_136 ", %68, %69, %70, %71"
#define TESSERA_ACC_144 TESSERA_ACC_136, TESSERA_ACC_4(68)
#define TESSERA_LIST_152 TESSERA_LIST_144 ", %72, %73, %74, %75"
#define TESSERA_ACC_152 TESSERA_ACC_144, TESSERA_ACC_4(72)
#define TESSERA_LIST_160 TESSERA_LIST_152 ", %76, %77, %78, %79"
#define TESSERA_ACC_160 TESSERA_ACC_152, TESSERA_ACC_4(76)
#define TESSERA_LIST_168 TESSERA_LIST_160 ", %80, %81, %82, %83"
#define TESSERA_ACC_168 TESSERA_ACC_160, TESSERA_ACC_4(80)
#define TESSERA_LIST_176 TESSERA_LIST_168 ", %84, %85, %86, %87"
#define TESSERA_ACC_176 TESSERA_ACC_168, TESSERA_ACC_4(84)
#define TESSERA_LIST_184 TESSERA_LIST_176 ", %88, %89, %90, %91"
#define TESSERA_ACC_184 TESSERA_ACC_176, TESSERA_ACC_4(88)
#define TESSERA_LIST_192 TESSERA_LIST_184 ", %92, %93, %94, %95"
#define TESSERA_ACC_192 TESSERA_ACC_184, TESSERA_ACC_4(92)
#define TESSERA_LIST_200 TESSERA_LIST_192 ", %96, %97, %98, %99"
#define TESSERA_ACC_200 TESSERA_ACC_192, TESSERA_ACC_4(96)
#define TESSERA_LIST_208 TESSERA_LIST_200 ", %100, %101, %102, %103"
#define TESSERA_ACC_208 TESSERA_ACC_200, TESSERA_ACC_4(100)
#define TESSERA_LIST_216 TESSERA_LIST_208 ", %104, %105, %106, %107"
#define TESSERA_ACC_216 TESSERA_ACC_208, TESSERA_ACC_4(104)
#define TESSERA_LIST_224 TESSERA_LIST_216 ", %108, %109, %110, %111"
#define TESSERA_ACC_224 TESSERA_ACC_216, TESSERA_ACC_4(108)
#define TESSERA_LIST_232 TESSERA_LIST_224 ", %112, %113, %114, %115"
#define TESSERA_ACC_232 TESSERA_ACC_224, TESSERA_ACC_4(112)
#define TESSERA_LIST_240 TESSERA_LIST_232 ", %116, %117, %118, %119"
#define TESSERA_ACC_240 TESSERA_ACC_232, TESSERA_ACC_4(116)
#define TESSERA_LIST_248 TESSERA_LIST_240 ", %120, %121, %122, %123"
#define TESSERA_ACC_248 TESSERA_ACC_240, TESSERA_ACC_4(120)
#define TESSERA_LIST_256 TESSERA_LIST_248 ", %124, %125, %126, %127"
#define TESSERA_ACC_256 TESSERA_ACC_248, TESSERA_ACC_4(124)

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
#define TESSERA_WARPGROUP_PRODUCT_E4M3(columns, a_idx, b_idx, flag_idx)                                \
  template <>                                                                                         \
  struct WarpgroupProductE4m3<columns> {                                                              \
    static __device__ __forceinline__ void run(float (&d)[columns / 2], uint64_t a, uint64_t b,       \
                                               bool accumulate) {                                     \
      asm volatile(                                                                                   \
          "{\n.reg .pred p;\nsetp.ne.b32 p, " flag_idx ", 0;\n"                                       \
          "wgmma.mma_async.sync.aligned.m64n" #columns "k32.f32.e4m3.e4m3 "                           \
          "{" TESSERA_LIST_##columns "}, " a_idx ", " b_idx ", p, 1, 1;\n}\n"                         \
          : TESSERA_ACC_##columns                                                                     \
          : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));                                       \
    }                                                                                                 \
  }
TESSERA_WARPGROUP_PRODUCT(32, "%16", "%17", "%18", "%19", "%20");
TESSERA_WARPGROUP_PRODUCT(64, "%32", "%33", "%34", "%35", "%36");
TESSERA_WARPGROUP_PRODUCT(96, "%48", "%49", "%50", "%51", "%52");
TESSERA_WARPGROUP_PRODUCT(104, "%52", "%53", "%54", "%55", "%56");
TESSERA_WARPGROUP_PRODUCT(112, "%56", "%57", "%58", "%59", "%60");
TESSERA_WARPGROUP_PRODUCT(120, "%60", "%61", "%62", "%63", "%64");
TESSERA_WARPGROUP_PRODUCT(128, "%64", "%65", "%66", "%67", "%68");
TESSERA_WARPGROUP_PRODUCT(136, "%68", "%69", "%70", "%71", "%72");
TESSERA_WARPGROUP_PRODUCT(144, "%72", "%73", "%74", "%75", "%76");
TESSERA_WARPGROUP_PRODUCT(152, "%76", "%77", "%78", "%79", "%80");
TESSERA_WARPGROUP_PRODUCT(160, "%80", "%81", "%82", "%83", "%84");
TESSERA_WARPGROUP_PRODUCT(168, "%84", "%85", "%86", "%87", "%88");
TESSERA_WARPGROUP_PRODUCT(176, "%88", "%89", "%90", "%91", "%92");
TESSERA_WARPGROUP_PRODUCT(184, "%92", "%93", "%94", "%95", "%96");
TESSERA_WARPGROUP_PRODUCT(192, "%96", "%97", "%98", "%99", "%100");
TESSERA_WARPGROUP_PRODUCT(200, "%100", "%101", "%102", "%103", "%104");
TESSERA_WARPGROUP_PRODUCT(208, "%104", "%105", "%106", "%107", "%108");
TESSERA_WARPGROUP_PRODUCT(216, "%108", "%109", "%110", "%111", "%112");
TESSERA_WARPGROUP_PRODUCT(224, "%112", "%113", "%114", "%115", "%116");
TESSERA_WARPGROUP_PRODUCT(232, "%116", "%117", "%118", "%119", "%120");
TESSERA_WARPGROUP_PRODUCT(240, "%120", "%121", "%122", "%123", "%124");
TESSERA_WARPGROUP_PRODUCT(248, "%124", "%125", "%126", "%127", "%128");
TESSERA_WARPGROUP_PRODUCT(256, "%128", "%129", "%130", "%131", "%132");
TESSERA_WARPGROUP_PRODUCT_E4M3(32, "%16", "%17", "%18");
TESSERA_WARPGROUP_PRODUCT_E4M3(64, "%32", "%33", "%34");
TESSERA_WARPGROUP_PRODUCT_E4M3(96, "%48", "%49", "%50");
TESSERA_WARPGROUP_PRODUCT_E4M3(104, "%52", "%53", "%54");
TESSERA_WARPGROUP_PRODUCT_E4M3(112, "%56", "%57", "%58");
TESSERA_WARPGROUP_PRODUCT_E4M3(120, "%60", "%61", "%62");
TESSERA_WARPGROUP_PRODUCT_E4M3(128, "%64", "%65", "%66");
TESSERA_WARPGROUP_PRODUCT_E4M3(136, "%68", "%69", "%70");
TESSERA_WARPGROUP_PRODUCT_E4M3(144, "%72", "%73", "%74");
TESSERA_WARPGROUP_PRODUCT_E4M3(152, "%76", "%77", "%78");
TESSERA_WARPGROUP_PRODUCT_E4M3(160, "%80", "%81", "%82");
TESSERA_WARPGROUP_PRODUCT_E4M3(168, "%84", "%85", "%86");
TESSERA_WARPGROUP_PRODUCT_E4M3(176, "%88", "%89", "%90");
TESSERA_WARPGROUP_PRODUCT_E4M3(184, "%92", "%93", "%94");
TESSERA_WARPGROUP_PRODUCT_E4M3(192, "%96", "%97", "%98");
TESSERA_WARPGROUP_PRODUCT_E4M3(200, "%100", "%101", "%102");
TESSERA_WARPGROUP_PRODUCT_E4M3(208, "%104", "%105", "%106");
TESSERA_WARPGROUP_PRODUCT_E4M3(216, "%108", "%109", "%110");
TESSERA_WARPGROUP_PRODUCT_E4M3(224, "%112", "%113", "%114");
TESSERA_WARPGROUP_PRODUCT_E4M3(232, "%116", "%117", "%118");
TESSERA_WARPGROUP_PRODUCT_E4M3(240, "%120", "%121", "%122");
TESSERA_WARPGROUP_PRODUCT_E4M3(248, "%124", "%125", "%126");
TESSERA_WARPGROUP_PRODUCT_E4M3(256, "%128", "%129", "%130");

#undef TESSERA_WARPGROUP_PRODUCT
#undef TESSERA_WARPGROUP_PRODUCT_E4M3
#undef TESSERA_ACC_4
#undef TESSERA_LIST_8
#undef TESSERA_ACC_8
#undef TESSERA_LIST_16
#undef TESSERA_ACC_16
#undef TESSERA_LIST_24
#undef TESSERA_ACC_24
#undef TESSERA_LIST_32
#undef TESSERA_ACC_32
#undef TESSERA_LIST_40
#undef TESSERA_ACC_40
#undef TESSERA_LIST_48
#undef TESSERA_ACC_48
#undef TESSERA_LIST_56
#undef TESSERA_ACC_56
#undef TESSERA_LIST_64
#undef TESSERA_ACC_64
#undef TESSERA_LIST_72
#undef TESSERA_ACC_72
#undef TESSERA_LIST_80
#undef TESSERA_ACC_80
#undef TESSERA_LIST_88
#undef TESSERA_ACC_88
#undef TESSERA_LIST_96
#undef TESSERA_ACC_96
#undef TESSERA_LIST_104
#undef TESSERA_ACC_104
#undef TESSERA_LIST_112
#undef TESSERA_ACC_112
#undef TESSERA_LIST_120
#undef TESSERA_ACC_120
#undef TESSERA_LIST_128
#undef TESSERA_ACC_128
#undef TESSERA_LIST_136
#undef TESSERA_ACC_136
#undef TESSERA_LIST_144
#undef TESSERA_ACC_144
#undef TESSERA_LIST_152
#undef TESSERA_ACC_152
#undef TESSERA_LIST_160
#undef TESSERA_ACC_160
#undef TESSERA_LIST_168
#undef TESSERA_ACC_168
#undef TESSERA_LIST_176
#undef TESSERA_ACC_176
#undef TESSERA_LIST_184
#undef TESSERA_ACC_184
#undef TESSERA_LIST_192
#undef TESSERA_ACC_192
#undef TESSERA_LIST_200
#undef TESSERA_ACC_200
#undef TESSERA_LIST_208
#undef TESSERA_ACC_208
#undef TESSERA_LIST_216
#undef TESSERA_ACC_216
#undef TESSERA_LIST_224
#undef TESSERA_ACC_224
#undef TESSERA_LIST_232
#undef TESSERA_ACC_232
#undef TESSERA_LIST_240
#undef TESSERA_ACC_240
#undef TESSERA_LIST_248
#undef TESSERA_ACC_248
#undef TESSERA_LIST_256
#undef TESSERA_ACC_256
// clang-format on

}  // namespace tessera::cuda
