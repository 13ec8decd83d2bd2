#include <iostream>

#include "cli/commands.h"
#include "core/error.h"
#include "core/file/file.h"
#include "serve/server.h"
#include "train/run/stop_signal.h"

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;

/// The key in a file, without the end of its line.
std::string read_api_key(const std::string& file) {
  if (file.empty()) return "";
  std::string key = read_text_file(file);
  while (!key.empty() && std::isspace(static_cast<unsigned char>(key.back())) != 0) key.pop_back();
  require(!key.empty(), "{}: there is no API key in it", file);
  return key;
}

/// Decodes until a signal came and the texts at work then are written, or their time is over.
void serve_until_stopped(CompletionServer& server, DecodingService& service,
                         const StopSignal& signal, std::chrono::seconds drain) {
  std::optional<Clock::time_point> end;
  service.run([&] {
    if (signal.received() == 0) return false;
    if (!end) {
      std::cerr << "tessera: stopping; texts at work are finished\n";
      end = Clock::now() + drain;
      server.drain();
    }
    return (service.load().num_open == 0 && server.num_answers() == 0) || Clock::now() >= *end;
  });
}

}  // namespace

int run_serve(const ServeArguments& arguments) {
  ServerOptions options = arguments.server;
  options.api_key = read_api_key(arguments.api_key_file);
  validate(options);
  validate(arguments.limits);
  LoadedModel model(
      arguments.checkpoint, arguments.device,
      arguments.allow_nonfinite ? NonFiniteWeights::kAllow : NonFiniteWeights::kRefuse);
  print_notes(model.notes());
  DecodingBatch batch(model.settings().model, model.settings().train.dtype(), model.backend(),
                      model.parameters(), model.experts(), arguments.limits);
  DecodingService service(batch,
                          {.max_open = arguments.limits.max_sequences + options.max_waiting});
  const std::string name =
      arguments.model_name.empty()
          ? std::filesystem::weakly_canonical(arguments.checkpoint).filename().string()
          : arguments.model_name;
  const CompletionRules rules{.tokenizer = model.tokenizer(),
                              .model = name,
                              .context = arguments.limits.context,
                              .default_max_tokens = arguments.max_tokens,
                              .max_choices = arguments.limits.max_sequences,
                              .chat = arguments.chat};
  const StopSignal signal;
  CompletionServer server(options, rules, service);
  if (options.any_host && options.api_key.empty())
    print_notes({"anyone who reaches this host can use the model; --api-key-file asks for a key"});
  server.start();
  std::cout << fmt::format("serving {} on http://{}:{}/v1\n", name, options.host, server.port())
            << std::flush;
  serve_until_stopped(server, service, signal, std::chrono::seconds(options.drain_seconds));
  return 0;
}

}  // namespace tessera
