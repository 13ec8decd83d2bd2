#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <span>
#include <vector>

#include "ops/adamw/adamw.h"
#include "ops/testing/gpu_kernel.h"
#include "ops/testing/op_test.h"

namespace tessera::testing {

/// All that a weight can have beside it: F32 or BF16, with every kind of moments and masters.
inline std::vector<AdamWSpec> list_adamw_specs() {
  constexpr MomentKind kKinds[] = {MomentKind::kF32, MomentKind::kBF16, MomentKind::kF16,
                                   MomentKind::kFp8};
  std::vector<AdamWSpec> specs = {{}, {.formats = {MomentKind::kBF16, MomentKind::kFp8}}};
  for (const MomentKind m : kKinds) {
    for (const MomentKind v : kKinds) {
      for (const MasterKind master :
           {MasterKind::kF32, MasterKind::kRemainder, MasterKind::kRemainder8, MasterKind::kNone})
        specs.push_back({.bf16_weight = true, .formats = {m, v, master}});
    }
  }
  return specs;
}

/// Three updates with gradients in BF16 leave the bits of updates with the same numbers in F32:
/// matrices of `shapes`, one after the other in a call.
inline void check_bf16_gradients(AdamWSpec spec, const std::vector<Shape>& shapes,
                                 const Backend& backend) {
  spec.bf16_grad = true;
  const OperatorPtr narrow = make_adamw(spec);
  spec.bf16_grad = false;
  const OperatorPtr wide = make_adamw(spec);
  SCOPED_TRACE(narrow->attributes());
  Random random(11, shapes.size());
  std::vector<OwnedTensor> narrow_grads, wide_grads, narrow_state, wide_state;
  for (const Shape& matrix : shapes) {
    const Shape shape = spec.formats.have_scales() ? matrix : Shape{matrix.num_elements()};
    const OwnedTensor grad = random_tensor(DType::kBF16, shape, random);
    const OwnedTensor same(DType::kF32, shape);
    std::ranges::copy(grad.get().span<Bf16>(), same.get().as<float>());
    narrow_grads.push_back(copy_to(backend, grad));
    wide_grads.push_back(copy_to(backend, same));
    const ValueType types[] = {{DType::kF32, shape}, {DType::kF32, {8}}, {DType::kF32, {2}}};
    for (const ValueType& type : wide->infer(types)) {
      const OwnedTensor zeros(type.dtype, type.shape);
      std::memset(zeros.get().data, 0, zeros.get().num_bytes());
      narrow_state.push_back(copy_to(backend, zeros));
      wide_state.push_back(copy_to(backend, zeros));
    }
  }
  AdamWGradScale host_scale{0.5F, 0};
  const OwnedTensor scale = copy_to(backend, view_of(host_scale));
  for (int64_t update = 1; update <= 3; ++update) {
    AdamWFactors host_factors = make_adamw_factors(spec, 1e-2, update);
    const OwnedTensor factors = copy_to(backend, view_of(host_factors));
    const auto run = [&](const Operator& op, const std::vector<OwnedTensor>& grads,
                         const std::vector<OwnedTensor>& state) {
      std::vector<Tensor> inputs(grads.begin(), grads.end());
      inputs.insert(inputs.end(), {factors, scale});
      const std::vector<Tensor> outputs(state.begin(), state.end());
      run_kernel(op, backend, inputs, outputs);
    };
    run(*narrow, narrow_grads, narrow_state);
    run(*wide, wide_grads, wide_state);
  }
  for (size_t i = 0; i < wide_state.size(); ++i) {
    const OwnedTensor found = copy_to_host(backend, narrow_state[i]);
    const OwnedTensor expected = copy_to_host(backend, wide_state[i]);
    EXPECT_EQ(std::memcmp(found.get().data, expected.get().data,
                          static_cast<size_t>(expected.get().num_bytes())),
              0)
        << "output " << i;
  }
}

/// Empty, single, ragged and whole blocks.
inline std::vector<Shape> bf16_gradient_shapes() {
  return {{0, 7}, {1, 1}, {3, 130}, {16, 256}, {5, 1000}, {33, 129}};
}

}  // namespace tessera::testing
