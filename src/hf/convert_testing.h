#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "core/file/file.h"
#include "hf/convert.h"
#include "hf/tensors/hf_tensors.h"
#include "hf/tensors/prediction_layers.h"
#include "hf/testing.h"
#include "hf/transfer/elements.h"

namespace tessera {

/// A folder that is removed at the end of a test.
class ScratchFolder {
 public:
  ScratchFolder() : path_(root() / unique_name("tessera-hf-test-")) { make_folder(path_); }
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;
  ~ScratchFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }
  const std::filesystem::path& path() const { return path_; }

 private:
  /// In memory where there is such a folder: waiting for the disk takes most of these tests' time.
  static std::filesystem::path root() {
    const std::filesystem::path memory = "/dev/shm";
    return std::filesystem::is_directory(memory) ? memory : std::filesystem::temp_directory_path();
  }

  std::filesystem::path path_;
};

/// A tensor in memory.
struct LooseTensor {
  DType dtype = DType::kF32;
  Shape shape;
  std::vector<std::byte> bytes;
  bool operator==(const LooseTensor&) const = default;
};
using LooseTensors = std::map<std::string, LooseTensor>;

inline LooseTensors read_loose(const std::filesystem::path& path) {
  const HfTensors tensors(path);
  LooseTensors loose;
  for (const auto& [name, tensor] : tensors.all()) {
    const auto bytes = tensor.bytes();
    loose[name] = {tensor.entry->dtype, tensor.entry->shape, {bytes.begin(), bytes.end()}};
  }
  return loose;
}

inline void write_loose(const std::filesystem::path& path, LooseTensors& tensors) {
  std::vector<NamedTensor> named;
  for (auto& [name, tensor] : tensors) {
    named.push_back({name, {tensor.bytes.data(), tensor.dtype, tensor.shape}});
  }
  write_safetensors(path, named, {{"format", "pt"}});
}

inline LooseTensor convert_loose(const LooseTensor& tensor, DType dtype) {
  const int64_t count = tensor.shape.num_elements();
  LooseTensor result{dtype, tensor.shape, {}};
  result.bytes.resize(static_cast<size_t>(count * dtype_size(dtype)));
  convert_elements(tensor.bytes.data(), tensor.dtype, result.bytes.data(), dtype, count);
  return result;
}

/// The configuration of a fixture, with the layers of multi-token prediction that its tensors show.
inline ImportedConfig fixture_config(const std::string& fixture) {
  ImportedConfig config = read_hf_config(hf_fixture(fixture));
  take_predictions(config, HfTensors(hf_fixture(fixture)));
  return config;
}

/// A fixture with other tensors.
inline void write_model(const std::filesystem::path& folder, const std::string& fixture,
                        LooseTensors& tensors) {
  make_folder(folder);
  std::filesystem::copy_file(hf_fixture(fixture) / "config.json", folder / "config.json");
  write_loose(folder / kHfWeightsFile, tensors);
}

/// An import and an export whose other values are as a test wants them.
inline ConvertReport import_plain(const std::filesystem::path& source,
                                  const std::filesystem::path& target,
                                  const std::function<void(ImportRequest&)>& change = {}) {
  ImportRequest request{.source = source, .target = target, .options = {}, .make_state = {}};
  request.make_state = [](const ImportedConfig&, DType) { return std::string("{}"); };
  if (change) change(request);
  return import_hf(request);
}

inline ConvertReport export_plain(const std::filesystem::path& source,
                                  const std::filesystem::path& target, const ModelConfig& model,
                                  DType dtype,
                                  const std::function<void(ExportRequest&)>& change = {}) {
  ExportRequest request{.source = source,
                        .target = target,
                        .model = model,
                        .model_dtype = dtype,
                        .family = {},
                        .like = {},
                        .fused_experts = {},
                        .options = {}};
  if (change) change(request);
  return export_hf(request);
}

/// Names of what is in a folder.
inline std::vector<std::string> list(const std::filesystem::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    names.push_back(entry.path().filename().string());
  }
  std::ranges::sort(names);
  return names;
}

template <typename Action>
std::string error_of(Action action) {
  try {
    action();
  } catch (const UserError& error) {
    return error.what();
  }
  return "no error";
}

/// Imports that are refused, and what they leave.
class ConversionTest : public ::testing::Test {
 protected:
  /// The message of importing a fixture with changed tensors; nothing may be left behind.
  std::string import_changed(const std::function<void(LooseTensors&)>& change,
                             const std::string& fixture = "mixtral") {
    LooseTensors tensors = read_loose(hf_fixture(fixture));
    change(tensors);
    write_model(scratch_ / "source", fixture, tensors);
    return import_error(scratch_ / "source");
  }
  std::string import_error(const std::filesystem::path& source,
                           const std::function<void(ImportRequest&)>& change = {}) {
    const std::string error = error_of([&] { import_plain(source, scratch_ / "own", change); });
    EXPECT_FALSE(std::filesystem::exists(scratch_ / "own")) << "nothing half-finished";
    for (const std::string& name : list(scratch_.path())) {
      EXPECT_FALSE(name.starts_with(".tmp")) << name;
    }
    return error;
  }
  ScratchFolder scratch_;
};

}  // namespace tessera
