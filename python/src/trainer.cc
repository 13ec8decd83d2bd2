#include <nanobind/stl/function.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include <algorithm>
#include <exception>
#include <filesystem>
#include <functional>
#include <memory>
#include <ostream>
#include <streambuf>
#include <type_traits>
#include <utility>

#include "comm/launch/launch.h"
#include "config_box.h"
#include "model_box.h"
#include "train/run/train_loop.h"

namespace tessera::python {
namespace {

/// Gives each whole line that is written to a function of Python.
class LineBuffer final : public std::streambuf {
 public:
  explicit LineBuffer(std::function<void(std::string)> take) : take_(std::move(take)) {}

  /// What Python raised where it was told a line, Ctrl-C among it: a stream would lose that.
  void rethrow() {
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  }

 private:
  int_type overflow(int_type c) override {
    if (c == traits_type::eof()) return c;
    if (c != '\n') {
      line_.push_back(static_cast<char>(c));
      return c;
    }
    const nb::gil_scoped_acquire acquired;
    try {
      take_(std::exchange(line_, {}));
    } catch (...) {
      if (!error_) error_ = std::current_exception();
    }
    return c;
  }

  std::function<void(std::string)> take_;
  std::string line_;
  std::exception_ptr error_;
};

bool names_data(const DataSettings& data) {
  return !data.text.empty() || !data.tokens.empty() || !data.blend.empty();
}

template <typename T>
void set_if(nb::dict& dict, const char* key, const std::optional<T>& value) {
  dict[key] = value ? nb::cast(*value) : nb::none();
}

nb::dict to_dict(const StepRecord& record) {
  nb::dict dict;
  dict["step"] = record.step;
  dict["total_steps"] = record.total_steps;
  dict["tokens_seen"] = record.tokens_seen;
  dict["loss"] = record.loss;
  set_if(dict, "validation_loss", record.validation_loss);
  set_if(dict, "mtp_loss", record.mtp_loss);
  set_if(dict, "balance_loss", record.balance_loss);
  set_if(dict, "z_loss", record.z_loss);
  set_if(dict, "max_logit", record.max_logit);
  dict["grad_norm"] = record.grad_norm;
  dict["learning_rate"] = record.learning_rate;
  dict["clip_factor"] = record.clip_factor;
  set_if(dict, "loss_scale", record.loss_scale);
  dict["seconds"] = record.step_seconds;
  dict["tokens_per_second"] = record.tokens_per_second;
  dict["tflops"] = record.tflops();
  set_if(dict, "utilisation", record.utilisation);
  dict["memory_used"] = record.memory_used;
  dict["dropped_tokens"] = record.dropped_tokens;
  dict["skipped_steps"] = record.skipped_steps;
  nb::dict loads;
  for (const ExpertLoad& load : record.expert_load) {
    nb::list counts;
    for (const int64_t count : load.tokens_per_expert) counts.append(count);
    loads[nb::cast(load.layer)] = counts;
  }
  dict["expert_load"] = loads;
  return dict;
}

/// A training as one rank, whose steps Python calls.
class TrainerBox {
 public:
  /// `pause` is called while this is made alone (TrainRequest).
  TrainerBox(const ConfigBox& config, std::function<void(std::string)> take_line,
             const std::function<void()>& pause)
      : lines_(std::move(take_line)), out_(&lines_), world_(make_single_world()) {
    require(detect_launch(process_environment()).num_ranks == 1,
            "Python trains on one rank, but this process was started as one of several; "
            "`tessera train` runs on many");
    has_data_ = names_data(config.settings().data);
    Settings settings = config.settings();
    // Python may change its working folder while it trains.
    if (!settings.run.folder.empty())
      settings.run.folder = std::filesystem::absolute(settings.run.folder).lexically_normal();
    run_ = std::make_unique<TrainingRun>(TrainRequest{.settings = settings,
                                                      .config_toml = config.schema().to_toml(),
                                                      .terminal = {},
                                                      .given_batches = !has_data_,
                                                      .pause = pause},
                                         *world_, out_);
    lines_.rethrow();
    Trainer& trainer = run_->trainer();
    require(trainer.state().weights() == nullptr,
            "parallel.shard = \"full\" is for several ranks; Python trains on one");
    model_.emplace(ModelParts{.config = without_prediction(trainer.settings().model),
                              .settings = trainer.settings(),
                              .backend = trainer.backend(),
                              .parameters = trainer.state().parameters(),
                              .experts = trainer.state().experts(),
                              .tokenizer = *trainer.data().tokenizer},
                   turns_, [&trainer] { trainer.state().wait_weights(); });
  }

  /// In a fork the run is its parent's, with folder and threads.
  ~TrainerBox() {
    if (!is_forked()) return;
    static_cast<void>(run_.release());
    static_cast<void>(world_.release());
  }
  TrainerBox(const TrainerBox&) = delete;
  TrainerBox& operator=(const TrainerBox&) = delete;

  TrainingRun& run() { return *run_; }
  /// Calls what computes with the run, then raises what was raised meanwhile.
  template <typename Work>
  auto act(const Work& work) {
    return compute(turns_, [&] {
      if constexpr (std::is_void_v<decltype(work(*run_))>) {
        work(*run_);
        lines_.rethrow();
      } else {
        auto result = work(*run_);
        lines_.rethrow();
        return result;
      }
    });
  }
  ModelBox& model() { return *model_; }
  bool has_data() const { return has_data_; }

  StepRecord step(const std::optional<TokenArrays>& given) {
    require(
        given || has_data_,
        "the run has no data (data.text, data.tokens or data.blend), and the step was given none");
    std::optional<TokenRows> rows;
    if (given) rows = read_tokens(*given, run_->trainer().settings().model.vocab_size);
    return act([&](TrainingRun& run) {
      if (rows) run.trainer().give_batches(cut_batches(*rows));
      if (!model_->parts().backend.is_host()) model_->forget();
      return run.step();
    });
  }

 private:
  std::vector<Batch> cut_batches(const TokenRows& rows) const {
    const Settings& settings = run_->trainer().settings();
    const int64_t length = settings.data.sequence_length;
    require(
        rows.tokens.num_rows == settings.train.global_batch && rows.tokens.length == length,
        "a step takes {} sequences of {} tokens (train.global_batch, data.sequence_length) with "
        "a label each: tokens [{}, {}], or [{}, {}] and labels; found {} sequences of {} tokens "
        "with labels",
        settings.train.global_batch, length, settings.train.global_batch, length + 1,
        settings.train.global_batch, length, rows.tokens.num_rows, rows.tokens.length);
    require(!rows.documents || settings.data.split_documents,
            "documents are kept apart where data.split_documents = true, which memory is planned "
            "for");
    require(std::ranges::any_of(rows.labels.values, [](int32_t id) { return id != kNoLabel; }),
            "nothing is predicted in this batch: labels are all -100, or every token begins a "
            "document of its own");
    std::vector<Batch> batches;
    for (int64_t i = 0; i < settings.train.num_micro_batches(); ++i)
      batches.push_back(
          make_batch(rows, i * settings.train.micro_batch, settings.train.micro_batch));
    return batches;
  }

  LineBuffer lines_;
  std::ostream out_;
  std::unique_ptr<World> world_;
  std::unique_ptr<TrainingRun> run_;
  std::optional<ModelBox> model_;
  Turns turns_;
  bool has_data_ = false;
};

std::unique_ptr<TrainerBox> make_trainer(const ConfigBox& config,
                                         std::function<void(std::string)> take_line) {
  Turns none;
  return compute(none, [&](const SignalMask& masked) {
    SignalWatch signals;
    return std::make_unique<TrainerBox>(config, std::move(take_line),
                                        [&] { signals.look(masked); });
  });
}

}  // namespace

void add_trainer(nb::module_& module) {
  module.def("make_trainer", make_trainer, nb::arg("config"), nb::arg("take_line"));
  nb::class_<TrainerBox>(module, "Trainer")
      .def(
          "step",
          [](TrainerBox& self, std::optional<IntArray> tokens, std::optional<IntArray> labels,
             std::optional<IntArray> documents) {
            std::optional<TokenArrays> given;
            if (tokens) given = {std::move(*tokens), std::move(labels), std::move(documents)};
            return to_dict(self.step(given));
          },
          nb::arg("tokens").none(), nb::arg("labels").none(), nb::arg("documents").none())
      .def("evaluate",
           [](TrainerBox& self) {
             return self.act([](TrainingRun& run) { return run.validate(); });
           })
      .def("save", [](TrainerBox& self) { self.act([](TrainingRun& run) { run.save(); }); })
      .def("end", [](TrainerBox& self) { self.act([](TrainingRun& run) { run.end(); }); })
      .def("model", &TrainerBox::model, nb::rv_policy::reference_internal)
      .def_prop_ro("has_data", &TrainerBox::has_data)
      .def_prop_ro("has_ended", [](TrainerBox& self) { return self.run().has_ended(); })
      .def_prop_ro("is_done", [](TrainerBox& self) { return self.run().is_done(); })
      .def_prop_ro("step_idx",
                   [](TrainerBox& self) { return self.run().trainer().position().step; })
      .def_prop_ro("tokens_seen",
                   [](TrainerBox& self) { return self.run().trainer().position().tokens_seen; })
      .def_prop_ro("total_steps",
                   [](TrainerBox& self) { return self.run().trainer().settings().train.steps; })
      .def_prop_ro("predicted_bytes",
                   [](TrainerBox& self) { return self.run().trainer().prediction().total(); });
}

}  // namespace tessera::python
