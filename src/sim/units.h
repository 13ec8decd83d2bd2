#pragma once

namespace tessera {

inline constexpr double kGiga = 1e9;
inline constexpr double kMicro = 1e-6;

}  // namespace tessera
