#pragma once

#include <memory>
#include <optional>
#include <ostream>

#include "comm/communicator.h"
#include "train/metrics/writer.h"
#include "train/run/run_lock.h"
#include "train/run/train_loop.h"
#include "train/trainer/trainer.h"

namespace tessera {

/// Opens the data of a run. Rank 0 tokenizes, which may take longer than ranks wait for one another
/// otherwise, and the others find its files. All ranks of `world` call.
TrainingData open_data_together(Settings& settings, const TrainRequest& request,
                                Communicator& world, std::ostream& out);

/// Rank 0's writer, which has told what the run is and what it goes on from.
std::unique_ptr<RunWriter> open_writer(const Trainer& trainer, const TrainRequest& request,
                                       const std::optional<ResumedRun>& resumed,
                                       const RunLock& lock, std::ostream& out);

}  // namespace tessera
