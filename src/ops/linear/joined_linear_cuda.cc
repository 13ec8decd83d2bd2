#include <algorithm>
#include <vector>

#include "ops/cuda/matrix_product.h"
#include "ops/cuda/tensor_map.h"
#include "ops/linear/joined_linear.h"
#include "ops/linear/joined_linear_kernels.h"
#include "ops/linear/linear_products.h"

namespace tessera {
namespace {

using namespace cuda;

static_assert(JoinedLinear::kMost == kMostJoined);

bool is_whole(const Tensor& matrix) {
  return matrix.num_elements() > 0 && matrix.shape[1] % 8 == 0 &&
         reinterpret_cast<uintptr_t>(matrix.data) % 16 == 0;
}

/// Whether the kernel takes products with these results of `rows` and weights, and is the quickest.
bool suits_kernel(std::span<const Tensor> operands, std::span<const Tensor> results) {
  if (operands.front().dtype != DType::kBF16) return false;
  std::vector<int64_t> features;
  for (const Tensor& result : results) features.push_back(result.shape[1]);
  return suits_joined_kernel(count_joined_tiles(results.front().shape[0], features)) &&
         std::ranges::all_of(operands, is_whole) && std::ranges::all_of(results, is_whole);
}

CUtensorMap map_of(const Tensor& matrix, int box_rows) {
  return make_tensor_map({matrix.data, matrix.shape[0], matrix.shape[1]}, box_rows);
}

JoinedProduct product_of(const Tensor& rows, const Tensor& weight, int64_t features, void* y) {
  return {.rows = map_of(rows, kJoinedRows),
          .weight = map_of(weight, kJoinedFeatures),
          .reduction = static_cast<int>(rows.shape[1]),
          .features = static_cast<int>(features),
          .y = y};
}

/// Appends a product whose tiles are behind those of the others.
void append(JoinedProducts& all, const JoinedProduct& product) {
  all.products[all.count] = product;
  const int tiles = (product.features + kJoinedFeatures - 1) / kJoinedFeatures;
  all.first_tile[all.count + 1] = all.first_tile[all.count] + tiles;
  ++all.count;
}

void joined_linear(const JoinedLinear& op, const KernelArgs& args) {
  const Tensor& x = args.in(JoinedLinear::kX);
  if (suits_kernel(args.inputs, args.outputs)) {
    JoinedProducts all{};
    all.num_rows = x.shape[0];
    for (int i = 0; i < op.count(); ++i) {
      const Tensor& y = args.out(i);
      append(all, product_of(x, args.in(JoinedLinear::kFirstWeight + i), y.shape[1], y.data));
    }
    return launch_joined_products(all, stream_of(args));
  }
  for (int i = 0; i < op.count(); ++i) {
    Gemm product = forward_product(x, args.in(JoinedLinear::kFirstWeight + i));
    product.c = args.out(i).data;
    multiply(args, product);
  }
}

void joined_linear_dgrad(const JoinedLinearDgrad& op, const KernelArgs& args) {
  const Tensor& grad_x = args.out(JoinedLinearDgrad::kGradX);
  const void* addend = op.addend() ? args.in(2 * op.count()).data : nullptr;
  if (suits_kernel(args.inputs, args.outputs) &&
      reinterpret_cast<uintptr_t>(addend) % alignof(uint32_t) == 0) {
    JoinedProducts all{};
    all.num_rows = grad_x.shape[0];
    all.addend = addend;
    all.sum = grad_x.data;
    for (int i = 0; i < op.count(); ++i)
      append(all, product_of(args.in(2 * i), args.in(2 * i + 1), grad_x.shape[1], nullptr));
    return launch_summed_products(all, stream_of(args));
  }
  for (int i = 0; i < op.count(); ++i) {
    Gemm product = input_grad_product(args.in(2 * i), args.in(2 * i + 1));
    product.c = grad_x.data;
    multiply(args, product, addend);
    addend = grad_x.data;
  }
}

/// The gradients of weights that are wanted.
bool suits_gradients(const KernelArgs& args) {
  const Tensor& x = args.in(JoinedLinearWgrad::kX);
  if (x.dtype != DType::kBF16) return false;
  std::vector<int64_t> features;
  for (const Tensor& grad : args.inputs.subspan(JoinedLinearWgrad::kFirstGrad))
    features.push_back(grad.shape[1]);
  return suits_joined_kernel(count_joined_tiles(x.shape[0], features)) &&
         std::ranges::all_of(args.inputs, is_whole) &&
         std::ranges::all_of(args.outputs, [](const Tensor& sums) {
           return reinterpret_cast<uintptr_t>(sums.data) % alignof(float2) == 0;
         });
}

void joined_linear_wgrad(const JoinedLinearWgrad& op, const KernelArgs& args) {
  const Tensor& x = args.in(JoinedLinearWgrad::kX);
  const bool joined = suits_gradients(args);
  JoinedGradients all{};
  all.num_rows = static_cast<int>(x.shape[0]);
  all.width = static_cast<int>(x.shape[1]);
  all.accumulate = !args.set_accumulators;
  if (joined) all.x = map_of(x, kJoinedFeatures);
  for (int i = 0; i < op.count(); ++i) {
    const Tensor& grad = args.in(JoinedLinearWgrad::kFirstGrad + i);
    if (!args.out(i)) continue;
    if (joined) {
      const auto features = static_cast<int>(grad.shape[1]);
      all.gradients[all.count] = {map_of(grad, kJoinedFeatures), features, args.out(i).as<float>()};
      all.first_tile[all.count + 1] =
          all.first_tile[all.count] + (features + kJoinedFeatures - 1) / kJoinedFeatures;
      ++all.count;
      continue;
    }
    Gemm product = weight_grad_product(x, grad);
    product.c = args.out(i).data;
    product.accumulate = !args.set_accumulators;
    multiply(args, product);
  }
  if (joined) launch_joined_gradients(all, stream_of(args));
}

}  // namespace

void add_joined_linear_cuda(KernelTable& table) {
  add_kernel<JoinedLinear>(table, joined_linear);
  add_kernel<JoinedLinearDgrad>(table, joined_linear_dgrad);
  add_kernel<JoinedLinearWgrad>(table, joined_linear_wgrad, {.sets_accumulators = true});
}

}  // namespace tessera
