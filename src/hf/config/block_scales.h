#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>

namespace tessera {

/// How the matrices of a folder are stored as E4M3 numbers: each block of `rows` x `cols` of a
/// matrix, the last ones smaller, has a scale by which its numbers are multiplied. The scales of
/// "NAME" are the matrix "NAME_scale_inv". So are DeepSeek-V3 and the FP8 models of Qwen published
/// (transformers' FineGrainedFP8Config; DeepSeek-V3, section 3.3.2); of DeepSeek-V4 the scales are
/// named otherwise (saved_v4_name), and matrices of E2M1 have blocks of their own beside them.
struct BlockScales {
  int64_t rows = 0;
  int64_t cols = 0;
};

/// Reads `quantization_config` of a config.json; null: nothing. Throws UserError for another
/// scheme, by name, and for keys that are not known.
std::optional<BlockScales> read_block_scales(const nlohmann::json& value, std::string_view where);

/// Whether `quantization_config` says that weights are MXFP4. Throws UserError for keys that are
/// not known with it.
bool read_mxfp4(const nlohmann::json& value, std::string_view where);

/// The text of a config.json without the key, and what goes with it: of the model whose weights are
/// the values.
std::string without_quantization(std::string_view text);

}  // namespace tessera
