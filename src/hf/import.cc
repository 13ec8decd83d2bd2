#include <algorithm>
#include <array>
#include <string_view>

#include "core/config/strict_json.h"
#include "core/error.h"
#include "core/file/file.h"
#include "hf/checkpoint_writer.h"
#include "hf/config/v4_json.h"
#include "hf/convert.h"
#include "hf/folder_builder.h"
#include "hf/hf_record.h"
#include "hf/tensor_writer.h"
#include "hf/tensors/name_list.h"
#include "hf/tensors/packed_tensors.h"
#include "hf/tensors/prediction_layers.h"
#include "hf/transfer/elements.h"
#include "hf/transfer/scaled_matrices.h"
#include "hf/verify.h"
#include "model/config/limits.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

/// Hugging Face's folder with all that is decided before anything is written.
struct Import {
  ImportedConfig config;
  HfTensors tensors;
  TensorMap map;
  HfRecord record;
  DType dtype = DType::kF32;
  std::vector<std::string> notes;
};

/// Tables of rotary frequencies, which old files hold and transformers computes anew.
std::vector<std::string> find_rotary_tables(const HfTensors& tensors) {
  std::vector<std::string> names;
  for (const auto& [name, tensor] : tensors.all()) {
    if (name.ends_with(".rotary_emb.inv_freq")) names.push_back(name);
  }
  return names;
}

/// Of a model with encoders of images, these.
std::vector<std::string> find_encoders(const HfTensors& tensors, const Family& family) {
  std::vector<std::string> names;
  for (const auto& entry : tensors.all()) {
    const std::string& name = entry.first;
    const bool is_encoder = std::ranges::any_of(family.encoders, [&](std::string_view prefix) {
      return !prefix.empty() && name.starts_with(prefix);
    });
    if (is_encoder) names.push_back(name);
  }
  return names;
}

/// Names that are left out on purpose, each kind with a note.
std::vector<std::string> find_ignored(const ImportRequest& request, Import& work) {
  std::vector<std::string> ignored = find_rotary_tables(work.tensors);
  if (!ignored.empty()) {
    work.notes.push_back(
        fmt::format("{} tables of rotary frequencies are left out; they follow "
                    "from the configuration",
                    ignored.size()));
  }
  const int64_t num_layers = work.config.model.num_layers;
  const std::vector<std::string> mtp = work.config.model.mtp_layers > 0
                                           ? std::vector<std::string>()
                                           : find_prediction_tensors(work.tensors, num_layers);
  require(mtp.empty() || request.drop_mtp,
          "{}: {} tensors seem to be of multi-token prediction, behind the {} layers or named so, "
          "and of model type '{}' none is known; --drop-mtp converts the model without them: {}",
          request.source.string(), mtp.size(), num_layers, work.config.family->model_type,
          list_names(mtp));
  if (!mtp.empty()) {
    work.notes.push_back(fmt::format(
        "{} tensors of multi-token prediction are left out, as --drop-mtp asks", mtp.size()));
  }
  ignored.insert(ignored.end(), mtp.begin(), mtp.end());
  if (work.config.of_whole) {
    const auto encoders = find_encoders(work.tensors, *work.config.family);
    work.notes.push_back(
        fmt::format("the model of text is taken; {} tensors of encoders of images are left out",
                    encoders.size()));
    ignored.insert(ignored.end(), encoders.begin(), encoders.end());
  }
  const std::vector<std::string> scales = list_scales(work.tensors);
  ignored.insert(ignored.end(), scales.begin(), scales.end());
  return ignored;
}

/// A configuration of far more tensors than there are is refused before they are listed.
void check_plausible(const Import& work, const HfLayout& layout) {
  const ModelConfig& model = work.config.model;
  const auto num_found = static_cast<int64_t>(work.tensors.all().size());
  const int64_t per_layer = layout.fused_experts ? 1 : std::max<int64_t>(model.moe.num_experts, 1);
  const int64_t least = model.num_layers + model.num_moe_layers() * per_layer;
  require(least <= num_found,
          "{}: {} layers with {} experts have {} tensors or more, and there are {}",
          work.tensors.path().string(), model.num_layers, model.moe.num_experts, least, num_found);
}

int64_t padded_vocab(const ImportRequest& request, int64_t vocab_size) {
  require(request.vocab_size == 0 || request.vocab_size >= vocab_size,
          "a vocabulary of {} was asked for, and the model has {} already", request.vocab_size,
          vocab_size);
  require(request.vocab_size <= kMaxVocabulary && request.pad_vocab_to <= kMaxVocabulary,
          "a vocabulary of {}, padded to a multiple of {}, was asked for; at most {} are supported",
          request.vocab_size, request.pad_vocab_to, kMaxVocabulary);
  const int64_t size = std::max(request.vocab_size, vocab_size);
  if (request.pad_vocab_to <= 1) return size;
  return (size + request.pad_vocab_to - 1) / request.pad_vocab_to * request.pad_vocab_to;
}

DType choose_dtype(const ImportRequest& request, const HfTensors& tensors) {
  if (request.options.dtype) return *request.options.dtype;
  const HfTensor* table = tensors.find("model.embed_tokens.weight");
  return table != nullptr && table->entry->dtype == DType::kBF16 ? DType::kBF16 : DType::kF32;
}

/// Whether two tensors are the same bytes of one type; also where neither is there.
bool are_equal(const HfTensor* a, const HfTensor* b) {
  if (a == nullptr || b == nullptr) return a == b;
  return a->entry->dtype == b->entry->dtype && std::ranges::equal(a->bytes(), b->bytes());
}

/// Tensors that must repeat others: a stored head of tied tables, and tables of multi-token
/// prediction.
void check_copies(const TensorMap& map, const HfTensors& tensors) {
  for (const auto& [copy, original] : map.copies) {
    const std::string& a = map.hf[copy].name;
    const std::string& b = map.hf[original].name;
    const bool are_copies = are_equal(tensors.find(a), tensors.find(b)) &&
                            are_equal(find_scales(tensors, a), find_scales(tensors, b));
    const bool is_tied = a == "lm_head.weight" || a == "head.weight";
    require(are_copies || !is_tied,
            "{}: tie_word_embeddings is true, but {} and {} differ; correct config.json or remove "
            "the tensor that is not used",
            tensors.path().string(), a, b);
    require(are_copies,
            "{}: {} and {} differ, and multi-token prediction shares the model's tables; "
            "--drop-mtp converts the model without it",
            tensors.path().string(), a, b);
  }
}

HfRecord make_record(const TensorMap& map, const HfTensors& tensors, const HfLayout& layout) {
  const Plan plan = plan_to_hf(map);
  HfRecord record;
  record.layout = layout;
  for (size_t i = 0; i < map.hf.size(); ++i) {
    const HfTensor* found = tensors.find(map.hf[i].name);  // null: packed
    const DType own = map.own[plan[i].front().source].dtype;
    DType dtype = found == nullptr ? own : found->entry->dtype;
    const bool is_kept = is_float_storage(dtype) || map.hf[i].is_whole_numbers;
    if (!is_kept || !is_exact(dtype, own)) dtype = own;
    if (i == 0) record.dtype = dtype;
    if (dtype != record.dtype) record.other_dtypes[map.hf[i].name] = dtype;
  }
  return record;
}

void note_scaled(Import& work) {
  int64_t scaled = 0;
  int64_t pairs = 0;
  int64_t packed = 0;
  for (const MappedTensor& tensor : work.map.hf) {
    const HfTensor* found = work.tensors.find(tensor.name);
    packed += found == nullptr ? 1 : 0;
    scaled += found != nullptr && found->entry->dtype == DType::kE4M3 ? 1 : 0;
    pairs += found != nullptr && holds_pairs(*found->entry, tensor.shape) ? 1 : 0;
  }
  const auto note = [&](int64_t count, const char* what) {
    if (count == 0) return;
    work.notes.push_back(
        fmt::format("{} {} numbers become {}, by their scales; an export has them "
                    "so",
                    count, what, work.dtype == DType::kBF16 ? "BF16" : "F32"));
  };
  note(scaled, "matrices of E4M3");
  note(pairs, "matrices of E2M1");
  note(packed, "tensors of MXFP4");
}

Import prepare(const ImportRequest& request) {
  Import work{.config = read_hf_config(request.source),
              .tensors = HfTensors(request.source),
              .map = {},
              .record = {},
              .notes = {}};
  const Family& family = *work.config.family;
  if (work.config.of_whole) work.tensors.name_as_text_model(family.whole_prefix, family.whole_part);
  if (family.deepseek_v4) work.tensors.rename(saved_v4_name);
  if (!request.drop_mtp) take_predictions(work.config, work.tensors);
  work.notes = work.config.notes;
  const HfLayout layout = detect_layout(family, work.config.model, work.tensors);
  check_plausible(work, layout);
  const auto ignored = find_ignored(request, work);
  ModelConfig& model = work.config.model;
  model.vocab_size = padded_vocab(request, model.vocab_size);
  validate(model);
  if (model.vocab_size > layout.vocab_size) {
    work.notes.push_back(fmt::format(
        "the vocabulary of {} is padded to {} with rows of zeros; the added tokens have "
        "the logit 0, and the way back removes them",
        layout.vocab_size, model.vocab_size));
  }
  work.dtype = choose_dtype(request, work.tensors);
  work.map = map_tensors(*work.config.family, model, work.dtype, layout);
  check_tensors(work.map, work.tensors, ignored);
  check_stored_types(work.map, work.tensors, work.config.scales, work.config.mxfp4);
  note_scaled(work);
  check_copies(work.map, work.tensors);
  work.record = make_record(work.map, work.tensors, layout);
  return work;
}

void write_companions(const fs::path& source, const fs::path& target, Import& work) {
  make_folder(target);
  const auto left_out = copy_companion_files(source, target);
  if (!left_out.empty()) {
    work.notes.push_back("files that are not carried along: " + list_names(left_out));
  }
  write_file_synced(target / kHfRecordFile, hf_record_text(work.record));
  sync_folder(target);
}

void write_weights(const fs::path& folder, Import& work, const ImportRequest& request,
                   ConversionProgress& progress) {
  const Plan plan = plan_to_own(work.map);
  const auto source = make_hf_source(work.map, work.tensors, work.config.scales);
  write_checkpoint_files(
      folder, request.make_state(work.config, work.dtype), work.map.own,
      request.options.shard_bytes,
      [&](const fs::path& file, size_t first, std::span<const MappedTensor> tensors) {
        return write_shard({file, tensors, std::span(plan).subspan(first, tensors.size())}, *source,
                           progress);
      });
  judge_nonfinite(source->nonfinite(), request.source.string(), request.options.allow_nonfinite,
                  work.notes);
}

VerifyReport verify_import(const fs::path& folder, const Import& work,
                           ConversionProgress& progress) {
  const CheckpointReader reader(folder, Verify::kSizes);
  const auto source = make_hf_source(work.map, work.tensors, work.config.scales);
  const auto target = make_checkpoint_source(work.map, reader);
  VerifyRequest request{.names = {},
                        .back = plan_to_hf(work.map),
                        .source = source.get(),
                        .target = target.get(),
                        .advance = [&](int64_t num_bytes) { progress.advance(num_bytes); }};
  for (const MappedTensor& tensor : work.map.hf) request.names.push_back(tensor.name);
  verify_padding(work.map.own, plan_to_own(work.map), *target);
  return verify_round_trip(request);
}

}  // namespace

ConvertReport import_hf(const ImportRequest& request) {
  FolderBuilder folder(request.target);
  Import work = prepare(request);
  ConvertReport report{.model_type = std::string(work.config.family->model_type),
                       .num_source_tensors = static_cast<int64_t>(work.tensors.all().size()),
                       .num_target_tensors = static_cast<int64_t>(work.map.own.size()),
                       .source_bytes = work.tensors.num_bytes(),
                       .target_bytes = count_bytes(work.map.own),
                       .notes = {}};
  folder.require_space(report.target_bytes);
  const int64_t checked = request.options.verify ? 2 * report.source_bytes : 0;
  ConversionProgress progress(request.options.progress, report.target_bytes + checked);
  progress.begin("writing");
  write_weights(folder.path(), work, request, progress);
  write_companions(request.source, folder.path() / kHfFolder, work);
  if (request.options.verify) {
    progress.begin("verifying");
    const VerifyReport verified = verify_import(folder.path(), work, progress);
    report.num_verified = verified.num_tensors;
    report.num_narrowed = verified.num_narrowed;
  }
  folder.publish();
  report.notes = std::move(work.notes);
  return report;
}

}  // namespace tessera
