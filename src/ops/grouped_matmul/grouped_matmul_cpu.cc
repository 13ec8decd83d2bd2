#include <omp.h>

#include <algorithm>

#include "ops/gemm/row_products.h"
#include "ops/grouped_matmul/grouped_matmul.h"
#include "ops/many_threads.h"
#include "ops/permute/row_maps.h"

namespace tessera {
namespace {

/// Cuts are made at multiples of this many rows or columns, which suits the product's kernels.
constexpr int64_t kCutAlignment = 16;
/// With fewer rows a thread than this, reading the weights costs more than the arithmetic, and
/// threads share out an expert's columns instead of its rows, so that each weight is read once.
constexpr int64_t kFewRowsPerThread = 32;
/// What it costs to add into one row of a weight's gradient, in products with one routed row.
constexpr int64_t kAccumulatorCost = 16;

/// Parts that the products are cut into for the threads of this call.
int count_parts() {
  return has_many_threads() ? 2 * omp_get_max_threads() : omp_get_max_threads();
}

/// One expert's share of the work: rows of `a` or of the weight, all at the same cost.
struct Units {
  int64_t count = 0;
  int64_t unit_cost = 0;
};

/// The products are cut into parts by cost, in the order of experts and regardless of their bounds:
/// one part may have several small experts and a piece of a large one. So it does not matter how
/// the rows are spread over experts, and there are at most E + parts - 1 products.
class Cut {
 public:
  template <typename UnitsOf>  // Units of an expert
  Cut(int64_t num_experts, int num_parts, UnitsOf units_of)
      : num_experts_(num_experts), num_parts_(num_parts) {
    for (int64_t e = 0; e < num_experts; ++e) {
      const Units units = units_of(e);
      total_ += units.count * units.unit_cost;
    }
  }

  int num_parts() const { return num_parts_; }

  /// Calls run(expert, first, last) for every run of units that belongs to `part`.
  template <typename UnitsOf, typename Run>
  void for_each_in(int part, UnitsOf units_of, Run run) const {
    const int64_t from = total_ * part / num_parts_;
    const int64_t to = total_ * (part + 1) / num_parts_;
    int64_t before = 0;
    for (int64_t e = 0; e < num_experts_; ++e) {
      const Units units = units_of(e);
      const int64_t first = unit_at(units, from - before);
      const int64_t last = unit_at(units, to - before);
      if (first < last) run(e, first, last);
      before += units.count * units.unit_cost;
    }
  }

 private:
  /// The unit that starts at a cost counted from the expert's first.
  static int64_t unit_at(const Units& units, int64_t cost) {
    if (cost <= 0 || units.unit_cost == 0) return 0;
    const int64_t unit = cost / units.unit_cost;
    return unit >= units.count ? units.count : unit / kCutAlignment * kCutAlignment;
  }

  int64_t num_experts_;
  int num_parts_;
  int64_t total_ = 0;
};

std::byte* at(const Tensor& tensor, int64_t row, int64_t col) {
  const int64_t idx = row * tensor.shape[1] + col;
  return static_cast<std::byte*>(tensor.data) + idx * dtype_size(tensor.dtype);
}

/// The rows of x, an input of the call, gathered into scratch memory first where the operator does.
template <typename Op>
Tensor find_rows(const Args<Op>& args, const Tensor& x, bool gather) {
  if (!gather) return x;
  const Tensor& source = args.in(Op::kSource);
  const Tensor rows{args.workspace.data(), x.dtype, {source.shape[0], x.shape[1]}};
  ensure(rows.num_bytes() <= std::ssize(args.workspace),
         "{} bytes of scratch memory for {} of rows", args.workspace.size(), rows.num_bytes());
  gather_rows(x, source, top_k_of(args.in(Op::kRowOf).shape), rows);
  return rows;
}

/// The tensors of one forward call.
struct Product {
  GemmFunction multiply;
  const ExpertSizes& sizes;
  GroupedSide side;
  const Tensor& a;
  const Tensor& weight;
  const Tensor& y;
  std::span<const int64_t> offsets;

  int64_t first_row(int64_t expert) const { return offsets[expert]; }
  int64_t num_rows(int64_t expert) const { return first_row(expert + 1) - first_row(expert); }
  int64_t num_cols(int64_t expert) const {
    return side == GroupedSide::kOut ? sizes[expert] : weight.shape[1];
  }
};

/// A rectangle of one expert's result, rows counted from its first.
struct Part {
  int64_t expert;
  int64_t weight_row;  ///< where the expert's block starts
  int64_t first_row, last_row;
  int64_t first_col, last_col;
};

void multiply(const Product& p, const Part& part) {
  const bool out = p.side == GroupedSide::kOut;
  const int64_t row = p.first_row(part.expert) + part.first_row;
  p.multiply({.transpose_b = out,
              .m = part.last_row - part.first_row,
              .n = part.last_col - part.first_col,
              .k = out ? p.weight.shape[1] : p.sizes[part.expert],
              .a = at(p.a, row, 0),
              .lda = p.a.shape[1],
              .b = out ? at(p.weight, part.weight_row + part.first_col, 0)
                       : at(p.weight, part.weight_row, part.first_col),
              .ldb = p.weight.shape[1],
              .c = at(p.y, row, part.first_col),
              .ldc = p.y.shape[1],
              .input_type = p.a.dtype,
              .output_type = p.y.dtype});
}

/// Where each expert's block of the weight starts, found while walking the experts in order.
class BlockStart {
 public:
  explicit BlockStart(const ExpertSizes& sizes) : sizes_(sizes) {}
  int64_t of(int64_t expert) {
    for (; expert_ < expert; ++expert_) row_ += sizes_[expert_];
    return row_;
  }

 private:
  const ExpertSizes& sizes_;
  int64_t expert_ = 0;
  int64_t row_ = 0;
};

void multiply_by_rows(const Product& p) {
  const auto units_of = [&](int64_t e) { return Units{p.num_rows(e), p.sizes[e]}; };
  const Cut cut(p.sizes.num_experts(), count_parts(), units_of);
#pragma omp parallel for schedule(dynamic, 1)
  for (int part = 0; part < cut.num_parts(); ++part) {
    BlockStart start(p.sizes);
    cut.for_each_in(part, units_of, [&](int64_t e, int64_t first, int64_t last) {
      multiply(p, {e, start.of(e), first, last, 0, p.num_cols(e)});
    });
  }
}

void multiply_by_columns(const Product& p) {
#pragma omp parallel
  {
    BlockStart start(p.sizes);
    for (int64_t e = 0; e < p.sizes.num_experts(); ++e) {
      const auto units_of = [&](int64_t) { return Units{p.num_cols(e), 1}; };
      const Cut cut(1, omp_get_num_threads(), units_of);
      cut.for_each_in(omp_get_thread_num(), units_of, [&](int64_t, int64_t first, int64_t last) {
        multiply(p, {e, start.of(e), 0, p.num_rows(e), first, last});
      });
    }
  }
}

void check_rows(const Tensor& rows, std::span<const int64_t> offsets) {
  ensure(offsets.front() == 0 && offsets.back() == rows.shape[0] && std::ranges::is_sorted(offsets),
         "grouped_matmul: offsets run from {} to {} over {} rows", offsets.front(), offsets.back(),
         rows.shape[0]);
}

template <GemmFunction kMultiply>
void grouped_matmul(const GroupedMatmul& op, const Args<GroupedMatmul>& args) {
  using Op = GroupedMatmul;
  const Tensor a = find_rows(args, args.in(Op::kA), op.gather());
  const Product product{kMultiply,
                        op.sizes(),
                        op.side(),
                        a,
                        args.in(Op::kWeight),
                        args.out(Op::kY),
                        args.in(Op::kOffsets).span<int64_t>()};
  check_rows(product.a, product.offsets);
  const bool few_rows = product.a.shape[0] < kFewRowsPerThread * omp_get_max_threads();
  (few_rows ? multiply_by_columns : multiply_by_rows)(product);
}

/// grad[first..last) of an expert's block = or += narrowᵀ · wide over its rows.
struct WeightGradient {
  const ExpertSizes& sizes;
  const Tensor& narrow;
  const Tensor& wide;
  const Tensor& grad;
  std::span<const int64_t> offsets;
  bool accumulate;

  int64_t first_row(int64_t expert) const { return offsets[expert]; }
  int64_t num_rows(int64_t expert) const { return first_row(expert + 1) - first_row(expert); }

  void add(int64_t expert, int64_t weight_row, int64_t first, int64_t last) const {
    gemm({.transpose_a = true,
          .m = last - first,
          .n = wide.shape[1],
          .k = num_rows(expert),
          .a = at(narrow, first_row(expert), first),
          .lda = narrow.shape[1],
          .b = at(wide, first_row(expert), 0),
          .ldb = wide.shape[1],
          .c = at(grad, weight_row + first, 0),
          .ldc = grad.shape[1],
          .input_type = wide.dtype,
          .output_type = DType::kF32,
          .accumulate = accumulate});
  }
};

void grouped_matmul_wgrad(const GroupedMatmulWgrad& op, const Args<GroupedMatmulWgrad>& args) {
  using Op = GroupedMatmulWgrad;
  if (!args.out(Op::kGradWeight)) return;
  const ExpertSizes& sizes = op.sizes();
  const Tensor wide = find_rows(args, args.in(Op::kWide), op.gather());
  const WeightGradient g{sizes,
                         args.in(Op::kNarrow),
                         wide,
                         args.out(Op::kGradWeight),
                         args.in(Op::kOffsets).span<int64_t>(),
                         !args.set_accumulators && !op.of_value()};
  check_rows(g.wide, g.offsets);
  if (op.of_value() && wide.shape[0] == 0) {
    std::ranges::fill(g.grad.span<float>(), 0.0F);
    return;
  }
  const auto units_of = [&](int64_t e) {
    // Without rows nothing is added, but zeros are written.
    return g.num_rows(e) == 0 && g.accumulate ? Units{}
                                              : Units{sizes[e], g.num_rows(e) + kAccumulatorCost};
  };
  const Cut cut(sizes.num_experts(), count_parts(), units_of);
#pragma omp parallel for schedule(dynamic, 1)
  for (int part = 0; part < cut.num_parts(); ++part) {
    BlockStart start(sizes);
    cut.for_each_in(part, units_of, [&](int64_t e, int64_t first, int64_t last) {
      g.add(e, start.of(e), first, last);
    });
  }
}

/// For the rows that are gathered of x.
template <typename Op>
int64_t gathered_bytes(const Op& op, std::span<const ValueType> inputs, const ValueType& x) {
  if (!op.gather()) return 0;
  return inputs[Op::kSource].shape[0] * x.shape[1] * dtype_size(x.dtype);
}

int64_t grouped_matmul_workspace(const GroupedMatmul& op, std::span<const ValueType> inputs) {
  return gathered_bytes(op, inputs, inputs[GroupedMatmul::kA]);
}

int64_t grouped_matmul_wgrad_workspace(const GroupedMatmulWgrad& op,
                                       std::span<const ValueType> inputs) {
  return gathered_bytes(op, inputs, inputs[GroupedMatmulWgrad::kWide]);
}

}  // namespace

void add_grouped_matmul_cpu(KernelTable& table) {
  add_kernel<GroupedMatmul>(table, grouped_matmul<gemm>,
                            {.workspace = grouped_matmul_workspace, .takes = takes_f16});
  add_kernel<GroupedMatmulWgrad>(
      table, grouped_matmul_wgrad,
      {.workspace = grouped_matmul_wgrad_workspace, .sets_accumulators = true, .takes = takes_f16});
  add_kernel<GroupedMatmulWgrad>(table, GroupedMatmulWgrad::kOfValue, grouped_matmul_wgrad,
                                 {.workspace = grouped_matmul_wgrad_workspace});
}

void add_grouped_matmul_of_rows_cpu(KernelTable& table) {
  add_kernel<GroupedMatmul>(table, grouped_matmul<gemm_of_rows>,
                            {.workspace = grouped_matmul_workspace});
}

}  // namespace tessera
