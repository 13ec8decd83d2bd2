#pragma once

#include <string>

#include "ops/operator.h"

namespace tessera {

/// Some members of a group, each of which has as many consecutive experts: member m those from
/// first_expert + m · experts_each on.
struct DestinationsSpec {
  int64_t members = 1;
  int64_t experts_each = 1;
  int64_t first_expert = 0;
};

/// To which members a token goes, once to each: (expert_idx I32 [T, K]) -> I32 [T, K]: the member
/// that has the expert, -1 where none has, or where an earlier choice of the token names it too. T
/// may be ragged. A pure function; no gradient; never recomputed, as routing is not.
class Destinations final : public Operator {
 public:
  static constexpr std::string_view kName = "destinations";
  enum Input : int { kExpertIdx };
  enum Output : int { kMembers };

  explicit Destinations(const DestinationsSpec& spec);
  const DestinationsSpec& spec() const { return spec_; }

  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  void differentiate(GradientBuilder& /*builder*/) const override {}
  bool recomputable() const override { return false; }

 private:
  DestinationsSpec spec_;
};

/// Each row's token's choices, by the map of a layout (RouteMap): (expert_idx I32 [T, K], source_R
/// I32 [R ragged]) -> I32 [R, K], -1 for padding. T may be ragged too. As Destinations in the rest.
class PermuteChoices final : public Operator {
 public:
  static constexpr std::string_view kName = "permute_choices";
  enum Input : int { kExpertIdx, kSource };
  enum Output : int { kChoices };

  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  void differentiate(GradientBuilder& /*builder*/) const override {}
  bool recomputable() const override { return false; }
};

OperatorPtr make_destinations(const DestinationsSpec& spec);
OperatorPtr make_permute_choices();

void add_destinations_cpu(KernelTable& table);
void add_destinations_cuda(KernelTable& table);

}  // namespace tessera
