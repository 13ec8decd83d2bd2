#include "serve/completion_request.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "core/random.h"

namespace tessera {
namespace {

class CompletionRequests : public ::testing::Test {
 protected:
  CompletionRequest parse(const std::string& body, bool is_chat = false) const {
    return parse_completion(body, is_chat, rules());
  }
  CompletionRules rules() const {
    return {.tokenizer = *tokenizer_, .model = "own", .context = 100, .chat = ChatFormat::kPlain};
  }
  int status(const std::string& body, bool is_chat = false) const {
    try {
      parse(body, is_chat);
      return 200;
    } catch (const ApiError& error) {
      EXPECT_EQ(error.body()["error"]["message"], error.what());
      return error.status();
    }
  }

 private:
  std::unique_ptr<Tokenizer> tokenizer_ = make_byte_tokenizer();
};

TEST_F(CompletionRequests, DefaultsAreThoseOfTheApi) {
  const CompletionRequest request = parse(R"({"prompt": "ab"})");
  ASSERT_EQ(request.choices.size(), 1);
  EXPECT_FALSE(request.stream || request.echo || request.is_chat || request.logprobs);
  const DecodingRequest& decoding = request.choices[0].decoding;
  EXPECT_THAT(decoding.prompt, ::testing::ElementsAre('a', 'b'));
  EXPECT_EQ(decoding.options.max_tokens, 16);
  EXPECT_EQ(decoding.options.temperature, 1);
  EXPECT_EQ(decoding.options.vocab_size, 257);
  EXPECT_EQ(request.prompt_tokens, 2);
}

TEST_F(CompletionRequests, ChoicesAreOfEachPromptAndSeed) {
  const CompletionRequest request =
      parse(R"({"prompt": ["a", [98, 99], ""], "n": 2, "seed": 7, "max_tokens": 3})");
  ASSERT_EQ(request.choices.size(), 6);
  EXPECT_EQ(request.choices[2].prompt, "bc");
  EXPECT_EQ(request.choices[3].decoding.options.seed, 8);
  EXPECT_THAT(request.choices[4].decoding.prompt, ::testing::ElementsAre(256));  // a new document
}

TEST_F(CompletionRequests, ChatsBecomePrompts) {
  const CompletionRequest request = parse(
      R"({"messages": [{"role": "user", "content": "hi"}], "logprobs": true, "top_logprobs": 2})",
      true);
  EXPECT_EQ(request.choices[0].prompt, "User: hi\n\nAssistant:");
  EXPECT_EQ(request.choices[0].decoding.options.max_tokens, 80);  // what the context has room for
  EXPECT_EQ(request.logprobs, 2);
  EXPECT_EQ(status(R"({"messages": [{"role": "user", "content": "hi"}], "top_logprobs": 2})", true),
            400);
}

/// What OpenAI's clients send of their own, or send back, and what would change the answer.
TEST_F(CompletionRequests, FieldsThatChangeNothingAreTaken) {
  const auto with = [&](const std::string& field, const std::string& value) {
    return fmt::format(R"({{"messages": [{{"role": "user", "content": "hi"}}], "{}": {}}})", field,
                       value);
  };
  const std::vector<std::pair<std::string, std::vector<std::string>>> taken = {
      {"store", {"true", "false", "null"}},
      {"metadata", {"{}", R"({"a": "b"})", "null"}},
      {"service_tier", {R"("auto")", R"("default")"}},
      {"user", {R"("me")"}},
      {"safety_identifier", {R"("me")"}},
      {"prompt_cache_key", {R"("me")"}},
      {"prompt_cache_retention", {R"("24h")", R"("in-memory")"}},
      {"parallel_tool_calls", {"true", "false"}},
      {"tools", {"[]"}},
      {"tool_choice", {R"("none")"}},
      {"functions", {"[]"}},
      {"function_call", {R"("auto")"}},
      {"modalities", {R"(["text"])"}},
      {"reasoning_effort", {R"("none")", "null"}},
      {"verbosity", {R"("medium")"}},
      {"response_format", {R"({"type": "text"})"}},
      {"prediction", {"null"}}};
  for (const auto& [field, values] : taken) {
    for (const std::string& value : values)
      EXPECT_EQ(status(with(field, value), true), 200) << field;
  }
  const std::vector<std::pair<std::string, std::string>> refused = {
      {"store", "1"},
      {"metadata", R"({"a": 1})"},
      {"metadata", R"(["a"])"},
      {"service_tier", R"("priority")"},
      {"user", "5"},
      {"parallel_tool_calls", R"("yes")"},
      {"tools", R"([{"type": "function"}])"},
      {"tool_choice", R"("required")"},
      {"functions", R"([{"name": "f"}])"},
      {"modalities", R"(["text", "audio"])"},
      {"audio", R"({"voice": "ash"})"},
      {"prediction", R"({"type": "content", "content": "a"})"},
      {"reasoning_effort", R"("high")"},
      {"verbosity", R"("low")"},
      {"web_search_options", "{}"},
      {"response_format", R"({"type": "json_object"})"}};
  for (const auto& [field, value] : refused) {
    const std::string body = with(field, value);
    EXPECT_THAT([&] { parse(body, true); },
                ::testing::ThrowsMessage<ApiError>(::testing::HasSubstr("'" + field + "'")));
  }
}

TEST_F(CompletionRequests, StreamOptionsThatChangeNothingAreTaken) {
  const auto with = [](const std::string& options) {
    return fmt::format(R"({{"prompt": "a", "stream": true, "stream_options": {}}})", options);
  };
  EXPECT_FALSE(parse(with(R"({"include_obfuscation": false})")).include_usage);
  EXPECT_TRUE(
      parse(with(R"({"include_obfuscation": false, "include_usage": true})")).include_usage);
  EXPECT_EQ(status(with(R"({"include_obfuscation": true})")), 400);
  EXPECT_EQ(status(with(R"({"other": false})")), 400);
}

/// Messages as OpenAI's clients keep them: an answer with all of its fields.
TEST_F(CompletionRequests, AnswersMayBeSentBack) {
  const auto prompt = [&](const std::string& message) {
    return parse(fmt::format(R"({{"messages": [{}]}})", message), true).choices[0].prompt;
  };
  EXPECT_EQ(prompt(R"({"role": "assistant", "content": "so", "refusal": null, "annotations": [],
                       "audio": null, "function_call": null, "tool_calls": null})"),
            "Assistant: so\n\nAssistant:");
  EXPECT_EQ(prompt(R"({"role": "assistant", "content": null, "tool_calls": []})"),
            "Assistant: \n\nAssistant:");
  EXPECT_EQ(prompt(R"({"role": "assistant"})"), "Assistant: \n\nAssistant:");
  EXPECT_EQ(prompt(R"({"role": "user", "name": "Ann", "content": [{"type": "text", "text": "a"},
                       {"type": "text", "text": "b"}]})"),
            "User: ab\n\nAssistant:");
  for (const char* message :
       {R"({"role": "user", "content": null})", R"({"role": "system"})",
        R"({"role": "assistant", "content": null, "tool_calls": [{"id": "a"}]})",
        R"({"role": "assistant", "content": "a", "refusal": "I cannot"})",
        R"({"role": "assistant", "content": "a", "function_call": {"name": "f"}})",
        R"({"role": "user", "content": "a", "mood": "good"})",
        R"({"role": "tool", "content": "a", "tool_call_id": "a"})"})
    EXPECT_EQ(status(fmt::format(R"({{"messages": [{}]}})", message), true), 400) << message;
}

TEST_F(CompletionRequests, TokensThatNobodyAsksForFitTheContext) {
  const std::string prompt(90, 'a');
  const CompletionRequest request = parse(fmt::format(R"({{"prompt": "{}"}})", prompt));
  EXPECT_EQ(request.choices[0].decoding.options.max_tokens, 10);
  EXPECT_EQ(status(fmt::format(R"({{"prompt": "{}", "max_tokens": 16}})", prompt)), 400);
  EXPECT_EQ(status(fmt::format(R"({{"prompt": "{}"}})", std::string(101, 'a'))), 400);
}

TEST_F(CompletionRequests, SharesAreAboveZero) {
  EXPECT_EQ(parse(R"({"prompt": "a", "top_p": 0.5})").choices[0].decoding.options.top_p, 0.5);
  EXPECT_THAT([&] { parse(R"({"prompt": "a", "top_p": 0})"); },
              ::testing::ThrowsMessage<ApiError>(
                  ::testing::HasSubstr("'top_p' is 0; it must be a number above 0 and at most 1")));
}

TEST_F(CompletionRequests, ErrorsHaveTheirStatus) {
  EXPECT_EQ(status(R"({"prompt": "a", "max_tokens": 99})"), 200);
  EXPECT_EQ(status(R"({"prompt": "a", "max_tokens": 100})"), 400);
  EXPECT_EQ(status(R"({"prompt": "a", "model": "own"})"), 200);
  EXPECT_EQ(status(R"({"prompt": "a", "model": "other"})"), 404);
  EXPECT_EQ(status(R"({"prompt": "a", "messages": []})"), 400);
  EXPECT_EQ(status(R"({"prompt": "a", "n": 64})"), 200);
  EXPECT_EQ(status(R"({"prompt": ["a", "b"], "n": 64})"), 400);
}

/// Whatever the bytes: an answer or an ApiError.
TEST_F(CompletionRequests, RandomChangesAreTakenOrRefused) {
  const std::string whole =
      R"({"prompt": ["a", [98, 99]], "n": 2, "seed": 7, "max_tokens": 3, "stop": ["x", "y"],)"
      R"( "logprobs": 3, "stream": true, "stream_options": {"include_usage": true}})";
  ASSERT_EQ(status(whole), 200);
  Random random(5, 5);
  for (int i = 0; i < 3000; ++i) {
    std::string body = whole;
    for (uint64_t changes = 1 + random.next_below(3); changes > 0; --changes) {
      const size_t at = random.next_below(body.size());
      if (random.next_below(2) == 0) {
        body.erase(at, 1 + random.next_below(6));
      } else {
        body[at] = static_cast<char>(" 09-.eE\"[]{}:,\\nt\x80"[random.next_below(18)]);
      }
      if (body.empty()) body = " ";
    }
    const int found = status(body);
    EXPECT_TRUE(found == 200 || found == 400 || found == 404) << body;
  }
}

}  // namespace
}  // namespace tessera
