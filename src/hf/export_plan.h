#pragma once

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "hf/convert.h"
#include "hf/hf_record.h"
#include "hf/tensors/tensor_map.h"

namespace tessera {

/// What config.json, tokenizer and layout are taken from, if anything.
struct Companions {
  std::filesystem::path folder;  ///< empty: nothing
  bool has_config = false;
  std::optional<HfRecord> record;
};

/// What an export writes.
struct Export {
  ModelConfig model;  ///< what is written
  const Family* family = nullptr;
  std::string config_text;
  Companions companions;
  HfRecord record;
  TensorMap map;
  std::vector<std::string> notes;
};

/// The tensors of a model that is exported.
struct ExportSource {
  std::string where;                    ///< for messages
  std::map<std::string, Shape> shapes;  ///< by name
  bool merges = false;                  ///< adapters among them go into the others
};

/// Of a request without multi-token prediction, of which `given` may have layers. Throws UserError
/// for a model that no family expresses, or not the one asked for, and for tensors that are not the
/// model's.
Export prepare_export(const ExportRequest& request, const ModelConfig& given,
                      const ExportSource& source);

/// Neither multi-token prediction nor adapters: the model of Hugging Face.
ExportRequest plain_request(ExportRequest request);

}  // namespace tessera
