#pragma once

#include <span>
#include <string_view>

namespace tessera {

/// A hardware file of configs/hardware, compiled into the program.
struct HardwareText {
  std::string_view name;
  std::string_view text;
};
std::span<const HardwareText> hardware_texts();

}  // namespace tessera
