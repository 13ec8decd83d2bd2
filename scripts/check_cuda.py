#!/usr/bin/env python3
"""Checks rules for CUDA sources (.cu, .cuh), which clang-tidy 14 cannot parse.

It looks at text alone, so it shows that these rules hold and nothing more. nvcc's warnings (scripts/tidy.py) and
compute-sanitizer (tools/gpu_sanitizers.sh) look at meaning.

- launch: a kernel is launched by launch_early (ops/cuda/dependent_launch.cuh), which checks that it was, and waits for the
  kernels before it, so that the one behind it may rely on them. A file that launches plainly gives the stream and
  asks cudaGetLastError() itself.
- wait: code of operators neither allocates memory nor waits for the GPU: buffers are planned, and the host runs ahead.
- print: a kernel's last words come from ops/cuda/fail.cuh alone.
- again: a constant that ops/cuda defines is not defined again by an operator.
- hardware: a block's bytes of shared memory are written in one place, and the number of SMs of a GPU nowhere.
"""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
CONSTANT = re.compile(r"^(?:inline )?constexpr (?:int|int64_t|unsigned|size_t|uint32_t|float) (k\w+) = ", re.M)
WAITS = re.compile(r"\bcuda(?:Malloc\w*|Free\w*|DeviceSynchronize|StreamSynchronize|EventSynchronize|Memcpy)\(")
SHARED_BYTES = re.compile(r"\b227 \* 1024\b|\b232448\b")
MOST = {"bytes of shared memory": 1, "a number of SMs": 0}  # places
NUM_SMS = re.compile(r"\b13[20]\b")


def without_comments(text):
    """The text with comments and strings blanked, lines kept."""
    blank = lambda match: re.sub(r"[^\n]", " ", match.group())
    return re.sub(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', blank, text, flags=re.S)


def end_of(text, position):
    """Behind the bracket that closes the one at `position`."""
    depth = 0
    for at in range(position, len(text)):
        depth += {"(": 1, "{": 1, ")": -1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return at + 1
    return len(text)


def kernels(text):
    """(position, body) of each kernel that is defined."""
    for match in re.finditer(r"\b__global__\b", text):
        at = match.end()
        while text[at] not in "{;":
            at = end_of(text, at) if text[at] == "(" else at + 1
        if text[at] == "{":
            yield match.start(), text[at:end_of(text, at)]


def line_of(text, position):
    return text.count("\n", 0, position) + 1


def check_launches(path, text):
    if "<<<" in text and "cudaGetLastError" not in text:
        yield line_of(text, text.index("<<<")), "launch: use launch_early, or check cudaGetLastError()"
    for match in re.finditer("<<<(.*?)>>>", text, re.S):
        if "stream" not in match.group(1):
            yield line_of(text, match.start()), "launch: give the stream"
    for position, body in kernels(text):
        if "<<<" not in text and "wait_for_earlier();" not in body:
            yield line_of(text, position), "launch: this kernel never calls wait_for_earlier()"


def check_waits(path, text):
    if "ops" in path.parts:
        for match in WAITS.finditer(text):
            yield line_of(text, match.start()), f"wait: {match.group()[:-1]} allocates or waits; plan a buffer, or use the stream"


def check_prints(path, text):
    if path.name != "fail.cuh":
        for match in re.finditer(r"\bprintf\(|\bassert\(", text):
            yield line_of(text, match.start()), "print: use ops/cuda/fail.cuh"


def check_constants(path, text, shared):
    if "cuda" in path.parts[path.parts.index("src") + 1:-1] if "src" in path.parts else False:
        return
    for match in CONSTANT.finditer(text):
        if match.group(1) in shared:
            yield line_of(text, match.start()), f"again: {match.group(1)} is defined in {shared[match.group(1)]}"


def main():
    files = {path: without_comments(path.read_text()) for path in sorted((ROOT / "src").rglob("*.cu*"))}
    ladder = [path for path in (ROOT / "src/ops/cuda").glob("*") if path.suffix in (".cuh", ".h")]
    shared = {name: path.relative_to(ROOT) for path in ladder for name in CONSTANT.findall(path.read_text())}
    problems = []
    places = {"bytes of shared memory": [], "a number of SMs": []}
    for path, text in files.items():
        for check in (check_launches(path, text), check_waits(path, text), check_prints(path, text),
                      check_constants(path, text, shared)):
            problems += [(path, line, what) for line, what in check]
        for name, pattern in (("bytes of shared memory", SHARED_BYTES), ("a number of SMs", NUM_SMS)):
            places[name] += [(path, line_of(text, match.start())) for match in pattern.finditer(text)]
    for name, found in places.items():
        problems += [(path, line, f"hardware: {name} stands in {len(found)} places") for path, line in found[MOST[name]:]]
    for path, line, what in problems:
        print(f"{path.relative_to(ROOT)}:{line}: {what}")
    if problems:
        sys.exit(1)
    print(f"cuda: {len(files)} files keep the rules")


if __name__ == "__main__":
    main()
