#pragma once

#include <filesystem>
#include <span>
#include <string>

namespace tessera {

/// What tells whether two processes, maybe on different machines, see the same files: how many
/// there are, their bytes, and a hash of names within a folder, sizes and content:
/// `3 files of 1,234 bytes with hash 0123456789abcdef`. Of much content a sample is hashed, spread
/// evenly, so that this takes about as long for a terabyte as for some megabytes. Times of change
/// do not count, since copies differ in them. Throws UserError for a file that cannot be read.
std::string identify_files(std::span<const std::filesystem::path> files);

}  // namespace tessera
