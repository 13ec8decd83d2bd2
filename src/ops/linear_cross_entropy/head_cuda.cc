#include "ops/linear_cross_entropy/head_cuda.h"

#include <algorithm>

#include "ops/cuda/column_sums.h"
#include "ops/cuda/context.h"
#include "ops/cuda/matrix_product.h"
#include "ops/workspace.h"

namespace tessera::cuda {
namespace {

/// A row of logits begins at a multiple of 32 bytes, as the products and vectors like it.
constexpr int64_t kStrideUnit = 8;
constexpr int64_t kMaxColumns = int64_t{1} << 30;

int64_t scratch_bytes(std::span<const ValueType> inputs, const CrossEntropySpec& spec,
                      bool makes_gradients) {
  const HeadCut cut(inputs[HeadOperands::kX].shape, inputs[HeadOperands::kWeight].shape, spec);
  return HeadScratch(cut, inputs[HeadOperands::kX].dtype,
                     makes_gradients && inputs[HeadOperands::kX].ragged(),
                     makes_gradients && spec.biased)
      .num_bytes;
}

}  // namespace

HeadCut::HeadCut(const Shape& x, const Shape& weight, const CrossEntropySpec& spec)
    : T(x[0]), H(x[1]), V(weight[0]), stride(align_up(V, kStrideUnit)), softcap(spec.softcap) {
  constexpr auto kValueBytes = static_cast<int64_t>(sizeof(float));
  const int64_t by_memory = kLogitsBytes / (kValueBytes * std::max<int64_t>(stride, 1));
  chunk = std::min(T, std::max({by_memory / kMinRows * kMinRows, kMinRows, spec.chunk_tokens}));
}

HeadScratch::HeadScratch(const HeadCut& cut, DType type, bool copies_x, bool sums_bias) {
  WorkspaceLayout layout;
  logits = layout.add<float>(cut.chunk * cut.stride);
  if (copies_x) x = layout.add<std::byte>(cut.chunk * cut.H * dtype_size(type));
  if (sums_bias) partials = layout.add<std::byte>(column_sums_bytes(cut.V));
  num_bytes = layout.num_bytes();
}

int64_t losses_scratch_bytes(std::span<const ValueType> inputs, const CrossEntropySpec& spec) {
  return scratch_bytes(inputs, spec, false);
}

int64_t gradients_scratch_bytes(std::span<const ValueType> inputs, const CrossEntropySpec& spec) {
  return scratch_bytes(inputs, spec, true);
}

Head::Head(const KernelArgs& args, const CrossEntropySpec& spec, const VocabularyPart& part,
           bool makes_gradients)
    : args_(args),
      cut_(args.in(HeadOperands::kX).shape, args.in(HeadOperands::kWeight).shape, spec),
      scratch_(cut_, args.in(HeadOperands::kX).dtype,
               makes_gradients && args.in_extent(HeadOperands::kX) != nullptr,
               makes_gradients && spec.biased),
      part_(part),
      x_(args.in(HeadOperands::kX)),
      weight_(args.in(HeadOperands::kWeight)) {
  ensure(cut_.V <= kMaxColumns, "a vocabulary of {}: its columns are counted in 32 bits", cut_.V);
}

HeadRows Head::multiply_logits(int64_t first_token) const {
  const HeadRows rows{.logits = workspace_part<float>(args_.workspace, scratch_.logits),
                      .num_rows = std::min(cut_.chunk, cut_.T - first_token),
                      .num_columns = cut_.V,
                      .stride = cut_.stride,
                      .first_token = first_token,
                      .extent = args_.in_extent(HeadOperands::kX),
                      .labels = args_.in(HeadOperands::kLabels).as<int32_t>(),
                      .first_column = part_.first_row,
                      .vocab_size = part_.vocab_size,
                      .ignored = kIgnoredLabel,
                      .bias = part_.bias,
                      .softcap = cut_.softcap,
                      .dtype = x_.dtype};
  multiply(args_, {.transpose_b = true,
                   .m = rows.num_rows,
                   .n = cut_.V,
                   .k = cut_.H,
                   .a = static_cast<const std::byte*>(x_.data) + first_token * row_bytes(),
                   .lda = cut_.H,
                   .b = weight_.data,
                   .ldb = cut_.H,
                   .c = rows.logits,
                   .ldc = cut_.stride,
                   .input_type = x_.dtype,
                   .output_type = DType::kF32});
  if (rows.softcap > 0 || rows.bias != nullptr) launch_head_finish(rows, stream_of(args_));
  return rows;
}

const void* Head::finite_rows(const HeadRows& rows) const {
  if (rows.extent == nullptr)
    return static_cast<const std::byte*>(x_.data) + rows.first_token * row_bytes();
  auto* const copy = workspace_part<std::byte>(args_.workspace, scratch_.x);
  launch_copy_rows({.from = x_.data,
                    .to = copy,
                    .row_bytes = row_bytes(),
                    .num_rows = rows.num_rows,
                    .first_token = rows.first_token,
                    .extent = rows.extent},
                   stream_of(args_));
  return copy;
}

void Head::add_to_bias(const HeadRows& rows) const {
  if (part_.bias_gradient == nullptr) return;
  launch_head_bias_gradient(
      rows, {.sums = part_.bias_gradient, .sets = args_.set_accumulators && rows.first_token == 0},
      workspace_part<float>(args_.workspace, scratch_.partials), context_of(args_).num_sms(),
      stream_of(args_));
}

void Head::multiply_gradients(const HeadRows& rows, const Tensor& dx, const Tensor& dweight) const {
  const int64_t stride = cut_.stride * (is_low_precision(rows.dtype) ? 2 : 1);
  multiply(args_, {.m = rows.num_rows,
                   .n = cut_.H,
                   .k = cut_.V,
                   .a = rows.logits,
                   .lda = stride,
                   .b = weight_.data,
                   .ldb = cut_.H,
                   .c = static_cast<std::byte*>(dx.data) + rows.first_token * row_bytes(),
                   .ldc = cut_.H,
                   .input_type = x_.dtype,
                   .output_type = x_.dtype});
  add_to_bias(rows);
  if (!dweight) return;
  multiply(args_, {.transpose_a = true,
                   .m = cut_.V,
                   .n = cut_.H,
                   .k = rows.num_rows,
                   .a = rows.logits,
                   .lda = stride,
                   .b = finite_rows(rows),
                   .ldb = cut_.H,
                   .c = dweight.data,
                   .ldc = cut_.H,
                   .input_type = x_.dtype,
                   .output_type = DType::kF32,
                   .accumulate = !args_.set_accumulators || rows.first_token > 0});
}

}  // namespace tessera::cuda
