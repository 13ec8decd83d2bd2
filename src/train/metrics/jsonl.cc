#include "train/metrics/jsonl.h"

#include <cmath>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "core/error.h"
#include "core/file/file.h"

namespace tessera {
namespace {

using Json = nlohmann::ordered_json;

/// Builds an object, keeping count of the numbers that JSON cannot hold.
class LineBuilder {
 public:
  explicit LineBuilder(const char* type) { line_["type"] = type; }

  void integer(const char* key, int64_t value) { line_[key] = value; }
  void number(const char* key, double value) {
    line_[key] = value;  // dumped as null where it is not finite
    if (!std::isfinite(value))
      nonfinite_[key] = fmt::format("{}", std::isnan(value) ? std::abs(value) : value);
  }
  void number(const char* key, const std::optional<double>& value) {
    if (value) number(key, *value);
  }
  void loads(const std::vector<ExpertLoad>& layers) {
    if (layers.empty()) return;
    Json& list = line_["expert_load"] = Json::array();
    for (const ExpertLoad& load : layers)
      list.push_back({{"layer", load.layer}, {"tokens", load.tokens_per_expert}});
  }
  void roundings(const std::vector<LayerRoundings>& layers) {
    if (layers.empty()) return;
    Json& list = line_["roundings"] = Json::array();
    for (const LayerRoundings& layer : layers) {
      list.push_back({{"layer", layer.layer},
                      {"activations", layer.activations},
                      {"weights", layer.weights},
                      {"gradients", layer.gradients},
                      {"nonfinite", layer.nonfinite}});
    }
  }
  void waits(const std::optional<TracedWaits>& waits) {
    if (!waits) return;
    Json for_ranks = Json::array();
    for (const TracedWaits::ForRank& entry : waits->for_ranks)
      for_ranks.push_back({{"rank", entry.rank}, {"seconds", entry.seconds}});
    line_["waits"] = {{"ranks", waits->num_ranks},
                      {"steps", waits->num_steps},
                      {"seconds", waits->seconds},
                      {"for_ranks", std::move(for_ranks)}};
    if (!waits->why.empty()) line_["waits"]["why"] = waits->why;
  }
  void objective(const std::vector<NamedNumber>& numbers) {
    if (numbers.empty()) return;
    Json& table = line_["objective"] = Json::object();
    for (const NamedNumber& number : numbers) table[number.name] = number.value;
  }
  std::string text() {
    if (!nonfinite_.empty()) line_["nonfinite"] = nonfinite_;
    return line_.dump();
  }

 private:
  Json line_ = Json::object();
  Json nonfinite_ = Json::object();
};

/// Reads the fields of one line; errors name the key.
class LineReader {
 public:
  explicit LineReader(std::string_view text) : line_(parse(text)) {
    require(line_.is_object(), "expected a JSON object, found {}", line_.type_name());
  }

  std::string type() const {
    const auto found = line_.find("type");
    require(found != line_.end() && found->is_string(),
            "the key 'type' must be \"step\" or \"validation\"");
    return found->get<std::string>();
  }
  int64_t integer(const char* key, int64_t fallback = 0) const {
    const auto found = line_.find(key);
    return found == line_.end() ? fallback : count(*found, key);
  }
  double number(const char* key) const { return optional_number(key).value_or(0.0); }
  std::optional<double> optional_number(const char* key) const {
    const auto found = line_.find(key);
    if (found == line_.end()) return std::nullopt;
    if (found->is_null()) return nonfinite(key);
    require(found->is_number(), "'{}' must be a number, found {}", key, found->type_name());
    return found->get<double>();
  }
  std::optional<int64_t> optional_integer(const char* key) const {
    const auto found = line_.find(key);
    return found == line_.end() ? std::nullopt : std::optional(count(*found, key));
  }
  std::vector<ExpertLoad> loads() const {
    std::vector<ExpertLoad> layers;
    const auto found = line_.find("expert_load");
    if (found == line_.end()) return layers;
    require(found->is_array(), "'expert_load' must be a list, found {}", found->type_name());
    for (const Json& entry : *found) layers.push_back(load(entry));
    return layers;
  }
  std::vector<LayerRoundings> roundings() const {
    std::vector<LayerRoundings> layers;
    const auto found = line_.find("roundings");
    if (found == line_.end()) return layers;
    require(found->is_array(), "'roundings' must be a list, found {}", found->type_name());
    for (const Json& entry : *found) {
      require(entry.is_object() && entry.contains("layer"),
              "each entry of 'roundings' must hold 'layer' and shares");
      layers.push_back({count(entry["layer"], "layer"), number_in(entry, "activations"),
                        number_in(entry, "weights"), number_in(entry, "gradients"),
                        number_in(entry, "nonfinite")});
    }
    return layers;
  }
  std::vector<NamedNumber> objective() const {
    std::vector<NamedNumber> numbers;
    const auto found = line_.find("objective");
    if (found == line_.end()) return numbers;
    require(found->is_object(), "'objective' must be a table, found {}", found->type_name());
    for (const auto& [name, value] : found->items()) {
      require(value.is_number() || value.is_null(), "'objective' must hold numbers, found {}",
              value.type_name());
      constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
      numbers.push_back({name, value.is_null() ? kNone : value.get<double>()});
    }
    return numbers;
  }
  std::optional<TracedWaits> waits() const {
    const auto found = line_.find("waits");
    if (found == line_.end()) return std::nullopt;
    require(found->is_object() && found->contains("ranks") && found->contains("steps") &&
                found->contains("for_ranks") && (*found)["for_ranks"].is_array(),
            "'waits' must hold 'ranks', 'steps', 'seconds' and a list 'for_ranks'");
    TracedWaits waits{.num_ranks = count((*found)["ranks"], "ranks"),
                      .num_steps = count((*found)["steps"], "steps"),
                      .seconds = seconds(*found),
                      .for_ranks = {},
                      .why = {}};
    if (found->contains("why") && (*found)["why"].is_string()) waits.why = (*found)["why"];
    for (const Json& entry : (*found)["for_ranks"]) {
      require(entry.is_object() && entry.contains("rank"),
              "each entry of 'for_ranks' must hold 'rank' and 'seconds'");
      waits.for_ranks.push_back({count(entry["rank"], "rank"), seconds(entry)});
    }
    return waits;
  }

 private:
  static Json parse(std::string_view text) {
    Json line = Json::parse(text, nullptr, /*allow_exceptions=*/false);
    require(!line.is_discarded(), "not valid JSON");
    return line;
  }
  static int64_t count(const Json& value, const char* key) {
    require(value.is_number_integer(), "'{}' must be an integer, found {}", key, value.type_name());
    const bool fits =
        !value.is_number_unsigned() ||
        value.get<uint64_t>() <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
    require(fits && value.get<int64_t>() >= 0, "'{}' is out of range: {}", key, value.dump());
    return value.get<int64_t>();
  }
  static ExpertLoad load(const Json& entry) {
    require(entry.is_object() && entry.contains("layer") && entry.contains("tokens") &&
                entry["tokens"].is_array(),
            "each entry of 'expert_load' must hold 'layer' and a list 'tokens'");
    ExpertLoad load{count(entry["layer"], "layer"), {}};
    for (const Json& tokens : entry["tokens"])
      load.tokens_per_expert.push_back(count(tokens, "tokens"));
    return load;
  }
  static double seconds(const Json& entry) { return number_in(entry, "seconds"); }
  static double number_in(const Json& entry, const char* key) {
    const auto found = entry.find(key);
    require(found != entry.end() && found->is_number(), "'{}' must be a number", key);
    return found->get<double>();
  }
  double nonfinite(const char* key) const {
    const auto table = line_.find("nonfinite");
    const bool named = table != line_.end() && table->is_object() && table->contains(key);
    const Json name = named ? (*table)[key] : Json("nan");
    if (name == "inf") return std::numeric_limits<double>::infinity();
    if (name == "-inf") return -std::numeric_limits<double>::infinity();
    return std::numeric_limits<double>::quiet_NaN();
  }

  Json line_;
};

StepRecord read_step(const LineReader& line) {
  StepRecord record;
  record.step = line.integer("step");
  record.total_steps = line.integer("total_steps");
  record.tokens_seen = line.integer("tokens_seen");
  record.loss = line.number("loss");
  record.validation_loss = line.optional_number("validation_loss");
  record.mtp_loss = line.optional_number("mtp_loss");
  record.balance_loss = line.optional_number("balance_loss");
  record.z_loss = line.optional_number("z_loss");
  record.max_logit = line.optional_number("max_logit");
  record.clipped_heads = line.optional_integer("clipped_heads");
  record.grad_norm = line.number("grad_norm");
  record.learning_rate = line.number("learning_rate");
  record.clip_factor = line.optional_number("clip_factor").value_or(1.0);
  record.loss_scale = line.optional_number("loss_scale");
  record.step_seconds = line.number("step_seconds");
  record.host_seconds = line.optional_number("host_seconds");
  record.tokens_per_second = line.number("tokens_per_second");
  record.model_flops = line.number("model_flops");
  record.utilisation = line.optional_number("utilisation");
  record.memory_used = line.integer("memory_used");
  record.memory_predicted = line.integer("memory_predicted");
  record.dropped_tokens = line.integer("dropped_tokens");
  record.skipped_steps = line.integer("skipped_steps");
  record.repeated_steps = line.optional_integer("repeated_steps");
  record.eta_seconds = line.number("eta_seconds");
  record.expert_load = line.loads();
  record.saturated = line.optional_number("saturated");
  record.roundings = line.roundings();
  record.waits = line.waits();
  record.objective = line.objective();
  return record;
}

ValidationRecord read_validation(const LineReader& line) {
  return {line.integer("step"), line.integer("tokens_seen"), line.number("loss"),
          line.number("seconds")};
}

/// Gives the lines of a file to `visit` until it returns false; errors get the file and the line
/// number.
class MetricsReader {
 public:
  explicit MetricsReader(const MetricsVisitor& visitor) : visitor_(visitor) {}

  /// The step that the line belongs to. The visitor sees it only where the step is at most
  /// `last_step`.
  int64_t read(std::string_view text, int64_t last_step) {
    const LineReader line(text);
    const std::string type = line.type();
    require(type == "step" || type == "validation",
            "unknown type '{}'; expected \"step\" or \"validation\"", type);
    const int64_t step = line.integer("step", -1);
    require(step >= 0, "the key 'step' is missing");
    check_order(step, type == "step");
    if (step <= last_step) deliver(line, type);
    return step;
  }

 private:
  void check_order(int64_t step, bool is_step) {
    const int64_t least = newest_step_ + (is_step ? 1 : 0);
    require(step >= least, "step {} comes after step {}", step, newest_step_);
    if (is_step) newest_step_ = step;
  }
  void deliver(const LineReader& line, std::string_view type) const {
    if (type == "step" && visitor_.step) visitor_.step(read_step(line));
    if (type == "validation" && visitor_.validation) visitor_.validation(read_validation(line));
  }

  const MetricsVisitor& visitor_;
  int64_t newest_step_ = 0;
};

/// Reads a file; returns how many of its bytes, from the start, are whole lines of steps up to
/// `last_step`.
std::streamoff scan(const std::filesystem::path& path, int64_t last_step,
                    const MetricsVisitor& visitor) {
  std::ifstream file(path, std::ios::binary);
  require(file.is_open(), "cannot read '{}': it is missing or not readable", path.string());
  MetricsReader reader(visitor);
  std::string line;
  std::streamoff kept = 0;
  for (int64_t number = 1; std::getline(file, line) && !file.eof(); ++number) {
    try {
      if (reader.read(line, last_step) > last_step) break;
    } catch (const UserError& error) {
      user_error("{}:{}: {}; the file is damaged or was not written by tessera", path.string(),
                 number, error.what());
    }
    kept += static_cast<std::streamoff>(line.size()) + 1;
  }
  require(!file.bad(), "cannot read '{}': the device reports an error", path.string());
  return kept;
}

}  // namespace

std::string to_json_line(const StepRecord& record) {
  LineBuilder line("step");
  line.integer("step", record.step);
  line.integer("total_steps", record.total_steps);
  line.integer("tokens_seen", record.tokens_seen);
  line.number("loss", record.loss);
  line.number("validation_loss", record.validation_loss);
  line.number("mtp_loss", record.mtp_loss);
  line.number("balance_loss", record.balance_loss);
  line.number("z_loss", record.z_loss);
  line.number("max_logit", record.max_logit);
  if (record.clipped_heads) line.integer("clipped_heads", *record.clipped_heads);
  line.number("grad_norm", record.grad_norm);
  line.number("learning_rate", record.learning_rate);
  line.number("clip_factor", record.clip_factor);
  line.number("loss_scale", record.loss_scale);
  line.number("step_seconds", record.step_seconds);
  line.number("host_seconds", record.host_seconds);
  line.number("tokens_per_second", record.tokens_per_second);
  line.number("model_flops", record.model_flops);
  line.number("tflops", record.tflops());
  line.number("utilisation", record.utilisation);
  line.integer("memory_used", record.memory_used);
  line.integer("memory_predicted", record.memory_predicted);
  line.integer("dropped_tokens", record.dropped_tokens);
  line.integer("skipped_steps", record.skipped_steps);
  if (record.repeated_steps) line.integer("repeated_steps", *record.repeated_steps);
  line.number("eta_seconds", record.eta_seconds);
  line.loads(record.expert_load);
  line.number("saturated", record.saturated);
  line.roundings(record.roundings);
  line.waits(record.waits);
  line.objective(record.objective);
  return line.text();
}

std::string to_json_line(const ValidationRecord& record) {
  LineBuilder line("validation");
  line.integer("step", record.step);
  line.integer("tokens_seen", record.tokens_seen);
  line.number("loss", record.loss);
  line.number("seconds", record.seconds);
  return line.text();
}

void read_metrics(const std::filesystem::path& path, const MetricsVisitor& visitor) {
  scan(path, std::numeric_limits<int64_t>::max(), visitor);
}

void truncate_metrics(const std::filesystem::path& path, int64_t last_step,
                      const MetricsVisitor& visitor) {
  if (!std::filesystem::exists(path)) return;
  const std::streamoff kept = scan(path, last_step, visitor);
  std::error_code error;
  std::filesystem::resize_file(path, static_cast<uintmax_t>(kept), error);
  require(!error, "cannot shorten '{}' for resuming: {}", path.string(), error.message());
}

std::optional<std::filesystem::path> rename_aside(const std::filesystem::path& path) {
  namespace fs = std::filesystem;
  const auto stands = [](const fs::path& at) { return fs::exists(fs::symlink_status(at)); };
  if (!stands(path)) return std::nullopt;
  for (int number = 1;; ++number) {
    fs::path aside = fmt::format("{}.{}", path.string(), number);
    if (stands(aside)) continue;
    rename_path(path, aside);
    return aside;
  }
}

}  // namespace tessera
