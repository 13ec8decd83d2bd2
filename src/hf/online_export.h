#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "hf/export_plan.h"
#include "hf/transfer/transfer.h"

namespace tessera {

/// Writes a model that is in memory as folders of Hugging Face, again and again as it changes: each
/// is what export_hf makes of a checkpoint of the same weights. What is written is decided once.
class OnlineExport {
 public:
  /// Of the request, `source` is where config.json and the tokenizer may be, if `like` is empty;
  /// `target`, `adapters_only` and `options.verify` are not used. `shapes`: of the model's tensors,
  /// by name. Throws UserError for what export_hf would refuse.
  OnlineExport(ExportRequest request, std::map<std::string, Shape> shapes);

  const std::string& model_type() const { return model_type_; }
  int64_t num_tensors() const { return std::ssize(work_.map.hf); }
  /// Of the weights in one folder.
  int64_t num_bytes() const;
  /// What the user should know.
  const std::vector<std::string>& notes() const { return notes_; }

  /// Writes the folder `target`, which must not exist and appears when it is complete. `files`, by
  /// name, are texts that go along. Throws UserError; nothing is left behind then.
  void write(const std::filesystem::path& target, const HeldTensors& tensors,
             const std::map<std::string, std::string>& files) const;

 private:
  ExportRequest given_;    ///< with adapters and multi-token prediction
  ExportRequest decoder_;  ///< without
  Export work_;
  std::string model_type_;
  std::vector<std::string> notes_;
};

}  // namespace tessera
