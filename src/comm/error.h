#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "comm/statistics.h"
#include "core/error.h"

namespace tessera {

/// Ranks that cannot communicate any more: one was lost, or did not come to an operation in time.
/// After it no operation of this rank's world completes; all that is left is to end the job
/// (World::abort).
class CommError : public UserError {
 public:
  using UserError::UserError;
};

/// What a rank was waiting for when it gave up. Ranks are those of the world.
struct FailedWait {
  int64_t rank = 0;
  CommKind kind = CommKind::kBarrier;
  int64_t number = 0;  ///< of the group's collectives, or of the messages between the two ranks
  std::string group;
  std::vector<int64_t> ranks;
  std::vector<int64_t> missing;  ///< ranks whose part is not there yet; empty where not known
  double seconds = 0;            ///< how long it waited
  std::string reason;            ///< why it gave up
};

/// `rank 2 waited 30.0 s for all_gather 17 of group "tp" (ranks 0 2), missing rank 0: REASON`.
std::string describe(const FailedWait& wait);

}  // namespace tessera
