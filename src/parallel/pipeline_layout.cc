#include "parallel/pipeline_layout.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "core/error.h"

namespace tessera {
namespace {

/// Expands repetitions and groups into a plain string of E, t, m, L and "|".
class LayoutExpander {
 public:
  explicit LayoutExpander(std::string_view text) : text_(text) {}

  std::string expand() {
    std::string result = sequence(0);
    if (at_ < text_.size()) fail("a ')' without its '('");
    return result;
  }

 private:
  static constexpr size_t kMaxExpanded = 1 << 20;
  static constexpr int kMaxDepth = 16;

  [[noreturn]] void fail(std::string_view what) const {
    user_error("pipeline layout \"{}\": {} at character {}", text_, what, at_ + 1);
  }
  bool done() const { return at_ >= text_.size(); }

  std::string sequence(int depth) {
    std::string result;
    while (!done() && text_[at_] != ')') {
      result += repeated(item(depth));
      if (result.size() > kMaxExpanded) fail("more than a million layers");
    }
    return result;
  }

  std::string item(int depth) {
    const char c = text_[at_];
    if (c == '(') {
      if (depth == kMaxDepth) fail("groups nested too deeply");
      ++at_;
      std::string inner = sequence(depth + 1);
      if (done()) fail("a '(' is not closed");
      ++at_;
      return inner;
    }
    if (std::string_view("EtmL|").find(c) == std::string_view::npos)
      fail(fmt::format("found '{}', expected E, t, m, L, |, ( or )", c));
    ++at_;
    return std::string(1, c);
  }

  std::string repeated(const std::string& once) {
    if (done() || text_[at_] != '*') return once;
    ++at_;
    size_t count = 0;
    const size_t begin = at_;
    while (!done() && text_[at_] >= '0' && text_[at_] <= '9') {
      count = count * 10 + static_cast<size_t>(text_[at_++] - '0');
      if (count > kMaxExpanded) fail("the number is too large");
    }
    if (begin == at_ || count == 0) fail("expected a number above 0 after '*'");
    if (count * std::max<size_t>(once.size(), 1) > kMaxExpanded) fail("more than a million layers");
    std::string result;
    for (size_t i = 0; i < count; ++i) result += once;
    return result;
  }

  std::string_view text_;
  size_t at_ = 0;
};

PipelineChunk make_chunk(std::string_view content, int64_t first_layer) {
  return {.embedding = content.find('E') != std::string_view::npos,
          .first_layer = first_layer,
          .num_layers = std::ranges::count(content, 't'),
          .num_mtp = std::ranges::count(content, 'm'),
          .loss = content.find('L') != std::string_view::npos};
}

void check_order(std::string_view expanded, std::string_view text, const LayerCounts& layers) {
  require(std::ranges::count(expanded, 'E') == 1 && expanded.front() == 'E',
          "pipeline layout \"{}\" must have one E, at its beginning", text);
  require(std::ranges::count(expanded, 'L') == 1 && expanded.back() == 'L',
          "pipeline layout \"{}\" must have one L, at its end", text);
  const int64_t found = std::ranges::count(expanded, 't');
  require(found == layers.decoder, "pipeline layout \"{}\" has {} decoder layers, the model {}",
          text, found, layers.decoder);
  const int64_t found_mtp = std::ranges::count(expanded, 'm');
  require(
      found_mtp == layers.mtp,
      "pipeline layout \"{}\" has {} layers of multi-token prediction (m), model.mtp_layers is {}",
      text, found_mtp, layers.mtp);
  require(found_mtp == 0 || expanded.find('m') > expanded.rfind('t'),
          "pipeline layout \"{}\" has a decoder layer (t) behind a layer of multi-token prediction "
          "(m), which continues the last one",
          text);
  const bool beside_loss =
      found_mtp == 0 || expanded.find('|', expanded.find('m')) == std::string_view::npos;
  require(beside_loss || !layers.mtp_beside_loss,
          "pipeline layout \"{}\" has a layer of multi-token prediction (m) in another chunk than "
          "the loss (L), and with model.mtp_normed it reads the norm before that; put it beside "
          "the loss",
          text);
}

void check_chunks(const PipelineLayout& layout, std::string_view text) {
  const int64_t count = std::ssize(layout.chunks);
  require(count % layout.num_stages == 0,
          "pipeline layout \"{}\" has {} chunks for {} stages; it needs a multiple, {} or {}", text,
          count, layout.num_stages,
          std::max(count / layout.num_stages, int64_t{1}) * layout.num_stages,
          (count / layout.num_stages + 1) * layout.num_stages);
}

}  // namespace

PipelineLayout parse_pipeline_layout(std::string_view text, int64_t num_stages,
                                     const LayerCounts& layers) {
  require(num_stages >= 1, "a pipeline of {} stages: there must be at least 1", num_stages);
  const std::string expanded = LayoutExpander(text).expand();
  require(!expanded.empty(), "the pipeline layout is empty");
  check_order(expanded, text, layers);
  PipelineLayout layout{.num_stages = num_stages};
  int64_t next_layer = 0;
  for (size_t begin = 0; begin <= expanded.size();) {
    const size_t end = std::min(expanded.find('|', begin), expanded.size());
    layout.chunks.push_back(
        make_chunk(std::string_view(expanded).substr(begin, end - begin), next_layer));
    next_layer += layout.chunks.back().all_layers();
    begin = end + 1;
  }
  for (const PipelineChunk& chunk : layout.chunks) {
    require(chunk.embedding || chunk.loss || chunk.all_layers() > 0,
            "pipeline layout \"{}\" has an empty chunk", text);
  }
  check_chunks(layout, text);
  return layout;
}

PipelineLayout even_pipeline_layout(int64_t num_stages, int64_t chunks_per_stage,
                                    const LayerCounts& layers) {
  const int64_t num_layers = layers.decoder;
  require(num_stages >= 1 && chunks_per_stage >= 1,
          "{} stages of {} chunks: there must be at least 1 of both", num_stages, chunks_per_stage);
  const int64_t count = num_stages * chunks_per_stage;
  require(num_layers >= count,
          "{} layers do not fill {} stages of {} chunks; lower parallel.pp or "
          "parallel.pipeline_chunks, whose product may be {}, or give parallel.pipeline_layout",
          num_layers, num_stages, chunks_per_stage, num_layers);
  PipelineLayout layout{.num_stages = num_stages};
  const int64_t left_over = num_layers % count;
  int64_t next_layer = 0;
  for (int64_t c = 0; c < count; ++c) {
    const bool takes_one = c >= 1 && c <= left_over;
    const bool last = c == count - 1;
    PipelineChunk chunk{.embedding = c == 0,
                        .first_layer = next_layer,
                        .num_layers = num_layers / count + (takes_one ? 1 : 0),
                        .num_mtp = last ? layers.mtp : 0,
                        .loss = last};
    next_layer += chunk.num_layers;
    layout.chunks.push_back(chunk);
  }
  return layout;
}

std::string write_pipeline_layout(const PipelineLayout& layout) {
  const auto repeated = [](char item, int64_t count) {
    return count == 0   ? std::string()
           : count == 1 ? std::string(1, item)
                        : fmt::format("{}*{}", item, count);
  };
  std::vector<std::string> chunks;
  for (const PipelineChunk& chunk : layout.chunks) {
    chunks.push_back(repeated('E', chunk.embedding ? 1 : 0) + repeated('t', chunk.num_layers) +
                     repeated('m', chunk.num_mtp) + repeated('L', chunk.loss ? 1 : 0));
  }
  return fmt::format("{}", fmt::join(chunks, "|"));
}

std::string to_string(const PipelineLayout& layout) {
  std::vector<std::string> texts;
  for (const PipelineChunk& chunk : layout.chunks) {
    std::vector<std::string> parts;
    if (chunk.embedding) parts.emplace_back("E");
    if (chunk.num_layers > 0) parts.push_back(fmt::format("t*{}", chunk.num_layers));
    if (chunk.num_mtp > 0) parts.push_back(fmt::format("m*{}", chunk.num_mtp));
    if (chunk.loss) parts.emplace_back("L");
    texts.push_back(fmt::format("[{}]", fmt::join(parts, " ")));
  }
  return fmt::format("{}", fmt::join(texts, " "));
}

}  // namespace tessera
