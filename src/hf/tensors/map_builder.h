#pragma once

#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/error.h"
#include "hf/tensors/tensor_map.h"

namespace tessera {

/// Adds tensors of Hugging Face with their links, layer by layer. Tables, layers and attention are
/// in tensor_map.cc, other mixers in map_mixers.cc, MLPs and experts in map_experts.cc.
class MapBuilder {
 public:
  MapBuilder(const Family& family, const ModelConfig& model, DType dtype, const HfLayout& layout);
  TensorMap build();

 private:
  void add_own(MappedTensor tensor) {
    own_index_[tensor.name] = map_.own.size();
    map_.own.push_back(std::move(tensor));
  }
  size_t own(const std::string& name) const {
    const auto found = own_index_.find(name);
    ensure(found != own_index_.end(), "the model has no tensor '{}'", name);
    return found->second;
  }
  size_t add_hf(std::string name, const Shape& shape) {
    map_.hf.push_back({std::move(name), shape});
    return map_.hf.size() - 1;
  }
  /// The whole of a tensor of Hugging Face is the rows from `first_row` of one of Tessera's.
  void link(const std::string& hf_name, const Shape& shape, const std::string& own_name,
            int64_t first_row = 0);
  void link_vector(const std::string& hf_name, int64_t size, const std::string& own_name,
                   int64_t begin = 0) {
    map_.links.push_back({.hf = add_hf(hf_name, {size}),
                          .own = own(own_name),
                          .own_begin = begin,
                          .rows = 1,
                          .cols = size});
  }
  /// Of a layer's or a head's RMSNorm: Qwen3-Next's multiplies by 1 + weight.
  void link_norm(const std::string& hf_name, int64_t size, const std::string& own_name);
  /// Of a norm of hidden states, whose names end in ".weight" and, of a LayerNorm, ".bias".
  void link_state_norm(const std::string& hf_name, const std::string& own_name);
  void add_tables();
  /// Nemotron-H's: a norm and what is called a mixer, whatever it is.
  void add_single_layer(int64_t layer);
  /// `hf`: what the names of its tensors begin with.
  void add_layer(int64_t layer, const std::string& hf);
  /// In prediction_layers.cc.
  void add_prediction(int64_t layer);
  /// DeepSeek-V4's, in map_v4.cc.
  void add_stream_prediction(int64_t layer);
  void add_projection(const std::string& hf_name, const std::string& own_name, const Shape& shape,
                      bool bias);
  std::string attention_name() const {
    return family_.mamba == MambaRule::kNemotron ? "mixer" : "self_attn";
  }
  void add_output_projection();
  void add_attention();
  /// A part of a tensor that stands in several of Tessera's, by the names of these.
  struct GroupPart {
    std::string own_name;
    int64_t rows = 0;  ///< of a group
  };
  /// Rows of a tensor [groups · rows of all parts, cols] in groups, each with its part of every
  /// one.
  void link_groups(size_t hf, int64_t groups, const std::vector<GroupPart>& parts, int64_t cols);
  /// Of every head its query, then the gate of what it attends to.
  void add_gated_queries();
  /// Qwen3-Next's: the projections of each key head and of its value heads follow one another.
  void add_joined_delta_projections(const std::string& hf);
  void add_apart_delta_projections(const std::string& hf);
  void add_delta();
  void add_kimi_delta();
  /// One projection makes the gate, x, B, C and the steps, one convolution follows x, B and C.
  void add_mamba(const std::string& hf);
  void add_latent_attention();
  /// DeepSeek-V4's, in map_v4.cc.
  void add_compressed_attention(int64_t layer);
  void add_compressor(const std::string& hf, const std::string& own, Compression kind,
                      int64_t size);
  /// The weights of residual streams of `count` logits.
  void add_streams(const std::string& hf, const std::string& own, int64_t count);
  void add_hash_table(const std::string& hf);
  void add_index();
  /// One projection makes B, C and x.
  void add_conv(const std::string& hf);
  /// One tensor of Hugging Face: the projection into the latent, then that to the rotated key.
  void add_kv_down();
  void add_mlp(const std::string& hf, const std::string& own, int64_t inner_size);
  void add_moe();
  /// Gemma 4's, beside which an MLP is the shared expert.
  void add_gemma_moe();
  void add_out_norms();
  /// ERNIE's is a row for each kind of input, of which text is the only one.
  void add_correction_bias(const std::string& hf);
  /// Granite's shared expert, or dense MLP.
  void add_linears(int64_t inner_size, const std::string& own_name);
  /// FC2 is stored input x output, unlike Hugging Face's.
  void link_down(size_t hf, int64_t hf_begin, int64_t expert);
  void add_expert(const std::string& hf, int64_t expert);
  void add_fused_experts(const std::string& gate_up, const std::string& down_name);
  /// Of tensors [E, inputs, outputs].
  void add_turned_experts(const std::string& hf);

  const Family& family_;
  const ModelConfig& model_;
  ModelConfig layer_;    // the model as the layer has it
  bool hashed_ = false;  // a table of token ids chooses the layer's experts
  HfLayout layout_;
  TensorMap map_;
  std::unordered_map<std::string, size_t> own_index_;
  size_t embedding_ = 0;  // of Hugging Face's tensors, the tables
  size_t head_ = 0;
  std::string hf_;   // prefix of the layer's names
  std::string own_;  // the same in Tessera
};

}  // namespace tessera
