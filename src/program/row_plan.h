#pragma once

#include <map>
#include <optional>
#include <vector>

#include "ops/backend.h"
#include "program/memory_plan.h"

namespace tessera {

/// Where the extents of ragged values come from, for whoever gives them memory by their rows.
struct ExtentSource {
  enum class Kind : uint8_t {
    kTold,   ///< a node tells the host
    kFound,  ///< no more than `node` makes of what it reads (Operator::infer), of which some is
             ///< told
    kInput,  ///< the program is given it, and whoever gives it was told
  };
  Kind kind = Kind::kTold;
  size_t node = 0;       ///< that writes it
  ValueId bounded = -1;  ///< kFound: an output of the node that has this extent
};

/// Rows of a program's ragged values: what they are where routing is balanced, and which values are
/// *elastic*: they may have fewer than their bound, and the host learns how many before they are
/// written.
class RowPlan {
 public:
  RowPlan() = default;
  /// `tells` says by node whether the host learns the extents that it writes; `given` are extents
  /// among the program's inputs that the host knows, with what they are where routing is balanced,
  /// and `expected` those of all, known to the host or not.
  RowPlan(const Program& program, const MemoryPlan& plan, const std::vector<bool>& tells,
          const std::map<ValueId, int64_t>& given, const std::map<ValueId, int64_t>& expected = {});

  bool has_elastic() const { return num_elastic_ > 0; }
  bool is_elastic(ValueId id) const { return elastic_[id]; }
  /// The elastic values that a node writes.
  const std::vector<ValueId>& written_by(size_t node) const { return written_[node]; }
  /// Null where the host does not learn it.
  const ExtentSource* find_source(ValueId extent) const;
  /// Rows of an elastic value that has `skew` times those of balanced routing, at most its bound.
  int64_t skewed_rows(const Program& program, ValueId id, double skew) const;
  /// The extents that the host learns, with what they are where routing is balanced.
  const std::map<ValueId, int64_t>& balanced() const { return balanced_; }
  /// The same of all extents of which it can be told, whoever learns them: for estimates of time.
  const std::map<ValueId, int64_t>& expected() const { return expected_; }

 private:
  void find_node(const Program& program, size_t idx, bool tells);
  void expect_node(const Program& program, size_t idx);

  std::map<ValueId, int64_t> balanced_;  // of all extents that may be fewer than their bounds
  std::map<ValueId, int64_t> expected_;
  std::map<ValueId, ExtentSource> sources_;
  IdVector<ValueId, bool> elastic_;
  std::vector<std::vector<ValueId>> written_;
  int num_elastic_ = 0;
};

/// By node, whether the host learns the extents that it writes.
std::vector<bool> find_tellers(const Program& program, const Backend& backend);

/// Bytes of `rows` rows, at most all, of a value that is ragged in its first dim, as a tensor of so
/// many rows has them.
int64_t bytes_of_rows(const ValueType& type, int64_t rows);

/// Bytes from a value's first one on.
struct ByteRange {
  int64_t offset = 0;
  int64_t num_bytes = 0;
  bool operator==(const ByteRange&) const = default;
};
/// Where such rows lie in a tensor at the bound: the elements, with room for scales just behind
/// them, and each kind of scales.
std::vector<ByteRange> ranges_at_bound(const ValueType& type, int64_t rows);

/// The bound of output `out` of a node, where its inputs have at most `rows` rows by extent.
int64_t bound_rows(const Program& program, const Node& node, ValueId out,
                   const std::map<ValueId, int64_t>& rows);

}  // namespace tessera
