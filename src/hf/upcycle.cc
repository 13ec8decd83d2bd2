#include "hf/upcycle.h"

#include <algorithm>
#include <unordered_map>

#include "core/error.h"
#include "core/file/file.h"
#include "core/process/progress.h"
#include "core/random.h"
#include "core/saturating.h"
#include "hf/checkpoint_writer.h"
#include "hf/folder_builder.h"
#include "hf/hf_record.h"
#include "hf/tensor_writer.h"
#include "hf/transfer/elements.h"
#include "model/config/limits.h"
#include "model/weights/parameters.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

/// Tensors of a model in a checkpoint; matrices of the type that the checkpoint has them in.
std::vector<MappedTensor> list_tensors(const ModelConfig& model, DType dtype) {
  std::vector<MappedTensor> tensors;
  for (const ParameterSpec& spec : list_parameters(model, dtype)) {
    tensors.push_back({spec.name, spec.shape, spec.dtype});
  }
  for (int64_t layer = 0; layer < model.num_layers; ++layer) {
    if (!model.is_moe_layer(layer)) continue;
    tensors.push_back({layer_parameter_name(layer, "moe.expert_bias"), {model.moe.num_experts}});
  }
  return tensors;
}

/// Blocks for every tensor of the new model; none for routers and expert biases.
class UpcyclePlanner {
 public:
  UpcyclePlanner(const std::vector<MappedTensor>& source, const UpcycleSpec& spec) : spec_(spec) {
    for (size_t i = 0; i < source.size(); ++i) by_name_[source[i].name] = {i, &source[i]};
  }

  std::vector<BlockCopy> plan(const MappedTensor& target) const {
    const auto same = by_name_.find(target.name);
    if (same != by_name_.end()) return {copy_whole(same->second)};
    if (target.name.ends_with("moe.router.weight") || target.name.ends_with("moe.expert_bias"))
      return {};
    if (target.name.ends_with("moe.experts.down.weight")) return plan_down(target);
    return plan_first(target);
  }

 private:
  struct Place {
    size_t index = 0;
    const MappedTensor* tensor = nullptr;
  };

  static BlockCopy copy_whole(const Place& place) {
    const Shape& shape = place.tensor->shape;
    return {place.index, 0, 0, shape.num_rows(), shape.last(), false};
  }

  /// The dense MLP's tensor that an expert tensor is made of.
  Place dense_part(const std::string& name) const {
    constexpr std::string_view kExperts = "moe.experts.";
    std::string dense = name;
    dense.replace(dense.find(kExperts), kExperts.size(), "mlp.");
    const auto found = by_name_.find(dense);
    ensure(found != by_name_.end(), "no dense tensor for '{}'", name);
    return found->second;
  }

  /// The shards of a copy, one after the other, are the rows of the transposed matrix.
  std::vector<BlockCopy> plan_down(const MappedTensor& target) const {
    const Place place = dense_part(target.name);
    const int64_t hidden = place.tensor->shape[0];
    const int64_t inner = place.tensor->shape[1];
    std::vector<BlockCopy> blocks;
    for (int64_t copy = 0; copy < spec_.copies; ++copy) {
      blocks.push_back({place.index, 0, copy * inner * hidden, inner, hidden, true});
    }
    return blocks;
  }

  /// Of each shard the rows of the gate, where there is one, then those of the other half.
  std::vector<BlockCopy> plan_first(const MappedTensor& target) const {
    const Place place = dense_part(target.name);
    const int64_t hidden = place.tensor->shape[1];
    const int64_t num_parts = target.name.ends_with("gate_up.weight") ? 2 : 1;
    const int64_t inner = place.tensor->shape[0] / num_parts;
    const int64_t rows = inner / spec_.granularity;
    std::vector<BlockCopy> blocks;
    int64_t begin = 0;
    for (int64_t expert = 0; expert < spec_.num_experts(); ++expert) {
      for (int64_t part = 0; part < num_parts; ++part) {
        const int64_t row = part * inner + expert % spec_.granularity * rows;
        blocks.push_back({place.index, row * hidden, begin, rows, hidden, false});
        begin += rows * hidden;
      }
    }
    return blocks;
  }

  UpcycleSpec spec_;
  std::unordered_map<std::string, Place> by_name_;
};

/// Random rows, one for each copy, each repeated for the shards of the copy.
std::vector<float> make_router(const UpcycleSpec& spec, const std::string& name, int64_t hidden) {
  const double given = spec.router_deviation;
  const double deviation = given > 0 ? given : (spec.normalize ? 0.02 : 1e-6);
  std::vector<float> rows(spec.copies * hidden);
  fill_normal(rows, spec.seed, hash64(name), static_cast<float>(deviation));
  std::vector<float> router;
  for (int64_t expert = 0; expert < spec.num_experts(); ++expert) {
    const auto row = rows.begin() + expert / spec.granularity * hidden;
    router.insert(router.end(), row, row + hidden);
  }
  return router;
}

/// Multiplies elements, rounding once.
std::vector<std::byte> scale_elements(std::span<const std::byte> bytes, DType dtype, double scale) {
  const auto count = std::ssize(bytes) / dtype_size(dtype);
  std::vector<float> values(count);
  auto* wide = reinterpret_cast<std::byte*>(values.data());
  convert_elements(bytes.data(), dtype, wide, DType::kF32, count);
  for (float& value : values) value = static_cast<float>(value * scale);
  std::vector<std::byte> scaled(bytes.size());
  convert_elements(wide, DType::kF32, scaled.data(), dtype, count);
  return scaled;
}

/// The writing of one upcycled checkpoint.
class Upcycling {
 public:
  Upcycling(const UpcycleRequest& request, const CheckpointReader& reader, DType dtype)
      : request_(request),
        source_map_{{}, list_tensors(request.dense, dtype), {}, {}},
        source_(make_checkpoint_source(source_map_, reader)),
        planner_(source_map_.own, request.spec),
        tensors_(list_tensors(upcycled_model(request.dense, request.spec), dtype)),
        progress_(request.options.progress, target_bytes()) {}

  int64_t target_bytes() const { return count_bytes(tensors_); }
  int64_t source_bytes() const { return count_bytes(source_map_.own); }
  int64_t num_source() const { return std::ssize(source_map_.own); }
  int64_t num_target() const { return std::ssize(tensors_); }

  /// Of the new model's tensors.
  const NonFiniteTensors& nonfinite() const { return nonfinite_; }

  void write(const fs::path& folder) {
    progress_.begin("writing");
    write_checkpoint_files(folder, request_.state, tensors_, request_.options.shard_bytes,
                           [&](const fs::path& file, size_t /*first*/, auto tensors) {
                             return write_file(file, tensors);
                           });
  }

 private:
  WrittenFile write_file(const fs::path& path, std::span<const MappedTensor> part) {
    std::vector<NamedTensor> named;
    for (const MappedTensor& tensor : part) {
      named.push_back({tensor.name, {nullptr, tensor.dtype, tensor.shape}});
    }
    SafetensorsWriter writer(path, named);
    PageKeeper pages({source_.get()});
    for (const size_t index : writer.order()) write_tensor(part[index], writer, pages);
    return writer.finish();
  }

  void write_tensor(const MappedTensor& tensor, SafetensorsWriter& writer, PageKeeper& pages) {
    if (tensor.name.ends_with("moe.router.weight")) {
      const auto router = make_router(request_.spec, tensor.name, tensor.shape.last());
      writer.write(std::as_bytes(std::span(router)));
      return;
    }
    const auto blocks = planner_.plan(tensor);
    const std::vector<DType> dtypes(blocks.size(), tensor.dtype);
    const bool scaled = tensor.name.ends_with("moe.experts.down.weight");
    const double scale = request_.spec.weight_scale();
    transfer_tensor(*source_,
                    {.blocks = blocks,
                     .dtypes = dtypes,
                     .num_elements = tensor.shape.num_elements(),
                     .padding_dtype = tensor.dtype},
                    [&](std::span<const std::byte> bytes) {
                      if (scaled) {
                        const auto product = scale_elements(bytes, tensor.dtype, scale);
                        nonfinite_.add(tensor.name, count_nonfinite(product, tensor.dtype));
                        writer.write(product);
                      } else {
                        nonfinite_.add(tensor.name, count_nonfinite(bytes, tensor.dtype));
                        writer.write(bytes);
                      }
                      pages.count(std::ssize(bytes));
                      progress_.advance(std::ssize(bytes));
                    });
  }

  const UpcycleRequest& request_;
  TensorMap source_map_;
  std::unique_ptr<ElementSource> source_;
  UpcyclePlanner planner_;
  std::vector<MappedTensor> tensors_;
  ConversionProgress progress_;
  NonFiniteTensors nonfinite_;
};

/// The tokenizer and what else came along, but not the configuration of the dense model.
void copy_companions(const fs::path& source, const fs::path& target) {
  if (!path_exists(source / kHfFolder)) return;
  make_folder(target / kHfFolder);
  copy_companion_files(source / kHfFolder, target / kHfFolder);
  remove_path(target / kHfFolder / "config.json");
}

void check_source(const CheckpointReader& reader, const ModelConfig& dense) {
  for (const MappedTensor& tensor : list_tensors(dense, DType::kF32)) {
    const auto found = reader.manifest().tensors.find(tensor.name);
    require(found != reader.manifest().tensors.end() && found->second.shape == tensor.shape,
            "{}: it has no tensor {} of shape {}, which its configuration asks for",
            reader.path().string(), tensor.name, tensor.shape.to_string());
  }
}

}  // namespace

double UpcycleSpec::weight_scale() const {
  const auto shards = static_cast<double>(granularity);
  if (normalize) return shards;
  return static_cast<double>(num_experts()) * shards / static_cast<double>(top_k);
}

ModelConfig upcycled_model(const ModelConfig& dense, const UpcycleSpec& spec) {
  ModelConfig model = without_prediction(dense);
  require(model.num_moe_layers() == 0,
          "the model has {} with experts already; upcycling takes a dense model",
          format_things(model.num_moe_layers(), "layer"));
  require(!dense.mlp_bias, "the model's MLPs have biases, which upcycling does not take");
  require(spec.copies >= 1 && spec.granularity >= 1 && spec.top_k >= 1,
          "experts {}, granularity {} and top-k {} must be at least 1", spec.copies,
          spec.granularity, spec.top_k);
  const Saturating num_experts = Saturating(spec.copies) * spec.granularity;
  require(num_experts.value() <= kMaxExperts && spec.top_k <= kMaxExperts,
          "{} experts for each of {} copies, and top-k {}: a layer has at most {} experts",
          spec.granularity, spec.copies, spec.top_k, kMaxExperts);
  require(spec.first_dense_layers <= kMaxLayers && spec.every <= kMaxLayers,
          "first dense layers {} and every {}: a model has at most {} layers",
          spec.first_dense_layers, spec.every, kMaxLayers);
  require(spec.router_deviation <= kMaxDeviation,
          "the router's deviation is {}; it must be at most {}", spec.router_deviation,
          kMaxDeviation);
  const int64_t inner = dense.dense_inner_size();
  require(inner % spec.granularity == 0,
          "the MLPs' inner size {} is not divisible by the granularity {}: {} = {} * {} + {}",
          inner, spec.granularity, inner, inner / spec.granularity, spec.granularity,
          inner % spec.granularity);
  require(
      spec.top_k % spec.granularity == 0,
      "top-k {} is not a multiple of the granularity {}: a token takes whole copies of the MLP, "
      "each of {} experts; the nearest are {} and {}",
      spec.top_k, spec.granularity, spec.granularity,
      std::max(spec.top_k / spec.granularity, int64_t{1}) * spec.granularity,
      (spec.top_k / spec.granularity + 1) * spec.granularity);
  require(spec.top_k <= spec.num_experts(), "top-k {} exceeds the {} * {} = {} experts", spec.top_k,
          spec.copies, spec.granularity, spec.num_experts());
  model.inner_size = inner;
  model.moe = MoeConfig{};
  model.moe.num_experts = spec.num_experts();
  model.moe.top_k = spec.top_k;
  model.moe.inner_size = inner / spec.granularity;
  model.moe.normalize_top_k = spec.normalize;
  model.moe.first_dense_layers = spec.first_dense_layers;
  model.moe.every = spec.every;
  require(
      model.num_moe_layers() > 0,
      "{} leading dense layers and experts in every {} layer(s) after them leave none of the {} "
      "layers with experts",
      spec.first_dense_layers, spec.every, model.num_layers);
  validate(model);
  return model;
}

ConvertReport upcycle(const UpcycleRequest& given) {
  UpcycleRequest request = given;
  request.dense = without_prediction(std::move(request.dense));
  FolderBuilder folder(request.target);
  const CheckpointReader reader(request.source);
  check_source(reader, request.dense);
  const DType dtype = reader.manifest().tensors.at("embedding.weight").dtype;
  Upcycling work(request, reader, dtype);
  folder.require_space(work.target_bytes());
  work.write(folder.path());
  std::vector<std::string> notes;
  judge_nonfinite(work.nonfinite(), request.source.string(), request.options.allow_nonfinite,
                  notes);
  copy_companions(request.source, folder.path());
  folder.publish();
  ConvertReport report{.model_type = "experts",
                       .num_source_tensors = work.num_source(),
                       .num_target_tensors = work.num_target(),
                       .source_bytes = work.source_bytes(),
                       .target_bytes = work.target_bytes(),
                       .notes = std::move(notes)};
  if (given.dense.mtp_layers > 0) {
    report.notes.push_back(
        "multi-token prediction is left out; training adds it anew with run.init_from and "
        "model.mtp_layers");
  }
  return report;
}

}  // namespace tessera
