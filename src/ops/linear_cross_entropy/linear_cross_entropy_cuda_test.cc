#include "ops/linear_cross_entropy/linear_cross_entropy.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <map>

#include "ops/linear_cross_entropy/vocab_lse.h"
#include "ops/testing/gpu_test.h"
#include "ops/testing/op_test.h"
#include "runtime/executable.h"

namespace tessera::testing {
namespace {

struct Case {
  int64_t T, H, V;
  double deviation = 1;  ///< of x
  int64_t extent = -1;   ///< of ragged tokens, at most T
  int64_t first_row = 0;
  int64_t vocab_size = 0;  ///< of the whole one, where V is a part of it
  bool weighted = false;
  float softcap = 0;
  bool biased = false;

  std::string to_string() const {
    return fmt::format("T {} H {} V {} deviation {} extent {} first row {}{} softcap {}{}", T, H, V,
                       deviation, extent, first_row, weighted ? " weighted" : "", softcap,
                       biased ? " biased" : "");
  }
};

std::vector<int32_t> random_labels(const Case& c, Random& random) {
  const int64_t vocabulary = std::max(c.V, c.vocab_size);
  std::vector<int32_t> labels;
  for (int64_t t = 0; t < c.T; ++t) {
    const auto label = static_cast<int32_t>(random.next_below(static_cast<uint64_t>(vocabulary)));
    labels.push_back(random.next_below(4) == 0 ? kIgnoredLabel : label);
  }
  for (int64_t t = c.extent; t >= 0 && t < c.T; ++t) labels[t] = 1 << 30;
  return labels;
}

using Values = std::map<std::string, OwnedTensor>;

Values make_values(const Case& c) {
  Random random(static_cast<uint64_t>(c.T), static_cast<uint64_t>(c.V));
  OwnedTensor x = random_tensor(DType::kBF16, {c.T, c.H}, random, c.deviation);
  for (int64_t i = c.extent * c.H; i >= 0 && i < c.T * c.H; ++i)
    x.get().as<Bf16>()[i] = Bf16(std::numeric_limits<float>::quiet_NaN());
  Values values;
  values.emplace("x", std::move(x));
  values.emplace("weight", random_tensor(DType::kBF16, {c.V, c.H}, random, 0.7));
  values.emplace("labels", tensor_of_i32({c.T}, random_labels(c, random)));
  values.emplace("scale", tensor_of({1}, {0.25F}));
  OwnedTensor weights = random_tensor(DType::kF32, {c.T}, random, 1.5);
  for (int64_t t = 0; t < c.T; t += 5) weights.get().as<float>()[t] = 0;
  values.emplace("token_weights", std::move(weights));
  values.emplace("bias", random_tensor(DType::kF32, {c.V}, random));
  if (c.extent >= 0) values.emplace("tokens", tensor_of_i64({1}, {c.extent}));
  return values;
}

/// x, weight and labels of a program.
std::vector<ValueId> add_inputs(Program& program, const Case& c, DType dtype) {
  ValueType x{dtype, {c.T, c.H}};
  if (c.extent >= 0) {
    x.ragged_dim = 0;
    x.extent = program.add_input("tokens", {DType::kI64, {1}});
  }
  ValueType labels = with_dtype(x, DType::kI32);
  labels.shape = {c.T};
  return {program.add_input("x", x), program.add_weight("weight", {dtype, {c.V, c.H}}),
          program.add_input("labels", labels)};
}

/// The last input, where there is one.
void add_bias(Program& program, const Case& c, std::vector<ValueId>& inputs) {
  if (c.biased) inputs.push_back(program.add_weight("bias", {DType::kF32, {c.V}}));
}

/// The scale, weights where there are some, and a bias behind what add_inputs gives.
CrossEntropySpec add_factors(Program& program, const Case& c, std::vector<ValueId>& inputs) {
  inputs.push_back(program.add_input("scale", {DType::kF32, {1}}));
  CrossEntropySpec spec;
  spec.weighted = c.weighted;
  spec.softcap = c.softcap;
  if (c.weighted) {
    const ValueType weights = with_dtype(program.type(inputs[2]), DType::kF32);
    inputs.push_back(program.add_input("token_weights", weights));
  }
  add_bias(program, c, inputs);
  spec.biased = c.biased;
  return spec;
}

CheckedProgram build_plain(const Case& c, DType dtype) {
  CheckedProgram checked{Program("plain"), {}};
  std::vector<ValueId> inputs = add_inputs(checked.program, c, dtype);
  const CrossEntropySpec spec = add_factors(checked.program, c, inputs);
  const auto outputs =
      checked.program.add(make_linear_cross_entropy(spec), inputs, {"loss", "token_loss", "lse"});
  checked.program.set_outputs(outputs);
  checked.request = {.outputs = {outputs[0]}, .inputs = {inputs[0]}};
  return checked;
}

CheckedProgram build_fused(const Case& c, DType dtype) {
  CheckedProgram checked{Program("fused"), {}};
  Program& program = checked.program;
  std::vector<ValueId> inputs = add_inputs(program, c, dtype);
  const CrossEntropySpec spec = add_factors(program, c, inputs);
  std::vector<ValueId> sums = {program.add_accumulator("dweight", {DType::kF32, {c.V, c.H}})};
  std::vector<std::string> names = {"loss", "token_loss", "dx", "dweight"};
  if (c.biased) {
    sums.push_back(program.add_accumulator("dbias", {DType::kF32, {c.V}}));
    names.push_back("dbias");
  }
  const auto outputs = program.add(make_linear_cross_entropy_fused(spec), inputs, names, sums);
  program.set_outputs({outputs[0], outputs[1], outputs[2]});
  return checked;
}

CheckedProgram build_part(const Case& c, DType dtype) {
  CheckedProgram checked{Program("part"), {}};
  std::vector<ValueId> inputs = add_inputs(checked.program, c, dtype);
  add_bias(checked.program, c, inputs);
  const auto op = make_vocab_lse({.first_row = c.first_row,
                                  .vocab_size = c.vocab_size,
                                  .cut = {.softcap = c.softcap, .biased = c.biased}});
  const auto outputs = checked.program.add(op, inputs, {"lse", "label_logit"});
  checked.program.set_outputs(outputs);
  checked.request = {.outputs = outputs, .inputs = {inputs[0]}};
  return checked;
}

class LinearCrossEntropyCuda : public GpuTest {
 protected:
  void check(CheckedProgram (*build)(const Case&, DType), const Case& c, bool once = false) const {
    SCOPED_TRACE(c.to_string());
    const Values values = make_values(c);
    const GpuCheck check{.values = {values.begin(), values.end()}, .once = once};
    check_on_gpu([&](DType dtype) { return build(c, dtype); }, cpu(), gpu(), check);
  }
};

std::vector<Case> cases() {
  return {{0, 4, 7},
          {1, 1, 1},
          {7, 16, 33},
          {33, 31, 257},
          {40, 64, 1000},
          {300, 96, 2048},
          {20, 24, 8193},
          {50, 64, 300, 6},
          {90, 40, 129, 1, 0},
          {90, 40, 129, 1, 57},
          {64, 33, 100, 1, 64},
          {300, 96, 2048, 1, -1, 0, 0, true},
          {90, 40, 129, 1, 57, 0, 0, true},
          {300, 96, 2048, 1, -1, 0, 0, false, 5},
          {90, 40, 129, 1, 57, 0, 0, true, 2},
          {1, 1, 1, 1, -1, 0, 0, false, 0, true},
          {300, 96, 2051, 1, -1, 0, 0, false, 0, true},
          {90, 40, 129, 1, 57, 0, 0, true, 2, true}};
}

TEST_F(LinearCrossEntropyCuda, PlainMatchesTheCpu) {
  for (const Case& c : cases()) check(build_plain, c);
}

TEST_F(LinearCrossEntropyCuda, FusedMatchesTheCpu) {
  for (const Case& c : cases()) check(build_fused, c);
}

TEST_F(LinearCrossEntropyCuda, TinyPlain) {
  check(build_plain, {37, 16, 301}, true);
}

TEST_F(LinearCrossEntropyCuda, TinyFused) {
  check(build_fused, {37, 16, 301, 1, 30}, true);
}

TEST_F(LinearCrossEntropyCuda, TinyBias) {
  check(build_plain, {37, 16, 301, 1, 30, 0, 0, true, 0, true}, true);
  check(build_fused, {37, 16, 301, 1, 30, 0, 0, true, 3, true}, true);
  check(build_part, {37, 16, 301, 1, -1, 20, 3000, false, 0, true}, true);
}

TEST_F(LinearCrossEntropyCuda, TinyPart) {
  check(build_part, {37, 16, 301, 1, -1, 20, 3000}, true);
}

TEST_F(LinearCrossEntropyCuda, ManyChunksMatchTheCpu) {
  for (const bool biased : {false, true}) {
    const Case c{2100, 8, 66000, 1, -1, 0, 0, false, 0, biased};
    check(build_plain, c);
    check(build_fused, c);
  }
}

TEST_F(LinearCrossEntropyCuda, PartsOfTheVocabularyMatchTheCpu) {
  for (const Case& c :
       {Case{0, 4, 7, 1, -1, 0, 7}, Case{1, 1, 1, 1, -1, 3, 5}, Case{33, 31, 257, 1, -1, 0, 1000},
        Case{20, 8, 257, 1, -1, 743, 1000}, Case{90, 40, 300, 1, 57, 200, 1000},
        Case{20, 8, 257, 1, -1, 743, 1000, false, 3},
        Case{20, 8, 257, 1, -1, 743, 1000, false, 0, true}}) {
    check(build_part, c);
  }
}

/// One run of an F32 program on the GPU, from given inputs and weights.
class GpuRun {
 public:
  GpuRun(const Program& program, const Backend& gpu, const Values& given)
      : executable_(program, gpu),
        device_(gpu.device()),
        transient_(std::max<int64_t>(executable_.plan().transient_bytes, 1), "values", device_) {
    Bindings bindings = executable_.make_bindings();
    bindings.transient = transient_.data();
    for (ValueId id = 0; id < program.num_values(); ++id) {
      const Value& value = program.value(id);
      if (value.kind == ValueKind::kIntermediate && !program.is_output(id)) continue;
      values_.emplace_back(value.type.dtype, value.type.shape, "a value", device_);
      bindings.tensors[id] = values_.back();
      const auto found = given.find(value.name);
      if (found != given.end()) fill(values_.back(), found->second);
    }
    executable_.run(bindings);
    for (const ValueId id : program.outputs()) outputs_.push_back(read(bindings, id));
  }
  const std::vector<float>& output(size_t idx) const { return outputs_[idx]; }

 private:
  void fill(const Tensor& to, const Tensor& from) {
    if (to.dtype == DType::kF32 && from.dtype == DType::kBF16) {
      const std::vector<double> values = to_doubles(from);
      return fill(to, tensor_of(from.shape, std::vector<float>(values.begin(), values.end())));
    }
    ensure(to.dtype == from.dtype, "a value of another type");
    device_.copy(to.data, from.data, to.num_bytes());
  }
  std::vector<float> read(const Bindings& bindings, ValueId id) const {
    const Tensor tensor = executable_.at_bound(bindings, id);
    std::vector<float> values(tensor.num_elements());
    device_.copy(values.data(), tensor.data, tensor.num_bytes());
    return values;
  }

  Executable executable_;
  Device& device_;
  Buffer transient_;
  std::vector<OwnedTensor> values_;
  std::vector<std::vector<float>> outputs_;
};

TEST_F(LinearCrossEntropyCuda, APartOfNoRowsAddsNothing) {
  const Case c{9, 5, 0, 1, -1, 40, 100};
  const CheckedProgram checked = build_part(c, DType::kF32);
  const Values values = make_values(c);
  const GpuRun run(checked.program, gpu(), values);
  EXPECT_EQ(run.output(0), std::vector<float>(9, -std::numeric_limits<float>::infinity()));
  EXPECT_EQ(run.output(1), std::vector<float>(9, 0.0F));

  Program backward("backward");
  std::vector<ValueId> inputs = add_inputs(backward, c, DType::kF32);
  for (const char* name : {"lse", "grad_lse", "grad_label_logit"})
    inputs.push_back(backward.add_input(name, {DType::kF32, {c.T}}));
  const ValueId sum = backward.add_accumulator("dweight", {DType::kF32, {c.V, c.H}});
  const auto op = std::make_shared<VocabLseBackward>(
      VocabLseSpec{.first_row = c.first_row, .vocab_size = c.vocab_size});
  backward.set_outputs({backward.add(op, inputs, {"dx", "dweight"}, {sum})[0]});
  EXPECT_EQ(GpuRun(backward, gpu(), values).output(0), std::vector<float>(9 * 5, 0.0F));
}

TEST_F(LinearCrossEntropyCuda, FusedGivesTheBitsOfThePlainLoss) {
  const Case c{2100, 8, 66000};
  const Values values = make_values(c);
  const GpuRun plain(build_plain(c, DType::kF32).program, gpu(), values);
  const GpuRun fused(build_fused(c, DType::kF32).program, gpu(), values);
  EXPECT_EQ(plain.output(0), fused.output(0));
  EXPECT_EQ(plain.output(1), fused.output(1));
  EXPECT_TRUE(std::isfinite(plain.output(0)[0]));
}

TEST_F(LinearCrossEntropyCuda, ALabelOutsideTheVocabularyMakesTheLossNotANumber) {
  const Case c{4, 8, 16};
  for (const int32_t wrong : {-1, 16}) {
    Values values = make_values(c);
    values.insert_or_assign("labels", tensor_of_i32({4}, {0, wrong, 15, kIgnoredLabel}));
    for (const auto build : {build_plain, build_fused}) {
      const GpuRun run(build(c, DType::kF32).program, gpu(), values);
      EXPECT_TRUE(std::isnan(run.output(0)[0]));
      EXPECT_TRUE(std::isfinite(run.output(1)[0]));
      EXPECT_TRUE(std::isnan(run.output(1)[1]));
      EXPECT_TRUE(std::isfinite(run.output(1)[2]));
    }
  }
}

}  // namespace
}  // namespace tessera::testing
