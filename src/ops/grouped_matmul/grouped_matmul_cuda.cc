#include "ops/grouped_matmul/grouped_matmul_cuda.h"

#include <limits>

#include "ops/cuda/check.h"
#include "ops/cuda/tensor_map.h"
#include "ops/grouped_matmul/grouped_kernels.h"
#include "ops/grouped_matmul/grouped_matmul.h"
#include "ops/grouped_matmul/grouped_tile_rule.h"
#include "ops/permute/row_maps.h"

namespace tessera::cuda {
namespace {

std::vector<int> block_begins(const ExpertSizes& sizes) {
  ensure(sizes.total() <= std::numeric_limits<int>::max(),
         "grouped product: experts of {} rows in all", sizes.total());
  std::vector<int> begins{0};
  for (const int64_t size : sizes.values())
    begins.push_back(begins.back() + static_cast<int>(size));
  return begins;
}

bool is_aligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

/// Whether the kernels on tensor cores take these matrices: the copy engine wants rows that begin
/// at multiples of 16 bytes.
bool fits_tensor_cores(const ExpertBlocks& experts, DType dtype,
                       std::initializer_list<const void*> matrices) {
  return runs_in_tiles({.dtype = dtype,
                        .num_experts = experts.num_experts,
                        .wide = experts.wide,
                        .largest = experts.largest}) &&
         std::ranges::all_of(matrices, is_aligned);
}

void check_type(DType dtype) {
  ensure(is_factor(dtype), "a grouped product of {}", dtype_name(dtype));
}

PlainRowsParams plain_params(const GroupedRows& product) {
  const ExpertBlocks& experts = product.experts;
  return {.a = product.a,
          .weight = product.weight,
          .y = product.y,
          .block_begin = experts.begin,
          .offsets = experts.offsets,
          .num_experts = experts.num_experts,
          .num_rows = product.num_rows,
          .wide = experts.wide,
          .largest = experts.largest,
          .source = product.gather.source,
          .top_k = product.gather.top_k};
}

/// Whether matrices of 16 bits can be read in vectors.
bool are_in_vectors(const ExpertBlocks& experts, std::initializer_list<const void*> matrices) {
  constexpr int64_t kVector = 8;
  return experts.total == experts.num_experts * experts.largest && experts.wide % kVector == 0 &&
         experts.largest % kVector == 0 && std::ranges::all_of(matrices, is_aligned);
}

/// Whether launch_few_rows takes the product, and is the quickest.
bool is_few(const GroupedRows& product) {
  return product.dtype == DType::kBF16 && product.num_rows <= kFewRows &&
         are_in_vectors(product.experts, {product.a, product.weight, product.y});
}

PlainWgradParams plain_params(const GroupedWgrad& product) {
  const ExpertBlocks& experts = product.experts;
  return {.narrow = product.narrow,
          .wide_rows = product.wide,
          .grad = product.grad,
          .block_begin = experts.begin,
          .offsets = experts.offsets,
          .num_experts = experts.num_experts,
          .wide = experts.wide,
          .largest = experts.largest,
          .total = experts.total,
          .accumulate = product.accumulate,
          .source = product.gather.source,
          .top_k = product.gather.top_k};
}

template <typename Product>
void check_half(const Product& product) {
  ensure(product.gather.source == nullptr, "a grouped product of F16 gathers no rows");
}

/// Rows of the wide operand that lie in memory.
template <typename Product>
int64_t num_given(const Product& product) {
  return product.gather.source == nullptr ? product.num_rows : product.gather.num_tokens;
}

void run_on_tensor_cores(const GroupedRows& product, cudaStream_t stream) {
  const ExpertBlocks& experts = product.experts;
  const int64_t a_columns = product.by_out ? experts.wide : experts.largest;
  const int64_t y_columns = product.by_out ? experts.largest : experts.wide;
  GroupedRowsParams params = {
      .weight = make_tensor_map({product.weight, experts.total, experts.wide},
                                product.by_out ? kGroupedFeatures : kGroupedReduction),
      .a = make_tensor_map({product.a, num_given(product), a_columns}, kGroupedBoxRows),
      .y_map = make_tensor_map({product.y, product.num_rows, y_columns}, kGroupedStoreRows),
      .y = product.y,
      .y_columns = static_cast<int>(y_columns),
      .source = product.gather.source,
      .top_k = Divider(static_cast<uint32_t>(product.gather.top_k)),
      .tokens = product.a,
      .num_source = product.num_rows};
  set_experts(params, experts, product.counter);
  launch_grouped_rows(params, product.by_out, stream);
}

void run_on_tensor_cores(const GroupedWgrad& product, cudaStream_t stream) {
  const ExpertBlocks& experts = product.experts;
  const GroupedWgradParams params = {
      .narrow =
          make_tensor_map({product.narrow, product.num_rows, experts.largest}, kGroupedReduction),
      .wide = make_tensor_map({product.wide, num_given(product), experts.wide}, kGroupedReduction),
      .grad = product.grad,
      .block_begin = experts.begin,
      .offsets = experts.offsets,
      .num_experts = experts.num_experts,
      .num_columns = static_cast<int>(experts.wide),
      .num_rows = product.num_rows,
      .weight_rows = experts.total,
      .accumulate = product.accumulate,
      .counter = product.counter,
      .source = product.gather.source,
      .top_k = Divider(static_cast<uint32_t>(product.gather.top_k)),
      .tokens = product.wide,
      .num_source = product.num_rows};
  launch_grouped_wgrad(params, stream);
}

}  // namespace

int num_clusters() {
  int device = 0;
  int count = 0;
  check(cudaGetDevice(&device));
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return count / 2;
}

void set_experts(GroupedRowsParams& params, const ExpertBlocks& experts, int* counter) {
  params.block_begin = experts.begin;
  params.offsets = experts.offsets;
  params.num_experts = experts.num_experts;
  params.wide = static_cast<int>(experts.wide);
  params.counter = counter;
}

ExpertBlocks ExpertTables::blocks(const ExpertSizes& sizes, int64_t wide) {
  auto found = tables_.find(sizes.values());
  if (found == tables_.end()) {
    const std::vector<int> begins = block_begins(sizes);
    const size_t num_bytes = begins.size() * sizeof(int);
    found = tables_.emplace(sizes.values(), DeviceBuffer(num_bytes)).first;
    check(cudaMemcpyAsync(found->second.as<void>(), begins.data(), num_bytes,
                          cudaMemcpyHostToDevice, stream_));
    check(cudaStreamSynchronize(stream_));
  }
  return {.num_experts = static_cast<int>(sizes.num_experts()),
          .begin = found->second.as<int>(),
          .wide = wide,
          .largest = sizes.largest(),
          .total = sizes.total(),
          .in_tiles = parts_in_tiles(sizes)};
}

void grouped_rows(const GroupedRows& product, cudaStream_t stream) {
  check_type(product.dtype);
  ensure(product.by_out || product.gather.source == nullptr,
         "a grouped product gathers rows of the narrow matrix");
  if (product.num_rows == 0 || (!product.by_out && product.experts.wide == 0)) return;
  if (product.dtype == DType::kF16) {
    check_half(product);
    return launch_half_rows(plain_params(product), product.by_out,
                            are_in_vectors(product.experts, {product.a, product.weight}), stream);
  }
  const bool fits =
      num_given(product) > 0 &&
      fits_tensor_cores(product.experts, product.dtype, {product.a, product.weight, product.y}) &&
      (product.by_out || product.experts.in_tiles);
  if (is_few(product)) return launch_few_rows(plain_params(product), product.by_out, stream);
  if (fits) return run_on_tensor_cores(product, stream);
  launch_plain_rows(plain_params(product), product.by_out, product.dtype, stream);
}

void grouped_wgrad(const GroupedWgrad& product, cudaStream_t stream) {
  check_type(product.dtype);
  if (product.experts.wide == 0 || (product.num_rows == 0 && product.accumulate)) return;
  if (product.dtype == DType::kF16) {
    check_half(product);
    return launch_half_wgrad(plain_params(product),
                             are_in_vectors(product.experts, {product.narrow, product.wide}),
                             stream);
  }
  const bool fits = product.num_rows > 0 && num_given(product) > 0 &&
                    fits_tensor_cores(product.experts, product.dtype,
                                      {product.narrow, product.wide, product.grad});
  if (fits) return run_on_tensor_cores(product, stream);
  launch_plain_wgrad(plain_params(product), product.dtype, stream);
}

}  // namespace tessera::cuda

namespace tessera {
namespace {

using cuda::context_of;
using cuda::stream_of;

template <typename Op>
cuda::ExpertBlocks blocks_of(const Args<Op>& args, const ExpertSizes& sizes, int64_t wide) {
  cuda::CudaContext& context = context_of(args);
  cuda::ExpertBlocks blocks = context.get<cuda::ExpertTables>().blocks(sizes, wide);
  blocks.offsets = args.in(Op::kOffsets).template as<int64_t>();
  return blocks;
}

/// The sources of gathered rows, and how many rows they make; those of `wide` where none are.
struct Rows {
  cuda::RowSource source;
  int64_t count = 0;
};
template <typename Op>
Rows find_rows(const Args<Op>& args, const Tensor& wide, bool gather) {
  if (!gather) return {{}, wide.shape[0]};
  const Tensor& source = args.in(Op::kSource);
  return {{.source = source.as<int32_t>(),
           .top_k = static_cast<int>(top_k_of(args.in(Op::kRowOf).shape)),
           .num_tokens = wide.shape[0]},
          source.shape[0]};
}

void grouped_matmul(const GroupedMatmul& op, const Args<GroupedMatmul>& args) {
  using Op = GroupedMatmul;
  const Tensor& a = args.in(Op::kA);
  const Tensor& weight = args.in(Op::kWeight);
  const Rows rows = find_rows(args, a, op.gather());
  cuda::grouped_rows({.experts = blocks_of(args, op.sizes(), weight.shape[1]),
                      .dtype = a.dtype,
                      .by_out = op.side() == GroupedSide::kOut,
                      .num_rows = rows.count,
                      .a = a.data,
                      .weight = weight.data,
                      .y = args.out(Op::kY).data,
                      .counter = context_of(args).get<cuda::ExpertTables>().counter(),
                      .gather = rows.source},
                     stream_of(args));
}

void grouped_matmul_wgrad(const GroupedMatmulWgrad& op, const Args<GroupedMatmulWgrad>& args) {
  using Op = GroupedMatmulWgrad;
  if (!args.out(Op::kGradWeight)) return;
  const Tensor& narrow = args.in(Op::kNarrow);
  const Tensor& wide = args.in(Op::kWide);
  const Rows rows = find_rows(args, wide, op.gather());
  cuda::grouped_wgrad({.experts = blocks_of(args, op.sizes(), wide.shape[1]),
                       .dtype = narrow.dtype,
                       .num_rows = rows.count,
                       .narrow = narrow.data,
                       .wide = wide.data,
                       .grad = args.out(Op::kGradWeight).as<float>(),
                       .accumulate = !args.set_accumulators && !op.of_value(),
                       .counter = context_of(args).get<cuda::ExpertTables>().counter(),
                       .gather = rows.source},
                      stream_of(args));
}

}  // namespace

void add_grouped_matmul_cuda(KernelTable& table) {
  add_kernel<GroupedMatmul>(table, grouped_matmul, {.takes = takes_f16});
  add_kernel<GroupedMatmulWgrad>(table, grouped_matmul_wgrad,
                                 {.sets_accumulators = true, .takes = takes_f16});
  add_kernel<GroupedMatmulWgrad>(table, GroupedMatmulWgrad::kOfValue, grouped_matmul_wgrad);
}

}  // namespace tessera
