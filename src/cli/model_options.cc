#include <CLI/CLI.hpp>
#include <map>

#include "cli/number_options.h"
#include "cli/options.h"

namespace tessera {
namespace {

void add_device(CLI::App& command, DeviceChoice& device) {
  command
      .add_option("--device", device,
                  "Where it computes; auto: on the first GPU where the kernels run on it")
      ->transform(CLI::CheckedTransformer(
          std::map<std::string, DeviceChoice>{{"auto", DeviceChoice::kAuto},
                                              {"cpu", DeviceChoice::kCpu},
                                              {"cuda", DeviceChoice::kCuda}}))
      ->option_text("TEXT:{auto,cpu,cuda}=auto");
}

void add_allow_nonfinite(CLI::App& command, bool& allow, const char* help) {
  command.add_flag("--allow-nonfinite", allow, help);
}

void add_tokenizer_training(CLI::App& command, TokenizerTraining& training,
                            CLI::Option& tokenizer) {
  CLI::Option* train =
      command
          .add_option("--train", training.path,
                      "First learn a byte-level BPE from the inputs and write it to this "
                      "tokenizer.json; without --output, do no more")
          ->excludes(&tokenizer);
  BpeTrainingOptions& options = training.options;
  add_number(command, "--vocab-size", &options.vocab_size, "With --train: tokens of the vocabulary",
             between(1, kManyTokens))
      ->needs(train);
  command
      .add_option("--split", options.split,
                  "With --train: how text becomes words: gpt2, qwen or llama3")
      ->capture_default_str()
      ->needs(train);
  command
      .add_option("--special-token", options.special_tokens,
                  "With --train: special tokens, the first for the end of a document")
      ->capture_default_str()
      ->needs(train);
  add_number(command, "--min-frequency", &options.min_frequency,
             "With --train: how often a pair must occur to be merged", at_least(1))
      ->needs(train);
}

}  // namespace

CLI::App* add_eval(CLI::App& app, EvalArguments& eval) {
  CLI::App* command =
      app.add_subcommand("eval", "Loss, perplexity and bits per byte of text under a model");
  EvaluationRequest& request = eval.request;
  command->add_option("checkpoint", eval.checkpoint, "Run folder or checkpoint")->required();
  add_device(*command, eval.device);
  command->add_option("--text", request.text,
                      "Text file or folder; default: the run's held-out data");
  command->add_option("--tokens", request.tokens, "Prefix of a token file instead");
  add_number(*command, "--sequence-length", &request.sequence_length,
             "Tokens of a window; 0: as trained", between(0, kManyTokens));
  add_number(*command, "--batch-size", &request.batch_size, "Windows evaluated together",
             between(1, kManyThings));
  add_number(*command, "--max-batches", &request.max_batches,
             "Stop after this many batches; 0: all", at_least(0));
  CLI::Option* ids =
      command->add_option("--input-ids", eval.input_ids,
                          "Sequences instead, as input_ids I64 [B, S] of a safetensors file");
  CLI::Option* logits =
      command->add_option("--logits", eval.logits, "Where the logits of those sequences go");
  ids->needs(logits);
  logits->needs(ids);
  command->add_option("--choices", eval.choices,
                      "Multiple-choice questions instead, as JSON lines with context, choices and "
                      "answer");
  add_allow_nonfinite(*command, request.allow_nonfinite,
                      "Take weights and losses that are NaN or infinite, and count them");
  command->add_flag("--json", eval.json, "Print JSON");
  return command;
}

CLI::App* add_generate(CLI::App& app, GenerateArguments& generate) {
  CLI::App* command = app.add_subcommand("generate", "Continue a text with a trained model");
  GenerateOptions& options = generate.options;
  command->add_option("checkpoint", generate.checkpoint, "Run folder or checkpoint")->required();
  add_device(*command, generate.device);
  CLI::Option* prompt =
      command->add_option("--prompt", generate.prompt, "Text to continue; empty: a new document");
  command
      ->add_option(
          "--prompts", generate.prompts,
          "Several prompts instead, as JSON lines: a string, or an object with \"prompt\"; "
          "written at the same time, the results are JSON lines")
      ->excludes(prompt);
  add_number(*command, "--samples", &generate.samples,
             "Texts of each prompt, of seeds one above the other; JSON lines",
             between(1, kManyThings));
  add_number(*command, "--max-sequences", &generate.max_sequences,
             "With --prompts or --samples: texts that are written at the same time",
             between(1, kManyThings));
  add_number(*command, "--max-tokens", &options.max_tokens, "Most tokens to generate",
             between(0, kManyTokens));
  add_number(*command, "--temperature", &options.temperature, "0: always the most likely token",
             at_least(0));
  add_number(*command, "--top-k", &options.top_k, "Only the k most likely tokens; 0: all",
             at_least(0));
  add_number(*command, "--top-p", &options.top_p,
             "Only the most likely tokens of this total probability",
             {.min = 0, .max = 1, .min_open = true});
  add_number(*command, "--seed", &options.seed, "Seed of the choice", at_least(0));
  add_allow_nonfinite(*command, generate.allow_nonfinite, "Take weights that are NaN or infinite");
  command->add_flag("--logprobs", generate.log_probabilities, "Print each token's log-probability");
  command->add_flag("--json", generate.json, "Print JSON");
  return command;
}

CLI::App* add_serve(CLI::App& app, ServeArguments& serve) {
  CLI::App* command = app.add_subcommand(
      "serve", "Answer OpenAI's completion requests over HTTP with a trained model");
  ServerOptions& server = serve.server;
  DecodingLimits& limits = serve.limits;
  command->add_option("checkpoint", serve.checkpoint, "Run folder or checkpoint")->required();
  add_device(*command, serve.device);
  command->add_option("--host", server.host, "Address to listen on")->capture_default_str();
  command->add_flag("--any-host", server.any_host,
                    "Allow an address that other machines can reach");
  add_number(*command, "--port", &server.port, "Port to listen on; 0: any that is free",
             between(0, 65535));
  command->add_option("--api-key-file", serve.api_key_file,
                      "File with the key that clients must give; default: none");
  command->add_option("--model-name", serve.model_name,
                      "Name of the model; default: that of the checkpoint's folder");
  add_number(*command, "--max-sequences", &limits.max_sequences,
             "Texts that are written at the same time", between(1, kManyThings));
  add_number(*command, "--max-waiting", &server.max_waiting,
             "Texts that wait beside those; more are refused", between(0, kManyThings));
  add_number(*command, "--context", &limits.context, "Most tokens of a prompt and its text",
             between(1, kManyTokens));
  add_number(*command, "--cache-tokens", &limits.cache_tokens,
             "Tokens of all texts that the cache has room for; 0: max-sequences times context",
             between(0, kManyTokens));
  add_number(*command, "--max-tokens", &serve.max_tokens,
             "Tokens of a text where the request does not say", between(0, kManyTokens));
  command
      ->add_option("--chat-format", serve.chat,
                   "How the messages of chats become a prompt; none: chats are refused")
      ->transform(CLI::CheckedTransformer(std::map<std::string, ChatFormat>{
          {"none", ChatFormat::kNone}, {"plain", ChatFormat::kPlain}}))
      ->option_text("TEXT:{none,plain}=none");
  add_number(*command, "--max-body", &server.max_body, "Most bytes of a request's body",
             at_least(1));
  add_number(*command, "--client-seconds", &server.client_seconds,
             "A client that neither sends nor takes anything for this long is given up",
             between(1, 86400));
  add_number(*command, "--drain-seconds", &server.drain_seconds,
             "Time for the texts at work when the server is to stop", between(0, 86400));
  add_allow_nonfinite(*command, serve.allow_nonfinite, "Take weights that are NaN or infinite");
  return command;
}

CLI::App* add_tokenize(CLI::App& app, TokenizeArguments& tokenize) {
  CLI::App* command = app.add_subcommand(
      "tokenize", "Turn text and JSONL into a token file; the same command continues a killed one");
  TokenizeRequest& request = tokenize.request;
  TextSource& source = request.source;
  command
      ->add_option(
          "inputs", source.paths,
          "Text (.txt, ...) and JSONL (.jsonl, .ndjson) files, also compressed (.gz, .zst, "
          ".xz), or folders of them")
      ->required();
  command->add_option("-o,--output", request.prefix, "Prefix of the .bin and .idx files to write");
  CLI::Option* tokenizer = command->add_option(
      "--tokenizer", tokenize.tokenizer.path,
      "byte, a tokenizer.json, a SentencePiece .model, or a folder with either");
  add_tokenizer_training(*command, tokenize.training, *tokenizer);
  command->add_option("--end-of-document", tokenize.tokenizer.end_of_document,
                      "Token between documents, as text or id; default: the tokenizer's own");
  command
      ->add_option("--format", source.format,
                   "auto: by the ending of the name; text; or jsonl: a JSON object a line")
      ->transform(CLI::CheckedTransformer(std::map<std::string, TextFormat>{
          {"auto", TextFormat::kAuto}, {"text", TextFormat::kText}, {"jsonl", TextFormat::kJsonl}}))
      ->option_text("TEXT:{auto,text,jsonl}=auto");
  command->add_option("--separator", source.separator_line,
                      "In text: the line that ends a document, \"\" for a blank one; default: each "
                      "file is one document");
  command->add_option("--json-key", source.json_key, "In JSONL: the key of the text")
      ->capture_default_str();
  command->add_flag("--instructions", source.instructions,
                    "JSONL with prompt and completion, or messages: only completions, or what the "
                    "assistant says, carry loss");
  command->add_flag("--skip-invalid", source.skip_invalid,
                    "Count lines of JSONL that cannot be used and go on");
  add_number(*command, "--threads", &request.num_threads, "0: all cores", between(0, kManyThreads));
  add_number(*command, "--sync-seconds", &request.sync_seconds,
             "Time between states on the disk that a killed run is continued from", at_least(0));
  command->add_flag_callback(
      "--overwrite", [&request] { request.other = OtherTokens::kReplace; },
      "Replace tokens of other text or options");
  command->add_flag("--json", tokenize.json, "Print JSON");
  return command;
}

CLI::App* add_convert(CLI::App& app, ConvertArguments& convert) {
  CLI::App* command = app.add_subcommand(
      "convert", "Turn a Hugging Face model into a checkpoint, or a checkpoint into such a model");
  command->add_option("source", convert.source, "Hugging Face folder, checkpoint or run folder")
      ->required();
  command->add_option("target", convert.target, "New folder")->required();
  command->add_option("--to", convert.to, "Direction; default: what the source is not")
      ->check(CLI::IsMember({"hf", "tessera"}));
  command->add_option("--dtype", convert.dtype, "Type of matrix weights; default: the source's")
      ->check(CLI::IsMember({"f32", "bf16"}));
  add_size(*command, "--shard-size", &convert.shard_bytes, "Most bytes of a file, e.g. 5GB");
  command->add_flag("--no-verify", convert.no_verify,
                    "Do not compare what was written with the source");
  add_number(*command, "--vocab-size", &convert.vocab_size,
             "To a checkpoint: pad the vocabulary with zeros to this size",
             between(0, kManyTokens));
  add_number(*command, "--pad-vocab-to", &convert.pad_vocab_to,
             "To a checkpoint: pad the vocabulary to a multiple", between(0, kManyTokens));
  add_allow_nonfinite(*command, convert.allow_nonfinite,
                      "Take weights that are NaN or infinite, and note them");
  command->add_flag("--drop-mtp", convert.drop_mtp,
                    "Leave out the layers of multi-token prediction");
  command->add_option("--family", convert.family,
                      "To Hugging Face: model type; default: one that expresses the model");
  command->add_option("--like", convert.like,
                      "To Hugging Face: folder whose config.json, tokenizer and layout to use");
  command
      ->add_option("--experts", convert.experts,
                   "To Hugging Face: one tensor per expert, or fused ones as in transformers 5")
      ->check(CLI::IsMember({"split", "fused"}));
  command->add_flag("--adapters", convert.adapters,
                    "To Hugging Face: the low-rank adapters alone, as PEFT reads them, instead of "
                    "the model with these merged");
  command->add_flag("--json", convert.json, "Print JSON");
  return command;
}

CLI::App* add_upcycle(CLI::App& app, UpcycleArguments& upcycle) {
  CLI::App* command = app.add_subcommand(
      "upcycle", "Turn a dense model into one of experts that starts with the same outputs");
  UpcycleSpec& spec = upcycle.spec;
  command
      ->add_option("source", upcycle.source, "Dense checkpoint, run folder or Hugging Face folder")
      ->required();
  command->add_option("target", upcycle.target, "New checkpoint")->required();
  add_number(*command, "--experts", &spec.copies,
             "Copies of each MLP; a layer has this times the granularity experts",
             between(1, kManyThings));
  add_number(*command, "--granularity", &spec.granularity, "Experts that a copy is cut into",
             between(1, kManyThings));
  add_number(*command, "--top-k", &spec.top_k, "Experts of a token, a multiple of the granularity",
             between(1, kManyThings));
  add_allow_nonfinite(*command, upcycle.allow_nonfinite,
                      "Take weights that are NaN or infinite, and note them");
  command->add_flag("--no-normalize", upcycle.no_normalize,
                    "Probabilities of a softmax over all experts, not scaled to sum 1");
  add_number(*command, "--router-deviation", &spec.router_deviation,
             "Deviation of the router's random weights; 0: 0.02, or 1e-6 without normalizing",
             at_least(0));
  add_number(*command, "--first-dense-layers", &spec.first_dense_layers,
             "Leading layers left dense", between(0, kManyThings));
  add_number(*command, "--every", &spec.every, "Every n-th layer after those gets experts",
             between(1, kManyThings));
  add_number(*command, "--seed", &spec.seed, "Seed of the router", at_least(0));
  command->add_flag("--json", upcycle.json, "Print JSON");
  return command;
}

CLI::App* add_doctor(CLI::App& app, DoctorArguments& doctor) {
  CLI::App* command = app.add_subcommand("doctor", "What this machine has and how fast it is");
  command->add_flag("--json", doctor.json, "Print JSON");
  return command;
}

}  // namespace tessera
