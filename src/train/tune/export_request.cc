#include "train/tune/export_request.h"

#include "core/error.h"
#include "core/file/file.h"
#include "tokenizer/tokenizer.h"
#include "train/state/checkpointing.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

/// Where config.json and the tokenizer come from unless rl.export_like says it.
fs::path find_origin(const Settings& settings) {
  const std::string& from = settings.run.init_from;
  if (from.empty()) return settings.run.folder;
  require(
      path_exists(from),
      "the run began with run.init_from {}, which is not there any more, and weights are handed "
      "over with its config.json and tokenizer; set rl.export_like to a folder that has them",
      from);
  return open_checkpoint(from, Verify::kSizes).reader.path();
}

}  // namespace

std::vector<std::string> add_tokenizer(const DataSettings& data, ExportRequest& request) {
  if (data.tokenizer == "none") return {};
  if (data.tokenizer == "byte") {
    request.end_of_document_id = make_tokenizer(data.tokenizer_spec())->end_of_document();
    return {"bytes need no tokenizer file, so none was written"};
  }
  fs::path path = data.tokenizer;
  for (const char* name : {"tokenizer.json", "tokenizer.model"}) {
    if (path_exists(path / name)) path /= name;
  }
  if (!path_exists(path)) {
    return {
        fmt::format("the tokenizer {} is not there any more, so none was written", path.string())};
  }
  const auto tokenizer = make_tokenizer(data.tokenizer_spec());
  const int32_t end = tokenizer->end_of_document();
  request.tokenizer = path;
  request.end_of_document = tokenizer->decode(std::span(&end, 1));
  request.end_of_document_id = end;
  return {};
}

ExportRequest request_export(const Settings& settings) {
  const std::string& like = settings.rl.exports.like;
  ExportRequest request{.source = like.empty() ? find_origin(settings) : fs::path(),
                        .target = {},
                        .model = settings.model,
                        .model_dtype = settings.train.dtype(),
                        .family = {},
                        .like = like,
                        .fused_experts = {},
                        .tokenizer = {},
                        .end_of_document = {},
                        .end_of_document_id = {},
                        .max_length = settings.data.sequence_length,
                        .options = {}};
  add_tokenizer(settings.data, request);
  return request;
}

}  // namespace tessera
