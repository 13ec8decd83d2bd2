#pragma once

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "core/memory.h"
#include "core/random.h"
#include "ops/storage.h"
#include "runtime/executable.h"

namespace tessera::testing {

/// Of F32 or BF16.
inline void fill_with_noise(const Tensor& tensor, Random& random) {
  with_storage(tensor.dtype, [&](auto storage) {
    using T = decltype(storage);
    for (T& x : tensor.span<T>()) x = T(static_cast<float>(random.next_normal()));
  });
}

/// Of I64 or I32.
inline void fill(const Tensor& tensor, const std::vector<int64_t>& numbers) {
  if (tensor.dtype == DType::kI64) {
    std::ranges::copy(numbers, tensor.as<int64_t>());
  } else {
    std::ranges::transform(numbers, tensor.as<int32_t>(),
                           [](int64_t number) { return static_cast<int32_t>(number); });
  }
}

inline std::vector<float> list_values(const Tensor& tensor) {
  std::vector<float> values;
  with_storage(tensor.dtype, [&](auto storage) {
    const auto elements = tensor.span<decltype(storage)>();
    values.assign(elements.begin(), elements.end());
  });
  return values;
}

/// Runs a program on random inputs of F32 and BF16, the same for programs with the same bound
/// values, and returns what it leaves in accumulators and outputs. Integers are `given` by name.
/// Working memory starts as NaN.
inline std::map<ValueId, std::vector<float>> run_on_noise(
    const Program& program, const KernelTable& kernels, const NodeObserver& observer = {},
    const std::map<std::string, std::vector<int64_t>>& given = {}) {
  const Executable run(program, kernels);
  Bindings bindings = run.make_bindings();
  std::map<ValueId, OwnedTensor> memory;
  for (ValueId id = 0; id < program.num_values(); ++id) {
    const Value& value = program.value(id);
    if (value.kind == ValueKind::kIntermediate && !program.is_output(id)) continue;
    OwnedTensor& tensor =
        memory.emplace(id, OwnedTensor(value.type.dtype, value.type.shape)).first->second;
    Random random(5, static_cast<uint64_t>(id));
    const auto numbers = given.find(value.name);
    numbers == given.end() ? fill_with_noise(tensor, random) : fill(tensor, numbers->second);
    bindings.tensors[id] = tensor;
  }
  const Buffer transient(run.plan().transient_bytes, "a test");
  std::fill_n(transient.data(), transient.num_bytes(), std::byte{0xFF});
  bindings.transient = transient.data();
  run.run(bindings, observer);
  std::map<ValueId, std::vector<float>> results;
  for (const auto& [id, tensor] : memory) {
    if (program.value(id).kind != ValueKind::kAccumulator && !program.is_output(id)) continue;
    results[id] = list_values(tensor);
  }
  return results;
}

}  // namespace tessera::testing
