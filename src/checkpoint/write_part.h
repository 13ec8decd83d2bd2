#pragma once

#include <filesystem>
#include <vector>

#include "checkpoint/format/manifest.h"
#include "checkpoint/parts.h"

namespace tessera {

/// What one rank writes of a checkpoint.
struct PartRequest {
  int64_t rank = 0;
  int64_t num_ranks = 1;
  int64_t step = 0;
  int64_t shard_bytes = 0;
  std::vector<GivenTensor> model;
  std::vector<GivenTensor> optimizer;
};

/// Writes a rank's tensors to files of its own in `folder`, waits until they are on the disk and
/// gives their records. File names carry the rank where there are several. A piece that is not the
/// whole tensor has the key "<name>[<first row>:<end>, <first column>:<end>]". Tensors of which the
/// rank gives nothing are in the record all the same.
Manifest write_part(const std::filesystem::path& folder, const PartRequest& request);

/// Joins what all ranks, in order, have written into one manifest. Throws InternalError where ranks
/// disagree on step, type, shape or group of a tensor, or where an element of one is given by no
/// rank or by several.
Manifest merge_parts(std::vector<Manifest> parts);

}  // namespace tessera
