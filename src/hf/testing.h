#pragma once

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

namespace tessera {

/// A folder of models of every family with their outputs; TESSERA_HF_FIXTURES names another one.
inline std::filesystem::path hf_fixture_root() {
  const char* root = std::getenv("TESSERA_HF_FIXTURES");
  return root != nullptr && *root != '\0' ? root : std::filesystem::path(TESSERA_TEST_DATA) / "hf";
}

inline std::filesystem::path hf_fixture(const std::string& name) {
  return hf_fixture_root() / name;
}

/// The names of all models there.
inline std::vector<std::string> hf_fixtures() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(hf_fixture_root())) {
    if (std::filesystem::exists(entry.path() / "config.json")) {
      names.push_back(entry.path().filename().string());
    }
  }
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace tessera
