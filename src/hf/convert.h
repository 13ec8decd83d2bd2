#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "hf/config/hf_config.h"

namespace tessera {

/// Called with what is being done and how far it is; may throw to stop.
using ConvertProgress =
    std::function<void(std::string_view stage, int64_t done_bytes, int64_t total_bytes)>;

struct ConvertOptions {
  std::optional<DType> dtype;  ///< F32 or BF16 of matrix weights; nothing: the source's
  bool verify = true;
  bool allow_nonfinite = false;  ///< NaN and infinite weights are noted, and not an error
  int64_t shard_bytes = int64_t{5} * 1000 * 1000 * 1000;
  ConvertProgress progress = [](std::string_view, int64_t, int64_t) {};
};

/// What was done. Conversions throw UserError for anything that is missing, left over, not
/// supported or not verified, and leave nothing behind then.
struct ConvertReport {
  std::string model_type;
  int64_t num_source_tensors = 0;
  int64_t num_target_tensors = 0;
  int64_t source_bytes = 0;
  int64_t target_bytes = 0;
  int64_t num_verified = 0;
  int64_t num_narrowed = 0;  ///< of those, tensors whose values were rounded to a narrower type
  std::vector<std::string> notes;
};

/// From Hugging Face's folder `source` to a checkpoint `target`.
struct ImportRequest {
  std::filesystem::path source;
  std::filesystem::path target;
  /// Rows are added to the tables up to this many, or to a multiple; 0: none.
  int64_t vocab_size = 0;
  int64_t pad_vocab_to = 0;
  /// Leaves out the layers of multi-token prediction, which transformers' models do not have.
  bool drop_mtp = false;
  ConvertOptions options;
  /// The checkpoint's state (checkpoint.h) of a model and the type of its matrices.
  std::function<std::string(const ImportedConfig&, DType)> make_state;
};
ConvertReport import_hf(const ImportRequest& request);

/// From a checkpoint of `model` to a folder `target` of Hugging Face. Low-rank adapters are merged:
/// W + scale · B A, in F32, rounded once.
struct ExportRequest {
  std::filesystem::path source;
  std::filesystem::path target;
  ModelConfig model;
  DType model_dtype = DType::kF32;  ///< of the matrices, as trained
  std::string family;               ///< "" finds one that expresses the model
  /// Where config.json, the tokenizer and the layout come from: a folder of Hugging Face, or a
  /// checkpoint made from one. Empty: `source`, if it is such a checkpoint.
  std::filesystem::path like;
  /// Writes the low-rank adapters alone, as PEFT's, instead of the merged model.
  bool adapters_only = false;
  std::optional<bool> fused_experts;  ///< nothing: as in `like`, else one by one
  /// A tokenizer.json or SentencePiece .model that goes along where `like` brings none; empty:
  /// none.
  std::filesystem::path tokenizer;
  std::string end_of_document;                ///< its token between documents, as text
  std::optional<int32_t> end_of_document_id;  ///< that token; nothing: no tokenizer is known
  int64_t max_length = 2048;                  ///< max_position_embeddings of a new config.json
  ConvertOptions options;
};
ConvertReport export_hf(const ExportRequest& request);

}  // namespace tessera
