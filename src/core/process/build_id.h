#pragma once

#include <string>

namespace tessera {

/// The linker's hash of this program (its GNU build ID), in hexadecimal digits; empty where it was
/// linked without one.
std::string program_build_id();

}  // namespace tessera
