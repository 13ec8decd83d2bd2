#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "core/tensor.h"
#include "hf/family/family.h"
#include "hf/tensors/hf_tensors.h"

namespace tessera {

/// How a folder of a family lays its tensors out, where there are several ways.
struct HfLayout {
  bool fused_experts =
      false;  ///< experts of a layer in one tensor [E, 2F, H], as in transformers 5
  bool plain_moe_name = false;  ///< "mlp" where the family has a name of its own for MoE layers
  /// Kimi Linear: dense MLPs bear the MoE layers' name, as transformers writes them
  bool dense_as_moe = false;
  bool stored_tied_head = false;  ///< lm_head.weight is there though it is the embedding
  /// Of layers of multi-token prediction, where they are: each has the two tables again.
  bool repeated_embedding = true;
  bool repeated_head = true;
  int64_t vocab_size = 0;  ///< rows of the tables, without Tessera's padding
};

/// A block of elements that lies densely in one tensor of each side.
struct TensorLink {
  size_t hf = 0;
  int64_t hf_begin = 0;  ///< first element
  size_t own = 0;
  int64_t own_begin = 0;
  int64_t rows = 0;  ///< of the block in Tessera's tensor
  int64_t cols = 0;
  bool transposed = false;  ///< Hugging Face's block is [cols, rows]
  /// In each row of Hugging Face's block the elements of two halves stand in turn, which in
  /// Tessera's follow one another.
  bool alternating = false;
  /// What Tessera's elements are more than Hugging Face's, in F32: norms of 1 + weight.
  float offset = 0;

  int64_t num_elements() const { return rows * cols; }
  /// Elements in a row of Hugging Face's block.
  int64_t hf_cols() const { return transposed ? rows : cols; }
  /// Where Tessera's element number `idx` of the block is in Hugging Face's.
  int64_t hf_index(int64_t idx) const;
};

/// A tensor of either side.
struct MappedTensor {
  std::string name;
  Shape shape;
  DType dtype = DType::kF32;      ///< of Tessera's tensors; Hugging Face's may have any
  bool is_whole_numbers = false;  ///< Hugging Face has integers, which F32 holds exactly
};

/// Which elements of Hugging Face's tensors are which of Tessera's.
struct TensorMap {
  std::vector<MappedTensor> hf;
  std::vector<MappedTensor> own;
  std::vector<TensorLink> links;
  /// Tensors of Hugging Face that repeat another, bit for bit: [copy, original].
  std::vector<std::pair<size_t, size_t>> copies;
};

/// The map of a model, whose vocabulary may be larger than the layout's: what is beyond, and expert
/// biases that a family does not have, are linked to nothing and zero in a converted model. Every
/// other element of either side is in exactly one link (or is a copy), which is checked.
/// Throws UserError for a model that the family's tensors cannot hold.
TensorMap map_tensors(const Family& family, const ModelConfig& model, DType dtype,
                      const HfLayout& layout);

/// Throws InternalError unless every element is in one link, but for what may be linked to nothing.
void check_coverage(const TensorMap& map);

/// The layout that the names in a folder show.
HfLayout detect_layout(const Family& family, const ModelConfig& model, const HfTensors& tensors);

/// Refuses files whose tensors are not exactly the map's, by name and shape; lists what is missing,
/// left over or of another shape. `ignored` are names that need not be mapped.
void check_tensors(const TensorMap& map, const HfTensors& tensors,
                   const std::vector<std::string>& ignored);

}  // namespace tessera
