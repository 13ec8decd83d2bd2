#include "model/config/layer_entries.h"

#include <charconv>
#include <set>

#include "core/error.h"

namespace tessera {
namespace {

/// Reads one entry.
class EntryParser {
 public:
  EntryParser(const LayerEntryKind& kind, const std::string& text) : kind_(kind), text_(text) {}

  LayerEntry run() const {
    const size_t at = text_.find('@');
    LayerEntry entry{.name = text_.substr(0, at)};
    if (entry.name.empty()) refuse(fmt::format("which names no {}", kind_.names));
    if (at == std::string::npos) return entry;
    const std::string_view range = std::string_view(text_).substr(at + 1);
    const size_t dash = range.find('-');
    const int64_t first = parse_layer(range.substr(0, dash));
    const int64_t last =
        dash == std::string_view::npos ? first : parse_layer(range.substr(dash + 1));
    if (last < first) refuse("whose layers end before they begin");
    entry.layers = {first, last};
    return entry;
  }

 private:
  [[noreturn]] void refuse(const std::string& why) const {
    throw UserError(fmt::format(
        "{} has '{}', {}; an entry is the name of a {}, or \"all\", perhaps with layers: {}",
        kind_.key, text_, why, kind_.names, kind_.examples));
  }

  int64_t parse_layer(std::string_view number) const {
    int64_t layer = 0;
    const char* const end = number.data() + number.size();
    const auto [at, error] = std::from_chars(number.data(), end, layer);
    if (number.empty() || error != std::errc() || at != end || layer < 0)
      refuse(fmt::format("in which '{}' is no layer", number));
    return layer;
  }

  const LayerEntryKind& kind_;
  const std::string& text_;
};

}  // namespace

std::string LayerEntry::to_string() const {
  if (!layers) return name;
  if (layers->first == layers->last) return fmt::format("{}@{}", name, layers->first);
  return fmt::format("{}@{}-{}", name, layers->first, layers->last);
}

std::vector<LayerEntry> parse_layer_entries(const LayerEntryKind& kind,
                                            const std::vector<std::string>& texts) {
  std::vector<LayerEntry> entries;
  entries.reserve(texts.size());
  for (const std::string& text : texts) entries.push_back(EntryParser(kind, text).run());
  return entries;
}

std::vector<std::string> names_of_layer(const std::vector<LayerEntry>& entries, int64_t layer) {
  std::set<std::string> names;
  for (const LayerEntry& entry : entries) {
    if (entry.covers(layer)) names.insert(entry.name);
  }
  if (names.contains("all")) return {"all"};
  return {names.begin(), names.end()};
}

void check_layers(std::string_view key, const LayerEntry& entry, int64_t num_layers) {
  require(!entry.layers || entry.layers->last < num_layers,
          "{} has '{}', but the model has layers 0 to {}", key, entry.to_string(), num_layers - 1);
}

}  // namespace tessera
