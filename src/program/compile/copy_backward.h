#pragma once

#include <map>
#include <vector>

#include "program/import.h"

namespace tessera {

/// Copies a backward program node by node into a new one, whose forward values come otherwise: a
/// pass says how by obtain(), which is asked for each in front of its first use.
class BackwardCopier {
 public:
  /// The links of `old` are to values of `forward`. Both must outlive it.
  BackwardCopier(const Program& forward, const Backward& old);
  virtual ~BackwardCopier() = default;
  BackwardCopier(const BackwardCopier&) = delete;
  BackwardCopier& operator=(const BackwardCopier&) = delete;

  /// The copy. To be called once.
  Backward run();

 protected:
  /// The new program's value for a forward value; may add nodes.
  virtual ValueId obtain(ValueId forward) = 0;

  const Program& forward() const { return forward_; }
  const Backward& old() const { return old_; }
  Program& program() { return result_.program; }
  ForwardImporter& importer() { return importer_; }

 private:
  void copy_links(const std::vector<Link>& from, std::vector<Link>& to);
  ValueId translate(ValueId id);
  ValueId add_accumulator(ValueId old_id, const std::string& name, const ValueType& type);
  ValueType translate_type(ValueType type);
  void copy_node(const Node& node);

  const Program& forward_;
  const Backward& old_;
  Backward result_;
  ForwardImporter importer_;
  std::map<ValueId, ValueId> forward_of_;
  std::map<ValueId, ValueId> translated_;
};

}  // namespace tessera
