// The tensors of DeepSeek-V4-Flash as they are published, by name and shape.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "core/file/file.h"
#include "hf/config/hf_config.h"
#include "hf/config/v4_json.h"
#include "hf/tensors/tensor_map.h"

namespace tessera {
namespace {

using Shapes = std::map<std::string, Shape>;

/// What every layer has, and so has that of multi-token prediction.
const Shapes kLayer = {
    {"attn.attn_sink", {64}},
    {"attn.kv_norm.weight", {512}},
    {"attn.q_norm.weight", {1024}},
    {"attn.wkv.weight", {512, 4096}},
    {"attn.wo_a.weight", {8192, 4096}},
    {"attn.wo_b.weight", {4096, 8192}},
    {"attn.wq_a.weight", {1024, 4096}},
    {"attn.wq_b.weight", {32768, 1024}},
    {"attn_norm.weight", {4096}},
    {"ffn.gate.weight", {256, 4096}},
    {"ffn.shared_experts.w1.weight", {2048, 4096}},
    {"ffn.shared_experts.w2.weight", {4096, 2048}},
    {"ffn.shared_experts.w3.weight", {2048, 4096}},
    {"ffn_norm.weight", {4096}},
    {"hc_attn_base", {24}},
    {"hc_attn_fn", {24, 16384}},
    {"hc_attn_scale", {3}},
    {"hc_ffn_base", {24}},
    {"hc_ffn_fn", {24, 16384}},
    {"hc_ffn_scale", {3}},
};
const Shapes kSparse = {
    {"attn.compressor.ape", {4, 1024}},
    {"attn.compressor.norm.weight", {512}},
    {"attn.compressor.wgate.weight", {1024, 4096}},
    {"attn.compressor.wkv.weight", {1024, 4096}},
    {"attn.indexer.compressor.ape", {4, 256}},
    {"attn.indexer.compressor.norm.weight", {128}},
    {"attn.indexer.compressor.wgate.weight", {256, 4096}},
    {"attn.indexer.compressor.wkv.weight", {256, 4096}},
    {"attn.indexer.weights_proj.weight", {64, 4096}},
    {"attn.indexer.wq_b.weight", {8192, 1024}},
};
const Shapes kHeavy = {
    {"attn.compressor.ape", {128, 512}},
    {"attn.compressor.norm.weight", {512}},
    {"attn.compressor.wgate.weight", {512, 4096}},
    {"attn.compressor.wkv.weight", {512, 4096}},
};

void add(Shapes& all, const std::string& prefix, const Shapes& part) {
  for (const auto& [name, shape] : part) all.emplace(saved_v4_name(prefix + name), shape);
}

void add_layer(Shapes& all, const std::string& prefix, bool hash) {
  add(all, prefix, kLayer);
  add(all, prefix,
      hash ? Shapes{{"ffn.gate.tid2eid", {129280, 6}}} : Shapes{{"ffn.gate.bias", {256}}});
  for (int expert = 0; expert < 256; ++expert) {
    const std::string own = fmt::format("{}ffn.experts.{}.", prefix, expert);
    add(all, own,
        {{"w1.weight", {2048, 4096}}, {"w2.weight", {4096, 2048}}, {"w3.weight", {2048, 4096}}});
  }
}

/// As a report of the files lists them; matrices of few bits by the shape that they stand for.
Shapes list_published() {
  Shapes all;
  add(all, "",
      {{"embed.weight", {129280, 4096}},
       {"hc_head_base", {4}},
       {"hc_head_fn", {4, 16384}},
       {"hc_head_scale", {1}},
       {"head.weight", {129280, 4096}},
       {"norm.weight", {4096}}});
  for (int layer = 0; layer < 43; ++layer) {
    const std::string prefix = fmt::format("layers.{}.", layer);
    add_layer(all, prefix, layer < 3);
    if (layer > 1) add(all, prefix, layer % 2 == 0 ? kSparse : kHeavy);
  }
  add_layer(all, "mtp.0.", false);
  add(all, "mtp.0.",
      {{"e_proj.weight", {4096, 4096}},
       {"enorm.weight", {4096}},
       {"h_proj.weight", {4096, 4096}},
       {"hc_head_base", {4}},
       {"hc_head_fn", {4, 16384}},
       {"hc_head_scale", {1}},
       {"hnorm.weight", {4096}},
       {"norm.weight", {4096}}});
  return all;
}

Shapes list_mapped(const ImportedConfig& config) {
  const HfLayout layout{.vocab_size = config.model.vocab_size};
  Shapes all;
  for (const MappedTensor& tensor :
       map_tensors(*config.family, config.model, DType::kBF16, layout).hf)
    all.emplace(tensor.name, tensor.shape);
  return all;
}

TEST(V4Published, TensorsAreThoseOfTheConfiguration) {
  const std::filesystem::path path =
      std::filesystem::path(TESSERA_TEST_DATA) / "hf_configs/dsv4flash.json";
  ImportedConfig config = parse_hf_config(read_text_file(path), path.string());
  config.model.mtp_layers = 1;
  EXPECT_EQ(list_mapped(config), list_published());
}

}  // namespace
}  // namespace tessera
