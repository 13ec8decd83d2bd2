#include "ops/testing/gpu_check.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>

#include "core/random.h"
#include "ops/testing/op_test.h"
#include "runtime/executable.h"

namespace tessera::testing {
namespace {

using HostValues = std::map<std::string, OwnedTensor>;

OwnedTensor converted(const Tensor& from, DType dtype) {
  OwnedTensor to(dtype, from.shape);
  if (from.dtype == dtype) {
    host_device().copy(to.get().data, from.data, from.num_bytes());
    return to;
  }
  const std::vector<double> values = to_doubles(from);
  for (size_t i = 0; i < values.size(); ++i) {
    if (dtype == DType::kBF16) {
      to.get().as<Bf16>()[i] = Bf16(static_cast<float>(values[i]));
    } else {
      to.get().as<float>()[i] = static_cast<float>(values[i]);
    }
  }
  return to;
}

/// A program's bound values on a device, and its slabs.
class Run {
 public:
  Run(const Program& program, const Backend& backend, const std::vector<ValueId>& saved)
      : executable_(program, backend, saved),
        device_(backend.device()),
        saved_(std::max<int64_t>(executable_.plan().saved_bytes, 1), "saved values", device_),
        transient_(std::max<int64_t>(executable_.plan().transient_bytes, 1), "transient values",
                   device_),
        bindings_(executable_.make_bindings()) {
    bindings_.saved = saved_.data();
    bindings_.transient = transient_.data();
    for (const Buffer* slab : {&saved_, &transient_}) poison(slab->data(), slab->num_bytes());
  }

  const Program& program() const { return executable_.program(); }
  void bind(ValueId id, const Tensor& memory) { bindings_.tensors[id] = memory; }
  /// Takes memory for a bound value, filled from the host's `value`, or with NaN.
  void allocate(ValueId id, const Tensor* value) {
    const ValueType& type = program().type(id);
    const auto at = memory_.emplace(id, OwnedTensor(type.dtype, type.shape, "a value", device_));
    const Tensor& tensor = at.first->second;
    if (value == nullptr) {
      poison(tensor.data, tensor.num_bytes());
    } else {
      device_.copy(tensor.data, value->data, tensor.num_bytes());
    }
    bind(id, tensor);
  }
  bool is_bound(ValueId id) const { return memory_.contains(id); }
  Tensor at_bound(ValueId id) const { return executable_.at_bound(bindings_, id); }
  /// A copy on the host, at actual extent.
  OwnedTensor read(ValueId id) const {
    const Tensor tensor = executable_.view(bindings_, id);
    OwnedTensor copy(tensor.dtype, tensor.shape);
    device_.copy(copy.get().data, tensor.data, tensor.num_bytes());
    return copy;
  }
  void run() {
    executable_.run(bindings_);
    device_.synchronize();
  }
  /// Runs again with accumulators that hold nothing yet, and NaN where they were; often enough that
  /// the last is a replay, where the device records.
  void run_anew(const std::vector<ValueId>& accumulators) {
    bindings_.unset = accumulators;
    for (int i = 0; i < 3; ++i) {
      for (const ValueId id : accumulators) poison(at_bound(id).data, at_bound(id).num_bytes());
      poison(transient_.data(), transient_.num_bytes());
      run();
    }
  }

 private:
  void poison(void* data, int64_t num_bytes) const {
    const std::vector<std::byte> bytes(num_bytes, std::byte{0xFF});
    device_.copy(data, bytes.data(), num_bytes);
  }

  Executable executable_;
  Device& device_;
  Buffer saved_;
  Buffer transient_;
  Bindings bindings_;
  std::map<ValueId, OwnedTensor> memory_;
};

std::vector<ValueId> forward_ids(const std::vector<Link>& links) {
  std::vector<ValueId> ids;
  for (const Link& link : links) ids.push_back(link.forward);
  return ids;
}

std::vector<ValueId> accumulators_of(const Program& program) {
  std::vector<ValueId> ids;
  for (ValueId id = 0; id < program.num_values(); ++id) {
    if (program.value(id).kind == ValueKind::kAccumulator) ids.push_back(id);
  }
  return ids;
}

/// The host's values of every input, weight, gradient of an output and accumulator, by name.
class Inputs {
 public:
  explicit Inputs(const GpuCheck& check) : check_(check) {}

  /// Rounded to BF16 throughout, so that programs of both types get the same values.
  Tensor get(const Value& value, const std::string& name) {
    const auto key = std::pair(name, value.type.dtype);
    const auto found = made_.find(key);
    if (found != made_.end()) return found->second;
    return made_.emplace(key, make(value, name)).first->second;
  }

 private:
  OwnedTensor make(const Value& value, const std::string& name) const {
    const auto given = check_.values.find(name);
    const ValueType& type = value.type;
    if (given != check_.values.end()) {
      EXPECT_EQ(given->second.shape, type.shape) << name;
      return converted(given->second, type.dtype);
    }
    ensure(type.dtype == DType::kF32 || type.dtype == DType::kBF16,
           "the check gives no value for '{}'", name);
    Random random(check_.seed, std::hash<std::string>{}(name));
    const OwnedTensor rounded = random_tensor(DType::kBF16, type.shape, random, check_.deviation);
    return converted(rounded, type.dtype);
  }

  const GpuCheck& check_;
  std::map<std::pair<std::string, DType>, OwnedTensor> made_;
};

/// What a program gives on one back end, by "output <name>" or "gradient of <name>".
HostValues run_on(const CheckedProgram& checked, const Backend& backend, Inputs& inputs,
                  bool once) {
  HostValues results;
  const Program& program = checked.program;
  const bool differentiated = !checked.request.outputs.empty();
  const Backward backward =
      differentiated ? differentiate(program, checked.request) : Backward{Program("none")};
  Run forward(program, backend, forward_ids(backward.saved));
  for (ValueId id = 0; id < program.num_values(); ++id) {
    const Value& value = program.value(id);
    if (value.kind == ValueKind::kIntermediate) {
      if (program.is_output(id)) forward.allocate(id, nullptr);
      continue;
    }
    const Tensor host = inputs.get(value, value.name);
    forward.allocate(id, &host);
  }
  forward.run();
  for (const ValueId id : program.outputs())
    results.emplace("output " + program.value(id).name, forward.read(id));
  if (!once && accumulators_of(program).empty()) forward.run_anew({});
  for (const ValueId id : program.outputs())
    results.emplace("output, again, " + program.value(id).name, forward.read(id));
  const std::vector<ValueId> sums = accumulators_of(program);
  for (const ValueId id : sums)
    results.emplace("accumulator " + program.value(id).name, forward.read(id));
  if (!once && !sums.empty()) forward.run_anew(sums);
  for (size_t i = 0; i < sums.size() && !once; ++i)
    results.emplace("accumulator, set, " + program.value(sums[i]).name, forward.read(sums[i]));
  if (!differentiated) return results;

  Run back(backward.program, backend, {});
  for (const auto* links : {&backward.saved, &backward.bound}) {
    for (const Link& link : *links) back.bind(link.backward, forward.at_bound(link.forward));
  }
  for (const auto* links : {&backward.grad_outputs, &backward.accumulators}) {
    for (const Link& link : *links) {
      const Value& value = backward.program.value(link.backward);
      const Tensor host = inputs.get(value, value.name);
      back.allocate(link.backward, &host);
    }
  }
  for (const Link& link : backward.grad_inputs) {
    // A gradient may be that of an output as it is.
    if (!back.is_bound(link.backward)) back.allocate(link.backward, nullptr);
  }
  back.run();
  for (const auto* links : {&backward.grad_inputs, &backward.accumulators}) {
    for (const Link& link : *links)
      results.emplace("gradient of " + program.value(link.forward).name, back.read(link.backward));
  }
  if (once) return results;
  std::vector<ValueId> grads;
  for (const Link& link : backward.accumulators) grads.push_back(link.backward);
  back.run_anew(grads);
  for (const Link& link : backward.grad_inputs) {
    results.emplace("gradient, again, of " + program.value(link.forward).name,
                    back.read(link.backward));
  }
  for (const Link& link : backward.accumulators) {
    results.emplace("gradient, set, of " + program.value(link.forward).name,
                    back.read(link.backward));
  }
  return results;
}

/// ‖a−b‖/‖b‖ by row; where b's row is all but zero, ‖a−b‖ over the largest row's norm.
std::vector<double> row_errors(const Tensor& actual, const Tensor& expected) {
  const std::vector<double> a = to_doubles(actual);
  const std::vector<double> b = to_doubles(expected);
  const size_t width = std::max<int64_t>(expected.shape.last(), 1);
  const size_t rows = b.size() / width;
  std::vector<double> difference(rows), norm(rows);
  for (size_t i = 0; i < rows * width; ++i) {
    difference[i / width] += (a[i] - b[i]) * (a[i] - b[i]);
    norm[i / width] += b[i] * b[i];
  }
  const double largest = rows == 0 ? 0.0 : std::ranges::max(norm);
  for (size_t r = 0; r < rows; ++r) {
    const double scale = std::max(norm[r], largest * 1e-6);
    difference[r] = std::sqrt(difference[r] / (scale > 0 ? scale : 1.0));
    if (std::isnan(difference[r])) difference[r] = INFINITY;
  }
  return difference;
}

bool is_integer(DType dtype) {
  return dtype != DType::kF32 && dtype != DType::kBF16 && dtype != DType::kF64;
}

void expect_equal_bits(const HostValues& a, const HostValues& b) {
  for (const auto& [name, tensor] : a) {
    const Tensor& other = b.at(name);
    ASSERT_EQ(tensor.get().shape, other.shape) << name;
    EXPECT_EQ(std::memcmp(tensor.get().data, other.data, static_cast<size_t>(other.num_bytes())), 0)
        << name << " differs from run to run";
  }
}

void compare(const std::string& name, const Tensor& gpu, const Tensor& cpu, const Tensor& exact,
             const GpuCheck& check, bool bf16) {
  ASSERT_EQ(gpu.shape, cpu.shape) << name;
  if (is_integer(gpu.dtype)) {
    EXPECT_EQ(to_doubles(gpu), to_doubles(cpu)) << name;
    return;
  }
  const std::vector<double> errors = row_errors(gpu, exact);
  const std::vector<double> cpu_errors = row_errors(cpu, exact);
  const double own =
      bf16 ? check.bf16_factor * (cpu_errors.empty() ? 0 : std::ranges::max(cpu_errors)) : 0;
  const double limit = std::max(bf16 ? check.tolerance_bf16 : check.tolerance_f32, own);
  for (size_t r = 0; r < errors.size(); ++r) {
    if (errors[r] <= limit) continue;
    ADD_FAILURE() << name << " " << gpu.shape.to_string() << ": row " << r << " is off by "
                  << errors[r] << ", more than " << limit << " (the CPU's worst: "
                  << (cpu_errors.empty() ? 0 : std::ranges::max(cpu_errors)) << ")";
    return;
  }
}

}  // namespace

void check_on_gpu(const std::function<CheckedProgram(DType)>& build, const Backend& cpu,
                  const Backend& gpu, const GpuCheck& check) {
  Inputs inputs(check);
  const HostValues exact = run_on(build(DType::kF32), cpu, inputs, check.once);
  for (const DType dtype : check.dtypes) {
    SCOPED_TRACE(dtype_name(dtype));
    const CheckedProgram checked = build(dtype);
    const HostValues on_gpu = run_on(checked, gpu, inputs, check.once);
    if (check.repeatable && !check.once)
      expect_equal_bits(on_gpu, run_on(checked, gpu, inputs, check.once));
    const HostValues on_cpu = run_on(checked, cpu, inputs, check.once);
    for (const auto& [name, tensor] : on_gpu)
      compare(name, tensor, on_cpu.at(name), exact.at(name), check, dtype == DType::kBF16);
  }
}

std::vector<std::string> numbered_outputs(const std::vector<ValueType>& inputs,
                                          const Operator& op) {
  std::vector<std::string> names;
  for (size_t i = 0; i < op.infer(inputs).size(); ++i) names.push_back(fmt::format("y{}", i));
  return names;
}

void check_operator_on_gpu(const OperatorPtr& op,
                           const std::function<OperatorInputs(DType)>& inputs,
                           const std::vector<int>& outputs_with_grad, const Backend& cpu,
                           const Backend& gpu, const GpuCheck& check) {
  const auto build = [&](DType dtype) {
    CheckedProgram checked{Program(std::string(op->name())), {}};
    const OperatorInputs given = inputs(dtype);
    std::vector<ValueId> ids;
    std::map<std::string, ValueId> by_name;
    for (size_t i = 0; i < given.names.size(); ++i) {
      const std::string& name = given.names[i];
      if (!by_name.contains(name))
        by_name[name] = name.starts_with("w") ? checked.program.add_weight(name, given.types[i])
                                              : checked.program.add_input(name, given.types[i]);
      ids.push_back(by_name.at(name));
    }
    const std::vector<ValueId> outputs =
        checked.program.add(op, ids, numbered_outputs(given.types, *op));
    checked.program.set_outputs(outputs);
    for (const int output : outputs_with_grad) checked.request.outputs.push_back(outputs[output]);
    if (outputs_with_grad.empty()) return checked;
    for (const auto& [name, id] : by_name) {
      if (name.starts_with("x")) checked.request.inputs.push_back(id);
    }
    return checked;
  };
  check_on_gpu(build, cpu, gpu, check);
}

}  // namespace tessera::testing
