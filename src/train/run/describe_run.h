#pragma once

#include <string>
#include <vector>

#include "train/memory/memory_prediction.h"
#include "train/setup/settings.h"
#include "train/setup/training_data.h"

namespace tessera {

/// The model's size and shape, and on lines of their own what its products read on the host or a
/// GPU, where that is told, and what memory is predicted at the peak.
std::string describe_model(const Settings& settings, const MemoryPrediction& memory, bool on_host);

/// "1.2M tokens in 3 documents, tokenizer bytes; 12k held out for validation".
std::string describe_data(const TrainingData& data);

/// What a user should know of token files: that another tokenizer made them than data.tokenizer, or
/// that data.instructions does not apply to them.
std::vector<std::string> find_data_notes(const Settings& settings, const TrainingData& data);

/// Now, as "2026-11-25 14:30 UTC".
std::string format_local_time();

}  // namespace tessera
