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
    if (const auto numbers = given.find(value.name); numbers != given.end()) {
      const bool is_wide = value.type.dtype == DType::kI64;
      for (size_t i = 0; i < numbers->second.size(); ++i) {
        is_wide ? void(tensor.get().as<int64_t>()[i] = numbers->second[i])
                : void(tensor.get().as<int32_t>()[i] = static_cast<int32_t>(numbers->second[i]));
      }
    } else {
      with_storage(value.type.dtype, [&](auto storage) {
        using T = decltype(storage);
        for (T& x : tensor.get().span<T>()) x = T(static_cast<float>(random.next_normal()));
      });
    }
    bindings.tensors[id] = tensor;
  }
  const Buffer transient(run.plan().transient_bytes, "a test");
  std::fill_n(transient.data(), transient.num_bytes(), std::byte{0xFF});
  bindings.transient = transient.data();
  run.run(bindings, observer);
  std::map<ValueId, std::vector<float>> results;
  for (const auto& [id, tensor] : memory) {
    if (program.value(id).kind != ValueKind::kAccumulator && !program.is_output(id)) continue;
    with_storage(tensor.get().dtype, [&, id = id](auto storage) {
      const auto elements = tensor.get().span<decltype(storage)>();
      results[id] = {elements.begin(), elements.end()};
    });
  }
  return results;
}

}  // namespace tessera::testing
