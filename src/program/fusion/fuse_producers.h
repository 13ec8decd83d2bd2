#pragma once

#include <span>

#include "program/program.h"

namespace tessera {

/// Makes one node of an operator and of the one that makes its first input, where it can
/// (JoinsProducer, ops/joins_producer.h): experts' activations become part of the products around
/// them. What lies between the two is made only where others read it, or where it is an output of
/// the program or one of `kept`. Values keep their ids; those that are no longer made have no node.
/// For programs that are not differentiated any more.
Program fuse_producers(const Program& program, std::span<const ValueId> kept = {});

}  // namespace tessera
