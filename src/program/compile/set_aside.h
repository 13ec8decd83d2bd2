#pragma once

#include "ops/backend.h"
#include "program/program.h"

namespace tessera {

/// Lets nodes run aside (Node::aside) that nothing in the program reads, since they only add to
/// accumulators, where the back end's side lane suits their cost. A program in which some node
/// communicates or tells the host something stays as it is: its nodes are given to the device in
/// stretches, and none could be left under way between them. For the last pass: others may move
/// nodes. What it computes keeps its bits. REQUIRES backend.side_lane().
Program set_aside(const Program& program, const Backend& backend);

}  // namespace tessera
