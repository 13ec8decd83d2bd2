#pragma once

#include "comm/communicator.h"
#include "comm/options.h"
#include "comm/shm/shm_mesh.h"

namespace tessera {

/// Finds which ranks of the world are processes of this machine whose memory this rank may read
/// while they may read its own, and joins those to the mesh. All ranks must call, whatever their
/// options say. Throws CommError.
void join_by_memory(World& world, const CommOptions& options, ShmMesh& mesh);

}  // namespace tessera
