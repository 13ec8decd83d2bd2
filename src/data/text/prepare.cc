#include "data/text/prepare.h"

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/error.h"
#include "core/file/file.h"
#include "core/random.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

/// <cache_dir>/<name>-<hash>, different for each source, tokenizer and way of reading.
std::string prefix_for(const TextSource& source, const Tokenizer& tokenizer,
                       const std::string& cache_dir) {
  std::string what = fmt::format("{}\n{}\n{}\n{}\n{}\n{}", tokenizer.name(),
                                 source.separator_line ? "line:" + *source.separator_line : "none",
                                 static_cast<int>(source.format), source.json_key,
                                 source.instructions, source.skip_invalid);
  for (const std::string& path : source.paths) what += "\n" + fs::weakly_canonical(path).string();
  constexpr size_t kLongestName = 128;  // bytes, of the 255 that a name may have with what follows
  std::string name = fs::path(source.paths.front()).stem().string().substr(0, kLongestName);
  std::ranges::replace_if(
      name, [](unsigned char c) { return std::isalnum(c) == 0 && c != '-' && c != '_'; }, '_');
  const uint64_t hash = hash_text(what.data(), what.size());
  return (fs::path(cache_dir) / fmt::format("{}-{:016x}", name, hash)).string();
}

}  // namespace

TokenizeSummary prepare_tokens(const TextSource& source, const Tokenizer& tokenizer,
                               const std::string& cache_dir,
                               const std::function<void(const TokenizeProgress&)>& progress,
                               const std::function<void()>& pause) {
  require(!cache_dir.empty(), "no folder is given for the token file");
  list_text_files(source);  // refuses what cannot be read before anything is named after it
  return tokenize_text({.source = source,
                        .prefix = prefix_for(source, tokenizer, cache_dir),
                        .other = OtherTokens::kReplace,
                        .progress = progress,
                        .pause = pause},
                       tokenizer);
}

std::string tokenizer_of(const std::string& prefix) {
  const fs::path path = prefix + ".json";
  if (!path_exists(path)) return "";
  const auto json = nlohmann::json::parse(read_text_file(path), nullptr, false);
  const auto name = nlohmann::json::json_pointer("/made_of/tokenizer");
  return json.contains(name) && json[name].is_string() ? json[name].get<std::string>() : "";
}

}  // namespace tessera
