#include <algorithm>
#include <array>
#include <numeric>
#include <utility>

#include "parallel/layout.h"
#include "train/trainer/trainer.h"
#include "train/verify/verify.h"

namespace tessera {
namespace {

/// `size`, but at most the least multiple of `unit` that is `limit` or more.
int64_t at_most(int64_t size, int64_t limit, int64_t unit) {
  return std::min(size, (limit + unit - 1) / unit * unit);
}

void shrink_index(IndexConfig& index, int64_t head) {
  index.top_k = std::min<int64_t>(index.top_k, 5);
  index.num_heads = std::min<int64_t>(index.num_heads, 8);
  index.head_size = std::min(index.head_size, head);
}

void shrink_compressed(ModelConfig& model, int64_t head) {
  CompressedConfig& compressed = model.compressed;
  model.head_size = std::min(model.head_dim(), head);
  compressed.query_rank = std::min<int64_t>(compressed.query_rank, 24);
  compressed.rope_size = std::min<int64_t>(compressed.rope_size, 4);
  compressed.output_rank = std::min<int64_t>(compressed.output_rank, 6);
  compressed.sparse_rate = std::min<int64_t>(compressed.sparse_rate, 2);
  compressed.heavy_rate = std::min<int64_t>(compressed.heavy_rate, 3);
  if (model.index.is_on()) shrink_index(model.index, head);
}

void shrink_attention(ModelConfig& model) {
  constexpr int64_t kHead = 8;
  if (model.is_latent()) {
    LatentConfig& latent = model.latent;
    latent.query_rank = std::min<int64_t>(latent.query_rank, 24);
    latent.kv_rank = std::min<int64_t>(latent.kv_rank, 16);
    latent.nope_size = std::min(latent.nope_size, kHead);
    latent.rope_size = std::min<int64_t>(latent.rope_size, 4);
    latent.value_size = std::min<int64_t>(latent.value_size, 6);
    if (model.index.is_on()) shrink_index(model.index, kHead);
  } else if (model.is_compressed()) {
    shrink_compressed(model, kHead);
  } else {
    model.head_size = std::min(model.head_dim(), kHead);
    model.window_head_size = std::min(model.window_head_size, 2 * kHead);
  }
}

/// Short keys made unit vectors, and norms of few values, would magnify errors of rounding.
void shrink_states(ModelConfig& model) {
  model.delta.key_size = std::min<int64_t>(model.delta.key_size, 24);
  model.delta.value_size = std::min<int64_t>(model.delta.value_size, 16);
  model.mamba.head_size = std::min<int64_t>(model.mamba.head_size, 8);
  model.mamba.state_size = std::min<int64_t>(model.mamba.state_size, 8);
}

void shrink_experts(MoeConfig& moe, int64_t etp, int64_t tp) {
  if (moe.num_experts == 0) return;
  const bool sparse = moe.experts == ExpertPath::kBlockSparse;
  if (sparse) moe.block_size = std::min<int64_t>(moe.block_size, 8);
  const int64_t unit = sparse ? etp * moe.block_size : etp;
  moe.inner_size = at_most(moe.inner_size, 12, unit);
  for (int64_t& size : moe.inner_sizes) size = at_most(size, 12, unit);
  if (moe.shared_inner_size > 0) moe.shared_inner_size = at_most(moe.shared_inner_size, 10, tp);
}

/// Random tokens of a small vocabulary are often equal, which must not decide what is dropped.
void shrink_vocabulary(ModelConfig& model) {
  const int64_t limit = model.moe.drops_by_probability() ? 4001 : 101;
  model.vocab_size = model.vocab_size > 0 ? std::min(model.vocab_size, limit) : limit;
}

/// Leaves out the windows behind the first `num_layers` layers, where some of these have one and
/// some have none: then there are both kinds among them. False where there are not.
bool keep_first_windows(ModelConfig& model, int64_t num_layers) {
  std::vector<int64_t> kept = model.window_layers;
  std::erase_if(kept, [&](int64_t layer) { return layer >= num_layers; });
  if (kept.empty() || std::cmp_greater_equal(kept.size(), num_layers)) return false;
  model.window_layers = std::move(kept);
  return true;
}

/// Layers from the first on until there is one of each list, if it has any; those behind them are
/// in none then.
int64_t keep_first_compressed(CompressedConfig& compressed, int64_t num_layers) {
  for (std::vector<int64_t>* layers : {&compressed.sparse_layers, &compressed.heavy_layers}) {
    if (!layers->empty()) num_layers = std::max(num_layers, *std::ranges::min_element(*layers) + 1);
  }
  for (std::vector<int64_t>* layers : {&compressed.sparse_layers, &compressed.heavy_layers})
    std::erase_if(*layers, [&](int64_t layer) { return layer >= num_layers; });
  return num_layers;
}

/// Layers from the first on until there is one of each kind of mixer, one without and one without
/// an MLP, if the model has any.
int64_t keep_first_mixers(ModelConfig& model, int64_t num_layers) {
  const std::array lists = {&model.delta_layers, &model.mamba_layers, &model.conv_layers,
                            &model.layers_without_mlp, &model.layers_without_mixer};
  for (int64_t layer = 0; layer < model.num_layers && model.has_states(); ++layer) {
    if (!model.is_attention_layer(layer)) continue;
    num_layers = std::max(num_layers, layer + 1);
    break;
  }
  for (const std::vector<int64_t>* layers : lists)
    if (!layers->empty()) num_layers = std::max(num_layers, *std::ranges::min_element(*layers) + 1);
  for (std::vector<int64_t>* layers : lists)
    std::erase_if(*layers, [&](int64_t layer) { return layer >= num_layers; });
  return num_layers;
}

/// Leaves out the layers behind the first `num_layers` whose experts tables give; where these are
/// all that are left, all but the first, so that there are both kinds. The last layer may be one
/// of prediction, which has none.
void keep_first_hash_layers(ModelConfig& model, int64_t num_layers) {
  std::vector<int64_t>& layers = model.moe.hash_layers;
  const int64_t end = num_layers - (model.mtp_layers > 0 ? 1 : 0);
  std::erase_if(layers, [&](int64_t layer) { return layer >= end; });
  if (num_layers > 1 && std::ssize(layers) == num_layers) layers.resize(1);
}

/// Few layers that still are of every kind and fill every stage.
void shrink_depth(Settings& settings) {
  if (!settings.parallel.pipeline_layout.empty()) return;
  ModelConfig& model = settings.model;
  model.mtp_layers = std::min<int64_t>(model.mtp_layers, 2);
  const int64_t chunks = settings.parallel.layout.pp * settings.parallel.chunks_per_stage;
  const int64_t kinds = std::max(model.moe.first_dense_layers + 2 * model.moe.every, int64_t{2});
  int64_t layers = std::min(model.num_layers, std::max(2 * chunks, kinds));
  if (!keep_first_windows(model, layers)) {
    for (const int64_t layer : model.window_layers) layers = std::max(layers, layer + 1);
  }
  for (const int64_t layer : model.moe.dense_layers) layers = std::max(layers, layer + 1);
  layers = keep_first_mixers(model, std::min(layers, model.num_layers));
  layers = keep_first_compressed(model.compressed, layers);
  model.num_layers = std::min(layers, model.num_layers);
  keep_first_hash_layers(model, model.num_layers);
}

}  // namespace

Settings without_data(Settings settings) {
  DataSettings& data = settings.data;
  data.text.clear();
  data.blend.clear();
  data.blend_changes.clear();
  data.instructions = false;
  data.tokenizer = "none";
  data.end_of_document.clear();
  data.validation_fraction = 0;
  settings.run.init_from.clear();
  settings.run.resume = ResumeMode::kNever;
  settings.schedule.warmup_steps = 0;
  return settings;
}

void check_as_training(Settings settings, int64_t num_ranks) {
  // Data of any name: what is checked here does not look into it.
  settings.data = without_data(settings).data;
  settings.data.tokens = "random";
  settings.run.device = DeviceChoice::kCpu;  // a shrunk model needs not fit a GPU as it is
  settings.run.cuda_graphs = GraphMode::kAuto;
  validate(settings);
  check_model(std::move(settings), num_ranks, FitCheck::kNone);
}

Settings shrink_for_verification(Settings settings, int64_t num_ranks) {
  const Layout layout(settings.parallel.layout, num_ranks);
  const int64_t tp = layout.degree(Axis::kTp);
  const int64_t cp = layout.degree(Axis::kCp);
  ModelConfig& model = settings.model;
  model.inner_size = at_most(model.dense_inner_size(), 24, tp);
  shrink_attention(model);
  shrink_states(model);
  const int64_t etp = layout.degree(Axis::kEtp);
  const int64_t width_unit = model.moe.mlp_bias ? etp : 1;  // whose biases ETP spreads
  const int64_t channels_unit = model.conv_layers.empty() ? 1 : tp * cp;
  model.hidden_size = at_most(model.hidden_size, 32, std::lcm(width_unit, channels_unit));
  model.moe.latent_size = at_most(model.moe.latent_size, (model.hidden_size + 1) / 2, width_unit);
  shrink_experts(model.moe, etp, tp);
  shrink_depth(settings);
  shrink_vocabulary(model);
  model.padding_token = std::min(model.padding_token, model.vocab_size - 1);
  model.window = std::min<int64_t>(model.window, 5);

  settings = without_data(std::move(settings));
  // The tokens that pad rows are equal too.
  if (model.moe.drops_by_probability()) settings.data.packing = Packing::kStream;
  settings.data.sequence_length = at_most(settings.data.sequence_length, 16, 2 * cp * tp);
  TrainSettings& train = settings.train;
  train.precision = Precision::kF32;
  settings.precision = {};
  // Of a model with fewer layers.
  for (std::string& entry : train.offload) entry.resize(std::min(entry.find('@'), entry.size()));
  train.micro_batch = std::min<int64_t>(train.micro_batch, 2);
  const int64_t wave = train.micro_batch * layout.degree(Axis::kDp);
  const int64_t waves = std::max<int64_t>(settings.train.global_batch / wave, 1);
  train.global_batch = wave * std::min(waves, 2 * layout.degree(Axis::kPp));
  settings.schedule.peak_lr = std::max(settings.schedule.peak_lr, 1e-2);
  return settings;
}

}  // namespace tessera
