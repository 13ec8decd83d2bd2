#pragma once

#include "program/program.h"

namespace tessera {

/// Lets the operators that make one operand of a sum (`add`) make the sum: the operand made last,
/// where nothing else reads it and its operator takes an addend (ops/addend.h). The sum then costs
/// one reading of the other operand instead of two and a writing, its memory lives no longer than
/// the operands' did, and it is rounded once. A sum of what an exchange brings is left alone where
/// the operator would otherwise not have to wait for that exchange. Values keep their ids; operands
/// that are no longer made have no node.
Program fuse_sums(const Program& program);

}  // namespace tessera
