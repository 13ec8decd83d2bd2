#include "train/verify/verify.h"

#include <algorithm>
#include <filesystem>

#include "comm/thread/thread_world.h"
#include "core/file/file.h"
#include "core/random.h"
#include "data/token_file_writer.h"
#include "parallel/layout.h"

namespace tessera {
namespace {

/// A folder that goes away with it.
class ScratchFolder {
 public:
  ScratchFolder() : path_(std::filesystem::temp_directory_path() / unique_name("tessera-verify-")) {
    std::filesystem::create_directories(path_);
  }
  ~ScratchFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;
  std::string file(const char* name) const { return (path_ / name).string(); }

 private:
  std::filesystem::path path_;
};

/// Documents of random tokens and random lengths, so that sequences are packed unevenly.
void write_random_tokens(const Settings& settings, int64_t num_tokens, const std::string& prefix) {
  TokenFileWriter writer(prefix, settings.model.vocab_size);
  Random random(static_cast<uint64_t>(settings.run.seed), 77);
  const auto vocabulary = static_cast<uint64_t>(settings.model.vocab_size);
  const auto longest = static_cast<uint64_t>(2 * settings.data.sequence_length);
  while (writer.num_tokens() < num_tokens) {
    std::vector<int32_t> document(1 + random.next_below(longest));
    for (int32_t& token : document) token = static_cast<int32_t>(random.next_below(vocabulary));
    writer.append(document);
    writer.end_document();
  }
  writer.finish();
}

/// What a layout is compared with.
struct Reference {
  Settings settings;
  int64_t num_ranks = 1;
};

bool drops_by_rank(const ModelConfig& model) {
  return model.moe.num_experts > 0 && model.moe.capacity_factor > 0 &&
         model.moe.capacity_scope == CapacityScope::kSubSequence;
}

/// One rank; or, where tokens are dropped among those of each rank, the ranks that share a
/// micro-batch's as the layout does.
Reference make_reference(Settings settings) {
  const ParallelSpec parallel = settings.parallel;
  settings.shard = {};
  settings.parallel = {};
  settings.train.schedule = kAsBuilt;
  Reference reference{.settings = std::move(settings)};
  // Tokens that only fill micro-batches count as little there.
  reference.settings.parallel.dynamic_cp = parallel.dynamic_cp;
  const LayoutSpec& layout = parallel.layout;
  if (!drops_by_rank(reference.settings.model) || layout.tp * layout.cp == 1) return reference;
  reference.num_ranks = layout.tp * layout.cp;
  ParallelSpec& shared = reference.settings.parallel;
  shared.layout.tp = layout.tp;
  shared.layout.cp = layout.cp;
  shared.attention = parallel.attention;
  shared.context = parallel.context;
  shared.context_inner = parallel.context_inner;
  return reference;
}

bool compresses(const Settings& settings) {
  return settings.shard.compression != GradientCompression::kNone ||
         settings.shard.gradients != DType::kF32;
}

std::vector<std::string> list_notes(const VerifyRequest& request, const Reference& reference) {
  std::vector<std::string> notes;
  if (request.settings.run.device == DeviceChoice::kCuda)
    notes.push_back(fmt::format("the run is on {}, its reference on the host",
                                request.num_ranks == 1 ? "the GPU" : "GPUs"));
  if (request.settings.train.precision != Precision::kF32)
    notes.push_back(fmt::format(
        "train.precision = \"{}\" is left aside: both runs are in F32, since rounding sends some "
        "tokens to other experts",
        precision_name(request.settings.train.precision)));
  if (compresses(request.settings)) {
    const bool keeps = request.settings.shard.gradients != DType::kF32;
    notes.push_back(fmt::format(
        "gradients {} BF16, so one step is compared, within BF16's rounding; {} compares {} within "
        "{:.0e}",
        keeps ? "are kept in" : "travel as",
        keeps ? "--optim.gradients=f32" : "--optim.gradient_compression=none", request.steps,
        request.tolerance));
  }
  if (request.settings.parallel.dynamic_cp)
    notes.push_back(
        "one rank packs the documents of a step, too: in neither run do tokens that only fill "
        "micro-batches count");
  if (reference.num_ranks > 1)
    notes.push_back(fmt::format(
        "each rank drops by capacity among its own tokens, which one rank cannot repeat: the "
        "reference is tp {} x cp {} alone; --moe.capacity_scope=sequence compares with one rank",
        reference.settings.parallel.layout.tp, reference.settings.parallel.layout.cp));
  return notes;
}

/// Where the layout runs.
DeviceChooser layout_device(const VerifyRequest& request) {
  return request.settings.run.device == DeviceChoice::kCuda ? choose_device : request.device;
}

std::vector<std::string> list_names(const Settings& settings) {
  std::vector<std::string> names;
  for (const ParameterSpec& spec : list_parameters(settings.model, DType::kF32))
    names.push_back(spec.name);
  return names;
}

}  // namespace

VerifyRule verify_rule(const Settings& settings, double tolerance) {
  const bool muon = settings.optimizer_kind == OptimizerKind::kMuon;
  VerifyRule rule{.tolerances = {.scalars = tolerance,
                                 .gradients = tolerance,
                                 .weights = muon ? 100 * tolerance : tolerance,
                                 .gradients_made_unit = muon}};
  if (!compresses(settings)) return rule;
  rule.tolerances.gradients = std::max(tolerance, 0x1.0p-6);
  rule.tolerances.weights = std::max(tolerance, muon ? 1.0 : 0x1.0p-4);
  rule.tolerances.floor = 1e-2;
  rule.least_eps = 1;
  return rule;
}

Verification verify_layout(const VerifyRequest& request) {
  require(!request.settings.shard.release_gradients,
          "verify compares gradients, which optim.release_gradients does not keep; leave it out");
  require(
      !request.settings.model.lora.is_on(),
      "verify begins with random weights, of which adapters are not trained; leave lora.rank out");
  const ScratchFolder scratch;
  const int64_t steps = compresses(request.settings) ? 1 : request.steps;
  Settings settings = request.settings;
  settings.data.tokens = scratch.file("tokens");
  settings.run.folder = scratch.file("run");
  settings.train.steps = steps;
  settings.schedule.num_steps = steps;
  const VerifyRule rule = verify_rule(settings, request.tolerance);
  settings.optimizer.eps = std::max(settings.optimizer.eps, rule.least_eps);
  const int64_t rows = settings.train.global_batch * steps;
  write_random_tokens(settings, 2 * (rows + 1) * settings.data.sequence_length,
                      settings.data.tokens);
  const Reference reference = make_reference(settings);
  Verification result =
      compare_runs(record_run(settings, request.num_ranks, steps, layout_device(request)),
                   record_run(reference.settings, reference.num_ranks, steps, request.device),
                   list_names(settings), rule.tolerances);
  result.reference_ranks = reference.num_ranks;
  result.notes = list_notes(request, reference);
  return result;
}

}  // namespace tessera
