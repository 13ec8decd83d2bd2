#include "train/run/describe_run.h"

#include <array>
#include <ctime>

#include "core/memory.h"
#include "core/process/progress.h"
#include "program/rounding/fp8_products.h"

namespace tessera {

namespace {

/// How the products of rounded numbers are made, and with what speed.
std::string_view describe_making(const ProductPrecision& products, bool on_host) {
  const Recipe& recipe = *products.recipe;
  if (on_host || !products.fp8_products || !has_fp8_product(recipe.activation, recipe.weight))
    return "emulated, so slower than BF16";
  if (products.plain_weight_gradients)
    return "multiplied in FP8 where sizes allow, gradients of weights in BF16";
  return has_fp8_wgrad(recipe.token_gradient, recipe.token_activation)
             ? "multiplied in FP8 where sizes allow"
             : "multiplied in FP8 where sizes allow; those of weights' gradients emulated";
}

/// The same of FP16, and how losses are scaled.
std::string describe_halves(const LossScaling& scaling, bool on_host) {
  const std::string scale =
      scaling.is_dynamic() ? fmt::format("{} at first, and follows the gradients", scaling.initial)
                           : fmt::format("{} throughout", scaling.constant);
  return fmt::format(
      "\nproducts of layers read F16 and give F32, {}; the loss scale is {}",
      on_host
          ? "multiplied in F32, so no faster than F32"
          : "multiplied on tensor cores, those of experts by a plain kernel, so slower than BF16",
      scale);
}

/// A line of its own where products read rounded numbers, else nothing.
std::string describe_products(const Settings& settings, bool on_host) {
  const ProductPrecision products = settings.products();
  if (products.recipe == nullptr) return "";
  std::string text =
      products.recipe->is_f16
          ? describe_halves(settings.precision.loss_scaling, on_host)
          : fmt::format("\nproducts of layers read {} numbers ({}): {}; {}", products.recipe->name,
                        products.recipe->activation.to_string(), products.recipe->what,
                        describe_making(products, on_host));
  if (settings.precision.fp8_weights)
    text += "; weights that they alone read are in FP8, cast from the masters";
  if (!products.plain.empty()) {
    text += "; not those of";
    for (const LayerEntry& entry : products.plain) text += ' ' + entry.to_string();
  }
  return text;
}

}  // namespace

std::string describe_model(const Settings& settings, const MemoryPrediction& memory, bool on_host) {
  const ModelConfig& model = settings.model;
  const ParameterCount count = count_parameters(model);
  std::string text = fmt::format("{} parameters, {} active per token; {}, hidden {}, {} ({} KV)",
                                 format_count(static_cast<double>(count.total)),
                                 format_count(static_cast<double>(count.active)),
                                 format_things(model.num_layers, "layer"), model.hidden_size,
                                 format_things(model.num_heads, "head"), model.kv_heads());
  const int64_t num_moe = without_prediction(model).num_moe_layers();
  if (num_moe > 0) {
    text += fmt::format("; {} of {}, top-{}, {}", format_things(num_moe, "MoE layer"),
                        format_things(model.moe.num_experts, "expert"), model.moe.top_k,
                        model.moe.experts_choose()      ? "chosen by experts"
                        : model.moe.capacity_factor > 0 ? "with a capacity"
                                                        : "dropless");
    if (model.moe.zero_experts > 0)
      text += fmt::format(", {} more that compute nothing", model.moe.zero_experts);
    if (model.moe.latent_size > 0)
      text += fmt::format(", in a latent space of {}", model.moe.latent_size);
  }
  if (model.mtp_layers > 0)
    text += fmt::format("; {} of multi-token prediction", format_things(model.mtp_layers, "layer"));
  if (model.lora.is_on())
    text += fmt::format("\nadapters of rank {}: {} of the parameters are trained", model.lora.rank,
                        format_count(static_cast<double>(count.trained)));
  if (num_moe > 0 && model.moe.experts_choose())
    text += "\nexperts choose among later tokens, too: the model cannot generate as it is trained";
  text += describe_products(settings, on_host);
  text += fmt::format(
      "\n{} predicted at the peak: {} weights, {} gradients, {} optimizer, {} activations{}",
      format_bytes(memory.total()), format_bytes(memory.state.weights),
      format_bytes(memory.state.gradients), format_bytes(memory.state.optimizer),
      format_bytes(memory.activations.total()),
      describe_offloaded(memory) + describe_overhead(memory.overhead) + describe_snapshot(memory) +
          describe_worst(memory));
  return text;
}

std::string format_local_time() {
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  localtime_r(&now, &local);
  std::array<char, 32> text{};
  std::strftime(text.data(), text.size(), "%Y-%m-%d %H:%M %Z", &local);
  return text.data();
}

std::string describe_data(const TrainingData& data) {
  if (data.train == nullptr)
    return fmt::format("batches are given to each step, tokenizer {}", data.tokenizer->name());
  std::string text = fmt::format(
      "{} tokens in {}, tokenizer {}", format_count(static_cast<double>(data.num_tokens())),
      format_things(data.num_documents(), "document"), data.tokenizer->name());
  if (data.files.size() > 1) text += fmt::format("; a blend of {} datasets", data.files.size());
  if (data.validation) {
    text += fmt::format("; {} held out for validation",
                        format_count(static_cast<double>(data.validation->num_tokens())));
  }
  return text;
}

std::vector<std::string> find_data_notes(const Settings& settings, const TrainingData& data) {
  if (!settings.data.text.empty()) return {};  // made just so
  const std::string own = data.tokenizer->name();
  std::vector<std::string> notes;
  for (const auto& file : data.files) {
    const std::string maker = tokenizer_of(file->prefix());
    if (own != "none" && !maker.empty() && maker != own)
      notes.push_back(
          fmt::format("{} was made by the tokenizer {}, and data.tokenizer is {}, which will read "
                      "and write the model's texts; set it to the one that made the tokens",
                      file->prefix(), maker, own));
    if (settings.data.instructions && file->silent_ranges().empty())
      notes.push_back(
          fmt::format("data.instructions changes nothing in {}, all of whose tokens carry loss; "
                      "tessera tokenize --instructions leaves prompts out",
                      file->prefix()));
  }
  return notes;
}

}  // namespace tessera
