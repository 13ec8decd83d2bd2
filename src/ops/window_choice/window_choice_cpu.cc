#include <algorithm>

#include "ops/paged_attention/kept_tokens.h"
#include "ops/window_choice/window_choice.h"

namespace tessera {
namespace {

/// The rows of one token.
class RowWriter {
 public:
  RowWriter(const WindowChoice& op, const KeptTokens& tokens, const KernelArgs& args)
      : spec_(op.spec()),
        tokens_(tokens),
        chosen_(op.chosen() ? args.in(op.chosen_input()).as<int32_t>() : nullptr),
        first_entry_(spec_.kept == KeptRows::kPacked ? tokens.count() : spec_.first_entry) {}

  /// Fills what is left with -1.
  void write(int64_t token, std::span<int32_t> rows) const {
    size_t count = 0;
    if (tokens_.sequence(token) >= 0) {
      const int64_t position = tokens_.position(token);
      for (int64_t i = position - std::min(position, spec_.window - 1); i <= position; ++i)
        rows[count++] = static_cast<int32_t>(tokens_.row(token, i));
      count += write_entries(token, rows.subspan(count));
    }
    std::ranges::fill(rows.subspan(count), -1);
  }

 private:
  size_t write_entries(int64_t token, std::span<int32_t> rows) const {
    size_t count = 0;
    if (chosen_ == nullptr) {
      for (int64_t i = 0; i < (tokens_.position(token) + 1) / spec_.rate; ++i) {
        rows[count++] =
            static_cast<int32_t>(first_entry_ + tokens_.entry_row(token, i, spec_.rate));
      }
      return count;
    }
    const int32_t* const own = chosen_ + token * spec_.entries;
    for (int64_t i = 0; i < spec_.entries && own[i] >= 0; ++i)
      rows[count++] = static_cast<int32_t>(first_entry_ + own[i]);
    return count;
  }

  const WindowChoiceSpec& spec_;
  const KeptTokens& tokens_;
  const int32_t* chosen_;
  int64_t first_entry_;
};

void check_entries(const WindowChoice& op, const KeptTokens& tokens) {
  tokens.check(op);
  const WindowChoiceSpec& spec = op.spec();
  for (int64_t token = 0; token < tokens.count() && !op.chosen(); ++token) {
    const int64_t entries = (tokens.position(token) + 1) / spec.rate;
    check_shape(op, entries <= spec.entries, "token {} sees {} entries of {} tokens, more than {}",
                token, entries, spec.rate, spec.entries);
  }
}

void window_choice(const WindowChoice& op, const KernelArgs& args) {
  const KeptTokens tokens(op.spec().kept, args, WindowChoice::kPositions, WindowChoice::kFirstKept);
  check_entries(op, tokens);
  const RowWriter writer(op, tokens, args);
  const auto rows = args.out(WindowChoice::kRows).span<int32_t>();
  const auto width = static_cast<size_t>(op.spec().window + op.spec().entries);
#pragma omp parallel for schedule(static)
  for (int64_t token = 0; token < tokens.count(); ++token)
    writer.write(token, rows.subspan(static_cast<size_t>(token) * width, width));
}

}  // namespace

void add_window_choice_cpu(KernelTable& table) {
  for (const KeptRows kept : {KeptRows::kPacked, KeptRows::kCached, KeptRows::kPaged})
    add_kernel<WindowChoice>(table, WindowChoice::name_of(kept), window_choice);
}

}  // namespace tessera
