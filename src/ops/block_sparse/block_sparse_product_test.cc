#include "ops/block_sparse/block_sparse_product.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "core/testing/case_share.h"
#include "ops/block_sparse/topology.h"
#include "ops/testing/op_test.h"

namespace tessera {
namespace {

using testing::random_tensor;
using testing::Role;
using testing::TestInput;
using testing::to_doubles;

/// A dense matrix in double, the reference's only data type.
struct Dense {
  int64_t rows = 0;
  int64_t cols = 0;
  std::vector<double> values;

  Dense(int64_t num_rows, int64_t num_cols)
      : rows(num_rows), cols(num_cols), values(static_cast<size_t>(num_rows * num_cols), 0.0) {}
  double& at(int64_t row, int64_t col) { return values[row * cols + col]; }
  double at(int64_t row, int64_t col) const { return values[row * cols + col]; }
};

Dense dense_of(const Tensor& tensor) {
  Dense matrix(tensor.shape[0], tensor.shape[1]);
  matrix.values = to_doubles(tensor);
  return matrix;
}

Dense transpose_if(bool transposed, const Dense& matrix) {
  if (!transposed) return matrix;
  Dense result(matrix.cols, matrix.rows);
  for (int64_t row = 0; row < matrix.rows; ++row) {
    for (int64_t col = 0; col < matrix.cols; ++col) result.at(col, row) = matrix.at(row, col);
  }
  return result;
}

Dense multiply(const Dense& a, const Dense& b) {
  Dense c(a.rows, b.cols);
  for (int64_t row = 0; row < a.rows; ++row) {
    for (int64_t inner = 0; inner < a.cols; ++inner) {
      const double factor = a.at(row, inner);
      for (int64_t col = 0; col < b.cols; ++col) c.at(row, col) += factor * b.at(inner, col);
    }
  }
  return c;
}

/// A topology with the mask that it was made from.
struct Pattern {
  std::vector<uint8_t> mask;
  int64_t block_rows = 0;
  int64_t block_cols = 0;
  BlockTopology topology;

  int64_t size() const { return topology.block_size; }
  int64_t rows() const { return block_rows * size(); }
  int64_t cols() const { return block_cols * size(); }
  int64_t num_blocks() const { return topology.view().num_blocks(); }
  bool has(int64_t row, int64_t col) const { return mask[row * block_cols + col] != 0; }

  /// Calls visit(row, col, index): each element of a block that is there, with its place in the
  /// documented storage: the blocks of a block-row side by side.
  template <typename Visit>
  void for_each_element(Visit&& visit) const {
    int64_t start = 0;
    for (int64_t block_row = 0; block_row < block_rows; ++block_row) {
      std::vector<int64_t> cols_there;
      for (int64_t col = 0; col < block_cols; ++col) {
        if (has(block_row, col)) cols_there.push_back(col);
      }
      const auto width = static_cast<int64_t>(cols_there.size()) * size();
      for (int64_t i = 0; i < size() * width; ++i) {
        const int64_t block_col = cols_there[i % width / size()];
        visit(block_row * size() + i / width, block_col * size() + i % size(), start + i);
      }
      start += size() * width;
    }
  }
};

Pattern make_pattern(int64_t block_rows, int64_t block_cols, double density, int64_t block_size,
                     Random& random) {
  Pattern pattern{std::vector<uint8_t>(block_rows * block_cols), block_rows, block_cols, {}};
  for (uint8_t& there : pattern.mask) there = random.next_uniform() < density ? 1 : 0;
  pattern.topology = make_mask_topology(pattern.mask, block_rows, block_cols, block_size);
  return pattern;
}

Dense dense_of_sparse(const Tensor& values, const Pattern& pattern) {
  const std::vector<double> elements = to_doubles(values);
  Dense matrix(pattern.rows(), pattern.cols());
  pattern.for_each_element(
      [&](int64_t row, int64_t col, int64_t idx) { matrix.at(row, col) = elements[idx]; });
  return matrix;
}

TestInput indices(const std::vector<int32_t>& values, const std::string& name) {
  return {testing::tensor_of_i32({static_cast<int64_t>(values.size())}, values), Role::kConstant,
          name};
}

/// A product with its inputs: operands random, `outer` the extent that is not the topology's.
struct Case {
  BlockSparseProductSpec spec;
  const Pattern* pattern = nullptr;
  int64_t outer = 0;
  DType dtype = DType::kF32;
  Role role = Role::kValue;

  bool sparse(int operand) const { return BlockSparseProduct(spec).is_sparse(operand); }
  bool transposed(int operand) const {
    return operand == 0 ? spec.transpose_left : spec.transpose_right;
  }

  Shape operand_shape(int operand) const {
    if (sparse(operand)) {
      return {pattern->num_blocks(), pattern->size(), pattern->size()};
    }
    // The entering matrix is [shared, outer], or for the other side [outer, shared].
    int64_t shared = operand == 0 ? pattern->rows() : pattern->cols();
    bool shared_first = operand == 0;
    if (spec.kind != ProductKind::kSdd) {
      const bool sparse_transposed = transposed(1 - operand);
      // What of the sparse matrix meets the dense operand: its columns from the left, its rows from
      // the right.
      shared = (operand == 1) != sparse_transposed ? pattern->cols() : pattern->rows();
      shared_first = operand == 1;
    }
    const bool stored_shared_first = shared_first != transposed(operand);
    return stored_shared_first ? Shape{shared, outer} : Shape{outer, shared};
  }

  std::vector<TestInput> inputs(Random& random) const {
    std::vector<TestInput> list;
    for (int operand = 0; operand < 2; ++operand) {
      const bool weight = spec.weight == operand;
      list.push_back({random_tensor(dtype, operand_shape(operand), random),
                      weight ? Role::kWeight : role, operand == 0 ? "left" : "right"});
    }
    const BlockTopology& topology = pattern->topology;
    list.push_back(indices(topology.row_offsets, "row_offsets"));
    list.push_back(indices(topology.col_indices, "col_indices"));
    list.push_back(indices(topology.row_indices, "row_indices"));
    list.push_back(indices(topology.col_offsets, "col_offsets"));
    list.push_back(indices(topology.transpose_indices, "transpose_indices"));
    if (BlockSparseProduct(spec).needs_rows()) {
      list.push_back(
          {random_tensor(DType::kF32, {pattern->rows()}, random), Role::kConstant, "rows"});
    }
    return list;
  }

  Dense entering(const std::vector<TestInput>& inputs, int operand) const {
    const Tensor& tensor = inputs[operand].tensor.get();
    const Dense matrix = sparse(operand) ? dense_of_sparse(tensor, *pattern) : dense_of(tensor);
    return transpose_if(transposed(operand), matrix);
  }

  std::string name() const {
    return fmt::format("{} {} {}x{} blocks, outer {}, {}", BlockSparseProduct(spec).name(),
                       BlockSparseProduct(spec).attributes(), pattern->block_rows,
                       pattern->block_cols, outer, dtype_name(dtype));
  }
};

KernelTable kernels() {
  KernelTable table;
  add_block_sparse_product_cpu(table);
  return table;
}

OwnedTensor tensor_of_doubles(const Shape& shape, const std::vector<double>& values) {
  return testing::tensor_of(shape, std::vector<float>(values.begin(), values.end()));
}

/// The reference's product in the output's storage.
OwnedTensor expected_output(const Case& test, const std::vector<TestInput>& inputs) {
  const Dense product = multiply(test.entering(inputs, 0), test.entering(inputs, 1));
  if (test.spec.kind != ProductKind::kSdd) {
    return tensor_of_doubles({product.rows, product.cols}, product.values);
  }
  const Shape shape{test.pattern->num_blocks(), test.pattern->size(), test.pattern->size()};
  std::vector<double> values(shape.num_elements());
  test.pattern->for_each_element(
      [&](int64_t row, int64_t col, int64_t idx) { values[idx] = product.at(row, col); });
  return tensor_of_doubles(shape, values);
}

void check_product(const Case& test, Random& random) {
  SCOPED_TRACE(test.name());
  const auto inputs = test.inputs(random);
  const auto op = make_block_sparse_product(test.spec);
  const auto outputs = testing::run_operator(*op, kernels(), inputs);
  const double tolerance =
      test.dtype == DType::kBF16 && !test.spec.accumulate ? 0x1.01p-8 : 0x1.0p-20;
  testing::expect_rows_near(outputs[0], expected_output(test, inputs), tolerance, test.name());
}

std::vector<BlockSparseProductSpec> all_products(int64_t block_size) {
  std::vector<BlockSparseProductSpec> specs;
  for (const auto kind : {ProductKind::kSdd, ProductKind::kDsd, ProductKind::kDds}) {
    for (const bool left : {false, true}) {
      for (const bool right : {false, true}) {
        specs.push_back({.kind = kind,
                         .block_size = block_size,
                         .transpose_left = left,
                         .transpose_right = right});
      }
    }
  }
  return specs;
}

TEST(BlockSparseProduct, EveryTranspositionOnRandomTopologies) {
  Random random(21, 0);
  for (const auto& [rows, cols] : {std::pair{0, 3}, {3, 0}, {1, 1}, {5, 4}, {3, 8}}) {
    for (const double density : {0.0, 0.4, 0.8, 1.0}) {
      const Pattern pattern = make_pattern(rows, cols, density, 8, random);
      for (const BlockSparseProductSpec& spec : all_products(8)) {
        for (const DType dtype : {DType::kF32, DType::kBF16}) {
          const auto outer = static_cast<int64_t>(random.next_below(40));
          check_product({spec, &pattern, outer, dtype}, random);
        }
      }
    }
  }
}

TEST(BlockSparseProduct, EveryBlockSize) {
  Random random(22, 0);
  for (const int64_t size : {8, 16, 32, 64, 128}) {
    const Pattern pattern = make_pattern(2, 3, 0.6, size, random);
    for (const BlockSparseProductSpec& spec : all_products(size)) {
      check_product({spec, &pattern, 33, DType::kF32}, random);
      check_product({spec, &pattern, 17, DType::kBF16}, random);
    }
  }
}

// Wide enough that a BF16 sum goes through several scratch tiles, and with that many stripes that
// they run side by side.
TEST(BlockSparseProduct, ManyStripesAndScratchTiles) {
  Random random(23, 0);
  const Pattern pattern = make_pattern(40, 36, 0.5, 8, random);
  for (const BlockSparseProductSpec& spec : testing::share_of_cases(all_products(8), 0)) {
    check_product({spec, &pattern, 1100, DType::kBF16}, random);
    check_product({spec, &pattern, 40, DType::kF32}, random);
  }
}

TEST(BlockSparseProduct, AccumulatesIntoF32) {
  Random random(24, 0);
  const Pattern pattern = make_pattern(5, 6, 0.5, 16, random);
  for (BlockSparseProductSpec spec : all_products(16)) {
    if (spec.kind == ProductKind::kSdd) continue;
    spec.accumulate = true;
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      check_product({spec, &pattern, 24, dtype}, random);
    }
  }
}

TEST(BlockSparseProduct, GradientsOfEveryTransposition) {
  Random random(25, 0);
  const Pattern pattern = make_pattern(3, 4, 0.6, 8, random);
  for (BlockSparseProductSpec spec : all_products(8)) {
    for (const int weight : {-1, 0, 1}) {
      spec.weight = weight;
      if (weight >= 0 && BlockSparseProduct(spec).is_sparse(weight)) continue;
      const Case test{spec, &pattern, 5, DType::kF32};
      SCOPED_TRACE(test.name());
      testing::check_gradients(make_block_sparse_product(spec), kernels(), test.inputs(random),
                               {.outputs = {}, .max_probes = 12});
    }
  }
}

TEST(BlockSparseProduct, RefusesShapesThatDoNotFit) {
  Random random(26, 0);
  const Pattern pattern = make_pattern(3, 4, 1.0, 8, random);
  const auto infer = [&](const BlockSparseProductSpec& spec, const Shape& left,
                         const Shape& right) {
    std::vector<ValueType> types;
    for (const TestInput& input : Case{spec, &pattern, 5}.inputs(random)) {
      types.push_back({input.tensor.get().dtype, input.tensor.get().shape});
    }
    types[0].shape = left;
    types[1].shape = right;
    return BlockSparseProduct(spec).infer(types);
  };
  const BlockSparseProductSpec sdd{.block_size = 8};
  const BlockSparseProductSpec dsd{.kind = ProductKind::kDsd, .block_size = 8};
  EXPECT_NO_THROW(infer(sdd, {24, 5}, {5, 32}));
  EXPECT_THROW(infer(sdd, {24, 5}, {6, 32}), UserError);
  EXPECT_THROW(infer(sdd, {32, 5}, {5, 32}), UserError);
  EXPECT_THROW(infer(sdd, {24, 5}, {5, 24}), UserError);
  EXPECT_THROW(infer(sdd, {12, 8, 8}, {5, 32}), UserError);
  EXPECT_NO_THROW(infer(dsd, {12, 8, 8}, {32, 5}));
  EXPECT_THROW(infer(dsd, {11, 8, 8}, {32, 5}), UserError);
  EXPECT_THROW(infer(dsd, {12, 8, 8}, {24, 5}), UserError);
  EXPECT_THROW(make_block_sparse_product({.block_size = 24}), UserError);
  EXPECT_THROW(make_block_sparse_product({.block_size = 8, .expert_sizes = {8, 12}}), UserError);
  BlockSparseProductSpec experts = sdd;
  experts.expert_sizes = {24, 8};
  EXPECT_NO_THROW(infer(experts, {24, 5}, {5, 32}));
  experts.expert_sizes = {24, 16};
  EXPECT_THROW(infer(experts, {24, 5}, {5, 32}), UserError);
}

TEST(BlockSparseProduct, CountsTheFlopsOfItsBlocks) {
  Random random(27, 0);
  const Pattern pattern = make_pattern(3, 4, 0.7, 8, random);
  for (const BlockSparseProductSpec& spec : all_products(8)) {
    std::vector<ValueType> types;
    for (const TestInput& input : Case{spec, &pattern, 5}.inputs(random)) {
      types.push_back({input.tensor.get().dtype, input.tensor.get().shape});
    }
    const BlockSparseProduct op(spec);
    EXPECT_EQ(op.cost(types, op.infer(types)).flops,
              2.0 * 5 * 64 * static_cast<double>(pattern.num_blocks()));
    BlockSparseProductSpec of_experts = spec;
    of_experts.expert_sizes = {8, 24};
    const BlockSparseProduct experts(of_experts);
    EXPECT_EQ(experts.cost(types, experts.infer(types)).flops, 2.0 * 5 * (3 * 8) * 16);
  }
}

}  // namespace
}  // namespace tessera
