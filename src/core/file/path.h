#pragma once

#include <filesystem>
#include <string_view>

namespace tessera {

/// Throws UserError unless the path exists; the message gives `what` ("configuration file") and the
/// name in the same folder that is nearest to the missing one.
void require_exists(const std::filesystem::path& path, std::string_view what);

}  // namespace tessera
