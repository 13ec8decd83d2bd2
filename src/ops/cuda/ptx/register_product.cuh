#pragma once

#include <cstdint>

#include "ops/cuda/ptx/warpgroup_product.cuh"

namespace tessera::cuda {

/// As WarpgroupProduct, but with a in registers: thread t of the warpgroup holds, in a[0] to a[3],
/// two neighbouring values each, the first of them in the low half: columns 2 (t % 4) of row
/// 16 (t / 32) + t % 32 / 4, the same 8 rows below, and both 8 columns on. That is how an
/// accumulator's 16 columns lie after conversion to BF16.
template <int kColumns, TileMajor kMajorB>
struct RegisterProduct;

/// d = a b, with both operands' rows along the reduction. Other than WarpgroupProduct without
/// accumulation, it does not make the compiler define d before.
template <int kColumns>
struct FirstProduct;

// clang-format off
#define TESSERA_ACC_8(i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define TESSERA_ACC_32(i) TESSERA_ACC_8(i), TESSERA_ACC_8(i + 8), TESSERA_ACC_8(i + 16), TESSERA_ACC_8(i + 24)
#define TESSERA_OUT_8(i) \
  "=f"(d[i]), "=f"(d[i + 1]), "=f"(d[i + 2]), "=f"(d[i + 3]), "=f"(d[i + 4]), "=f"(d[i + 5]), "=f"(d[i + 6]), "=f"(d[i + 7])
#define TESSERA_OUT_32(i) TESSERA_OUT_8(i), TESSERA_OUT_8(i + 8), TESSERA_OUT_8(i + 16), TESSERA_OUT_8(i + 24)
#define TESSERA_OUT_64 TESSERA_OUT_32(0)
#define TESSERA_OUT_128 TESSERA_OUT_32(0), TESSERA_OUT_32(32)
#define TESSERA_LIST_64 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define TESSERA_ACC_64 TESSERA_ACC_32(0)
#define TESSERA_LIST_128 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31" ", " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define TESSERA_ACC_128 TESSERA_ACC_32(0), TESSERA_ACC_32(32)
#define TESSERA_LIST_192 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31" ", " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63" ", " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define TESSERA_ACC_192 TESSERA_ACC_32(0), TESSERA_ACC_32(32), TESSERA_ACC_32(64)
#define TESSERA_LIST_256 TESSERA_LIST_192 ", " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define TESSERA_ACC_256 TESSERA_ACC_192, TESSERA_ACC_32(96)
#define TESSERA_REGISTER_PRODUCT(columns, a0, a1, a2, a3, b_idx, flag_idx, transpose_b)               \
  template <TileMajor kMajorB>                                                                        \
  struct RegisterProduct<columns, kMajorB> {                                                          \
    static __device__ __forceinline__ void run(float (&d)[columns / 2], const uint32_t (&a)[4],       \
                                               uint64_t b, bool accumulate) {                         \
      asm volatile(                                                                                   \
          "{\n.reg .pred p;\nsetp.ne.b32 p, " flag_idx ", 0;\n"                                       \
          "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32.bf16.bf16 "                           \
          "{" TESSERA_LIST_##columns "}, {" a0 ", " a1 ", " a2 ", " a3 "}, " b_idx                    \
          ", p, 1, 1, " transpose_b ";\n}\n"                                                          \
          : TESSERA_ACC_##columns                                                                     \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)),    \
            "n"(kMajorB == TileMajor::kOther));                                                       \
    }                                                                                                 \
  }
TESSERA_REGISTER_PRODUCT(64, "%32", "%33", "%34", "%35", "%36", "%37", "%38");
TESSERA_REGISTER_PRODUCT(128, "%64", "%65", "%66", "%67", "%68", "%69", "%70");
TESSERA_REGISTER_PRODUCT(192, "%96", "%97", "%98", "%99", "%100", "%101", "%102");
TESSERA_REGISTER_PRODUCT(256, "%128", "%129", "%130", "%131", "%132", "%133", "%134");

#define TESSERA_FIRST_PRODUCT(columns, a_idx, b_idx, flag_idx)                                        \
  template <>                                                                                         \
  struct FirstProduct<columns> {                                                                      \
    static __device__ __forceinline__ void run(float (&d)[columns / 2], uint64_t a, uint64_t b) {     \
      asm volatile(                                                                                   \
          "{\n.reg .pred p;\nsetp.ne.b32 p, " flag_idx ", 0;\n"                                       \
          "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32.bf16.bf16 "                           \
          "{" TESSERA_LIST_##columns "}, " a_idx ", " b_idx ", p, 1, 1, 0, 0;\n}\n"                   \
          : TESSERA_OUT_##columns                                                                     \
          : "l"(a), "l"(b), "n"(0));                                                                  \
    }                                                                                                 \
  }
TESSERA_FIRST_PRODUCT(64, "%32", "%33", "%34");
TESSERA_FIRST_PRODUCT(128, "%64", "%65", "%66");

#undef TESSERA_FIRST_PRODUCT
#undef TESSERA_OUT_8
#undef TESSERA_OUT_32
#undef TESSERA_OUT_64
#undef TESSERA_OUT_128
#undef TESSERA_REGISTER_PRODUCT
#undef TESSERA_ACC_8
#undef TESSERA_ACC_32
#undef TESSERA_LIST_64
#undef TESSERA_ACC_64
#undef TESSERA_LIST_128
#undef TESSERA_ACC_128
#undef TESSERA_LIST_192
#undef TESSERA_ACC_192
#undef TESSERA_LIST_256
#undef TESSERA_ACC_256
// clang-format on

}  // namespace tessera::cuda
