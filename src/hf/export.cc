#include <algorithm>

#include "core/error.h"
#include "core/file/file.h"
#include "hf/convert.h"
#include "hf/export_files.h"
#include "hf/export_plan.h"
#include "hf/folder_builder.h"
#include "hf/merged_adapters.h"
#include "hf/peft_adapters.h"
#include "hf/verify.h"
#include "model/weights/parameters.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

VerifyReport verify_export(const fs::path& folder, const Export& work, ElementSource& source,
                           ConversionProgress& progress) {
  const HfTensors tensors(folder);
  check_tensors(work.map, tensors, {});
  const auto target = make_hf_source(work.map, tensors, std::nullopt);
  VerifyRequest request{.names = {},
                        .back = plan_to_own(work.map),
                        .source = &source,
                        .target = target.get(),
                        .advance = [&](int64_t num_bytes) { progress.advance(num_bytes); }};
  for (const MappedTensor& tensor : work.map.own) request.names.push_back(tensor.name);
  return verify_round_trip(request);
}

/// The tensors of a checkpoint's model.
ExportSource source_of(const CheckpointReader& reader, bool merges) {
  ExportSource source{.where = reader.path().string(), .shapes = {}, .merges = merges};
  for (const std::string& name : reader.names(TensorGroup::kModel))
    source.shapes[name] = reader.manifest().tensors.at(name).shape;
  return source;
}

/// Whether some are of a model with experts, but not of what mixes its tokens.
bool adapts_experts_or_mlps(const ModelConfig& model) {
  return model.num_moe_layers() > 0 &&
         std::ranges::any_of(adaptable_matrices(model), [&](const std::string& matrix) {
           const bool is_mlp = matrix.starts_with("mlp.") || matrix.starts_with("moe.");
           return is_mlp && is_adapted(model, matrix);
         });
}

/// Adapters alone, which have no configuration and tokenizer of a model beside them.
ConvertReport export_adapters(const ExportRequest& request) {
  require(request.model.lora.is_on(), "{} has no low-rank adapters; leave --adapters out",
          request.source.string());
  FolderBuilder folder(request.target);
  const CheckpointReader reader(request.source);
  const ExportRequest decoder = plain_request(request);
  const Export work = prepare_export(decoder, decoder.model, source_of(reader, true));
  ConvertReport report{.model_type = std::string(work.family->model_type), .notes = work.notes};
  report.num_target_tensors =
      2 * write_peft_adapters(folder.path(), work.map, reader, request.model);
  for (const std::string& name : reader.names(TensorGroup::kModel)) {
    if (!is_adapter_parameter(name)) continue;
    const auto& tensor = reader.manifest().tensors.at(name);
    report.num_source_tensors += 1;
    report.source_bytes += tensor.shape.num_elements() * dtype_size(tensor.dtype);
  }
  report.target_bytes =
      static_cast<int64_t>(std::filesystem::file_size(folder.path() / "adapter_model.safetensors"));
  folder.publish();
  if (adapts_experts_or_mlps(request.model)) {
    report.notes.emplace_back(
        "of models with experts PEFT 0.21 with transformers 5 leaves out adapters of MLPs, and for "
        "some model types those of experts, without a word: compare what it makes of these with "
        "the merged model, which convert writes without --adapters");
  }
  return report;
}

}  // namespace

ConvertReport export_hf(const ExportRequest& request) {
  if (request.adapters_only) return export_adapters(request);
  const ExportRequest decoder = plain_request(request);
  const LoraConfig& lora = request.model.lora;
  FolderBuilder folder(request.target);
  const CheckpointReader reader(request.source);
  Export work = prepare_export(decoder, request.model, source_of(reader, lora.is_on()));
  ConvertReport report{.model_type = std::string(work.family->model_type),
                       .num_source_tensors = static_cast<int64_t>(work.map.own.size()),
                       .num_target_tensors = static_cast<int64_t>(work.map.hf.size()),
                       .source_bytes = count_bytes(work.map.own),
                       .target_bytes = count_bytes(work.map.hf),
                       .notes = {}};
  folder.require_space(report.target_bytes);
  const int64_t checked = request.options.verify ? 2 * report.source_bytes : 0;
  ConversionProgress progress(request.options.progress, report.target_bytes + checked);
  const auto source = lora.is_on() ? make_merged_source(work.map, reader, request.model)
                                   : make_checkpoint_source(work.map, reader);
  progress.begin("writing");
  write_weights(folder.path(), work, *source, decoder, progress);
  judge_nonfinite(source->nonfinite(), request.source.string(), request.options.allow_nonfinite,
                  work.notes);
  write_companions(folder.path(), work, decoder);
  if (request.options.verify) {
    progress.begin("verifying");
    const VerifyReport verified = verify_export(folder.path(), work, *source, progress);
    report.num_verified = verified.num_tensors;
    report.num_narrowed = verified.num_narrowed;
  }
  folder.publish();
  report.notes = std::move(work.notes);
  if (lora.is_on())
    report.notes.push_back(
        fmt::format("adapters of rank {} are merged into the weights", lora.rank));
  return report;
}

}  // namespace tessera
