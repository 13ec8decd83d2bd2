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
#include "hf/convert.h"
#include "train/run/stop_signal.h"
#include "train/state/checkpointing.h"
#include "train/tune/export_request.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

bool to_hugging_face(const ConvertArguments& arguments) {
  if (!arguments.to.empty()) return arguments.to == "hf";
  return !path_exists(fs::path(arguments.source) / "config.json");
}

ConvertOptions make_options(const ConvertArguments& arguments, const ConvertProgress& progress) {
  ConvertOptions options;
  if (!arguments.dtype.empty()) {
    require(arguments.dtype == "f32" || arguments.dtype == "bf16",
            "the type of weights is \"{}\"; expected f32 or bf16", arguments.dtype);
    options.dtype = arguments.dtype == "bf16" ? DType::kBF16 : DType::kF32;
  }
  options.verify = !arguments.no_verify;
  options.allow_nonfinite = arguments.allow_nonfinite;
  options.shard_bytes = arguments.shard_bytes;
  options.progress = progress;
  return options;
}

ConvertReport convert_from_hf(const ConvertArguments& arguments, const ConvertOptions& options) {
  require(arguments.family.empty() && arguments.like.empty() && arguments.experts.empty() &&
              !arguments.adapters,
          "--family, --like, --experts and --adapters belong to conversions to Hugging Face; {} is "
          "a folder of Hugging Face",
          arguments.source);
  return import_hf({.source = arguments.source,
                    .target = arguments.target,
                    .vocab_size = arguments.vocab_size,
                    .pad_vocab_to = arguments.pad_vocab_to,
                    .drop_mtp = arguments.drop_mtp,
                    .options = options,
                    .make_state = [&](const ImportedConfig& config, DType dtype) {
                      return imported_state(config, dtype, arguments.source);
                    }});
}

ConvertReport convert_to_hf(const ConvertArguments& arguments, const ConvertOptions& options) {
  require(arguments.vocab_size == 0 && arguments.pad_vocab_to == 0 && !arguments.drop_mtp,
          "--vocab-size, --pad-vocab-to and --drop-mtp belong to conversions from Hugging Face");
  const OpenedCheckpoint opened = open_checkpoint(arguments.source);
  const CheckpointReader& reader = opened.reader;
  print_skipped(opened);
  Settings settings = checkpoint_settings(reader);
  if (settings.model.vocab_size == 0) settings.model.vocab_size = resolved_vocab_size(reader);
  validate(settings.model);
  ExportRequest request{.source = reader.path(),
                        .target = arguments.target,
                        .model = settings.model,
                        .model_dtype = settings.train.dtype(),
                        .family = arguments.family,
                        .like = arguments.like,
                        .adapters_only = arguments.adapters,
                        .fused_experts = {},
                        .max_length = settings.data.sequence_length,
                        .options = options};
  if (!arguments.experts.empty()) request.fused_experts = arguments.experts == "fused";
  std::vector<std::string> notes = add_tokenizer(settings.data, request);
  ConvertReport report = export_hf(request);
  report.notes.insert(report.notes.end(), notes.begin(), notes.end());
  return report;
}

void print_report(const ConvertArguments& arguments, const ConvertReport& report, double seconds) {
  const double rate = static_cast<double>(report.source_bytes) / 1e6 / std::max(seconds, 1e-9);
  const std::string peak = format_bytes(process_memory().peak);
  if (arguments.json) {
    const nlohmann::json json = {{"target", arguments.target},
                                 {"model_type", report.model_type},
                                 {"source_tensors", report.num_source_tensors},
                                 {"target_tensors", report.num_target_tensors},
                                 {"source_bytes", report.source_bytes},
                                 {"target_bytes", report.target_bytes},
                                 {"verified_tensors", report.num_verified},
                                 {"narrowed_tensors", report.num_narrowed},
                                 {"notes", report.notes},
                                 {"seconds", seconds},
                                 {"megabytes_per_second", rate},
                                 {"peak_bytes", process_memory().peak}};
    std::cout << json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) << "\n";
    return;
  }
  for (const std::string& note : report.notes) std::cout << "note: " << note << "\n";
  std::cout << fmt::format("{}: {}, {} tensors from {} ({} from {})\n", arguments.target,
                           report.model_type, report.num_target_tensors, report.num_source_tensors,
                           format_bytes(report.target_bytes), format_bytes(report.source_bytes));
  if (report.num_verified > 0) {
    std::cout << fmt::format(
        "verified: all {} tensors of the source, mapped back from what was "
        "written, have the same hash\n",
        report.num_verified);
  }
  if (report.num_narrowed > 0) {
    std::cout << fmt::format(
        "{} of them were rounded to a narrower type, and compared after the "
        "same rounding\n",
        report.num_narrowed);
  }
  std::cout << fmt::format("{} at {:.0f} MB/s, {} of memory at most\n", format_duration(seconds),
                           rate, peak);
}

}  // namespace

ConvertReport convert_model(const ConvertArguments& arguments, const ConvertProgress& progress) {
  const ConvertOptions options = make_options(arguments, progress);
  return to_hugging_face(arguments) ? convert_to_hf(arguments, options)
                                    : convert_from_hf(arguments, options);
}

int run_convert(const ConvertArguments& arguments) {
  const auto start = std::chrono::steady_clock::now();
  const StopSignal stop;
  ProgressBar bar(std::cout, arguments.json ? Terminal{} : detect_terminal(STDOUT_FILENO),
                  "converting");
  const ConvertReport report = convert_model(arguments, show_conversion(bar, stop));
  bar.clear();
  print_report(arguments, report, seconds_since(start));
  return 0;
}

}  // namespace tessera
