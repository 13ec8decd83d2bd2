#include "hf/tensors/map_builder.h"
#include "model/layers/residual_blocks.h"
#include "model/layers/vocabulary_program.h"

namespace tessera {

void MapBuilder::add_compressed_attention(int64_t layer) {
  const CompressedConfig& compressed = model_.compressed;
  const int64_t hidden = model_.hidden_size;
  const int64_t size = model_.head_dim();
  const int64_t width = model_.num_heads * size;
  const int64_t inner = compressed.output_groups * compressed.output_rank;
  const std::string hf = hf_ + "attn.";
  const std::string own = own_ + "attn.";
  link(hf + "wq_a.weight", {compressed.query_rank, hidden}, own + "q_down.weight");
  link_norm(hf + "q_norm.weight", compressed.query_rank, own + "q_latent_norm.weight");
  link(hf + "wq_b.weight", {width, compressed.query_rank}, own + "q_up.weight");
  link(hf + "wkv.weight", {size, hidden}, own + "kv.weight");
  link_norm(hf + "norm.weight", size, own + "kv_norm.weight");
  link(hf + "wo_a.weight", {inner, width / compressed.output_groups}, own + "o_down.weight");
  link(hf + "wo_b.weight", {hidden, inner}, own + "o_up.weight");
  link_vector(fmt::format("{}{}", hf, family_.sinks_name), model_.num_heads, own + "sinks");
  const Compression kind = model_.compression(layer);
  if (kind == Compression::kNone) return;
  add_compressor(hf + "compressor.", own_ + "compress.", kind, size);
  if (kind != Compression::kSparse) return;
  const IndexConfig& index = model_.index;
  add_compressor(hf + "indexer.compressor.", own_ + "index.", kind, index.head_size);
  link(hf + "indexer.wq_b.weight", {index.num_heads * index.head_size, compressed.query_rank},
       own_ + "index.q.weight");
  link(hf + "indexer.weights_proj.weight", {index.num_heads, hidden},
       own_ + "index.weights.weight");
}

void MapBuilder::add_compressor(const std::string& hf, const std::string& own, Compression kind,
                                int64_t size) {
  // Entries that overlap are made of two series.
  const int64_t width = (kind == Compression::kSparse ? 2 : 1) * size;
  link(hf + "wkv.weight", {width, model_.hidden_size}, own + "kv.weight");
  link(hf + "wgate.weight", {width, model_.hidden_size}, own + "gate.weight");
  link(hf + "ape", {model_.compressed.rate(kind), width}, own + "position_bias");
  link_norm(hf + "norm.weight", size, own + "norm.weight");
}

void MapBuilder::add_streams(const std::string& hf, const std::string& own, int64_t count) {
  link(hf + "fn", {count, model_.state_width()}, own + "weight");
  link_vector(hf + "base", count, own + "base");
  link_vector(hf + "scale", count == model_.residual_streams ? 1 : 3, own + "scale");
}

void MapBuilder::add_stream_prediction(int64_t layer) {
  const int64_t depth = layer - model_.num_layers;
  const int64_t size = model_.hidden_size;
  const std::string hf = fmt::format("mtp.{}.", depth);
  add_layer(layer, hf);
  link_norm(hf + "enorm.weight", size, own_ + "embed_norm.weight");
  link_norm(hf + "hnorm.weight", size, own_ + "hidden_norm.weight");
  link(hf + "e_proj.weight", {size, size}, own_ + "embed_proj.weight");
  link(hf + "h_proj.weight", {size, size}, own_ + "hidden_proj.weight");
  link_norm(hf + "norm.weight", size, head_norm_name(depth + 1));
  add_streams(hf + "hc_head_", head_streams_name(depth + 1), model_.residual_streams);
}

void MapBuilder::add_hash_table(const std::string& hf) {
  link(hf + "gate.tid2eid", {layout_.vocab_size, model_.moe.top_k}, own_ + "moe.hash_table");
  map_.hf.back().is_whole_numbers = true;
}

}  // namespace tessera
