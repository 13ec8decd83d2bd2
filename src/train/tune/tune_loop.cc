#include "train/tune/tune_loop.h"

#include "train/run/stop_signal.h"

namespace tessera {

void run_tuned_steps(TrainingRun& run, int64_t interval, const std::function<TunedStep()>& next,
                     std::ostream& out) {
  Trainer& trainer = run.trainer();
  require(trainer.position().step % interval == 0,
          "the run in {} is at step {}, in the middle of a rollout of {} steps (rl.updates); "
          "continue it with the rl.updates that it had",
          trainer.settings().run.folder, trainer.position().step, interval);
  const StopSignal signal;
  while (!run.is_done()) {
    if (trainer.position().step % interval == 0 && signal.received() != 0) break;
    TunedStep step = next();
    trainer.give_batches(std::move(step.batches));
    run.step(std::move(step.numbers));
  }
  if (!run.is_done())
    run.note(
        describe_stop(signal.received(), trainer.position().step, trainer.settings().run.save));
  run.end();
  const std::filesystem::path report = run.report_path();
  if (!report.empty()) out << "report: " << report.string() << "\n";
}

}  // namespace tessera
