#pragma once

#include "ops/addend.h"
#include "ops/testing/gpu_check.h"

namespace tessera::testing {

/// check_on_gpu for an operator that takes an addend, given the inputs of the one that takes none:
/// forward alone, with every accumulator.
inline void check_addend_on_gpu(const Operator& plain,
                                const std::function<OperatorInputs(DType)>& inputs,
                                const Backend& cpu, const Backend& gpu,
                                const GpuCheck& check = {}) {
  const auto build = [&](DType dtype) {
    CheckedProgram checked{Program(std::string(plain.name())), {}};
    Program& program = checked.program;
    const OperatorInputs given = inputs(dtype);
    const std::vector<ValueType> results = plain.infer(given.types);
    std::vector<ValueId> ids;
    for (size_t i = 0; i < given.names.size(); ++i)
      ids.push_back(program.add_input(given.names[i], given.types[i]));
    ids.push_back(program.add_input("addend", results[0]));
    std::vector<ValueId> sums;
    for (int i = 0; i < std::ssize(results); ++i) {
      if (plain.accumulates(i))
        sums.push_back(
            program.add_accumulator(fmt::format("sum{}", i), with_dtype(results[i], DType::kF32)));
    }
    const auto outputs =
        program.add(dynamic_cast<const TakesAddend&>(plain).with_addend(given.types), ids,
                    numbered_outputs(given.types, plain), sums);
    std::vector<ValueId> read;
    for (int i = 0; i < std::ssize(results); ++i)
      if (!plain.accumulates(i)) read.push_back(outputs[i]);
    program.set_outputs(read);
    return checked;
  };
  check_on_gpu(build, cpu, gpu, check);
}

}  // namespace tessera::testing
