#!/usr/bin/env python3
"""Builds the tests under AddressSanitizer and UndefinedBehaviorSanitizer and runs them, program by program.

    scripts/sanitize.py [--seconds N] [CMAKE SETTING...]      settings such as -DTESSERA_CPU_LEVELS=

A program that passed costs nothing until it changes: what passed is remembered in $TESSERA_SANITIZE_CACHE (default:
~/.cache/tessera/sanitize), by the content of the program, of tests/data and of how it is started, so that a run goes on
where one before it ended. With --seconds nothing is begun after that time, what is being built then is given up until the
next run, and what is left is named. Programs come in an order that builds the lower rooms first. Exit code 1 where a build or a test fails.
"""
import argparse
import hashlib
import json
import os
import pathlib
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = ROOT / "build-asan"
BATCH = 3  # programs that are built, then run, together
STARTED = {"tests/cli_test": "tessera", "tests/comm_": "tests/comm_test_rank"}  # by programs whose names begin so
# oneDNN keeps its compiled kernels until the process ends, which LeakSanitizer would call a leak.
ENVIRONMENT = os.environ | {"ASAN_OPTIONS": "detect_leaks=0"}


def cache_folder():
    default = pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache")) / "tessera/sanitize"
    return pathlib.Path(os.environ.get("TESSERA_SANITIZE_CACHE", default))


def ninja_targets():
    """The files that ninja can make, relative to the build folder."""
    lines = subprocess.run(["ninja", "-C", BUILD, "-t", "targets", "all"], capture_output=True, text=True, check=True).stdout
    return {line.split(":")[0] for line in lines.splitlines() if ":" in line}


def list_tests():
    """CTest's tests by name, in its order: what starts each, and how."""
    result = subprocess.run(["ctest", "--test-dir", BUILD, "--show-only=json-v1", "-LE", "slow"], capture_output=True, text=True,
                            check=True)
    return {test["name"]: test for test in json.loads(result.stdout)["tests"]}


def group_by_program(names, made):
    """The tests of each program that the build makes, in its order, and last those that scripts run."""
    groups = {}
    for name in names:
        target = f"tests/{name.split('.')[0]}"
        groups.setdefault(target if target in made else "all", []).append(name)
    scripts = groups.pop("all", [])
    return list(groups.items()) + [("all", scripts)] * bool(scripts)


def hash_data():
    digest = hashlib.sha256()
    listed = subprocess.run(["git", "ls-files", "-s", "tests"], cwd=ROOT, capture_output=True, text=True)
    digest.update(listed.stdout.encode())
    return digest.hexdigest()


def key_of(target, names, tests, data):
    """The hash of what decides whether a program's tests pass."""
    digest = hashlib.sha256(data.encode())
    programs = ["tessera"] if target == "all" else [target]
    programs += [other for begin, other in STARTED.items() if target.startswith(begin)]
    for program in programs:
        digest.update(hashlib.sha256((BUILD / program).read_bytes()).digest())
    for name in names:
        digest.update(json.dumps([tests[name].get("command"), tests[name].get("properties")]).encode())
    return digest.hexdigest()


def build(targets, end):
    """Returns whether there was time to build them, or exits where they cannot be built."""
    command = ["ninja", "-C", BUILD, *targets]
    # Again, with what the compiler says; once in some thousand times GCC alone had failed.
    for output in (subprocess.DEVNULL, None):
        with subprocess.Popen(command, stdout=output) as ninja:
            try:
                if ninja.wait(None if end == float("inf") else max(end - time.monotonic(), 0)) == 0:
                    return True
            except subprocess.TimeoutExpired:
                ninja.terminate()  # objects that are done stay
                return False
    sys.exit(f"sanitize: {', '.join(targets)} cannot be built")


def run_batch(batch, folder, data, end):
    """Builds and runs some programs; returns how many tests were run, None where time ended the build; exits where one fails."""
    if not build([target for target, _ in batch], end):
        return None
    tests = list_tests()  # those of a program are known when it is built
    keys = {target: key_of(target, names, tests, data) for target, names in batch}
    # What scripts decide is not in the key; they are short.
    todo = [(target, names) for target, names in batch if target == "all" or not (folder / keys[target]).exists()]
    chosen = [name for _, names in todo for name in names]
    if not chosen:
        return 0
    pattern = "^(" + "|".join(name.replace(".", r"\.") for name in chosen) + ")$"
    result = subprocess.run(["ctest", "--test-dir", BUILD, "-j2", "--output-on-failure", "-LE", "slow", "-R", pattern],
                            env=ENVIRONMENT, capture_output=True, text=True)
    if result.returncode:
        sys.exit(result.stdout + result.stderr + "sanitize: tests failed")
    for target, _ in todo:
        (folder / keys[target]).touch()
    return len(chosen)


def main():
    parser = argparse.ArgumentParser(usage="scripts/sanitize.py [--seconds N] [CMAKE SETTING...]", description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=float("inf"))
    arguments, settings = parser.parse_known_args()
    wrong = [setting for setting in settings if not setting.startswith("-D")]
    if wrong:
        parser.error(f"'{wrong[0]}' is no setting of CMake, which begins with -D")
    end = time.monotonic() + arguments.seconds
    subprocess.run(["cmake", "--preset", "asan", *settings], cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    tests = list_tests()
    groups = group_by_program(tests, ninja_targets())
    data = hash_data()
    num_run, left = 0, []
    for first in range(0, len(groups), BATCH):
        if time.monotonic() > end:
            left = groups[first:]
            break
        run = run_batch(groups[first:first + BATCH], folder, data, end)
        if run is None:
            left = groups[first:]
            break
        num_run += run
        print(f"sanitize: {min(first + BATCH, len(groups))} of {len(groups)} programs", flush=True)
    num_left = sum(len(names) for _, names in left)
    print(f"sanitize: {num_run} of {len(tests)} tests run and passed, {len(tests) - num_run - num_left} passed before, "
          f"{num_left} left", flush=True)
    if left:
        print("sanitize: no time for " + ", ".join(name for _, names in left for name in names), flush=True)


if __name__ == "__main__":
    main()
