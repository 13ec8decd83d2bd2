#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "hf/tensors/tensor_map.h"

namespace tessera {

/// What a checkpoint made from a Hugging Face folder keeps of it, in its folder `huggingface`:
/// config.json and the tokenizer's files as they were, and a record of how the tensors were laid
/// out, so that the way back writes the same.
struct HfRecord {
  HfLayout layout;
  DType dtype = DType::kF32;
  std::map<std::string, DType> other_dtypes;  ///< of the tensors of another type, by name

  DType dtype_of(const std::string& name) const;
};

inline constexpr const char* kHfFolder = "huggingface";
inline constexpr const char* kHfRecordFile = "tessera_layout.json";

std::string hf_record_text(const HfRecord& record);
/// Throws UserError that starts with `where`.
HfRecord parse_hf_record(std::string_view text, std::string_view where);

/// Copies the files of a folder that are neither weights nor an index or record of them: those that
/// make a Hugging Face folder whole. Returns the names of files that are of no known kind and were
/// left out.
std::vector<std::string> copy_companion_files(const std::filesystem::path& from,
                                              const std::filesystem::path& to);

}  // namespace tessera
