#include "ops/testing/op_test.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "core/fp8.h"
#include "core/half.h"
#include "program/differentiate.h"
#include "runtime/executable.h"

namespace tessera::testing {
namespace {

constexpr int64_t kGuardBytes = 256;
constexpr auto kGuard = std::byte{0xA5};
constexpr auto kPoison = std::byte{0xFF};

/// Memory of one output between two guard bands.
class GuardedOutput {
 public:
  GuardedOutput(const ValueType& type, bool zeroed)
      : type_(type), buffer_(type.num_bytes() + 2 * kGuardBytes, "a guarded output") {
    std::fill_n(buffer_.data(), buffer_.num_bytes(), kGuard);
    std::fill_n(buffer_.data() + kGuardBytes, type.num_bytes(), zeroed ? std::byte{0} : kPoison);
  }
  Tensor tensor() const { return buffer_.tensor(kGuardBytes, type_.dtype, type_.shape); }
  void expect_guards_intact(std::string_view op, size_t output) const {
    const auto intact = [](std::byte b) { return b == kGuard; };
    EXPECT_TRUE(std::all_of(buffer_.data(), buffer_.data() + kGuardBytes, intact))
        << op << " wrote before output " << output;
    const std::byte* end = buffer_.data() + kGuardBytes + type_.num_bytes();
    EXPECT_TRUE(std::all_of(end, end + kGuardBytes, intact))
        << op << " wrote past output " << output;
  }

 private:
  ValueType type_;
  Buffer buffer_;
};

std::vector<ValueType> input_types(const std::vector<TestInput>& inputs) {
  std::vector<ValueType> types;
  for (const TestInput& input : inputs)
    types.push_back({input.tensor.get().dtype, input.tensor.get().shape});
  return types;
}

OwnedTensor copy_of(const Tensor& tensor) {
  OwnedTensor copy(tensor.dtype, tensor.shape);
  if (tensor.num_bytes() > 0) std::memcpy(copy.get().data, tensor.data, tensor.num_bytes());
  return copy;
}

/// A forward program of one operator, its derived backward program, and the memory to run both.
class GradientRig {
 public:
  GradientRig(OperatorPtr op, const KernelTable& kernels, const std::vector<TestInput>& inputs,
              const std::vector<bool>& outputs_with_grad)
      : forward_(build(op, inputs)),
        backward_(derive(inputs, outputs_with_grad)),
        forward_run_(forward_, kernels, saved_values()),
        backward_run_(backward_.program, kernels) {
    allocate(inputs);
  }

  /// Runs the forward program with the inputs' present values and returns the outputs at their
  /// actual extents.
  std::vector<OwnedTensor> run_forward() {
    forward_run_.run(forward_bindings_);
    std::vector<OwnedTensor> outputs;
    for (const ValueId id : outputs_)
      outputs.push_back(copy_of(forward_run_.view(forward_bindings_, id)));
    return outputs;
  }

  /// Runs the backward program with the gradients of the outputs; the result is by input, empty for
  /// constants.
  std::vector<OwnedTensor> run_backward(const std::vector<OwnedTensor>& grad_outputs,
                                        Random* accumulator_noise) {
    Bindings bindings = bind_backward(grad_outputs);
    std::vector<OwnedTensor> start;
    for (const Link& link : backward_.accumulators) {
      Tensor accumulator = bindings.tensors[link.backward];
      for (float& x : accumulator.span<float>()) {
        x = accumulator_noise == nullptr ? 0.0F
                                         : static_cast<float>(accumulator_noise->next_normal());
      }
      start.push_back(copy_of(accumulator));
    }
    backward_run_.run(bindings);
    std::vector<OwnedTensor> grads(inputs_.size());
    for (const Link& link : backward_.grad_inputs) {
      grads[index_of(link.forward)] = copy_of(backward_run_.view(bindings, link.backward));
    }
    for (size_t i = 0; i < backward_.accumulators.size(); ++i) {
      const Link& link = backward_.accumulators[i];
      OwnedTensor grad = copy_of(bindings.tensors[link.backward]);
      const auto before = start[i].get().span<float>();
      const auto after = grad.get().span<float>();
      for (size_t j = 0; j < after.size(); ++j) after[j] -= before[j];
      grads[index_of(link.forward)] = std::move(grad);
    }
    return grads;
  }

  const std::vector<ValueId>& outputs() const { return outputs_; }
  const Program& forward() const { return forward_; }

 private:
  Program build(const OperatorPtr& op, const std::vector<TestInput>& inputs) {
    Program program("test");
    for (const TestInput& input : inputs) {
      const ValueType type{input.tensor.get().dtype, input.tensor.get().shape};
      const std::string name = input.name + "#" + std::to_string(inputs_.size());
      inputs_.push_back(input.role == Role::kWeight ? program.add_weight(name, type)
                                                    : program.add_input(name, type));
    }
    outputs_ = program.add(op, inputs_);
    program.set_outputs(outputs_);
    return program;
  }

  Backward derive(const std::vector<TestInput>& inputs,
                  const std::vector<bool>& outputs_with_grad) {
    DifferentiateRequest request;
    for (size_t i = 0; i < outputs_.size(); ++i) {
      if (outputs_with_grad[i]) request.outputs.push_back(outputs_[i]);
    }
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (inputs[i].role == Role::kValue) request.inputs.push_back(inputs_[i]);
    }
    return differentiate(forward_, request);
  }

  std::vector<ValueId> saved_values() const {
    std::vector<ValueId> saved;
    for (const Link& link : backward_.saved) saved.push_back(link.forward);
    return saved;
  }

  void allocate(const std::vector<TestInput>& inputs) {
    forward_bindings_ = forward_run_.make_bindings();
    for (size_t i = 0; i < inputs.size(); ++i) {
      forward_bindings_.tensors[inputs_[i]] = inputs[i].tensor.get();
    }
    for (const ValueId id : outputs_) {
      output_memory_.emplace_back(forward_.type(id).dtype, forward_.type(id).shape);
      forward_bindings_.tensors[id] = output_memory_.back().get();
    }
    transient_ =
        Buffer(std::max(forward_run_.plan().transient_bytes, backward_run_.plan().transient_bytes),
               "test");
    saved_ = Buffer(forward_run_.plan().saved_bytes, "test");
    forward_bindings_.saved = saved_.data();
    forward_bindings_.transient = transient_.data();
  }

  Bindings bind_backward(const std::vector<OwnedTensor>& grad_outputs) {
    Bindings bindings = backward_run_.make_bindings();
    const auto bind_forward = [&](const Link& link) {
      Tensor tensor = forward_run_.view(forward_bindings_, link.forward);
      tensor.shape = backward_.program.type(link.backward).shape;
      bindings.tensors[link.backward] = tensor;
    };
    std::ranges::for_each(backward_.saved, bind_forward);
    std::ranges::for_each(backward_.bound, bind_forward);
    bound_grads_.clear();
    for (const Link& link : backward_.grad_outputs) bind_grad_output(link, grad_outputs, bindings);
    for (const Link& link : backward_.grad_inputs) bind_result(link.backward, bindings);
    for (const Link& link : backward_.accumulators) bind_result(link.backward, bindings);
    bindings.transient = transient_.data();
    return bindings;
  }

  /// Copies a gradient (given at actual extent) into memory of the bound's size.
  void bind_grad_output(const Link& link, const std::vector<OwnedTensor>& grad_outputs,
                        Bindings& bindings) {
    const ValueType& type = backward_.program.type(link.backward);
    bound_grads_.emplace_back(type.dtype, type.shape);
    const auto at = std::ranges::find(outputs_, link.forward) - outputs_.begin();
    const Tensor& grad = grad_outputs[at].get();
    ensure(grad.num_bytes() <= type.num_bytes(), "gradient larger than its bound");
    if (grad.num_bytes() > 0) {
      std::memcpy(bound_grads_.back().get().data, grad.data, grad.num_bytes());
    }
    bindings.tensors[link.backward] = bound_grads_.back().get();
  }

  /// A gradient that passes through is bound already.
  void bind_result(ValueId id, Bindings& bindings) {
    if (bindings.tensors[id]) return;
    const ValueType& type = backward_.program.type(id);
    bound_grads_.emplace_back(type.dtype, type.shape);
    bindings.tensors[id] = bound_grads_.back().get();
  }

  size_t index_of(ValueId forward_input) const {
    return static_cast<size_t>(std::ranges::find(inputs_, forward_input) - inputs_.begin());
  }

  std::vector<ValueId> inputs_;
  std::vector<ValueId> outputs_;
  Program forward_;
  Backward backward_;
  Executable forward_run_;
  Executable backward_run_;
  Bindings forward_bindings_;
  std::vector<OwnedTensor> output_memory_;
  std::vector<OwnedTensor> bound_grads_;
  Buffer transient_;
  Buffer saved_;
};

std::vector<bool> outputs_to_check(const Operator& op, const std::vector<TestInput>& inputs,
                                   const GradientCheck& check) {
  const auto types = op.infer(input_types(inputs));
  std::vector<bool> wanted(types.size(), false);
  for (size_t i = 0; i < types.size(); ++i) {
    const bool listed =
        std::ranges::find(check.outputs, static_cast<int>(i)) != check.outputs.end();
    wanted[i] = types[i].dtype == DType::kF32 && (check.outputs.empty() || listed);
  }
  return wanted;
}

/// Random coefficients of the checked outputs, at their actual extents.
std::vector<OwnedTensor> make_coefficients(const std::vector<OwnedTensor>& outputs,
                                           const std::vector<bool>& wanted, Random& random) {
  std::vector<OwnedTensor> coefficients(outputs.size());
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (wanted[i]) coefficients[i] = random_tensor(DType::kF32, outputs[i].get().shape, random);
  }
  return coefficients;
}

double weighted_sum(const std::vector<OwnedTensor>& outputs,
                    const std::vector<OwnedTensor>& coefficients) {
  double total = 0;
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (!coefficients[i].get()) continue;
    const auto values = outputs[i].get().span<float>();
    const auto weights = coefficients[i].get().span<float>();
    for (size_t j = 0; j < values.size(); ++j) total += static_cast<double>(values[j]) * weights[j];
  }
  return total;
}

double central_difference(GradientRig& rig, float& element,
                          const std::vector<OwnedTensor>& coefficients, double step) {
  const float kept = element;
  element = static_cast<float>(kept + step);
  const double right = element;
  const double above = weighted_sum(rig.run_forward(), coefficients);
  element = static_cast<float>(kept - step);
  const double left = element;
  const double below = weighted_sum(rig.run_forward(), coefficients);
  element = kept;
  return (above - below) / (right - left);
}

std::vector<size_t> choose_probes(size_t num_elements, int max_probes, Random& random) {
  std::vector<size_t> probes(num_elements);
  std::iota(probes.begin(), probes.end(), size_t{0});
  for (size_t i = 0; i + 1 < probes.size(); ++i)
    std::swap(probes[i], probes[i + random.next_below(probes.size() - i)]);
  probes.resize(std::min(probes.size(), static_cast<size_t>(max_probes)));
  return probes;
}

void check_input(GradientRig& rig, const TestInput& input, const Tensor& grad,
                 const GradientCheck& check, const std::vector<OwnedTensor>& coefficients,
                 Random& random) {
  const auto values = input.tensor.get().span<float>();
  const auto grads = grad.span<float>();
  ASSERT_EQ(values.size(), grads.size()) << input.name;
  float largest = 1.0F;
  for (const float g : grads) largest = std::max(largest, std::abs(g));
  for (const size_t probe : choose_probes(values.size(), check.max_probes, random)) {
    const double expected = central_difference(rig, values[probe], coefficients, check.step);
    EXPECT_NEAR(grads[probe], expected, check.tolerance * largest)
        << "gradient of " << input.name << "[" << probe << "]";
  }
}

double row_error(std::span<const double> actual, std::span<const double> expected) {
  double difference = 0;
  double norm = 0;
  for (size_t i = 0; i < actual.size(); ++i) {
    difference += (actual[i] - expected[i]) * (actual[i] - expected[i]);
    norm += expected[i] * expected[i];
  }
  return std::sqrt(difference) / std::max(std::sqrt(norm), 1e-6);
}

template <typename T>
OwnedTensor filled(const Shape& shape, const std::vector<T>& values) {
  OwnedTensor tensor(DTypeOf<T>::value, shape);
  ensure(static_cast<int64_t>(values.size()) == shape.num_elements(), "{} values for shape {}",
         values.size(), shape.to_string());
  std::ranges::copy(values, tensor.get().template span<T>().begin());
  return tensor;
}

template <typename T>
std::vector<double> widen(const Tensor& tensor) {
  std::vector<double> result;
  for (const T& x : tensor.span<T>()) result.push_back(static_cast<double>(x));
  return result;
}

}  // namespace

OwnedTensor random_tensor(DType dtype, const Shape& shape, Random& random, double deviation) {
  std::vector<float> values(shape.num_elements());
  for (float& value : values) value = static_cast<float>(random.next_normal() * deviation);
  return tensor_of(shape, values, dtype);
}

OwnedTensor tensor_of(const Shape& shape, const std::vector<float>& values, DType dtype) {
  if (dtype == DType::kF32) return filled(shape, values);
  if (dtype == DType::kF16) return filled(shape, std::vector<Half>(values.begin(), values.end()));
  ensure(dtype == DType::kBF16, "tensor_of makes f32, bf16 and f16");
  return filled(shape, std::vector<Bf16>(values.begin(), values.end()));
}

OwnedTensor tensor_of_i32(const Shape& shape, const std::vector<int32_t>& values) {
  return filled(shape, values);
}
OwnedTensor tensor_of_i64(const Shape& shape, const std::vector<int64_t>& values) {
  return filled(shape, values);
}

std::vector<double> to_doubles(const Tensor& tensor) {
  switch (tensor.dtype) {
    case DType::kF32:
      return widen<float>(tensor);
    case DType::kBF16: {
      std::vector<double> result;
      for (const Bf16& x : tensor.span<Bf16>()) result.push_back(static_cast<float>(x));
      return result;
    }
    case DType::kF16: {
      std::vector<double> result;
      for (const Half& x : tensor.span<Half>()) result.push_back(static_cast<float>(x));
      return result;
    }
    case DType::kI32:
      return widen<int32_t>(tensor);
    case DType::kI64:
      return widen<int64_t>(tensor);
    case DType::kF64:
      return widen<double>(tensor);
    case DType::kU8:
      return widen<uint8_t>(tensor);
    case DType::kU16:
      return widen<uint16_t>(tensor);
    case DType::kE4M3:
      return widen<E4m3>(tensor);
    case DType::kE5M2:
      return widen<E5m2>(tensor);
  }
  throw InternalError("to_doubles: unknown type");
}

std::vector<OwnedTensor> run_operator(const Operator& op, const KernelTable& kernels,
                                      const std::vector<TestInput>& inputs) {
  const auto types = op.infer(input_types(inputs));
  std::vector<GuardedOutput> guarded;
  guarded.reserve(types.size());
  std::vector<Tensor> outputs;
  for (size_t i = 0; i < types.size(); ++i) {
    guarded.emplace_back(types[i], op.accumulates(static_cast<int>(i)));
    outputs.push_back(guarded.back().tensor());
    const Extent extent = types[i].extent;
    if (types[i].ragged() && extent.kind() == Extent::Kind::kOwnInput)
      outputs.back().shape[types[i].ragged_dim] =
          *inputs[extent.index()].tensor.get().as<int64_t>();
  }
  std::vector<Tensor> arguments;
  for (const TestInput& input : inputs) arguments.push_back(input.tensor.get());
  const int64_t workspace_bytes = Backend(kernels).workspace_bytes(op, input_types(inputs));
  Buffer workspace(workspace_bytes, "a test's workspace");
  std::fill_n(workspace.data(), workspace_bytes, kPoison);
  kernels.at(std::string(op.name()))(
      op, {arguments, outputs, {workspace.data(), static_cast<size_t>(workspace_bytes)}});

  std::vector<OwnedTensor> results;
  for (size_t i = 0; i < types.size(); ++i) {
    guarded[i].expect_guards_intact(op.name(), i);
    Tensor result = outputs[i];
    const Extent extent = types[i].extent;
    if (types[i].ragged() && extent.kind() == Extent::Kind::kOwnOutput)
      result.shape[types[i].ragged_dim] = *outputs[extent.index()].as<int64_t>();
    results.push_back(copy_of(result));
  }
  return results;
}

std::vector<OwnedTensor> run_gradients(OperatorPtr op, const KernelTable& kernels,
                                       const std::vector<TestInput>& inputs,
                                       const std::vector<OwnedTensor>& grad_outputs) {
  std::vector<bool> with_grad;
  for (const OwnedTensor& grad : grad_outputs) with_grad.push_back(static_cast<bool>(grad.get()));
  GradientRig rig(std::move(op), kernels, inputs, with_grad);
  rig.run_forward();
  return rig.run_backward(grad_outputs, nullptr);
}

void check_gradients(OperatorPtr op, const KernelTable& kernels,
                     const std::vector<TestInput>& inputs, const GradientCheck& check) {
  Random random(check.seed, hash_text("check_gradients", 15));
  const std::vector<bool> wanted = outputs_to_check(*op, inputs, check);
  GradientRig rig(std::move(op), kernels, inputs, wanted);
  const auto coefficients = make_coefficients(rig.run_forward(), wanted, random);
  const auto grads = rig.run_backward(coefficients, &random);
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i].role != Role::kConstant)
      check_input(rig, inputs[i], grads[i], check, coefficients, random);
  }
}

void expect_rows_near(const Tensor& actual, const Tensor& expected, double tolerance,
                      const std::string& what) {
  ASSERT_EQ(actual.shape.to_string(), expected.shape.to_string()) << what;
  const auto a = to_doubles(actual);
  const auto b = to_doubles(expected);
  const size_t width = std::max<int64_t>(actual.shape.last(), 1);
  for (size_t row = 0; row * width < a.size(); ++row) {
    const double error = row_error(std::span(a).subspan(row * width, width),
                                   std::span(b).subspan(row * width, width));
    EXPECT_LE(error, tolerance) << what << ", row " << row;
  }
}

void expect_bitwise_equal(const Tensor& actual, const Tensor& expected, const std::string& what) {
  ASSERT_EQ(actual.shape.to_string(), expected.shape.to_string()) << what;
  ASSERT_EQ(actual.dtype, expected.dtype) << what;
  if (actual.num_bytes() == 0) return;
  EXPECT_EQ(std::memcmp(actual.data, expected.data, static_cast<size_t>(actual.num_bytes())), 0)
      << what;
}

}  // namespace tessera::testing
