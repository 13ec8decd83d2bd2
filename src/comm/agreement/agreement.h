#pragma once

#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/communicator.h"

namespace tessera {

/// What a rank says of itself when the ranks have been connected, before it reads or writes
/// anything: values that must be the same on all ranks.
struct RankStatement {
  struct Topic {
    std::map<std::string, std::string> values;  ///< by key; as they stand in a message
    std::string advice;                         ///< what to do where ranks differ
  };
  /// The first topic in which ranks differ is told, since others may differ because of it. A rank
  /// that failed may have fewer of them.
  std::vector<Topic> topics;
  std::string failure;  ///< why this rank cannot run; empty: it can
};

/// What keeps ranks with these statements, one by rank, from running together, in one line:
/// `optim.learning_rate is 0.001 on rank 0 and 0.002 on rank 1; start ...`, or `rank 1: FAILURE`.
/// Nothing where they agree.
std::optional<std::string> find_disagreement(std::span<const RankStatement> ranks);

/// Whether all ranks of the world say the same and none failed; all must call. Where not, rank 0
/// has told why on standard error when this returns, and all that is left is to end with exit code
/// 2. Throws CommError.
bool ranks_agree(World& world, const RankStatement& own);

}  // namespace tessera
