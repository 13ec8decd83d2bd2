#!/usr/bin/env python3
"""Compares encoding with the PyPI package `tokenizers`: the same ids, and the speed of both on one thread.

    pip install tokenizers numpy
    tools/compare_tokenizers.py --bench build/bench/tokenizer_bench --tokenizer tokenizer.json --text text.txt

The text is cut into documents of about 16 KB at line ends, as `tokenizer_bench` does. Both sides give the best of five
runs after loading; the package through `encode`, `encode_batch` and `encode_batch_fast`. Exits with 1 where an id differs.
"""
import argparse
import os
import subprocess
import sys
import tempfile
import time

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["RAYON_NUM_THREADS"] = "1"

import numpy  # noqa: E402
import tokenizers  # noqa: E402

DOCUMENT_BYTES = 16384
REPETITIONS = 5


def documents(data):
    found = []
    start = 0
    while start < len(data):
        end = data.find(b"\n", min(start + DOCUMENT_BYTES, len(data)))
        end = len(data) if end < 0 else end + 1
        found.append(data[start:end].decode("utf-8"))
        start = end
    return found


def best_seconds(function):
    times = []
    for _ in range(REPETITIONS):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def run_bench(arguments):
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "ids")
        command = [arguments.bench, arguments.tokenizer, arguments.text, path]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return float(output.split()[0]), numpy.fromfile(path, dtype=numpy.int32)


def package_ids(tokenizer, texts):
    ids = []
    for encoding in tokenizer.encode_batch(texts, add_special_tokens=False):
        ids.extend(encoding.ids)
        ids.append(-1)
    return numpy.array(ids, dtype=numpy.int32)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bench", required=True)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--text", required=True)
    arguments = parser.parse_args()
    with open(arguments.text, "rb") as file:
        data = file.read()
    texts = documents(data)
    tokenizer = tokenizers.Tokenizer.from_file(arguments.tokenizer)

    speed, ids = run_bench(arguments)
    rows = [("Tessera", speed)]
    methods = {
        "encode": lambda: [tokenizer.encode(text, add_special_tokens=False) for text in texts],
        "encode_batch": lambda: tokenizer.encode_batch(texts, add_special_tokens=False),
        "encode_batch_fast": lambda: tokenizer.encode_batch_fast(texts, add_special_tokens=False),
    }
    for name, method in methods.items():
        rows.append((f"tokenizers {tokenizers.__version__} {name}", len(data) / 1e6 / best_seconds(method)))
    for name, megabytes in rows:
        print(f"{name:40} {megabytes:8.2f} MB/s   {speed / megabytes:6.1f}x")

    expected = package_ids(tokenizer, texts)
    same = numpy.array_equal(ids, expected)
    print(f"{len(ids) - len(texts)} ids: {'all equal' if same else 'DIFFERENT'}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
