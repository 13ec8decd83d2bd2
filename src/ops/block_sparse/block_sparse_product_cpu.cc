#include <omp.h>

#include <algorithm>

#include "ops/block_sparse/block_sparse_product.h"
#include "ops/block_sparse/stripes.h"
#include "ops/cpu_dispatch.h"
#include "ops/gemm/gemm.h"
#include "ops/simd.h"

namespace tessera {
namespace {

/// Outer extent of a scratch tile; its other side is one block.
constexpr int64_t kTileExtent = 1024;
/// What a row (column) of the output costs beside its products, in elements of the sparse matrix.
constexpr int64_t kOutputCost = 16;
/// Stripes are cut at multiples of this many rows (columns), which suits the products' kernels.
constexpr int64_t kCutAlignment = 16;

/// A dense row-major operand; `transposed` says how it enters the product.
struct Matrix {
  const std::byte* data = nullptr;
  int64_t rows = 0;
  int64_t ld = 0;
  int64_t element = 0;
  bool transposed = false;

  const std::byte* at(int64_t row, int64_t col) const { return data + (row * ld + col) * element; }
  /// Where row `row` and column `col` of the entering matrix stand.
  const std::byte* entering(int64_t row, int64_t col) const {
    return transposed ? at(col, row) : at(row, col);
  }
};

Matrix matrix_of(const Tensor& tensor, bool transposed) {
  return {static_cast<const std::byte*>(tensor.data), tensor.shape[0], tensor.shape[1],
          dtype_size(tensor.dtype), transposed};
}

/// The topology among the inputs, its rows cut to the actual ones.
TopologyView topology_of(const BlockSparseProductSpec& spec, const KernelArgs& args,
                         int64_t num_rows) {
  using Op = BlockSparseProduct;
  const auto tensor = [&](Op::Input input) { return args.in(input).span<int32_t>(); };
  ensure(num_rows % spec.block_size == 0, "{} rows are not a multiple of the block size {}",
         num_rows, spec.block_size);
  const auto num_offsets = static_cast<size_t>(num_rows / spec.block_size) + 1;
  ensure(num_offsets <= tensor(Op::kRowOffsets).size(), "{} rows exceed the topology's bound",
         num_rows);
  TopologyView view{spec.block_size,         tensor(Op::kRowOffsets).first(num_offsets),
                    tensor(Op::kColIndices), tensor(Op::kRowIndices),
                    tensor(Op::kColOffsets), tensor(Op::kTransposeIndices)};
  ensure(view.num_blocks() <= static_cast<int64_t>(view.col_indices.size()),
         "topology of {} blocks with {} indices", view.num_blocks(), view.col_indices.size());
  return view;
}

/// Rows (columns) first .. last-1 of a stripe, counted in elements from its start.
struct Slice {
  Stripe stripe;
  int64_t first = 0;
  int64_t last = 0;
};

/// A walk's work cut into equal shares in the order of stripes, so that it does not matter how the
/// blocks are spread over rows (columns): a share may be several small stripes and a part of a
/// large one.
class Shares {
 public:
  Shares(const TopologyView& topology, WalkOrder order, int num_shares)
      : topology_(topology), order_(order), num_shares_(num_shares) {
    for_each_stripe(topology_, order_,
                    [&](const Stripe& stripe) { total_ += length(stripe) * unit_cost(stripe); });
  }

  /// Calls body(slice) for each slice of one share.
  template <typename Body>
  void for_each_slice(int share, const Body& body) const {
    const int64_t from = total_ * share / num_shares_;
    const int64_t to = total_ * (share + 1) / num_shares_;
    int64_t before = 0;
    for_each_stripe(topology_, order_, [&](const Stripe& stripe) {
      const Slice slice{stripe, cut(stripe, from - before), cut(stripe, to - before)};
      if (slice.first < slice.last) body(slice);
      before += length(stripe) * unit_cost(stripe);
    });
  }

 private:
  int64_t length(const Stripe& stripe) const { return stripe.extent() * topology_.block_size; }
  int64_t unit_cost(const Stripe& stripe) const {
    return num_cross_blocks(topology_, stripe) * topology_.block_size + kOutputCost;
  }
  /// Where a cost counted from the stripe's start ends in it.
  int64_t cut(const Stripe& stripe, int64_t cost) const {
    if (cost <= 0) return 0;
    const int64_t unit = cost / unit_cost(stripe);
    return unit >= length(stripe) ? length(stripe) : unit / kCutAlignment * kCutAlignment;
  }

  const TopologyView& topology_;
  WalkOrder order_;
  int num_shares_;
  int64_t total_ = 0;
};

/// Calls body(slice) for slices that together are the whole matrix, on `num_threads` threads.
template <typename Body>
void run_slices(const TopologyView& topology, WalkOrder order, int num_threads, const Body& body) {
#pragma omp parallel num_threads(num_threads)
  Shares(topology, order, omp_get_num_threads()).for_each_slice(omp_get_thread_num(), body);
}

/// Sparse output: each rectangle is one product of a row range of the left and a column range of
/// the right operand.
void run_sdd(const BlockSparseProductSpec& spec, const KernelArgs& args) {
  const Matrix left = matrix_of(args.in(BlockSparseProduct::kLeft), spec.transpose_left);
  const Matrix right = matrix_of(args.in(BlockSparseProduct::kRight), spec.transpose_right);
  const Tensor& out = args.out(BlockSparseProduct::kOut);
  const int64_t size = spec.block_size;
  const auto topology = topology_of(spec, args, left.transposed ? left.ld : left.rows);
  ensure(topology.num_blocks() == out.shape[0], "{} blocks for a topology of {}", out.shape[0],
         topology.num_blocks());
  run_slices(topology, WalkOrder::kRows, omp_get_max_threads(), [&](const Slice& slice) {
    for_each_rectangle(topology, slice.stripe, [&](const Rectangle& rectangle) {
      const int64_t c = rectangle.offset + slice.first * rectangle.ld;
      gemm({.transpose_a = left.transposed,
            .transpose_b = right.transposed,
            .m = slice.last - slice.first,
            .n = (rectangle.cross_last - rectangle.cross_first) * size,
            .k = left.transposed ? left.rows : left.ld,
            .a = left.entering(slice.stripe.first * size + slice.first, 0),
            .lda = left.ld,
            .b = right.entering(0, rectangle.cross_first * size),
            .ldb = right.ld,
            .c = static_cast<std::byte*>(out.data) + c * left.element,
            .ldc = rectangle.ld,
            .input_type = out.dtype,
            .output_type = out.dtype});
    });
  });
}

/// A part of the dense output. `along` counts in the sparse matrix's dim, from the stripe's start;
/// `outer` in the other.
struct Tile {
  int64_t along_first = 0;
  int64_t along_extent = 0;
  int64_t outer_first = 0;
  int64_t outer_extent = 0;
};

/// DSD and DDS: a dense output of which every stripe of the sparse matrix gives rows (DSD) or
/// columns (DDS).
class DenseProduct {
 public:
  DenseProduct(const BlockSparseProductSpec& spec, const KernelArgs& args)
      : spec_(spec),
        sparse_left_(spec.kind == ProductKind::kDsd),
        sparse_transposed_(sparse_left_ ? spec.transpose_left : spec.transpose_right),
        order_(sparse_left_ != sparse_transposed_ ? WalkOrder::kRows : WalkOrder::kCols),
        sparse_(args.in(sparse_left_ ? BlockSparseProduct::kLeft : BlockSparseProduct::kRight)),
        dense_(matrix_of(
            args.in(sparse_left_ ? BlockSparseProduct::kRight : BlockSparseProduct::kLeft),
            sparse_left_ ? spec.transpose_right : spec.transpose_left)),
        out_(args.out(BlockSparseProduct::kOut)),
        topology_(topology_of(spec, args, sparse_rows())),
        scratch_(args.workspace) {
    ensure(topology_.num_blocks() == sparse_.shape[0], "{} blocks for a topology of {}",
           sparse_.shape[0], topology_.num_blocks());
  }

  void run() const {
    run_slices(topology_, order_, num_threads(), [this](const Slice& slice) { run_slice(slice); });
  }

 private:
  int64_t sparse_rows() const {
    if (order_ == WalkOrder::kRows) return out_.shape[sparse_left_ ? 0 : 1];
    return sparse_left_ != dense_.transposed ? dense_.rows : dense_.ld;
  }

  /// The output's extent in the dim that is not the sparse matrix's.
  int64_t outer_extent() const { return out_.shape[sparse_left_ ? 1 : 0]; }
  bool rounds_sums() const { return is_low_precision(out_.dtype); }

  int num_threads() const {
    const int64_t slots =
        static_cast<int64_t>(scratch_.size()) / product_scratch_bytes(spec_.block_size);
    return rounds_sums() ? static_cast<int>(std::min<int64_t>(omp_get_max_threads(), slots))
                         : omp_get_max_threads();
  }

  std::byte* output_at(const Stripe& stripe, const Tile& tile) const {
    const int64_t along = stripe.first * spec_.block_size + tile.along_first;
    const int64_t row = sparse_left_ ? along : tile.outer_first;
    const int64_t col = sparse_left_ ? tile.outer_first : along;
    return static_cast<std::byte*>(out_.data) +
           (row * out_.shape[1] + col) * dtype_size(out_.dtype);
  }

  void run_slice(const Slice& slice) const {
    const Stripe& stripe = slice.stripe;
    const Tile whole{slice.first, slice.last - slice.first, 0, outer_extent()};
    int64_t num_rectangles = 0;
    for_each_rectangle(topology_, stripe, [&](const Rectangle&) { ++num_rectangles; });
    if (num_rectangles == 0) {
      if (!spec_.accumulate) clear(stripe, whole);
    } else if (num_rectangles == 1 || !rounds_sums()) {
      run_tile(stripe, whole, output_at(stripe, whole), out_.shape[1], out_.dtype);
    } else {
      run_through_scratch(stripe, whole);
    }
  }

  /// Zeros a tile of the output.
  void clear(const Stripe& stripe, const Tile& tile) const {
    const int64_t rows = sparse_left_ ? tile.along_extent : tile.outer_extent;
    const int64_t cols = sparse_left_ ? tile.outer_extent : tile.along_extent;
    std::byte* out = output_at(stripe, tile);
    const int64_t element = dtype_size(out_.dtype);
    for (int64_t row = 0; row < rows; ++row) {
      std::fill_n(out + row * out_.shape[1] * element, cols * element, std::byte{0});
    }
  }

  /// Sums the rectangles' products into a tile at `c`.
  void run_tile(const Stripe& stripe, const Tile& tile, void* c, int64_t ldc,
                DType output_type) const {
    bool accumulate = spec_.accumulate;
    for_each_rectangle(topology_, stripe, [&](const Rectangle& rectangle) {
      Gemm product{.k = (rectangle.cross_last - rectangle.cross_first) * spec_.block_size,
                   .c = c,
                   .ldc = ldc,
                   .input_type = sparse_.dtype,
                   .output_type = output_type,
                   .accumulate = accumulate};
      const int64_t cross = rectangle.cross_first * spec_.block_size;
      if (sparse_left_) {
        set_left(product, sparse_part(rectangle, tile), rectangle.ld, sparse_transposed_,
                 tile.along_extent);
        set_right(product, dense_.entering(cross, tile.outer_first), dense_.ld, dense_.transposed,
                  tile.outer_extent);
      } else {
        set_left(product, dense_.entering(tile.outer_first, cross), dense_.ld, dense_.transposed,
                 tile.outer_extent);
        set_right(product, sparse_part(rectangle, tile), rectangle.ld, sparse_transposed_,
                  tile.along_extent);
      }
      gemm(product);
      accumulate = true;
    });
  }

  static void set_left(Gemm& product, const std::byte* a, int64_t lda, bool transposed, int64_t m) {
    product.a = a;
    product.lda = lda;
    product.transpose_a = transposed;
    product.m = m;
  }

  static void set_right(Gemm& product, const std::byte* b, int64_t ldb, bool transposed,
                        int64_t n) {
    product.b = b;
    product.ldb = ldb;
    product.transpose_b = transposed;
    product.n = n;
  }

  /// The rectangle's values from the tile's start on.
  const std::byte* sparse_part(const Rectangle& rectangle, const Tile& tile) const {
    const int64_t stride = order_ == WalkOrder::kRows ? rectangle.ld : 1;
    return static_cast<const std::byte*>(sparse_.data) +
           (rectangle.offset + tile.along_first * stride) * dtype_size(sparse_.dtype);
  }

  /// BF16 outputs to which several rectangles add: tile by tile in FP32, rounded once.
  void run_through_scratch(const Stripe& stripe, const Tile& whole) const {
    const int64_t thread = omp_get_thread_num();
    auto* scratch = reinterpret_cast<float*>(scratch_.data() +
                                             thread * product_scratch_bytes(spec_.block_size));
    const int64_t last = whole.along_first + whole.along_extent;
    for (int64_t along = whole.along_first; along < last; along += spec_.block_size) {
      for (int64_t outer = 0; outer < whole.outer_extent; outer += kTileExtent) {
        const Tile tile{along, std::min(spec_.block_size, last - along), outer,
                        std::min(kTileExtent, whole.outer_extent - outer)};
        const int64_t cols = sparse_left_ ? tile.outer_extent : tile.along_extent;
        const int64_t rows = sparse_left_ ? tile.along_extent : tile.outer_extent;
        run_tile(stripe, tile, scratch, cols, DType::kF32);
        store_rounded(scratch, rows, cols, reinterpret_cast<Bf16*>(output_at(stripe, tile)));
      }
    }
  }

  void store_rounded(const float* tile, int64_t rows, int64_t cols, Bf16* out) const {
    for (int64_t row = 0; row < rows; ++row) {
      simd::convert(out + row * out_.shape[1], tile + row * cols, cols);
    }
  }

  BlockSparseProductSpec spec_;
  bool sparse_left_;
  bool sparse_transposed_;
  WalkOrder order_;
  Tensor sparse_;
  Matrix dense_;
  Tensor out_;
  TopologyView topology_;
  std::span<std::byte> scratch_;
};

void sdd_kernel(const BlockSparseProduct& op, const KernelArgs& args) {
  run_sdd(op.spec(), args);
}

void dense_kernel(const BlockSparseProduct& op, const KernelArgs& args) {
  if (!args.out(BlockSparseProduct::kOut)) return;
  DenseProduct(op.spec(), args).run();
}

/// A dense output in BF16 is summed up in FP32 first, a tile for each thread.
int64_t dense_workspace(const BlockSparseProduct& op, std::span<const ValueType> inputs) {
  const bool rounds_sums =
      !op.spec().accumulate && is_low_precision(inputs[BlockSparseProduct::kLeft].dtype);
  return rounds_sums ? omp_get_max_threads() * product_scratch_bytes(op.spec().block_size) : 0;
}

}  // namespace

TESSERA_LEVELED(int64_t, product_scratch_bytes, (int64_t block_size), (block_size)) {
  return block_size * kTileExtent * int64_t{sizeof(float)};
}

TESSERA_CPU_KERNELS(add_block_sparse_product_cpu, table) {
  add_kernel<BlockSparseProduct>(table, "sdd", sdd_kernel);
  for (const std::string_view name : {"dsd", "dds"})
    add_kernel<BlockSparseProduct>(table, name, dense_kernel, {.workspace = dense_workspace});
}

}  // namespace tessera
