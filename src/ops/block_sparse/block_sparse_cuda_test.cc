#include "ops/block_sparse/block_sparse.h"
#include "ops/testing/gpu_test.h"
#include "ops/testing/op_test.h"
#include "ops/testing/owning_check.h"
#include "runtime/executable.h"

namespace tessera {
namespace {

using testing::CheckedProgram;
using testing::GpuTest;
using testing::OwningCheck;

/// Experts with the rows of each, multiples of the block size.
struct Case {
  int64_t block_size = 16;
  int64_t outer = 24;
  std::vector<int64_t> sizes;
  std::vector<int64_t> rows;
  int64_t spare_rows = 0;  ///< how far the bound of rows is above their number

  std::vector<int64_t> offsets() const {
    std::vector<int64_t> result{0};
    for (const int64_t count : rows) result.push_back(result.back() + count);
    return result;
  }
  int64_t max_rows() const { return offsets().back() + spare_rows; }
};

std::vector<Case> cases() {
  return {{8, 5, {8, 24, 16}, {16, 0, 40}, 19},   {16, 24, {32, 16, 48, 16}, {0, 64, 16, 32}, 16},
          {32, 72, {64, 32}, {96, 0}, 64},        {64, 130, {128, 64, 192}, {64, 128, 0}, 0},
          {128, 96, {256, 128}, {128, 384}, 130}, {16, 8, {16, 16}, {0, 0}, 32}};
}

/// Such as whole experts are multiplied of: one block, experts of one size and of several, several
/// tiles of rows and of columns, experts without rows, rows that no whole tile has.
std::vector<Case> expert_cases() {
  return {{64, 72, {64}, {64}, 0},
          {64, 136, {128, 64, 192}, {64, 128, 0}, 0},
          {64, 520, {320, 320, 320}, {448, 64, 1024}, 64},
          {128, 96, {256, 128}, {128, 384}, 130},
          {128, 264, {128, 384, 128, 256}, {0, 128, 640, 256}, 128},
          {64, 128, {64, 64}, {0, 0}, 128}};
}

/// A product of a dense matrix and one that a topology makes sparse, all of them random.
struct Product {
  BlockSparseProductSpec spec;
  Case shape;

  bool by_rows() const { return (spec.kind == ProductKind::kDsd) != sparse_transposed(); }
  bool sparse_transposed() const {
    return spec.kind == ProductKind::kDsd ? spec.transpose_left : spec.transpose_right;
  }
};

/// A layer's experts as block_sparse.h composes them, forward and backward.
CheckedProgram build_layer(const Case& c, const ActivationFunction& activation, DType dtype) {
  CheckedProgram checked{Program("layer"), {}};
  Program& program = checked.program;
  const int64_t gates = is_gated(activation.kind) ? 2 : 1;
  std::vector<int64_t> first_sizes = c.sizes;
  int64_t inner = 0;
  for (int64_t& size : first_sizes) {
    inner += size;
    size *= gates;
  }
  const ValueId extent = program.add_input("extent", {DType::kI64, {1}});
  const ValueId offsets = program.add_input("offsets", {DType::kI64, {std::ssize(c.sizes) + 1}});
  const ValueId rows = program.add_input("rows", {dtype, {c.max_rows(), c.outer}, 0, extent});
  const ValueId probs = program.add_input("probs", {DType::kF32, {c.max_rows()}, 0, extent});
  const ValueId w1 = program.add_weight("w1", {dtype, {gates * inner, c.outer}});
  const ValueId w2 = program.add_weight("w2", {dtype, {inner, c.outer}});
  const auto t1 =
      program.add(make_block_topology({c.block_size, first_sizes, c.max_rows()}), {offsets});
  const auto t2 =
      program.add(make_block_topology({c.block_size, c.sizes, c.max_rows()}), {offsets});
  const ValueId pre = program.add1(make_block_sparse_fc1(c.block_size, first_sizes),
                                   {rows, w1, t1[0], t1[1], t1[2], t1[3], t1[4]}, "pre");
  const ValueId act = program.add1(make_block_sparse_activation({activation, c.block_size}),
                                   {pre, probs, t2[0], t2[1]}, "act");
  const ValueId y = program.add1(make_block_sparse_fc2(c.block_size, c.sizes),
                                 {act, w2, t2[0], t2[1], t2[2], t2[3], t2[4], probs}, "y");
  program.set_outputs({y});
  checked.request = {.outputs = {y}, .inputs = {rows, probs}};
  return checked;
}

class BlockSparseCuda : public GpuTest {
 protected:
  static OwningCheck check_of(const Case& c, uint64_t seed) {
    OwningCheck check;
    check.seed = seed;
    check.give("offsets", testing::tensor_of_i64({std::ssize(c.sizes) + 1}, c.offsets()));
    check.give("extent", testing::tensor_of_i64({1}, {c.offsets().back()}));
    return check;
  }

  /// `rows` and `cols` are of the operand as it enters the product; only rows of the sparse matrix
  /// are ragged.
  static ValueType dense(DType dtype, int64_t rows, int64_t cols, bool transposed, int ragged_dim,
                         ValueId extent) {
    ValueType type{dtype, transposed ? Shape{cols, rows} : Shape{rows, cols}};
    if (ragged_dim >= 0) {
      type.ragged_dim = transposed ? 1 - ragged_dim : ragged_dim;
      type.extent = extent;
    }
    return type;
  }

  static CheckedProgram build(const Product& p, DType dtype) {
    const Case& c = p.shape;
    CheckedProgram checked{Program("product"), {}};
    Program& program = checked.program;
    const ValueId extent = program.add_input("extent", {DType::kI64, {1}});
    const ValueId offsets = program.add_input("offsets", {DType::kI64, {std::ssize(c.sizes) + 1}});
    const auto t = program.add(make_block_topology({c.block_size, c.sizes, c.max_rows()}),
                               {offsets}, {"t0", "t1", "t2", "t3", "t4", "t5"});
    int64_t cols = 0;
    for (const int64_t size : c.sizes) cols += size;
    const int64_t rows = c.max_rows();
    // The sparse matrix is itself a product, so that its values are its own.
    const ValueId a = program.add_input("a", dense(dtype, rows, c.outer, false, 0, extent));
    const ValueId b = program.add_input("b", dense(dtype, c.outer, cols, false, -1, -1));
    const BlockSparseProductSpec& s = p.spec;
    if (s.kind == ProductKind::kSdd) {
      const bool tl = s.transpose_left;
      const ValueId left =
          tl ? program.add_input("left", dense(dtype, rows, c.outer, true, 0, extent)) : a;
      const ValueId right =
          s.transpose_right ? program.add_input("right", dense(dtype, c.outer, cols, true, -1, -1))
                            : b;
      const ValueId out = program.add1(make_block_sparse_product(s),
                                       {left, right, t[0], t[1], t[2], t[3], t[4]}, "out");
      std::vector<ValueId> outputs(t.begin(), t.end());
      outputs.push_back(out);
      program.set_outputs(outputs);
      return checked;
    }
    const ValueId sparse = program.add1(
        make_block_sparse_product({.kind = ProductKind::kSdd, .block_size = c.block_size}),
        {a, b, t[0], t[1], t[2], t[3], t[4]}, "sparse");
    const bool sparse_left = s.kind == ProductKind::kDsd;
    const bool transposed = sparse_left ? s.transpose_right : s.transpose_left;
    // The dense operand's dim that the sum runs over is the sparse matrix's columns or rows.
    const int64_t cross = p.by_rows() ? cols : rows;
    const int ragged = p.by_rows() ? -1 : (sparse_left ? 0 : 1);
    const ValueId other = program.add_input(
        "other", sparse_left ? dense(dtype, cross, c.outer, transposed, ragged, extent)
                             : dense(dtype, c.outer, cross, transposed, ragged, extent));
    std::vector<ValueId> inputs = {sparse_left ? sparse : other, sparse_left ? other : sparse};
    inputs.insert(inputs.end(), t.begin(), t.begin() + BlockTopologyOp::kNumBlocks);
    if (p.by_rows()) {
      // DDSᵀ has the rows as its last dim, and takes them from a value's last dim.
      ValueType like{DType::kF32, {rows}, 0, extent};
      inputs.push_back(program.add_input("like", like));
    }
    const OperatorPtr op = make_block_sparse_product(s);
    std::vector<ValueId> sums;
    if (s.accumulate)
      sums.push_back(program.add_accumulator("sum", op->infer(program.types(inputs))[0]));
    const ValueId out = program.add(op, inputs, {"out"}, sums)[0];
    program.set_outputs({s.accumulate ? sparse : out});
    return checked;
  }

  void check(const Product& p, uint64_t seed) {
    SCOPED_TRACE(fmt::format("{} {} outer {}", make_block_sparse_product(p.spec)->name(),
                             make_block_sparse_product(p.spec)->attributes(), p.shape.outer));
    testing::check_on_gpu([&](DType dtype) { return build(p, dtype); }, cpu(), gpu(),
                          check_of(p.shape, seed));
  }

  void check_tiny_layer(const Case& c, DType dtype) const {
    OwningCheck how = check_of(c, 90);
    how.dtypes = {dtype};
    how.once = true;
    testing::check_on_gpu([&](DType type) { return build_layer(c, Activation::kSwiGLU, type); },
                          cpu(), gpu(), how);
  }

  /// All products, with the promise that the topology is that of experts or without.
  void check_all(const Case& c, const std::vector<int64_t>& expert_sizes, uint64_t& seed) {
    for (const ProductKind kind : {ProductKind::kSdd, ProductKind::kDsd, ProductKind::kDds}) {
      for (const bool left : {false, true}) {
        for (const bool right : {false, true}) {
          check({{.kind = kind,
                  .block_size = c.block_size,
                  .transpose_left = left,
                  .transpose_right = right,
                  .expert_sizes = expert_sizes},
                 c},
                ++seed);
        }
      }
    }
  }
};

TEST_F(BlockSparseCuda, EveryProduct) {
  uint64_t seed = 1;
  for (const Case& c : cases()) check_all(c, {}, seed);
}

TEST_F(BlockSparseCuda, EveryProductOfExperts) {
  uint64_t seed = 100;
  for (const Case& c : expert_cases()) check_all(c, c.sizes, seed);
}

TEST_F(BlockSparseCuda, GradientsOfWeights) {
  uint64_t seed = 300;
  for (const bool of_experts : {false, true}) {
    for (const Case& c : expert_cases()) {
      for (const ProductKind kind : {ProductKind::kDsd, ProductKind::kDds}) {
        check({{.kind = kind,
                .block_size = c.block_size,
                .transpose_left = true,
                .accumulate = true,
                .expert_sizes = of_experts ? c.sizes : std::vector<int64_t>{}},
               c},
              ++seed);
      }
    }
  }
}

TEST_F(BlockSparseCuda, ALayerOfExperts) {
  uint64_t seed = 50;
  for (const auto& activation : std::initializer_list<ActivationFunction>{
           Activation::kSwiGLU,
           Activation::kGeGLU,
           Activation::kGeGLUTanh,
           Activation::kGelu,
           Activation::kGeluTanh,
           {Activation::kSwiGLUOai, 0.75},
           {Activation::kSwiGLUClamped, 1.25},
           Activation::kRelu2,
       }) {
    for (const Case& c : cases()) {
      SCOPED_TRACE(fmt::format("{} block {}", to_string(activation), c.block_size));
      testing::check_on_gpu([&](DType dtype) { return build_layer(c, activation, dtype); }, cpu(),
                            gpu(), check_of(c, ++seed));
    }
  }
}

TEST_F(BlockSparseCuda, ALayerOfWholeExperts) {
  uint64_t seed = 80;
  for (const Case& c : expert_cases()) {
    SCOPED_TRACE(fmt::format("block {} outer {}", c.block_size, c.outer));
    testing::check_on_gpu([&](DType dtype) { return build_layer(c, Activation::kSwiGLU, dtype); },
                          cpu(), gpu(), check_of(c, ++seed));
  }
}

/// Experts of different sizes, one without rows, and all products, forward and backward.
Case tiny_case(int64_t block_size) {
  return {block_size,
          24,
          {2 * block_size, block_size, block_size},
          {block_size, 0, 2 * block_size},
          block_size};
}

TEST_F(BlockSparseCuda, TinyBlocksExact) {
  check_tiny_layer(tiny_case(8), DType::kF32);
}

TEST_F(BlockSparseCuda, TinyBlocksOfFragments) {
  check_tiny_layer(tiny_case(16), DType::kBF16);
}

TEST_F(BlockSparseCuda, TinyBlocksOfWholeExperts) {
  check_tiny_layer(tiny_case(128), DType::kBF16);
}

TEST_F(BlockSparseCuda, TinyFragmentsOfWideBlocks) {
  const Case c = tiny_case(64);
  OwningCheck how = check_of(c, 91);
  how.dtypes = {DType::kBF16};
  how.once = true;
  const Product product = {{.kind = ProductKind::kDsd, .block_size = 64}, c};
  testing::check_on_gpu([&](DType type) { return build(product, type); }, cpu(), gpu(), how);
}

TEST_F(BlockSparseCuda, RefusesAnotherRaggedDim) {
  const Case c = cases()[1];
  const auto build_ragged = [&](DType dtype) {
    CheckedProgram checked{Program("product"), {}};
    Program& program = checked.program;
    const ValueId extent = program.add_input("extent", {DType::kI64, {1}});
    const ValueId offsets = program.add_input("offsets", {DType::kI64, {std::ssize(c.sizes) + 1}});
    const auto t =
        program.add(make_block_topology({c.block_size, c.sizes, c.max_rows()}), {offsets});
    const ValueId a = program.add_input("a", {dtype, {c.max_rows(), 32}, 1, extent});
    const ValueId b = program.add_input("b", {dtype, {32, 112}, 0, extent});
    program.set_outputs({program.add1(
        make_block_sparse_product({.kind = ProductKind::kSdd, .block_size = c.block_size}),
        {a, b, t[0], t[1], t[2], t[3], t[4]}, "out")});
    return checked;
  };
  EXPECT_THROW(Executable(build_ragged(DType::kF32).program, gpu()), UserError);
}

}  // namespace
}  // namespace tessera
