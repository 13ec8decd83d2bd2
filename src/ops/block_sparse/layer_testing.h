#pragma once

#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "ops/block_sparse/block_sparse.h"
#include "ops/expert_activation/expert_activation.h"
#include "ops/grouped_matmul/grouped_matmul.h"
#include "ops/testing/op_test.h"
#include "ops/testing/program_run.h"

/// The experts of one layer by either implementation, for tests and the benchmark.
namespace tessera::testing {

/// One layer's experts with a routing: `rows` without padding, per expert.
struct LayerCase {
  Activation activation = Activation::kSwiGLU;
  DType dtype = DType::kF32;
  int64_t block_size = 16;
  int64_t hidden = 24;
  std::vector<int64_t> sizes;
  std::vector<int64_t> rows;
  int64_t spare_rows = 40;  ///< how far the bound of rows is above the actual number

  int64_t gates() const { return is_gated(activation) ? 2 : 1; }
  int64_t inner() const { return std::accumulate(sizes.begin(), sizes.end(), int64_t{0}); }
  std::vector<int64_t> first_sizes() const {
    std::vector<int64_t> result = sizes;
    for (int64_t& size : result) size *= gates();
    return result;
  }
  std::vector<int64_t> offsets() const {
    std::vector<int64_t> result = {0};
    for (const int64_t count : rows) {
      result.push_back(result.back() + (count + block_size - 1) / block_size * block_size);
    }
    return result;
  }
  int64_t max_rows() const { return offsets().back() + spare_rows; }
};

/// The bound values of a layer's program.
struct LayerValues {
  ValueId extent, offsets, rows_RH, probs_R, w1, w2, y_RH;
};

inline LayerValues add_layer_inputs(const LayerCase& layer, Program& program) {
  const auto num_offsets = static_cast<int64_t>(layer.sizes.size()) + 1;
  LayerValues v{};
  v.extent = program.add_input("extent", {DType::kI64, {1}});
  v.offsets = program.add_input("offsets", {DType::kI64, {num_offsets}});
  v.rows_RH =
      program.add_input("rows", {layer.dtype, {layer.max_rows(), layer.hidden}, 0, v.extent});
  v.probs_R = program.add_input("probs", {DType::kF32, {layer.max_rows()}, 0, v.extent});
  v.w1 = program.add_weight("w1", {layer.dtype, {layer.gates() * layer.inner(), layer.hidden}});
  v.w2 = program.add_weight("w2", {layer.dtype, {layer.inner(), layer.hidden}});
  return v;
}

/// As the comment of block_sparse.h composes it, over all inputs; gives y_RH.
inline ValueId add_block_sparse_experts(const LayerCase& layer, const LayerValues& v,
                                        Program& program) {
  const int64_t size = layer.block_size;
  const int64_t max_rows = program.type(v.rows_RH).shape[0];
  const auto topology = [&](const std::vector<int64_t>& sizes) {
    return program.add(make_block_topology({size, sizes, max_rows}), {v.offsets});
  };
  const auto t1 = topology(layer.first_sizes());
  const auto t2 = topology(layer.sizes);
  const ValueId pre = program.add1(make_block_sparse_fc1(size, layer.first_sizes()),
                                   {v.rows_RH, v.w1, t1[0], t1[1], t1[2], t1[3], t1[4]}, "pre");
  const ValueId act = program.add1(make_block_sparse_activation({layer.activation, size}),
                                   {pre, v.probs_R, t2[0], t2[1]}, "act");
  return program.add1(make_block_sparse_fc2(size, layer.sizes),
                      {act, v.w2, t2[0], t2[1], t2[2], t2[3], t2[4], v.probs_R}, "y");
}

inline LayerValues build_block_sparse_layer(const LayerCase& layer, Program& program) {
  LayerValues v = add_layer_inputs(layer, program);
  v.y_RH = add_block_sparse_experts(layer, v, program);
  program.set_outputs({v.y_RH});
  return v;
}

inline LayerValues build_grouped_layer(const LayerCase& layer, Program& program) {
  LayerValues v = add_layer_inputs(layer, program);
  const ValueId pre = program.add1(make_grouped_matmul({layer.first_sizes(), GroupedSide::kOut}),
                                   {v.rows_RH, v.w1, v.offsets}, "pre");
  const ValueId act = program.add1(make_expert_activation({layer.activation, layer.sizes, true}),
                                   {pre, v.probs_R, v.offsets}, "act");
  v.y_RH = program.add1(make_grouped_matmul({layer.sizes, GroupedSide::kIn}),
                        {act, v.w2, v.offsets}, "y");
  program.set_outputs({v.y_RH});
  return v;
}

inline KernelTable layer_kernels() {
  KernelTable table;
  add_block_sparse_cpu(table);
  add_grouped_matmul_cpu(table);
  add_expert_activation_cpu(table);
  return table;
}

inline void copy_into(const Tensor& to, const Tensor& from) {
  ensure(from.num_bytes() <= to.num_bytes(), "copy of {} into {} bytes", from.num_bytes(),
         to.num_bytes());
  if (from.num_bytes() > 0) {
    std::memcpy(to.data, from.data, from.num_bytes());
  }
}

/// Sets random inputs; padding rows and their probabilities are zero, what lies past the rows is
/// NaN.
inline void fill_inputs(const LayerCase& layer, const LayerValues& v, const ProgramRun& run,
                        Random& random) {
  const auto offsets = layer.offsets();
  *run.value(v.extent).as<int64_t>() = offsets.back();
  std::ranges::copy(offsets, run.value(v.offsets).as<int64_t>());
  for (const ValueId id : {v.rows_RH, v.probs_R}) {
    std::memset(run.value(id).data, 0xFF, run.value(id).num_bytes());
    const int64_t row_bytes = (id == v.rows_RH ? layer.hidden * dtype_size(layer.dtype) : 4);
    std::memset(run.value(id).data, 0, row_bytes * offsets.back());
  }
  for (size_t expert = 0; expert < layer.rows.size(); ++expert) {
    const int64_t count = layer.rows[expert];
    Tensor part = run.value(v.rows_RH);
    part.data = static_cast<std::byte*>(part.data) +
                offsets[expert] * layer.hidden * dtype_size(layer.dtype);
    part.shape = {count, layer.hidden};
    copy_into(part, random_tensor(layer.dtype, part.shape, random));
    for (int64_t row = 0; row < count; ++row) {
      run.value(v.probs_R).as<float>()[offsets[expert] + row] =
          static_cast<float>(random.next_uniform());
    }
  }
  for (const ValueId id : {v.w1, v.w2}) {
    copy_into(run.value(id), random_tensor(layer.dtype, run.value(id).shape, random, 0.3));
  }
  copy_into(run.grad(v.y_RH), random_tensor(layer.dtype, {offsets.back(), layer.hidden}, random));
}

}  // namespace tessera::testing
