#pragma once

#include <filesystem>

#include "hf/export_plan.h"
#include "hf/tensor_writer.h"
#include "hf/transfer/transfer.h"

namespace tessera {

/// The weights of an export, read from `source`, as safetensors files of up to
/// request.options.shard_bytes, with an index where there are several.
void write_weights(const std::filesystem::path& folder, const Export& work, ElementSource& source,
                   const ExportRequest& request, ConversionProgress& progress);

/// What makes the folder whole: config.json, the tokenizer and whatever came along.
void write_companions(const std::filesystem::path& folder, const Export& work,
                      const ExportRequest& request);

}  // namespace tessera
