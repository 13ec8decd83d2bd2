#pragma once

#include <map>
#include <vector>

#include "core/memory.h"
#include "core/random.h"
#include "runtime/executable.h"

namespace tessera::testing {

/// Runs a program on random inputs, the same for programs with the same bound values, and returns
/// what it leaves in accumulators and outputs. Working memory starts as NaN.
inline std::map<ValueId, std::vector<float>> run_on_noise(const Program& program,
                                                          const KernelTable& kernels,
                                                          const NodeObserver& observer = {}) {
  const Executable run(program, kernels);
  Bindings bindings = run.make_bindings();
  std::map<ValueId, OwnedTensor> memory;
  for (ValueId id = 0; id < program.num_values(); ++id) {
    const Value& value = program.value(id);
    if (value.kind == ValueKind::kIntermediate && !program.is_output(id)) continue;
    OwnedTensor& tensor =
        memory.emplace(id, OwnedTensor(value.type.dtype, value.type.shape)).first->second;
    Random random(5, static_cast<uint64_t>(id));
    for (float& x : tensor.get().span<float>()) x = static_cast<float>(random.next_normal());
    bindings.tensors[id] = tensor;
  }
  const Buffer transient(run.plan().transient_bytes, "a test");
  std::fill_n(transient.data(), transient.num_bytes(), std::byte{0xFF});
  bindings.transient = transient.data();
  run.run(bindings, observer);
  std::map<ValueId, std::vector<float>> results;
  for (const auto& [id, tensor] : memory) {
    if (program.value(id).kind != ValueKind::kAccumulator && !program.is_output(id)) continue;
    const auto elements = tensor.get().span<float>();
    results[id] = {elements.begin(), elements.end()};
  }
  return results;
}

}  // namespace tessera::testing
