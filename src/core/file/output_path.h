#pragma once

#include <filesystem>
#include <string_view>

namespace tessera {

/// Refuses a path that no file can be written to, before the work whose result goes there: a
/// folder, a folder that is missing or closed around it, a file that is write-protected. Leaves
/// everything as it is; what replace_file writes afterwards may still fail, on a full disk, say.
/// `option` begins the message. Throws UserError.
void check_output_path(std::string_view option, const std::filesystem::path& path);

}  // namespace tessera
