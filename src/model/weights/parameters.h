#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/format.h"
#include "core/memory.h"
#include "model/build/weight_placement.h"
#include "model/config/config.h"
#include "model/config/product_precision.h"
#include "parallel/pipeline_layout.h"
#include "parallel/stage_groups.h"

namespace tessera {

/// One weight of the model, the part of it that this rank holds, and how it starts.
struct ParameterSpec {
  std::string name;  ///< "layers.3.attn.q.weight"
  /// In the order of all layers, those of multi-token prediction last; none for the ends.
  std::optional<int64_t> layer;
  DType dtype = DType::kF32;
  Shape shape;             ///< of this rank's part
  ScaleLayout scale = {};  ///< where it is stored in FP8 (OperandRounding::fp8_weights)
  WeightPlacement placement;
  double init_deviation = 0;  ///< normal with this deviation; 0: the constant below
  float init_constant = 0;
  bool init_decays = false;  ///< logarithms of decays, spread evenly over (0, 16), instead
  bool init_steps = false;   ///< biases of steps as Mamba-2 has them, instead
  int64_t init_experts = 0;  ///< a table of the experts of ids, of so many (HashTableSpec), instead

  Format format() const { return {dtype, scale}; }
  bool is_fp8() const { return scale.is_scaled(); }
};

/// Every weight in the order of the layers, taken from the very programs that use them; those that
/// are trained before those that are frozen. Matrix weights have type `dtype`, or with
/// ProductPrecision::fp8_weights that of fp8_weight_format; norms and the router are F32.
std::vector<ParameterSpec> list_parameters(const ModelConfig& config, DType dtype,
                                           const ProductPrecision& products = {});
/// The same for the parts of a model that one rank holds: its share of the weights in `chunks`.
std::vector<ParameterSpec> list_parameters(const ModelConfig& config, DType dtype,
                                           const StageGroups& groups,
                                           const std::vector<PipelineChunk>& chunks,
                                           const ProductPrecision& products = {});

/// The whole model as one chunk.
PipelineChunk whole_model(const ModelConfig& config);

/// The name of a layer program's weight in layer `layer`.
std::string layer_parameter_name(int64_t layer, std::string_view weight);
/// The same where `layer` may be one of multi-token prediction: "mtp.0.attn.q.weight", and of
/// kPreviousNorm the norm of the head before it.
std::string layer_parameter_name(const ModelConfig& config, int64_t layer, std::string_view weight);

/// The other way: the name in the layer's program of a layer's weight.
std::string_view layer_weight_name(const ModelConfig& config, const ParameterSpec& spec);

/// Which layer of multi-token prediction a weight or expert bias is of alone, as its name has it:
/// "0" for "mtp.0.attn.q.weight" and for the norm of that layer's head; "" for any other.
std::string mtp_layer_of(const std::string& name);
/// Whether a weight or expert bias is of multi-token prediction alone.
bool is_mtp_parameter(const std::string& name);

/// Whether a weight is of a low-rank adapter (LoraConfig).
bool is_adapter_parameter(std::string_view name);

/// Fills a part of a weight, of shape part.shape(): a pure function of the seed, the weight's name
/// and an element's place in the whole weight, so that all layouts start alike.
void initialize_weight(const ParameterSpec& spec, const Slice& part, const Tensor& weight,
                       uint64_t seed);

/// Where a part of a weight in FP8 would share blocks of scales with other ranks' parts: "rows 64
/// to 192", which begin or end between multiples of 128.
std::optional<std::string> find_cut_block(const Slice& part);

/// A weight and its gradient (null views in a set without gradients, and of frozen weights).
struct ModelParameter {
  ParameterSpec spec;
  Tensor weight;
  Tensor grad;  ///< F32 or BF16
  Tensor sum;   ///< F32, what programs add to: the gradient itself where that is F32

  bool is_frozen() const { return spec.placement.frozen; }
  bool rounds_gradient() const { return !is_frozen() && grad.dtype != DType::kF32; }
};

/// How gradients lie in memory. Those of the model's ends are F32 and have their own in any case.
enum class GradientPlaces : uint8_t {
  kApart,         ///< all are there at a time
  kLayersInTurn,  ///< of the layers one after the other, in the same memory
  kTwoInTurn,     ///< the same, but that each second layer has memory of its own
  /// All are there, those of the layers in BF16. A layer's programs add to F32 sums, which are in
  /// the same memory for all layers, and which StepParameters::round_gradients adds to these.
  kRounded,
};

class ParameterSet;
/// Fills the weights of `to` with those of the same names in `from`, wherever either is.
void copy_weights(const ParameterSet& from, const ParameterSet& to);

/// The weights of a model in one buffer, and their gradients in another.
class ParameterSet {
 public:
  ParameterSet(std::vector<ParameterSpec> specs, bool with_gradients,
               Device& device = host_device(), GradientPlaces places = GradientPlaces::kApart);
  /// A set without memory, whose tensors have types and shapes alone: a WeightStore has the rest.
  static ParameterSet without_memory(std::vector<ParameterSpec> specs,
                                     GradientPlaces places = GradientPlaces::kApart);
  /// The same for a prediction: the tensors have addresses that lie to one another as those of a
  /// set with gradients would, and that nobody may read.
  static ParameterSet planned(std::vector<ParameterSpec> specs,
                              GradientPlaces places = GradientPlaces::kApart);

  /// Bytes of the two buffers, before they are taken.
  struct Bytes {
    int64_t weights = 0;
    int64_t gradients = 0;
  };
  static Bytes count_bytes(const std::vector<ParameterSpec>& specs, bool with_gradients,
                           GradientPlaces places = GradientPlaces::kApart);
  Bytes bytes() const { return {weights_.num_bytes(), gradients_.num_bytes()}; }

  std::vector<ModelParameter>& all() { return parameters_; }
  const std::vector<ModelParameter>& all() const { return parameters_; }
  /// Throws InternalError where there is none of that name.
  const ModelParameter& find(std::string_view name) const { return parameters_[index(name)]; }
  /// Its place in all().
  size_t index(std::string_view name) const;
  /// Fills all weights, as initialize_weight.
  void initialize(uint64_t seed);
  void zero_gradients();

  /// For a new step without the cost of zeros: gradients hold nothing yet. Whoever adds to one
  /// first is told by begin_gradient(), and those that nobody added to are zeroed when they are
  /// settled.
  void reset_gradients();
  /// Whether the gradient of all()[idx] held nothing yet, which the caller changes.
  bool begin_gradient(size_t idx);
  /// The same of what a program adds to. Sums that are rounded hold nothing before any program.
  bool begin_sum(size_t idx);
  void settle_gradient(size_t idx);
  void settle_gradients();

 private:
  ParameterSet() = default;
  void list(std::vector<ParameterSpec> specs, GradientPlaces places);
  /// Where the tensors of parameters lie, in their order: bytes from the beginning of all weights,
  /// and of all gradients.
  struct Places {
    std::vector<int64_t> weight_of, gradient_of;
    std::vector<int64_t> sum_of;  ///< where gradients are rounded: of their F32 sums
    int64_t gradients = 0;        ///< bytes of all, with the sums
  };
  static Places find_places(const std::vector<ParameterSpec>& specs, GradientPlaces places);
  /// Puts the tensors into the memory that begins there; gradients nowhere where that is null.
  void place(std::byte* weights, std::byte* gradients, const Places& places);

  std::vector<ModelParameter> parameters_;
  std::vector<uint8_t> is_unset_;    // by parameter
  std::vector<uint8_t> is_trained_;  // by parameter: not frozen
  std::map<std::string, size_t, std::less<>> by_name_;
  Device* device_ = nullptr;
  Buffer weights_;
  Buffer gradients_;
};

}  // namespace tessera
