#!/usr/bin/env python3
"""What the kernels for GPUs cost a build: CPU seconds by source, the number of kernels, and the program's size.

usage: tools/build_report.py [--build build] [--seconds]

Needs a build tree with CUDA in which the target tessera is up to date. --seconds compiles every source of the library
tessera_cuda anew, one at a time and without a cache, into a temporary folder: CPU time of the compiler and all that it
starts, which other work on the machine changes little. The program without CUDA is linked from the same objects and the
stub that stands for the kernels then.
"""
import argparse
import json
import pathlib
import re
import resource
import shlex
import subprocess
import tempfile

LIBRARY = "src/ops/libtessera_cuda.a"
STUB = "src/runtime/cuda/no_cuda.cc"


def output(*command, **options):
    return subprocess.run([str(part) for part in command], check=True, stdout=subprocess.PIPE, text=True, **options).stdout


def compile_into(command, folder):
    """The command without a compiler cache and with its outputs in `folder`."""
    words = shlex.split(command)
    if "ccache" in words:
        words = words[words.index("ccache") + 1:]
    target = pathlib.Path(folder, "object.o")
    for flag in ("-o", "-MF"):
        if flag in words:
            words[words.index(flag) + 1] = str(target.with_suffix(".d") if flag == "-MF" else target)
    return words, target


def cpu_seconds():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def library_sources(build):
    """By source of the library its entry of compile_commands.json."""
    entries = json.loads((build / "compile_commands.json").read_text())
    own = {entry["file"]: entry for entry in entries if "/tessera_cuda.dir/" in entry["command"]}
    return dict(sorted(own.items(), key=lambda item: (not item[0].endswith(".cu"), item[0])))


def report_seconds(sources):
    times = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, entry in sources.items():
            before = cpu_seconds()
            subprocess.run(compile_into(entry["command"], folder)[0], cwd=entry["directory"], check=True,
                           stderr=subprocess.DEVNULL)
            times[name] = cpu_seconds() - before
            print(f"{times[name]:7.1f} s  {name[name.index('/src/') + 1:]}", flush=True)
    for kind, suffix in (("kernels (.cu)", ".cu"), ("host parts (.cc)", ".cc")):
        part = [seconds for name, seconds in times.items() if name.endswith(suffix)]
        print(f"{kind}: {len(part)} files, {sum(part):.0f} s of CPU time")


def count_kernels(build):
    """Each kernel, of a template each instance, has a function on the host that launches it, and its own variables."""
    symbols = output("nm", build / LIBRARY, stderr=subprocess.DEVNULL)
    starts = re.finditer(r"(\d+)(?=__device_stub__)", symbols)
    return len({symbols[start.end():start.end() + int(start[1])] for start in starts})


def link_without_cuda(build, folder):
    entries = json.loads((build / "compile_commands.json").read_text())
    like = next(entry for entry in entries if "/tessera_cuda.dir/" in entry["command"] and entry["file"].endswith(".cc"))
    command, stub = compile_into(like["command"], folder)
    root = pathlib.Path(like["file"][:like["file"].index("/src/")])
    command[command.index(like["file"])] = str(root / STUB)
    subprocess.run(command, cwd=like["directory"], check=True)
    library = pathlib.Path(folder, "libtessera_cuda.a")
    output("ar", "qc", library, stub)
    link = output("ninja", "-C", build, "-t", "commands", "-s", "tessera").splitlines()[-1]
    link = re.sub(r"^.*?(?=\S*(c\+\+|g\+\+|clang\+\+))", "", link, count=1)
    program = pathlib.Path(folder, "tessera")
    words = shlex.split(link)
    words = words[:words.index("&&")] if "&&" in words else words
    words = [str(library) if word == LIBRARY else word for word in words]
    words[words.index("-o") + 1] = str(program)
    subprocess.run(words, cwd=build, check=True)
    return program


def stripped_size(program, folder):
    copy = pathlib.Path(folder, "stripped")
    output("strip", "-o", copy, program)
    return copy.stat().st_size


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, default=pathlib.Path("build"))
    parser.add_argument("--seconds", action="store_true", help="compile the sources and time that")
    options = parser.parse_args()
    build = options.build.resolve()
    sources = library_sources(build)
    if not any(name.endswith(".cu") for name in sources):
        parser.error(f"{build} was configured without CUDA; nvcc 13 has to be found, see scripts/build.sh")
    if options.seconds:
        report_seconds(sources)
    print(f"kernels: {count_kernels(build)}")
    with tempfile.TemporaryDirectory() as folder:
        for name, program in (("with CUDA", build / "tessera"), ("without CUDA", link_without_cuda(build, folder))):
            print(f"tessera {name}: {program.stat().st_size / 2**20:.1f} MiB, "
                  f"{stripped_size(program, folder) / 2**20:.1f} MiB stripped")


if __name__ == "__main__":
    main()
