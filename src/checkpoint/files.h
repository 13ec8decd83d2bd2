#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "checkpoint/format/manifest.h"
#include "checkpoint/format/safetensors.h"

namespace tessera {

// The files of a checkpoint against its manifest. What does not fit throws UserError.

/// All files are there and of their sizes.
void check_files_exist(const std::filesystem::path& folder, const Manifest& manifest);

SafetensorsReader open_file(const std::filesystem::path& path, const FileRecord& record,
                            Verify verify);

/// A piece is in its file with the type of its tensor and its own shape.
void check_piece(const SafetensorsReader& file, const TensorPiece& piece, DType dtype);

/// Of these files: every piece is in its file, and every tensor of a file is a piece.
void check_pieces(const Manifest& manifest, const std::map<std::string, SafetensorsReader>& files);

/// Spreads the files over ranks, so that each has about as many bytes to read; a pure function of
/// the manifest. Gives the names of `rank`.
std::vector<std::string> files_of_rank(const Manifest& manifest, int64_t rank, int64_t num_ranks);

}  // namespace tessera
