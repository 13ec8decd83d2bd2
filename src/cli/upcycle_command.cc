#include <unistd.h>

#include <chrono>
#include <iostream>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/conversion_progress.h"
#include "cli/imported_state.h"
#include "core/error.h"
#include "core/file/file.h"
#include "core/memory.h"
#include "core/process/progress.h"
#include "core/process/stopwatch.h"
#include "train/run/stop_signal.h"
#include "train/state/checkpointing.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

/// A checkpoint to read from: the one given, or one made of a Hugging Face folder, which is removed
/// in the end.
class DenseSource {
 public:
  DenseSource(const UpcycleArguments& arguments, const ConvertOptions& options) {
    if (!path_exists(fs::path(arguments.source) / "config.json")) {
      const OpenedCheckpoint opened = open_checkpoint(arguments.source, Verify::kChecksums);
      print_skipped(opened);
      path_ = opened.reader.path();
      return;
    }
    const fs::path target = fs::absolute(arguments.target).lexically_normal();
    made_ = target.parent_path() / unique_name(".tmp-dense-");
    import_hf({.source = arguments.source,
               .target = made_,
               .options = options,
               .make_state = [&](const ImportedConfig& config, DType dtype) {
                 return imported_state(config, dtype, arguments.source);
               }});
    path_ = made_;
  }
  DenseSource(const DenseSource&) = delete;
  DenseSource& operator=(const DenseSource&) = delete;
  ~DenseSource() {
    std::error_code ignored;
    if (!made_.empty()) fs::remove_all(made_, ignored);
  }
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
  fs::path made_;
};

/// The dense run's settings with another model, as TOML. A tokenizer within the dense checkpoint
/// comes along, so its place is named as seen from the new one.
std::string upcycled_config(const CheckpointReader& reader, const ModelConfig& model) {
  Settings settings;
  ConfigSchema schema = make_schema(settings);
  schema.load_toml_text(checkpoint_config(reader), reader.path().string());
  settings.model = model;
  return schema.to_toml();
}

void print_report(const UpcycleArguments& arguments, const ModelConfig& model,
                  const ConvertReport& report, double seconds) {
  const ParameterCount count = count_parameters(model);
  if (arguments.json) {
    const nlohmann::json json = {{"target", arguments.target},
                                 {"experts", model.moe.num_experts},
                                 {"top_k", model.moe.top_k},
                                 {"expert_inner_size", model.moe.inner_size},
                                 {"weight_scale", arguments.spec.weight_scale()},
                                 {"parameters", count.total},
                                 {"active_parameters", count.active},
                                 {"notes", report.notes},
                                 {"seconds", seconds},
                                 {"peak_bytes", process_memory().peak}};
    std::cout << json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) << "\n";
    return;
  }
  std::cout << fmt::format(
      "{}: {} experts of inner size {} in {} of {} layers, {} for each token, weights scaled by "
      "{:.6g}\n{} parameters, {} active; {} from {} in {}, {} of memory at most\n",
      arguments.target, model.moe.num_experts, model.moe.inner_size, model.num_moe_layers(),
      model.num_layers, model.moe.top_k, arguments.spec.weight_scale(),
      format_count(static_cast<double>(count.total)),
      format_count(static_cast<double>(count.active)), format_bytes(report.target_bytes),
      format_bytes(report.source_bytes), format_duration(seconds),
      format_bytes(process_memory().peak));
  for (const std::string& note : report.notes) std::cout << "note: " << note << "\n";
}

}  // namespace

int run_upcycle(const UpcycleArguments& given) {
  const auto start = std::chrono::steady_clock::now();
  UpcycleArguments arguments = given;
  arguments.spec.normalize = !given.no_normalize;
  const StopSignal stop;
  ProgressBar bar(std::cout, arguments.json ? Terminal{} : detect_terminal(STDOUT_FILENO),
                  "upcycling");
  ConvertOptions options;
  options.progress = show_conversion(bar, stop);
  options.allow_nonfinite = given.allow_nonfinite;
  const DenseSource source(arguments, options);
  const CheckpointReader reader(source.path(), Verify::kSizes);
  ModelConfig dense = checkpoint_settings(reader).model;
  require(!dense.lora.is_on(),
          "{} has low-rank adapters, which are of a dense model's matrices; export and import it, "
          "which merges them, and upcycle that",
          reader.path().string());
  if (dense.vocab_size == 0) dense.vocab_size = resolved_vocab_size(reader);
  const ModelConfig model = upcycled_model(dense, arguments.spec);
  const ConvertReport report = upcycle({.source = source.path(),
                                        .target = arguments.target,
                                        .dense = dense,
                                        .spec = arguments.spec,
                                        .state = fresh_state(upcycled_config(reader, model)),
                                        .options = options});
  bar.clear();
  print_report(arguments, model, report, seconds_since(start));
  return 0;
}

}  // namespace tessera
