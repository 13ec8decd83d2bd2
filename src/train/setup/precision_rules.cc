#include "train/setup/precision_rules.h"

#include <optional>
#include <string>
#include <string_view>

#include "core/error.h"

namespace tessera {
namespace {

/// One of delayed scales that is not as by default.
std::optional<std::string_view> changed_key(const DelayedScaling& delayed) {
  const DelayedScaling plain;
  if (delayed.history != plain.history) return "precision.amax_history";
  if (delayed.choice != plain.choice) return "precision.amax_algorithm";
  if (delayed.margin != plain.margin) return "precision.amax_margin";
  if (delayed.overflows != plain.overflows) return "precision.overflow";
  return std::nullopt;
}

/// The same of how losses are scaled.
std::optional<std::string_view> changed_key(const LossScaling& scaling) {
  const LossScaling plain;
  if (scaling.constant != plain.constant) return "precision.loss_scale";
  if (scaling.initial != plain.initial) return "precision.initial_loss_scale";
  if (scaling.minimum != plain.minimum) return "precision.min_loss_scale";
  if (scaling.window != plain.window) return "precision.loss_scale_window";
  if (scaling.hysteresis != plain.hysteresis) return "precision.hysteresis";
  return std::nullopt;
}

/// The same of what FP8 and FP16 have in common.
std::optional<std::string_view> changed_common_key(const PrecisionSettings& precision) {
  const PrecisionSettings plain;
  if (!precision.plain.empty()) return "precision.plain";
  if (precision.weight_gradients != plain.weight_gradients) return "precision.weight_gradients";
  if (precision.weight_copies != plain.weight_copies) return "precision.weight_copies";
  return std::nullopt;
}

/// The same of FP8 alone.
std::optional<std::string_view> changed_fp8_key(const PrecisionSettings& precision) {
  const PrecisionSettings plain;
  if (precision.recipe != plain.recipe) return "precision.recipe";
  if (precision.saved != plain.saved) return "precision.saved";
  if (precision.fp8_weights != plain.fp8_weights) return "precision.primary_weights";
  if (precision.emulate != plain.emulate) return "precision.emulate";
  return changed_key(precision.delayed);
}

void validate_delayed(const Settings& settings) {
  const DelayedScaling& delayed = settings.precision.delayed;
  if (!settings.products().is_delayed()) {
    require(!changed_key(delayed).has_value(),
            "{} is set, but precision.recipe is \"{}\", whose scales are of the values at hand and "
            "never too small; set precision.recipe = \"tensorwise_delayed\", or leave it out",
            changed_key(delayed).value_or(""), settings.precision.recipe);
    return;
  }
  require(!delayed.overflows || settings.train.on_nonfinite == NonFinite::kSkip,
          "precision.overflow is \"skip\", but train.on_nonfinite is \"stop\", with which the run "
          "would end at the first value that is beyond its scale; set train.on_nonfinite = "
          "\"skip\", or precision.overflow = \"saturate\"");
}

/// What cannot be had of weights that are stored in FP8.
void validate_primary_weights(const Settings& settings) {
  if (!settings.precision.fp8_weights) return;
  constexpr std::string_view kKey = "precision.primary_weights = \"fp8\"";
  require(can_store_weights(*settings.products().recipe),
          "{} stores a weight once, with a scale for 128 x 128, but precision.recipe \"{}\" rounds "
          "it by other scales for each product that reads it; set precision.recipe = "
          "\"blockwise\", or leave precision.primary_weights out",
          kKey, settings.precision.recipe);
  require(settings.optimizer.formats.master == MasterKind::kF32,
          "{} casts weights from masters in F32, but optim.master is \"{}\", which needs a weight "
          "in BF16; leave one of them out",
          kKey,
          settings.optimizer.formats.master == MasterKind::kNone
              ? "none"
              : master_suffix(settings.optimizer.formats.master));
  require(settings.shard.scope != ShardScope::kFull,
          "{} is not yet there for optim.shard = \"full\", whose shares may cut a block of 128 "
          "rows; set optim.shard = \"state\", or leave precision.primary_weights out",
          kKey);
  require(
      settings.train.objective == Objective::kNextToken,
      "{} is for training on the next token: other objectives ask the model in BF16 in between; "
      "leave precision.primary_weights out",
      kKey);
}

/// Keys that say nothing with the precision that there is.
void refuse_idle_keys(const Settings& settings) {
  const Precision precision = settings.train.precision;
  const std::string_view name = precision_name(precision);
  const auto refuse = [&](std::optional<std::string_view> key, std::string_view users) {
    require(!key.has_value(),
            "{} is set, but train.precision is \"{}\", and it is for {}; set that, or leave it out",
            key.value_or(""), name, users);
  };
  const PrecisionSettings& given = settings.precision;
  if (precision != Precision::kFp8) refuse(changed_fp8_key(given), "\"fp8\"");
  if (precision != Precision::kFp16) refuse(changed_key(given.loss_scaling), "\"fp16\"");
  if (precision != Precision::kFp8 && precision != Precision::kFp16)
    refuse(changed_common_key(given),
           "\"fp8\" and \"fp16\", with which products round what they read");
}

/// What a scale that follows the gradients asks of the rest.
void validate_loss_scaling(const Settings& settings) {
  const LossScaling& scaling = settings.precision.loss_scaling;
  validate(scaling);
  if (!scaling.is_dynamic()) return;
  require(
      !settings.shard.release_gradients,
      "optim.release_gradients updates layers before it is known that all gradients are finite, "
      "but with train.precision = \"fp16\" a step that overflows must be left out as a whole; "
      "set precision.loss_scale to a constant, such as 1024, or leave "
      "optim.release_gradients out");
}

/// Experts whose products are rounded.
void validate_rounded_experts(const Settings& settings) {
  const MoeConfig& moe = settings.model.moe;
  const std::string given =
      fmt::format("train.precision = \"{}\"", precision_name(settings.train.precision));
  if (moe.num_experts == 0) return;
  require(moe.experts == ExpertPath::kGrouped,
          "moe.experts = \"block_sparse\" with {}: products of blocks are not rounded; set "
          "moe.experts = \"grouped\"",
          given);
  require(moe.inner_sizes.empty() || settings.train.precision == Precision::kFp16,
          "moe.inner_sizes with {}: products of experts of several sizes are not rounded; leave it "
          "out",
          given);
  require(moe.fuse_gather != GatherFusion::kAlways,
          "moe.fuse_gather = \"always\" with {}: rows are rounded where they stand; leave "
          "moe.fuse_gather out",
          given);
  require(settings.parallel.clone_experts == 0,
          "parallel.clone_experts {} with {}: products of clones are not rounded; set "
          "parallel.clone_experts = 0",
          settings.parallel.clone_experts, given);
}

}  // namespace

void validate_precision(const Settings& settings) {
  refuse_idle_keys(settings);
  const Precision precision = settings.train.precision;
  if (precision != Precision::kFp8 && precision != Precision::kFp16) return;
  validate_rounded_experts(settings);
  if (precision == Precision::kFp16) {
    require(!settings.model.moe.fuse_activation,
            "moe.fuse_activation with train.precision = \"fp16\": products read F16 and give F32, "
            "for which there is no kernel with an activation; leave moe.fuse_activation out");
    return validate_loss_scaling(settings);
  }
  validate_delayed(settings);
  validate_primary_weights(settings);
  const ProductPrecision products = settings.products();
  require(!products.keeps_rounded || has_row_scales(*products.recipe),
          "precision.saved = \"{}\" keeps tokens with scales of their own, which precision.recipe "
          "\"{}\" does not give; take rowwise, blockwise or mxfp8",
          products.keeps_all_rounded ? "fp8_all" : "fp8", settings.precision.recipe);
}

}  // namespace tessera
