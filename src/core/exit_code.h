#pragma once

namespace tessera {

/// How a process ends for a mistake of its user, and for one of Tessera.
inline constexpr int kUserErrorCode = 2;
inline constexpr int kInternalErrorCode = 1;

}  // namespace tessera
