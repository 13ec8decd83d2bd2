#pragma once

#include <string>
#include <vector>

#include "comm/communicator.h"
#include "runtime/executable.h"

namespace tessera {

/// The group in which an operator communicates; null where it does not.
const Communicator* group_of(const Operator& op);

/// The types of a program's values, ragged ones with `skew` times the rows of balanced routing
/// where the program knows these, otherwise with their bounds.
std::vector<ValueType> types_at(const Executable& executable, const std::vector<ValueId>& ids,
                                double skew = 1);

/// The format of the first operand that is no index or count: "bf16", "e4m3 row".
std::string operand_format(const std::vector<ValueType>& inputs);

}  // namespace tessera
