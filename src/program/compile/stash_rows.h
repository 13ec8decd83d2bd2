#pragma once

#include <string_view>

#include "program/differentiate.h"
#include "program/row_plan.h"

namespace tessera {

/// What is stashed of a program: saved values that are ragged in their first dim, of more pages at
/// their bound than `rows` rows take.
struct StashRule {
  int64_t page_bytes = 0;  ///< of the pool; a multiple of 16
  int64_t rows = 0;        ///< for which the pool has room
};

/// What the pool's parts are called in all programs that use it.
inline constexpr std::string_view kStashPages = "stash.pages";
inline constexpr std::string_view kStashFree = "stash.free";
inline constexpr std::string_view kStashState = "stash.state";

/// Values that the rule lets be stashed, of those in `saved`: not such whose rows the host learns,
/// which have memory by these (RowPlan), nor such with scales.
std::vector<ValueId> choose_stashed(const Program& forward, const std::vector<ValueId>& saved,
                                    const RowPlan& rows, const StashRule& rule);

/// Paged stashing (ops/page_stash): the forward program copies these values to pages behind their
/// last use, and the backward program back in front of their first. Between the two they have no
/// memory of their own, and in the programs they are transient: all layers share it. What is kept
/// for the backward program are the tables that say which pages.
void stash_rows(Program& forward, Backward& backward, const std::vector<ValueId>& stashed,
                const StashRule& rule);

}  // namespace tessera
