#include "ops/gemm/gemm.h"

#include <omp.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "core/process/cpu_level.h"
#include "ops/gemm/convert_rows.h"
#include "ops/gemm/gemm_block.h"
#include "ops/gemm/matmul_primitive.h"
#include "ops/gemm/tile_products.h"

namespace tessera {
namespace {

/// A BF16 result is made in F32 tiles of at most this size: small enough to stay in cache, large
/// enough not to slow the product (within 4 % of an F32 result, measured).
constexpr int64_t kOutputTile = int64_t{1} << 20;
constexpr int64_t kOutputTileCols = 2048;
/// Tiles of inputs that are widened to F32 are kWidenedTile squared.
constexpr int64_t kWidenedTile = 512;

dnnl::cpu_isa onednn_isa(CpuLevel level) {
  switch (level) {
    case CpuLevel::kAvx2:
      return dnnl::cpu_isa::avx2;
    case CpuLevel::kAvx512:
      return dnnl::cpu_isa::avx512_core;
    case CpuLevel::kAvx512Bf16:
      return dnnl::cpu_isa::avx512_core_bf16;
    case CpuLevel::kAmx:
      break;
  }
  return dnnl::cpu_isa::all;
}

/// Holds oneDNN to TESSERA_CPU, which it can be told only before it makes its first primitive.
void limit_onednn() {
  static const bool kDone = [] {
    const std::optional<CpuLevel> limit = cpu_levels().limit;
    if (!limit) return true;
    return dnnl::set_max_cpu_isa(onednn_isa(*limit)) == dnnl::status::success;
  }();
  ensure(kDone, "oneDNN does not take a limit to its instructions");
}

dnnl::engine make_engine() {
  limit_onednn();
  return {dnnl::engine::kind::cpu, 0};
}

/// A free place in the allocator's heap for the buffers into which oneDNN packs operands. It takes
/// and frees them in every product; without a place that nobody else may use, small blocks get into
/// the room of the last one, the next does not fit any more, and the heap grows by it.
class PackingRoom {
 public:
  PackingRoom() { take(); }
  ~PackingRoom() { std::free(held_); }
  PackingRoom(const PackingRoom&) = delete;
  PackingRoom& operator=(const PackingRoom&) = delete;

  /// For what `work` takes on this thread and frees again.
  template <typename Work>
  void lend(const Work& work) {
    std::free(std::exchange(held_, nullptr));
    work();
    take();
  }

 private:
  /// The same place as before, where nobody took it: of a block that begins aligned as oneDNN asks
  /// for, the allocator splits nothing off.
  void take() {
    held_ = std::malloc(bytes_);
    if (reinterpret_cast<uintptr_t>(held_) % kPackingAlignment == 0) return;
    std::free(held_);
    held_ = std::aligned_alloc(kPackingAlignment, bytes_);
  }

  static constexpr size_t kPackingAlignment = 128;
  /// The most that oneDNN 2.6 was seen to take for one product, of F32 on AVX-512, is 2.13 MiB for
  /// each thread that works on it.
  static constexpr size_t kBytes = size_t{9} << 18;
  static constexpr size_t kMostBytes = size_t{16} << 20;

  const size_t bytes_ = std::min(
      kMostBytes, kBytes*(omp_in_parallel() != 0 ? 1 : static_cast<size_t>(omp_get_max_threads())));
  void* held_ = nullptr;
};

/// One thread's oneDNN objects and scratch memory. Primitives share a scratchpad per thread and so
/// may not run on two threads at once; there are at most 16 of them for sizes that come at run
/// time.
class ThreadContext {
 public:
  static ThreadContext& current() {
    thread_local ThreadContext context;
    return context;
  }

  /// Whether oneDNN has products of this type for this CPU.
  bool supports(DType input_type) { return static_cast<bool>(matmul({.input_type = input_type})); }

  void run(const Gemm& product);

  /// Memory for kOutputTile floats, made when first asked for.
  float* output_tile() { return at_least(output_tile_, kOutputTile); }
  /// Memory for two widened input tiles.
  float* widened_tiles() { return at_least(widened_tiles_, 2 * kWidenedTile * kWidenedTile); }

 private:
  ThreadContext() : engine_(make_engine()), stream_(engine_) {}

  static float* at_least(std::vector<float>& memory, int64_t count) {
    if (memory.empty()) memory.resize(count);
    return memory.data();
  }

  const dnnl::matmul& matmul(const MatmulKind& kind) {
    const size_t idx = (kind.transpose_a ? 1U : 0U) + (kind.transpose_b ? 2U : 0U) +
                       (kind.accumulate ? 4U : 0U) + (kind.input_type == DType::kBF16 ? 8U : 0U);
    if (!matmuls_[idx]) matmuls_[idx] = make_matmul(kind, engine_);
    return *matmuls_[idx];
  }

  dnnl::engine engine_;
  dnnl::stream stream_;
  std::array<std::optional<dnnl::matmul>, 16> matmuls_;
  PackingRoom packing_room_;
  std::vector<float> output_tile_;
  std::vector<float> widened_tiles_;
};

void ThreadContext::run(const Gemm& p) {
  const MatrixLayout a{p.m, p.k, p.lda, p.transpose_a};
  const MatrixLayout b{p.k, p.n, p.ldb, p.transpose_b};
  const MatrixLayout c{p.m, p.n, p.ldc, false};
  // oneDNN takes sources as void* but only reads them.
  const dnnl::memory a_memory(a.desc(p.input_type), engine_, const_cast<void*>(p.a));
  const dnnl::memory b_memory(b.desc(p.input_type), engine_, const_cast<void*>(p.b));
  const dnnl::memory c_memory(c.desc(DType::kF32), engine_, p.c);
  const dnnl::matmul& product = matmul({p.transpose_a, p.transpose_b, p.input_type, p.accumulate});
  packing_room_.lend([&] {
    product.execute(
        stream_,
        {{DNNL_ARG_SRC, a_memory}, {DNNL_ARG_WEIGHTS, b_memory}, {DNNL_ARG_DST, c_memory}});
    stream_.wait();
  });
}

/// Calls `run(block)` for every block of at most the given extents.
template <typename F>
void for_each_block(const Gemm& p, int64_t rows, int64_t cols, int64_t inners, F run) {
  for (int64_t row = 0; row < p.m; row += rows) {
    for (int64_t col = 0; col < p.n; col += cols) {
      for (int64_t inner = 0; inner < p.k; inner += inners) {
        run(GemmBlock{row, col, inner, std::min(rows, p.m - row), std::min(cols, p.n - col),
                      std::min(inners, p.k - inner)});
      }
    }
  }
}

/// Copies a part of an operand of low precision to a tile in F32.
void widen(DType dtype, const void* from, int64_t stride, float* tile, int64_t rows, int64_t cols) {
  if (dtype == DType::kF16) {
    widen_rows(RowsAt<const Half>{static_cast<const Half*>(from), stride}, {tile, cols}, rows,
               cols);
  } else {
    widen_rows(RowsAt<const Bf16>{static_cast<const Bf16*>(from), stride}, {tile, cols}, rows,
               cols);
  }
}

/// A product of F16, or of BF16 where oneDNN has none for the CPU: tile by tile in F32.
void run_widened(ThreadContext& context, const Gemm& p) {
  float* a_tile = context.widened_tiles();
  float* b_tile = a_tile + kWidenedTile * kWidenedTile;
  for_each_block(p, kWidenedTile, kWidenedTile, kWidenedTile, [&](const GemmBlock& block) {
    Gemm part = part_of(p, block);
    const auto take = [&](float* tile, const void* from, int64_t stride, int64_t rows,
                          int64_t cols) {
      widen(p.input_type, from, stride, tile, rows, cols);
      return cols;
    };
    part.lda = p.transpose_a ? take(a_tile, part.a, p.lda, part.k, part.m)
                             : take(a_tile, part.a, p.lda, part.m, part.k);
    part.ldb = p.transpose_b ? take(b_tile, part.b, p.ldb, part.n, part.k)
                             : take(b_tile, part.b, p.ldb, part.k, part.n);
    part.a = a_tile;
    part.b = b_tile;
    part.input_type = DType::kF32;
    part.accumulate = p.accumulate || block.inner > 0;
    context.run(part);
  });
}

void run_to_f32(ThreadContext& context, const Gemm& p) {
  if (p.input_type != DType::kF16 && context.supports(p.input_type)) {
    context.run(p);
  } else {
    run_widened(context, p);
  }
}

/// oneDNN would make a BF16 result in an F32 buffer of the whole result's size, allocated anew in
/// each call.
void run_to_bf16(ThreadContext& context, const Gemm& p) {
  float* tile = context.output_tile();
  const int64_t cols = std::min(p.n, kOutputTileCols);
  for_each_block(p, kOutputTile / cols, cols, p.k, [&](const GemmBlock& block) {
    Gemm part = part_of(p, block);
    Bf16* c = static_cast<Bf16*>(part.c);
    part.c = tile;
    part.ldc = part.n;
    part.output_type = DType::kF32;
    run_to_f32(context, part);
    narrow_rows({tile, part.n}, {c, p.ldc}, part.m, part.n);
  });
}

void run_any_size(ThreadContext& context, const Gemm& p) {
  if (p.output_type == DType::kBF16) {
    run_to_bf16(context, p);
  } else {
    run_to_f32(context, p);
  }
}

void clear_result(const Gemm& p) {
  const int64_t size = dtype_size(p.output_type);
  for (int64_t row = 0; row < p.m; ++row) {
    std::memset(static_cast<std::byte*>(p.c) + row * p.ldc * size, 0, p.n * size);
  }
}

void check(const Gemm& p) {
  const bool bf16_in = p.input_type == DType::kBF16;
  const bool bf16_out = p.output_type == DType::kBF16;
  ensure(is_factor(p.input_type), "gemm: inputs of type {}", dtype_name(p.input_type));
  ensure(p.output_type == DType::kF32 || (bf16_in && bf16_out && !p.accumulate),
         "gemm: {} result from {} inputs{}", dtype_name(p.output_type), dtype_name(p.input_type),
         p.accumulate ? ", accumulating" : "");
  ensure(p.m >= 0 && p.n >= 0 && p.k >= 0, "gemm: extents {}, {}, {}", p.m, p.n, p.k);
  ensure(
      p.lda >= (p.transpose_a ? p.m : p.k) && p.ldb >= (p.transpose_b ? p.k : p.n) && p.ldc >= p.n,
      "gemm: leading dims {}, {}, {} too small for m {}, n {}, k {}", p.lda, p.ldb, p.ldc, p.m, p.n,
      p.k);
}

}  // namespace

void gemm(const Gemm& product) {
  check(product);
  if (product.m == 0 || product.n == 0) return;
  if (product.k == 0) {
    if (!product.accumulate) clear_result(product);
    return;
  }
  if (suits_tiles(product)) return gemm_on_tiles(product);
  run_any_size(ThreadContext::current(), product);
}

std::string_view matrix_instructions() {
  limit_onednn();
  switch (dnnl::get_effective_cpu_isa()) {
    case dnnl::cpu_isa::sse41:
      return "sse41";
    case dnnl::cpu_isa::avx:
      return "avx";
    case dnnl::cpu_isa::avx2:
      return "avx2";
    case dnnl::cpu_isa::avx2_vnni:
      return "avx2_vnni";
    case dnnl::cpu_isa::avx512_core:
      return "avx512_core";
    case dnnl::cpu_isa::avx512_core_vnni:
      return "avx512_core_vnni";
    case dnnl::cpu_isa::avx512_core_bf16:
      return "avx512_core_bf16";
    case dnnl::cpu_isa::avx512_core_amx:
      return "avx512_core_amx";
    default:
      return "others";
  }
}

}  // namespace tessera
