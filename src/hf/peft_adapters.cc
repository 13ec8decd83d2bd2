#include "hf/peft_adapters.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/error.h"
#include "core/file/file.h"
#include "core/memory.h"
#include "hf/adapter_parts.h"
#include "hf/transfer/elements.h"

namespace tessera {
namespace {

constexpr std::string_view kPeftWeight = ".weight";

/// Writes modules one after the other.
class PeftWriter {
 public:
  PeftWriter(const TensorMap& map, const CheckpointReader& reader, const ModelConfig& model)
      : map_(map), reader_(reader), rank_(model.lora.rank) {
    for (const MappedTensor& tensor : map.own) adapters_.push_back(find_adapter(model, tensor));
    for (const TensorLink& link : map.links) {
      if (adapters_[link.own]) add(link);
    }
  }

  const std::vector<std::string>& modules() const { return modules_; }
  void write(const std::filesystem::path& path) const {
    std::vector<NamedTensor> named;
    for (const auto& [name, tensor] : tensors_) named.push_back({name, tensor});
    write_safetensors(path, named, {{"format", "pt"}});
  }

 private:
  void add(const TensorLink& link) {
    const MappedTensor& hf = map_.hf[link.hf];
    const MappedTensor& own = map_.own[link.own];
    const AdapterParts& adapter = *adapters_[link.own];
    const bool is_module = hf.shape.num_elements() == link.num_elements() && !link.alternating &&
                           link.transposed == adapter.transposed && hf.name.ends_with(kPeftWeight);
    require(is_module,
            "the adapter of '{}' cannot be one of PEFT's: '{}' is no linear module of its own; "
            "leave --adapters out, which merges it, or train other lora.targets",
            own.name, hf.name);
    const int64_t first = link.own_begin / link.cols;
    const int64_t block = adapter.block_of(first);
    const std::string module = hf.name.substr(0, hf.name.size() - kPeftWeight.size());
    modules_.push_back(module);
    // [rows of the link, r] and [r, columns].
    OwnedTensor rows = load(adapter.rows, first, {link.rows, rank_});
    OwnedTensor columns = load(adapter.columns, block * rank_, {rank_, link.cols});
    if (adapter.transposed) {
      keep(module, "lora_A", transpose(rows));
      keep(module, "lora_B", transpose(columns));
    } else {
      keep(module, "lora_A", std::move(columns));
      keep(module, "lora_B", std::move(rows));
    }
  }

  void keep(const std::string& module, std::string_view part, OwnedTensor tensor) {
    tensors_.emplace_back(fmt::format("base_model.model.{}.{}.weight", module, part),
                          std::move(tensor));
  }

  OwnedTensor load(const std::string& name, int64_t first, const Shape& shape) const {
    const auto found = reader_.manifest().tensors.find(name);
    require(found != reader_.manifest().tensors.end(), "{}: adapter matrix '{}' is missing",
            reader_.path().string(), name);
    OwnedTensor tensor(found->second.dtype, shape);
    reader_.load_part(name, {first, 0}, tensor);
    return tensor;
  }

  static OwnedTensor transpose(const Tensor& from) {
    OwnedTensor to(from.dtype, {from.shape[1], from.shape[0]});
    transpose_columns({.data = static_cast<const std::byte*>(from.data),
                       .rows = from.shape[0],
                       .cols = from.shape[1],
                       .dtype = from.dtype},
                      0, from.shape[1], static_cast<std::byte*>(to.get().data), from.dtype);
    return to;
  }

  const TensorMap& map_;
  const CheckpointReader& reader_;
  int64_t rank_;
  std::vector<std::optional<AdapterParts>> adapters_;  // by tensor of `own`
  std::vector<std::string> modules_;
  std::vector<std::pair<std::string, OwnedTensor>> tensors_;
};

bool has_expert_adapters(const ModelConfig& model) {
  return std::ranges::any_of(adaptable_matrices(model), [&](const std::string& matrix) {
    return matrix.starts_with("moe.experts.") && is_adapted(model, matrix);
  });
}

/// Where transformers joins gate and up of experts PEFT makes them one adapter of twice the rank
/// and twice alpha, which is the same factor for alpha / r, and not for alpha / sqrt(r).
std::pair<double, bool> written_scale(const ModelConfig& model) {
  const LoraConfig& lora = model.lora;
  if (!lora.rank_stabilized || !has_expert_adapters(model))
    return {lora.alpha, lora.rank_stabilized};
  return {lora.scale() * static_cast<double>(lora.rank), false};
}

}  // namespace

int64_t write_peft_adapters(const std::filesystem::path& folder, const TensorMap& map,
                            const CheckpointReader& reader, const ModelConfig& model) {
  const PeftWriter writer(map, reader, model);
  writer.write(folder / "adapter_model.safetensors");
  const auto [alpha, rank_stabilized] = written_scale(model);
  const nlohmann::json config = {{"peft_type", "LORA"},
                                 {"task_type", "CAUSAL_LM"},
                                 {"base_model_name_or_path", nullptr},
                                 {"r", model.lora.rank},
                                 {"lora_alpha", alpha},
                                 {"use_rslora", rank_stabilized},
                                 {"lora_dropout", 0.0},
                                 {"bias", "none"},
                                 {"fan_in_fan_out", false},
                                 {"inference_mode", true},
                                 {"target_modules", writer.modules()}};
  write_file_synced(folder / "adapter_config.json", config.dump(2) + "\n");
  return std::ssize(writer.modules());
}

}  // namespace tessera
