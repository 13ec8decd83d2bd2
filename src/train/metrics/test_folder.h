#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "core/error.h"
#include "core/file/file.h"

namespace tessera {

/// A folder for one test, removed at its end.
class TestFolder {
 public:
  TestFolder()
      : path_(std::filesystem::temp_directory_path() / unique_name("tessera-metrics-test-")) {
    std::filesystem::create_directories(path_);
  }
  TestFolder(const TestFolder&) = delete;
  TestFolder& operator=(const TestFolder&) = delete;
  ~TestFolder() { std::filesystem::remove_all(path_); }

  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path write(const std::string& name, const std::string& text) const {
    std::ofstream(path_ / name, std::ios::binary) << text;
    return path_ / name;
  }

 private:
  std::filesystem::path path_;
};

/// The message of the UserError that `act` throws; "" and a failure where it throws none.
template <typename Act>
std::string user_error_of(const Act& act) {
  try {
    act();
  } catch (const UserError& error) {
    return error.what();
  }
  ADD_FAILURE() << "expected a UserError";
  return "";
}

}  // namespace tessera
