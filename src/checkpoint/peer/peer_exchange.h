#pragma once

#include <filesystem>
#include <optional>

#include "checkpoint/format/manifest.h"
#include "comm/communicator.h"

namespace tessera {

/// A complete part of a checkpoint, a rank's files, that another rank wants.
struct GivenPart {
  std::filesystem::path folder;
  int64_t to = 0;
};

/// Where a part that another rank gives is to be: a folder that does not exist.
struct TakenPart {
  std::filesystem::path folder;
  int64_t from = 0;
};

/// Gives one part and takes one, each perhaps none, at the same time. Of two ranks that are each
/// other's `to` and `from`, both call. Files come in pieces of some MiB; what has come is compared
/// with the hashes of its manifest. Throws UserError where this rank's part cannot be read, or what
/// comes cannot be written or is damaged, after all that the other rank waits for; then nothing is
/// left of the taken part. Throws CommError where a rank is lost.
void exchange_parts(Communicator& world, const std::optional<GivenPart>& given,
                    const std::optional<TakenPart>& taken);

}  // namespace tessera
