#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

/// One change made to text before it is split into words.
struct NormalizerStep {
  enum class Kind {
    kNfc,
    kNfd,
    kNfkc,
    kNfkd,
    kPrepend,  ///< `content`, to a text that is not empty
    kReplace   ///< each `pattern` by `content`
  };
  Kind kind = Kind::kNfc;
  std::string pattern;
  std::string content;
};

/// Changes made one after the other. Bytes that are not UTF-8 stay as they are.
class Normalizer {
 public:
  Normalizer() = default;
  explicit Normalizer(std::vector<NormalizerStep> steps) : steps_(std::move(steps)) {}

  const std::vector<NormalizerStep>& steps() const { return steps_; }
  /// The text changed: a view of the text itself where nothing changes, else of `buffer`.
  std::string_view apply(std::string_view text, std::string& buffer) const;

 private:
  std::vector<NormalizerStep> steps_;
};

}  // namespace tessera
