#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "comm/options.h"
#include "core/config/config.h"
#include "data/row_source.h"
#include "data/text/text_source.h"
#include "model/config/config.h"
#include "model/config/product_precision.h"
#include "model/run/saved_policy.h"
#include "ops/backend.h"
#include "optim/loss_scaler.h"
#include "optim/optimizer.h"
#include "optim/schedule.h"
#include "optim/sharded/fully_sharded.h"
#include "optim/sharded/sharded_optimizer.h"
#include "parallel/options.h"
#include "tokenizer/tokenizer.h"
#include "train/setup/objective.h"

namespace tessera {

enum class ResumeMode { kAuto, kNever, kRequired };
/// kFp16: F32, but products read F16, and losses are scaled; kFp8: BF16, but products round what
/// they read (PrecisionSettings).
enum class Precision { kF32, kBF16, kFp16, kFp8 };
/// As train.precision has it.
std::string_view precision_name(Precision precision);
/// Where a run computes; kAuto: a run on one rank takes the first GPU where the kernels run on it.
enum class DeviceChoice { kAuto, kCpu, kCuda };
/// What happens when a step's loss or gradient is NaN or infinite.
enum class NonFinite { kStop, kSkip };

/// On which processors ranks run.
enum class RankBinding : uint8_t {
  kAuto,   ///< near their NUMA nodes, where a machine has several
  kNone,   ///< where the system puts them
  kNuma,   ///< on those of a NUMA node
  kCores,  ///< each on cores of its own
};

struct RunSettings {
  std::string folder = "runs/default";
  /// A checkpoint whose weights a new run starts from; empty: random ones.
  std::string init_from;
  int64_t seed = 1;
  DeviceChoice device = DeviceChoice::kAuto;
  GraphMode cuda_graphs = GraphMode::kAuto;
  ResumeMode resume = ResumeMode::kAuto;
  bool save = true;
  int64_t checkpoint_interval = 500;
  /// Whether training goes on while a checkpoint is written.
  bool background_save = true;
  int64_t keep_last = 2;
  int64_t log_interval = 10;
  bool tensorboard = true;
  bool report = true;
  /// Seconds that a rank waits for the others before it takes one for lost.
  double comm_timeout = 600;
  bool peer_memory = true;
  SharedMemory shared_memory = SharedMemory::kAuto;
  RankBinding bind = RankBinding::kAuto;
};

/// Each rank's newest state in memory of two ranks.
struct PeerSettings {
  bool copy = false;
  int64_t interval = 10;  ///< steps
  std::string folder = "/dev/shm";
};

struct DataSettings {
  std::string text;                        ///< file or folder of text; or
  std::string tokens;                      ///< prefix of a Megatron .bin/.idx pair; or
  std::vector<std::string> blend;          ///< several of those, see blend_settings.h
  std::vector<std::string> blend_changes;  ///< of the blend, from given steps on
  std::string tokenizer = "byte";
  std::string end_of_document;  ///< the token between documents; empty: the tokenizer's own choice
  std::string separator;        ///< a line that ends a document; empty: each file is one document
  TextFormat format = TextFormat::kAuto;
  std::string json_key = "text";
  bool instructions = false;
  std::string cache;  ///< folder for token files; empty: <run.folder>/tokens
  int64_t sequence_length = 256;
  double validation_fraction = 0.05;
  Packing packing = Packing::kStream;
  bool split_documents = false;

  TokenizerSpec tokenizer_spec() const {
    return {.path = tokenizer, .end_of_document = end_of_document};
  }
};

/// The train.memory_limit that is the device's own memory.
inline constexpr std::string_view kDeviceLimit = "auto";

/// The train.schedule of passes one behind the other, by parallel.pipeline_schedule.
inline constexpr std::string_view kAsBuilt = "as_built";
/// The train.hardware that is the device's own.
inline constexpr std::string_view kDeviceHardware = "auto";

/// Where rows that came to experts wait for the backward pass, whose number the device alone knows.
enum class StashMode : uint8_t {
  kNone,  ///< each layer and micro-batch has memory for the worst routing
  kAuto,  ///< in pages that all of them share
};

struct TrainSettings {
  Objective objective = Objective::kNextToken;
  int64_t steps = 1000;
  int64_t micro_batch = 8;   ///< sequences that pass at once
  int64_t global_batch = 8;  ///< sequences of a step
  Precision precision = Precision::kF32;
  std::vector<std::string> recompute;
  std::vector<std::string> offload;  ///< see parse_offload
  double offload_rate = 50;          ///< GB/s to the host's memory, and as many back
  StashMode stash = StashMode::kNone;
  double stash_factor = StashPolicy().factor;
  int64_t stash_page = StashPolicy().page_rows;
  std::string memory_limit{kDeviceLimit};  ///< or "none", or as parse_byte_size
  std::string schedule{kAsBuilt};          ///< see step_schedule.h
  std::string hardware{kDeviceHardware};   ///< what train.schedule = "auto" simulates steps on
  double max_grad_norm = 1.0;
  NonFinite on_nonfinite = NonFinite::kStop;
  int64_t validation_interval = 200;
  int64_t validation_batches = 20;

  /// Of weights and activations.
  DType dtype() const {
    const bool is_f32 = precision == Precision::kF32 || precision == Precision::kFp16;
    return is_f32 ? DType::kF32 : DType::kBF16;
  }
  bool stashes() const { return stash != StashMode::kNone; }
  int64_t num_micro_batches() const { return global_batch / micro_batch; }
  /// Throws UserError for entries of `recompute` or `offload` that are none.
  SavedPolicy saved_policy() const;
  /// Bytes; nothing for "auto" and "none", which empty means too. Throws UserError for all that is
  /// no limit.
  std::optional<int64_t> parse_memory_limit() const;
};

/// What each of the ranks that hold a weight alike keeps of it.
enum class ShardScope : uint8_t {
  kNone,   ///< weights, gradients and optimizer state, whole
  kState,  ///< a share of the state (ZeRO-1)
  kFull,   ///< a share of everything (FSDP)
};

struct ShardSettings {
  ShardScope scope = ShardScope::kState;
  /// Full sharding: data-parallel ranks that share one copy of the model; 0: all.
  int64_t group = 0;
  /// None and state: neighbouring ranks within which gradients are summed first; 1: one level.
  int64_t reduce_group = 1;
  int64_t bucket_bytes = ShardingOptions().bucket_bytes;
  GradientCompression compression = GradientCompression::kNone;
  DType gradients = DType::kF32;   ///< of layers' weights, or BF16
  bool release_gradients = false;  ///< as ShardingOptions'
  bool state_on_host = false;
  bool updates_on_host = false;  ///< by the host's threads, where the state is there

  ShardingOptions replicated() const;
  FullShardingOptions full() const;
};

/// What updates the weights.
enum class OptimizerKind : uint8_t {
  kAdamW,
  kMuon,  ///< of the matrices of hidden layers (WeightPlacement::matrix_rows), and AdamW the rest
};

/// What of products' operands is kept for the backward pass (precision.saved).
enum class SavedPrecision : uint8_t {
  kBf16,
  kFp8,
  kFp8All,  ///< and what activations' gradients read
};

/// What fp8 and fp16 mean (train.precision).
struct PrecisionSettings {
  std::string recipe = "blockwise";  ///< of recipes()
  std::vector<std::string> plain;    ///< see parse_plain
  /// Whether the products that give weights' gradients read rounded numbers too.
  bool weight_gradients = true;
  bool weight_copies = true;  ///< what weights are quantized to is made once a step
  SavedPrecision saved = SavedPrecision::kBf16;
  /// Weights that only such products read are cast from their masters, without values in BF16.
  bool fp8_weights = false;
  bool emulate = false;  ///< multiply rounded numbers in BF16 even where tensor cores have FP8
  /// With a recipe of delayed scales.
  DelayedScaling delayed;
  LossScaling loss_scaling;  ///< with fp16
};

/// Everything that a training run is told.
struct Settings {
  std::string preset;
  RunSettings run;
  PeerSettings peer;
  DataSettings data;
  ModelConfig model;
  TrainSettings train;
  PrecisionSettings precision;
  DpoSettings dpo;
  RlSettings rl;
  OptimizerKind optimizer_kind = OptimizerKind::kAdamW;
  OptimizerOptions optimizer;
  double qk_clip = 0;  ///< what attention logits may be at most (QkClip); 0: anything
  ShardSettings shard;
  ScheduleSpec schedule;
  ParallelSpec parallel;

  /// Throws UserError for entries of precision.plain that are none.
  ProductPrecision products() const;
  /// Whether the answers of a step share rows and may fill fewer micro-batches (AnswerBatches).
  bool packs_answers() const {
    return train.objective != Objective::kNextToken && data.packing == Packing::kBestFit;
  }
};

/// Binds every key of a training configuration; the fields of `settings` must outlive the schema.
ConfigSchema make_schema(Settings& settings);

/// Refuses what cannot be trained, except for the model's shapes, which need the vocabulary (see
/// model/config/config.h).
void validate(const Settings& settings);

}  // namespace tessera
