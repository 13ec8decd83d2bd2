#pragma once

#include <filesystem>

#include "train/setup/settings.h"

namespace tessera {

/// The folder of the run that a checkpoint is one of; empty where it lies by itself.
std::filesystem::path run_folder_of(const std::filesystem::path& checkpoint);

/// Relative paths of a run's data and tokenizer count from the folder that the run was started in,
/// wherever this process was. That is known where run.folder is relative too and still ends the
/// name of the run's folder; there they become whole paths, unless nothing lies there.
void resolve_data_paths(DataSettings& data, const std::string& named_folder,
                        const std::filesystem::path& run_folder);

}  // namespace tessera
