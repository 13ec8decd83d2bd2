#!/usr/bin/env python3
"""Tests `tessera serve` with real clients on loopback: serve_test.py PROGRAM [unittest arguments].

Only Python's own library is needed. OpenAI's client takes part where it is installed.
"""
import concurrent.futures
import contextlib
import gzip
import http.client
import json
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest
import zlib

PROGRAM = ""
WORDS = "the old king went to sea with his three sons and saw a great whale under the stars".split()
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OMP_NUM_THREADS", "2")


def run(*arguments, expected=0):
    done = subprocess.run([PROGRAM, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == expected, f"{arguments} ended with {done.returncode}: {done.stderr}"
    return done


def train(folder):
    """A model of bytes that writes something of its own for each seed."""
    choose = random.Random(1)
    text = folder / "text.txt"
    text.write_text("\n\n".join(" ".join(choose.choice(WORDS) for _ in range(40)) for _ in range(200)))
    run("train", f"--data.text={text}", f"--run.folder={folder / 'run'}", "--run.report=false",
        "--data.sequence_length=16", "--model.hidden_size=16", "--model.num_layers=2", "--model.num_heads=2",
        "--moe.num_experts=4", "--moe.inner_size=16", "--train.micro_batch=2", "--train.global_batch=2",
        "--train.validation_batches=2", "--train.steps=40", "--optim.learning_rate=0.01")
    return folder / "run"


class Server:
    """A server on a port of the system's choice."""

    def __init__(self, *options):
        self.process = subprocess.Popen([PROGRAM, "serve", str(RUN), "--port", "0", *options], text=True,
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        line = self.process.stdout.readline()
        found = re.search(r":(\d+)/v1$", line.strip())
        assert found, f"no port in {line!r}: {self.process.communicate(timeout=10)[1]}"
        self.port = int(found.group(1))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    def stop(self, expected=0):
        self.process.send_signal(signal.SIGTERM)
        errors = self.process.communicate(timeout=60)[1]
        assert self.process.returncode == expected, f"{self.process.returncode}: {errors}"

    def request(self, method, path, body=None, headers=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            data = body if body is None or isinstance(body, (str, bytes)) else json.dumps(body)
            connection.request(method, path, data, headers or {})
            answer = connection.getresponse()
            return answer.status, answer.read(), dict(answer.getheaders())

    def complete(self, path="/v1/completions", **fields):
        status, body, _ = self.request("POST", path, fields)
        assert status == 200, f"{status}: {body}"
        return json.loads(body)

    def stream(self, path="/v1/completions", **fields):
        status, body, headers = self.request("POST", path, {**fields, "stream": True})
        assert status == 200 and headers["Content-Type"] == "text/event-stream", f"{status}: {body}"
        lines = body.decode().split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""], lines[-2:]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]

    def health(self):
        return json.loads(self.request("GET", "/health")[1])

    def wait_until_free(self, seconds=20):
        end = time.monotonic() + seconds
        while self.health()["open"] > 0:
            assert time.monotonic() < end, "texts are still open"
            time.sleep(0.05)

    def open_stream(self, **fields):
        """A socket on which a stream has begun, which nobody reads."""
        body = json.dumps({**fields, "stream": True}).encode()
        link = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        link.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        return link


def generate(prompt, seed, max_tokens, *options):
    prompts = RUN.parent / f"prompts-{seed}-{os.getpid()}.jsonl"
    prompts.write_text(json.dumps(prompt))
    lines = run("generate", str(RUN), "--device", "cpu", "--prompts", str(prompts), "--seed", str(seed),
                "--max-tokens", str(max_tokens), "--logprobs", *options).stdout.splitlines()
    return [json.loads(line) for line in lines]


class Answers(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = Server("--device", "cpu", "--context", "512", "--max-waiting", "128")

    @classmethod
    def tearDownClass(cls):
        cls.server.stop()

    def test_models_and_health(self):
        status, body, _ = self.server.request("GET", "/v1/models")
        self.assertEqual((status, json.loads(body)["data"][0]["id"]), (200, "run"))
        self.assertEqual(self.server.health()["status"], "ok")
        status, body, _ = self.server.request("GET", "/v1/models/run")
        self.assertEqual((status, json.loads(body)["id"]), (200, "run"))
        status, body, _ = self.server.request("GET", "/v1/models/other")
        self.assertEqual((status, json.loads(body)["error"]["code"]), (404, "model_not_found"))

    def test_http_1_0_gets_no_chunks(self):
        body = json.dumps({"prompt": "the old ", "max_tokens": 5, "seed": 3}).encode()
        expected = self.server.complete(prompt="the old ", max_tokens=5, seed=3)["choices"]
        for keep in (b"", b"Connection: Keep-Alive\r\n"):
            with socket.create_connection(("127.0.0.1", self.server.port), timeout=60) as client:
                client.sendall(b"POST /v1/completions HTTP/1.0\r\n%sContent-Length: %d\r\n\r\n%s" %
                               (keep, len(body), body))
                answer = b"".join(iter(lambda: client.recv(65536), b""))
            head, _, found = answer.partition(b"\r\n\r\n")
            self.assertNotIn(b"chunked", head)
            self.assertEqual(json.loads(found)["choices"], expected)

    def test_text_is_that_of_generate(self):
        for seed in (3, 4):
            expected = generate("the old ", seed, 30, "--samples", "2")
            found = self.server.complete(prompt="the old ", seed=seed, max_tokens=30, n=2, logprobs=2)
            for choice, text in zip(found["choices"], expected):
                self.assertEqual(choice["text"], text["text"])
                self.assertEqual(choice["logprobs"]["token_logprobs"], [t["logprob"] for t in text["tokens"]])
                self.assertEqual(choice["finish_reason"], "stop" if text["ended"] else "length")

    def test_64_clients_at_once_get_what_each_gets_alone(self):
        requests = [{"prompt": WORDS[i % 16] + " ", "seed": i, "max_tokens": 5 + i, "logprobs": i % 3,
                     "temperature": i % 4} for i in range(64)]
        ask = lambda fields: self.server.complete(**fields)["choices"]
        alone = [ask(fields) for fields in requests]
        with concurrent.futures.ThreadPoolExecutor(64) as pool:
            together = list(pool.map(ask, requests))
        self.assertEqual(together, alone)

    def test_a_stream_makes_up_the_whole(self):
        for extra in ({}, {"echo": True, "logprobs": 3}, {"stop": ["e ", "sea"]}, {"temperature": 3}):
            fields = {"prompt": ["a whale", "the"], "seed": 5, "max_tokens": 60, "n": 2, **extra}
            whole = self.server.complete(**fields)
            parts = self.server.stream(**fields, stream_options={"include_usage": True})
            self.assertEqual(parts[-1]["usage"], whole["usage"])
            self.assertTrue(all(part["usage"] is None for part in parts[:-1]))
            for choice in whole["choices"]:
                own = [c for part in parts for c in part["choices"] if c["index"] == choice["index"]]
                self.assertEqual("".join(c["text"] for c in own), choice["text"])
                self.assertEqual(own[-1]["finish_reason"], choice["finish_reason"])
                self.assertTrue(all(c["finish_reason"] is None for c in own[:-1]))
                if choice["logprobs"] is None:
                    continue
                for name, values in choice["logprobs"].items():
                    self.assertEqual(sum((c["logprobs"][name] for c in own), []), values)

    def test_stop_strings_end_the_text_before_them(self):
        whole = self.server.complete(prompt="the ", seed=7, max_tokens=80)["choices"][0]["text"]
        stop = whole[20:24]
        found = self.server.complete(prompt="the ", seed=7, max_tokens=80, stop=stop)["choices"][0]
        self.assertEqual(found["text"], whole[:whole.index(stop)])
        self.assertEqual(found["finish_reason"], "stop")
        self.server.wait_until_free()

    def test_echo_and_token_ids(self):
        found = self.server.complete(prompt="old king", max_tokens=0, echo=True, logprobs=0)["choices"][0]
        self.assertEqual(found["text"], "old king")
        self.assertEqual(found["logprobs"]["tokens"], list("old king"))
        self.assertIsNone(found["logprobs"]["token_logprobs"][0])
        self.assertIsNone(found["logprobs"]["top_logprobs"][0])
        self.assertEqual(found["logprobs"]["top_logprobs"][1:], [{}] * 7)
        self.assertEqual(found["logprobs"]["text_offset"], list(range(8)))
        expected = generate("old king", 1, 0)[0]["prompt_tokens"]
        self.assertEqual(found["logprobs"]["token_logprobs"][1:], [t["logprob"] for t in expected])
        ids = self.server.complete(prompt=list(b"old king"), max_tokens=9, seed=2)
        text = self.server.complete(prompt="old king", max_tokens=9, seed=2)
        self.assertEqual(ids["choices"], text["choices"])

    def test_long_prompts_are_read_in_pieces(self):
        prompt = " ".join(WORDS * 6)[:450]
        expected = generate(prompt, 1, 20)[0]
        found = self.server.complete(prompt=prompt, seed=1, max_tokens=20)
        self.assertEqual(found["choices"][0]["text"], expected["text"])
        self.assertEqual(found["usage"]["prompt_tokens"], 450)

    def refuse(self, expected, body, path="/v1/completions", method="POST", code=None, param=None):
        status, answer, headers = self.server.request(method, path, body)
        error = json.loads(answer)["error"]
        self.assertEqual((status, headers["Content-Type"]), (expected, "application/json"), answer)
        self.assertTrue(error["message"])
        if code:
            self.assertEqual(error["code"], code)
        if param:
            self.assertEqual(error["param"], param)

    def test_broken_requests_are_refused(self):
        self.refuse(400, "{")
        self.refuse(400, "[1]")
        self.refuse(400, b"\xff\xfe")
        self.refuse(400, "[" * 100000)
        self.refuse(400, {}, param="prompt")
        for field, value in (("prompt", 5), ("prompt", []), ("prompt", [[]]), ("prompt", [-1]), ("prompt", [10**9]),
                             ("prompt", [1.5]), ("max_tokens", -1), ("max_tokens", 1.5), ("max_tokens", "9"),
                             ("max_tokens", 2**70), ("temperature", -1), ("temperature", "hot"), ("top_p", 0),
                             ("top_p", 1.1), ("n", 0), ("n", 1000), ("seed", -1), ("logprobs", 21), ("stop", ""),
                             ("stop", [3]), ("stream", 1), ("best_of", 2), ("presence_penalty", 1), ("frobnicate", 1),
                             ("suffix", "x"), ("logit_bias", {"5": 1}), ("stream_options", {"include_usage": True})):
            with self.subTest(field=field, value=value):
                self.refuse(400, {"prompt": "a", field: value}, param=field)
        self.refuse(404, {"prompt": "a", "model": "gpt-4"}, code="model_not_found")
        self.refuse(400, {"prompt": "a", "max_tokens": 600}, code="context_length_exceeded")
        self.refuse(400, {"messages": [{"role": "user", "content": "a"}]}, "/v1/chat/completions",
                    code="no_chat_template")

    def test_wrong_methods_and_places(self):
        self.refuse(405, None, method="GET")
        self.refuse(405, {}, path="/v1/models")
        self.refuse(404, None, path="/v1/nothing", method="GET")
        self.refuse(404, {}, path="/v1/embeddings")

    def test_huge_bodies_and_headers_are_refused(self):
        self.refuse(413, "x" * (5 << 20))
        for request in (b"GET /" + b"a" * 100000 + b" HTTP/1.1\r\n\r\n",
                        b"GET /health HTTP/1.1\r\nX: " + b"a" * 100000 + b"\r\n\r\n",
                        b"\x00\x01\x02\r\n\r\n", b"NONSENSE\r\n\r\n"):
            with socket.create_connection(("127.0.0.1", self.server.port), timeout=30) as link:
                with contextlib.suppress(ConnectionError):
                    link.sendall(request)
                    answer = link.recv(65536)
                    self.assertTrue(answer == b"" or re.match(rb"HTTP/1.1 4\d\d", answer), answer)
        self.assertEqual(self.server.health()["status"], "ok")

    def peak_kib(self):
        status = pathlib.Path(f"/proc/{self.server.process.pid}/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+)", status).group(1))

    def test_bodies_are_limited_however_they_come(self):
        chat, complete = "/v1/chat/completions", "/v1/completions"
        before = self.peak_kib()
        packer = zlib.compressobj(9, zlib.DEFLATED, 31)
        bomb = b"".join(packer.compress(b" " * 2**20) for _ in range(300)) + packer.flush()
        for path, expected in ((complete, 413), (chat, 413), ("/v1/nothing", 404), ("/v1/models", 405)):
            status, body, _ = self.server.request("POST", path, bomb, {"Content-Encoding": "gzip"})
            self.assertEqual(status, expected, body)
            self.assertTrue(json.loads(body)["error"]["message"])
            with socket.create_connection(("127.0.0.1", self.server.port), timeout=30) as link:
                with contextlib.suppress(ConnectionError):
                    link.sendall(b"POST %s HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" % path.encode())
                    for _ in range(300):
                        link.sendall(b"100000\r\n" + b" " * 2**20 + b"\r\n")
                with contextlib.suppress(ConnectionError):
                    answer = link.recv(65536)
                    self.assertRegex(answer, rb"^(HTTP/1.1 %d|$)" % expected)
        self.assertLess(self.peak_kib() - before, 100_000)
        self.assertEqual(self.server.health()["status"], "ok")

    def test_bodies_of_any_type_are_read(self):
        fields = {"prompt": "old king ", "max_tokens": 5, "seed": 3}
        expected = self.server.complete(**fields)["choices"]
        long = json.dumps(fields) + " " * 20_000
        for body, headers in ((long, {"Content-Type": "application/x-www-form-urlencoded"}), (long, {}),
                              (gzip.compress(long.encode()), {"Content-Encoding": "gzip"})):
            status, answer, _ = self.server.request("POST", "/v1/completions", body, headers)
            self.assertEqual((status, json.loads(answer).get("choices")), (200, expected), answer)
        parts = {"Content-Type": "multipart/form-data; boundary=x"}
        status, answer, _ = self.server.request("POST", "/v1/completions", "--x\r\n\r\na\r\n--x--\r\n", parts)
        self.assertEqual(status, 400, answer)
        self.assertIn("JSON is expected", json.loads(answer)["error"]["message"])

    def send_raw(self, request):
        """What comes until the server ends the connection, within ten seconds."""
        with socket.create_connection(("127.0.0.1", self.server.port), timeout=10) as link:
            link.sendall(request)
            answer = b""
            with contextlib.suppress(ConnectionResetError):
                while part := link.recv(65536):
                    answer += part
            return answer

    def test_lengths_that_are_none_end_the_connection(self):
        health = b"GET /health HTTP/1.1\r\n\r\n"
        for length in (b"-5", b"-1", b"x", b"1x", b"1 2", b"1, 1", b"+3", b"0x10", b"99999999999999999999",
                       b"3\r\nContent-Length: 4"):
            for path in (b"POST /v1/completions", b"GET /health"):
                with self.subTest(length=length, path=path):
                    begin = time.monotonic()
                    answer = self.send_raw(path + b" HTTP/1.1\r\nContent-Length: " + length + b"\r\n\r\n" + health)
                    self.assertLess(time.monotonic() - begin, 3)
                    head, body = answer.split(b"\r\n\r\n", 1)
                    self.assertTrue(head.startswith(b"HTTP/1.1 400"), answer)
                    self.assertIn(b"Connection: close", head)
                    self.assertNotIn(b"Keep-Alive", head)
                    self.assertIn("Content-Length", json.loads(body)["error"]["message"])  # and no second answer
        both = b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        answer = self.send_raw(b"POST /v1/completions HTTP/1.1\r\n" + both + health)
        self.assertRegex(answer, rb"^HTTP/1.1 400")
        self.assertEqual(answer.count(b"HTTP/1.1"), 1, answer)
        for lines in (b"", b"Content-Length:\r\n"):
            answer = self.send_raw(b"POST /v1/completions HTTP/1.1\r\n" + lines + b"\r\n" + health)
            self.assertRegex(answer, rb"^HTTP/1.1 411")
            self.assertEqual(answer.count(b"HTTP/1.1"), 1, answer)
        self.assertEqual(self.server.health()["status"], "ok")

    def test_neutral_fields_are_taken(self):
        self.server.complete(prompt="a", model="run", max_tokens=2, best_of=1, presence_penalty=0,
                             frequency_penalty=0.0, logit_bias={}, suffix=None, user="me", top_k=3, stop=None,
                             store=True, metadata={"of": "me"}, service_tier="auto")

    def test_a_client_that_leaves_frees_its_texts(self):
        for fields in ({"stream": True}, {}):
            body = json.dumps({"prompt": "a", "n": 8, "max_tokens": 500, "temperature": 0.1, **fields}).encode()
            link = socket.create_connection(("127.0.0.1", self.server.port), timeout=30)
            link.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            time.sleep(0.05)
            link.close()
        self.server.wait_until_free()

    def test_truncated_requests_hold_nobody_up(self):
        links = []
        for text in (b"POST /v1/comp", b"POST /v1/completions HTTP/1.1\r\nContent-Length: 99\r\n\r\n{"):
            links.append(socket.create_connection(("127.0.0.1", self.server.port), timeout=30))
            links[-1].sendall(text)
        self.server.complete(prompt="a", max_tokens=2)
        for link in links:
            link.close()

    def test_openai_client(self):
        try:
            import openai
        except ImportError:
            self.skipTest("the Python package openai is not installed")
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{self.server.port}/v1", api_key="none")
        found = client.completions.create(model="run", prompt="the ", seed=3, max_tokens=12)
        parts = client.completions.create(model="run", prompt="the ", seed=3, max_tokens=12, stream=True)
        self.assertEqual("".join(p.choices[0].text for p in parts), found.choices[0].text)
        with self.assertRaises(openai.BadRequestError):
            client.completions.create(model="run", prompt="the ", max_tokens=-1)


class Chats(unittest.TestCase):
    def test_plain_format_is_a_completion(self):
        with Server("--device", "cpu", "--chat-format", "plain", "--context", "200") as server:
            chat = "/v1/chat/completions"
            messages = [{"role": "system", "content": "be old"},
                        {"role": "user", "content": [{"type": "text", "text": "a whale"}]}]
            prompt = "System: be old\n\nUser: a whale\n\nAssistant:"
            text = server.complete(prompt=prompt, seed=5, max_tokens=20)["choices"][0]["text"]
            fields = {"messages": messages, "seed": 5, "max_completion_tokens": 20}
            found = server.complete(chat, **fields, logprobs=True, top_logprobs=2)
            self.assertEqual(found["choices"][0]["message"], {"role": "assistant", "content": text})
            self.assertEqual(len(found["choices"][0]["logprobs"]["content"][0]["top_logprobs"]), 2)
            parts = server.stream(chat, **fields)
            self.assertEqual(parts[0]["choices"][0]["delta"]["role"], "assistant")
            self.assertEqual("".join(p["choices"][0]["delta"]["content"] for p in parts), text)
            # What a client sends of its own, and an answer that it sends back, change nothing.
            neutral = {"store": False, "metadata": {"of": "me"}, "service_tier": "default", "user": "me",
                       "parallel_tool_calls": True, "reasoning_effort": "none", "response_format": {"type": "text"}}
            self.assertEqual(server.complete(chat, **fields, **neutral)["choices"][0]["message"]["content"], text)
            answer = {"role": "assistant", "content": None, "refusal": None, "tool_calls": None}
            self.assertEqual(server.complete(chat, messages=[answer, *messages])["usage"]["prompt_tokens"],
                             len("Assistant: \n\n" + prompt))
            for field, value in (("tools", [{"type": "function"}]), ("reasoning_effort", "high"),
                                 ("response_format", {"type": "json_object"}), ("service_tier", "priority")):
                status, body, _ = server.request("POST", chat, {**fields, field: value})
                self.assertEqual((status, json.loads(body)["error"]["param"]), (400, field))
            for broken in ([], "x", [1], [{"role": "robot", "content": "x"}], [{"role": "user"}],
                           [{"role": "user", "content": [{"type": "image_url"}]}]):
                status, _, _ = server.request("POST", chat, {"messages": broken})
                self.assertEqual(status, 400, broken)


class Limits(unittest.TestCase):
    def test_too_many_texts_are_told_to_come_again(self):
        with Server("--device", "cpu", "--max-sequences", "2", "--max-waiting", "0", "--context", "4096") as server:
            links = [server.open_stream(prompt="a", max_tokens=3000) for _ in range(2)]
            while server.health()["open"] < 2:
                time.sleep(0.01)
            status, body, headers = server.request("POST", "/v1/completions", {"prompt": "a"})
            self.assertEqual((status, headers.get("Retry-After")), (429, "1"), body)
            for link in links:
                link.close()
            server.wait_until_free()
            server.complete(prompt="a", max_tokens=3)

    def test_a_client_that_never_reads_is_given_up(self):
        with Server("--device", "cpu", "--client-seconds", "1", "--context", "100000",
                    "--cache-tokens", "200000") as server:
            link = server.open_stream(prompt="a", max_tokens=90000, temperature=0, logprobs=20)
            server.complete(prompt="a", max_tokens=20)  # is not held up
            server.wait_until_free(100)
            link.close()

    def test_a_key_is_asked_for(self):
        key = RUN.parent / "key"
        key.write_text("secret\n")
        with Server("--device", "cpu", "--api-key-file", str(key)) as server:
            for given in (None, "Bearer wrong", "secret", "Bearer secretx"):
                headers = {"Authorization": given} if given else {}
                status, body, _ = server.request("GET", "/v1/models", None, headers)
                self.assertEqual((status, json.loads(body)["error"]["code"]), (401, "invalid_api_key"))
            self.assertEqual(server.request("GET", "/v1/models", None, {"Authorization": "Bearer secret"})[0], 200)
            # The body that nobody reads is not taken for a request.
            with socket.create_connection(("127.0.0.1", server.port), timeout=10) as link:
                hidden = b"GET /health HTTP/1.1\r\n\r\n"
                link.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(hidden) + hidden)
                answer = b""
                with contextlib.suppress(ConnectionResetError):
                    while part := link.recv(65536):
                        answer += part
                self.assertEqual(answer.count(b"HTTP/1.1"), 1, answer)
            self.assertEqual(server.health()["status"], "ok")

    def test_a_stop_lets_a_stream_end(self):
        with Server("--device", "cpu", "--context", "4096") as server:
            with concurrent.futures.ThreadPoolExecutor() as pool:
                parts = pool.submit(server.stream, prompt="a", max_tokens=1500, seed=1, temperature=0.5)
                while server.health()["open"] == 0:
                    time.sleep(0.01)
                server.stop()
                self.assertIn(parts.result()[-1]["choices"][0]["finish_reason"], ("length", "stop"))

    def test_a_stop_waits_no_longer_than_it_is_told(self):
        with Server("--device", "cpu", "--context", "100000", "--cache-tokens", "100000", "--drain-seconds", "1",
                    "--client-seconds", "1") as server:
            link = server.open_stream(prompt="a", max_tokens=90000, temperature=0)
            while server.health()["open"] == 0:
                time.sleep(0.01)
            begin = time.monotonic()
            server.stop()
            self.assertLess(time.monotonic() - begin, 20)
            link.close()


class Refusals(unittest.TestCase):
    def refuse(self, part, *options):
        errors = run("serve", str(RUN), "--device", "cpu", *options, expected=2).stderr
        self.assertIn(part, errors)
        self.assertEqual(errors.count("\n"), 1, errors)

    def test_addresses_that_cannot_be_had(self):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            self.refuse("in use", "--port", str(taken.getsockname()[1]))
        self.refuse("--host", "--host", "no.such.host.invalid")
        self.refuse("--any-host", "--host", "0.0.0.0")
        self.refuse("port", "--port", "70000")
        self.refuse("port", "--port", "-1")
        if os.geteuid() != 0:
            self.refuse("denied", "--port", "80")

    def test_two_servers_do_not_share_a_port(self):
        with Server("--device", "cpu") as server:
            self.refuse("in use", "--port", str(server.port))

    def test_options_out_of_range(self):
        self.refuse("max-sequences", "--max-sequences", "0")
        self.refuse("context", "--context", "0")
        (RUN.parent / "empty").write_text("\n")
        self.refuse("key", "--api-key-file", str(RUN.parent / "empty"))
        self.refuse("chat-format", "--chat-format", "llama")


if __name__ == "__main__":
    PROGRAM = os.path.abspath(sys.argv.pop(1))
    with tempfile.TemporaryDirectory() as scratch:
        RUN = train(pathlib.Path(scratch))
        result = unittest.main(exit=False, verbosity=2).result
    sys.exit(not result.wasSuccessful())
