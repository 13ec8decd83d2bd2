#!/usr/bin/env python3
"""Checks that every #include in src/ points down: to the same room or to one that stands below it.

A room is a folder of src/, or a folder within one. LAYERS lists the rooms from the bottom up, those on one line being
beside one another: they may not include each other. Tests, and what is for tests alone, may look anywhere.

An operator, or the compiler, that includes an operator's header must also link its library: what links by luck in one
build does not in another.
"""
import pathlib
import re
import sys

SRC = pathlib.Path(__file__).resolve().parent.parent / "src"

# ops/ is three rooms: what an operator is (files directly in ops/), the operators, and the table of them all.
LAYERS = [
    "core/text",
    "core",
    "core/file",
    "core/process core/config core/pages",
    "comm",
    "comm/thread comm/tcp comm/mpi comm/shm comm/agreement",
    "comm/launch",
    "ops",
    "ops/gemm",
    "ops/cuda",
    "ops/cuda/ptx",
    "ops/cuda/tile ops/cuda/pipeline",
    "ops/*",
    "ops/registry",
    "program",
    "program/rounding program/fusion",
    "program/compile",
    "runtime",
    "runtime/cuda",
    "tokenizer/text",
    "checkpoint/format",
    "parallel optim tokenizer checkpoint",
    "optim/exchange checkpoint/peer",
    "optim/sharded",
    "sharding",
    "data",
    "data/text",
    "model/config",
    "model/dispatch",
    "model/build",
    "model/mixers model/experts",
    "model/layers",
    "model/weights model/batch",
    "model/run",
    "model/proof",
    "step",
    "step/build step/run",
    "sim",
    "hf/family",
    "hf/config",
    "hf/tensors",
    "hf/transfer",
    "hf",
    "train/setup train/metrics",
    "train/state",
    "train/memory",
    "train/plan train/infer",
    "train/trainer",
    "train/run",
    "train/verify train/tune",
    "train/bench",
    "serve",
    "cli",
]


def levels():
    return {room: level for level, line in enumerate(LAYERS) for room in line.split()}


LEVELS = levels()


def room_of(path):
    """The room of a path below src/, such as "model/run" or "ops/*" for an operator's folder."""
    inner = "/".join(path.parts[:3])
    if len(path.parts) > 3 and inner in LEVELS:
        return inner
    room = "/".join(path.parts[:2]) if len(path.parts) > 2 else path.parts[0]
    if room.startswith("ops/") and room not in LEVELS:
        return "ops/*"
    return room if room in LEVELS else None


def is_for_tests(path):
    return "testing" in path.parts or re.search(r"(_test|_testing|_cases|synthetic_run|test_folder|random_program)\.",
                                                path.name) is not None


def check(path):
    relative = path.relative_to(SRC)
    room = room_of(relative)
    if room is None:
        yield f"src/{relative}: belongs to no room; add its folder to LAYERS in scripts/check_includes.py"
        return
    for number, line in enumerate(path.read_text().splitlines(), 1):
        found = re.match(r'\s*#\s*include\s+"([^"]+)"', line)
        if not found:
            continue
        other = room_of(pathlib.PurePath(found[1]))
        if other is not None and other != room and LEVELS[other] >= LEVELS[room]:
            yield f'src/{relative}:{number}: includes "{found[1]}" of {other}/, which does not stand below {room}/'


def linked_libraries():
    """By library of an operator, or of program/, the others that CMake links it with."""
    linked = {}
    for path in (SRC / room / "CMakeLists.txt" for room in ("ops", "program")):
        if not path.exists():
            continue
        commands = re.findall(r"(?:tessera_library|target_link_libraries)\(([^)]*)\)", path.read_text())
        for name, *rest in (command.split() for command in commands):
            linked.setdefault(name, set()).update(word for word in rest if word.startswith("tessera_"))
    return linked


def library_of(path):
    parts = path.parts
    if len(parts) > 2 and parts[0] == "ops":
        return f"tessera_op_{parts[1]}"
    return "tessera_program" if parts[0] == "program" else None


def reachable(library, linked):
    seen, todo = set(), [library]
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo += linked.get(name, ())
    return seen


def check_links(path, linked):
    relative = path.relative_to(SRC)
    library = library_of(relative)
    if library is None or relative.parts[1] in ("registry", "cuda", "gemm") or relative.stem.endswith("_cuda"):
        return
    allowed = reachable(library, linked)
    for number, line in enumerate(path.read_text().splitlines(), 1):
        found = re.match(r'\s*#\s*include\s+"(ops/(\w+)/[^"]+)"', line)
        if not found or found[2] in ("cuda", "gemm"):
            continue
        other = f"tessera_op_{found[2]}"
        if other not in allowed:
            yield f'src/{relative}:{number}: includes "{found[1]}", but {library} does not link {other}'


def main():
    linked = linked_libraries()
    files = [path for kind in ("*.h", "*.cc", "*.cu", "*.cuh") for path in SRC.rglob(kind)]
    checked = [path for path in sorted(files) if not is_for_tests(path.relative_to(SRC))]
    problems = [problem for path in checked for problem in check(path)]
    problems += [problem for path in checked if path.suffix == ".cc" for problem in check_links(path, linked)]
    print("\n".join(problems) if problems else f"includes: {len(files)} files point down")
    return 1 if problems else 0


sys.exit(main())
