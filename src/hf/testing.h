#pragma once

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

namespace tessera {

/// A model of the repository's folder of models of every family with their outputs. One from
/// elsewhere, as hf_fixtures() names it, is a path of its own.
inline std::filesystem::path hf_fixture(const std::string& name) {
  return std::filesystem::path(TESSERA_TEST_DATA) / "hf" / name;
}

/// The folders of models: the repository's, and the one that TESSERA_HF_FIXTURES adds.
inline std::vector<std::filesystem::path> hf_fixture_roots() {
  std::vector<std::filesystem::path> roots = {hf_fixture("").parent_path()};
  const char* more = std::getenv("TESSERA_HF_FIXTURES");
  if (more != nullptr && *more != '\0') roots.push_back(std::filesystem::absolute(more));
  return roots;
}

/// All models there: those of the repository by name, others by path.
inline std::vector<std::string> hf_fixtures() {
  std::vector<std::string> names;
  const auto roots = hf_fixture_roots();
  for (const std::filesystem::path& root : roots) {
    for (const auto& entry : std::filesystem::directory_iterator(root)) {
      if (!std::filesystem::exists(entry.path() / "config.json")) continue;
      const bool own = root == roots.front();
      names.push_back(own ? entry.path().filename().string() : entry.path().string());
    }
  }
  std::sort(names.begin(), names.end());
  return names;
}

/// A name of a model as part of a test's name.
inline std::string hf_fixture_label(const std::string& fixture) {
  std::string label = std::filesystem::path(fixture).filename().string();
  std::replace_if(
      label.begin(), label.end(), [](unsigned char c) { return std::isalnum(c) == 0; }, '_');
  return std::filesystem::path(fixture).is_absolute() ? "more_" + label : label;
}

}  // namespace tessera
