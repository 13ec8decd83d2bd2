#!/usr/bin/env python3
"""Prints the figures by which the source is judged: lengths of functions and files, casts, and how many files a change
touches. Needs universal-ctags (Debian package universal-ctags).

    tools/measure_house.py [FOLDER...] [--long]     default: src bench; --long lists functions over 80 lines

Definitions, the same for any C++ or CUDA source:
- Code: .h .hpp .cc .cpp .cu .cuh files, except tests and what only tests use (folders and stems named test*).
- A function is a definition that ctags finds; its length is from the line of its name to its closing brace.
- Parameters are counted in the signature, at its top level.
- Comment lines are lines with nothing but a comment, as a share of lines that are not blank.
- size_t casts are `static_cast<size_t>`, `size_t(` and `(size_t)`, std:: or not, for each 1000 lines.

What a change touches is counted in this source as it stands:
- operator: files of code in the folder of one operator, and files outside that include one of its headers in order to
  register or to build it. Given as the median over the folders, and the least.
- format: files that name one element type (kBF16).
- layer input: files that name one port of a layer. Given as the median and the most over the ports.
- pass: files that include the header of one pass. Given as the median and the most over the passes.
"""
import argparse
import json
import pathlib
import re
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
SUFFIXES = {".h", ".hpp", ".cc", ".cpp", ".cu", ".cuh"}
TEST_STEM = re.compile(r"(^|_)(tests?|testing)$|_cases$|^(synthetic_run|test_folder|random_program)$")
CAST = re.compile(r"static_cast<(?:std::)?size_t>|\b(?:std::)?size_t\(|\((?:std::)?size_t\)")
MAX_LINES = 80
MAX_PARAMETERS = 8


def is_test(path):
    return bool(TEST_STEM.search(path.stem)) or any(re.fullmatch(r"tests?|testing", part) for part in path.parts[:-1])


def code_files(folders):
    """The code below the folders, relative to ROOT where it is inside."""
    found = []
    for folder in folders:
        base = pathlib.Path(folder)
        for path in sorted(base.rglob("*")):
            if path.suffix in SUFFIXES and path.is_file() and not is_test(path.relative_to(base)):
                found.append(path)
    return found


def count_parameters(signature):
    """Commas at the top level of "(int a, std::map<K, V> b)", plus one; 0 for () and (void)."""
    inner = signature[1:signature.rfind(")")].strip()
    if inner in ("", "void"):
        return 0
    depth, count = 0, 1
    for symbol in inner:
        if symbol in "(<[{":
            depth += 1
        elif symbol in ")>]}":
            depth -= 1
        elif symbol == "," and depth == 0:
            count += 1
    return count


def functions_of(paths):
    """(path, name, first line, length, parameters) of each function definition."""
    command = ["ctags", "--output-format=json", "--fields=+neS", "--languages=C++,CUDA", "--map-C++=+.h", "--map-CUDA=.cu.cuh",
               "--kinds-C++=f", "--kinds-CUDA=f", "-I", "__launch_bounds__+,__align__+,__cluster_dims__+", "-L", "-", "-f", "-"]
    result = subprocess.run(command, input="\n".join(map(str, paths)), capture_output=True, text=True, check=True)
    functions = []
    for line in result.stdout.splitlines():
        tag = json.loads(line)
        if tag.get("_type") == "tag" and "end" in tag:
            functions.append((tag["path"], tag["name"], tag["line"], tag["end"] - tag["line"] + 1,
                              count_parameters(tag.get("signature", "()"))))
    return functions


def percentile(values, share):
    """The smallest value that is not below `share` of the values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0


def comment_lines(lines):
    """Number of lines with nothing but a comment."""
    count, inside = 0, False
    for line in lines:
        text = line.strip()
        if inside:
            count += 1
            inside = "*/" not in text
        elif text.startswith("//"):
            count += 1
        elif text.startswith("/*"):
            count += 1
            inside = "*/" not in text
    return count


def files_a_folder(paths):
    """(files, folder) for the folder with the most files of code, tests included: what a reader sees."""
    counts = {}
    for folder in {path.parent for path in paths}:
        counts[folder] = sum(1 for path in folder.iterdir() if path.suffix in SUFFIXES)
    return max((count, str(folder)) for folder, count in counts.items())


# --- What a change touches -----------------------------------------------------------------------------------------------


def files_with(texts, pattern):
    expression = re.compile(pattern)
    return [path for path, text in texts.items() if expression.search(text)]


def operator_touches(texts):
    """For each operator's folder: its files, and the files outside that include from it."""
    outside = {}
    folders = {}
    for path in texts:
        parts = path.relative_to(ROOT / "src").parts if path.is_relative_to(ROOT / "src") else ()
        if len(parts) == 3 and parts[0] == "ops" and parts[1] not in ("cuda", "registry", "testing", "gemm"):
            folders.setdefault(parts[1], []).append(path)
    for name, own in folders.items():
        includes = files_with({p: t for p, t in texts.items() if p not in own}, rf'#include "ops/{name}/')
        registries = [p for p in includes if "registry" in p.parts]
        outside[name] = (len(own), len(registries), len(includes))
    return outside


def layer_ports(texts):
    """Patterns by which code names the ports of a layer: enumerators of `Port`, or the fields of `LayerProgram`."""
    for text in texts.values():
        found = re.search(r"enum class (\w*Port)\b[^{]*\{(.*?)\}", text, re.S)
        if found:
            body = re.sub(r"//[^\n]*|/\*.*?\*/", "", found.group(2), flags=re.S)
            names = re.findall(r"\b(k[A-Z]\w*)", body)
            return {name: rf"\b{found.group(1)}::{name}\b|\b{name}\b" for name in names if name not in ("kCount", "kNumPorts")}
    for text in texts.values():
        found = re.search(r"struct LayerProgram \{(.*?)\n\};", text, re.S)
        if found:
            return {name: rf"[.>]{name}\b" for name in re.findall(r"ValueId (\w+) = -1", found.group(1))}
    return {}


def pass_headers(texts):
    """Headers of program/ that declare a function from program to program."""
    return [path for path, text in texts.items()
            if path.suffix == ".h" and path.is_relative_to(ROOT / "src/program")
            and re.search(r"^[\w:<>]+\s+(?:differentiate|fuse_\w+|join_\w+|recompute\w*|schedule\w*|set_aside|split_\w+"
                          r"|plan_memory)\(", text, re.M)]


def summary(counts):
    return f"median {statistics.median(counts):g}, most {max(counts)}" if counts else "none"


def print_touches(texts):
    operators = operator_touches(texts)
    if operators:
        own = [own + registries for own, registries, _ in operators.values()]
        print(f"an operator: {summary(own)} files (least {min(own)}), of which registries "
              f"{max(registries for _, registries, _ in operators.values())}; "
              f"{statistics.median([o for _, _, o in operators.values()]):g} files outside include it")
    formats = len(files_with(texts, r"\bkBF16\b|\bbool bf16\b"))
    sites = sum(len(re.findall(r"[=!]= *(?:\w+::)*kBF16\b|\bbool bf16\b", text)) for text in texts.values())
    print(f"a format: {formats} files name BF16, {sites} sites compare with it or take it as a boolean")
    ports = layer_ports(texts)
    print(f"a layer input: {summary([len(files_with(texts, p)) for p in ports.values()])} files ({len(ports)} ports)")
    headers = pass_headers(texts)
    counts = [len(files_with(texts, rf'#include "{h.relative_to(ROOT / "src")}"')) for h in headers]
    print(f"a pass: {summary(counts)} files include its header ({len(headers)} passes)")


def print_row(name, paths, functions):
    lengths = [length for _, _, _, length, _ in functions]
    lines = {path: path.read_text(errors="replace").splitlines() for path in paths}
    file_lengths = [len(text) for text in lines.values()]
    filled = sum(1 for text in lines.values() for line in text if line.strip())
    comments = sum(comment_lines(text) for text in lines.values())
    casts = sum(len(CAST.findall(line)) for text in lines.values() for line in text)
    print("| non-test code | functions median / p90 / p99 | over 80 lines | over 8 parameters | file p90 / max | comment lines | "
          "size_t casts per kloc |\n|---|---|---|---|---|---|---|")
    print(f"| {name} ({sum(file_lengths) / 1000:.0f}k lines) | {statistics.median(lengths):g} / {percentile(lengths, 0.9)} / "
          f"{percentile(lengths, 0.99)} | {sum(length > MAX_LINES for length in lengths)} | "
          f"{sum(parameters > MAX_PARAMETERS for *_, parameters in functions)} | {percentile(file_lengths, 0.9)} / "
          f"{max(file_lengths)} | {100 * comments / filled:.1f} % | {1000 * casts / sum(file_lengths):.1f} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", default=[str(ROOT / "src"), str(ROOT / "bench")])
    parser.add_argument("--long", action="store_true", help="list functions over 80 lines or over 8 parameters")
    arguments = parser.parse_args()
    paths = code_files(arguments.folders)
    if not paths:
        sys.exit("measure_house: no code in " + " ".join(arguments.folders))
    try:
        functions = functions_of(paths)
    except FileNotFoundError:
        sys.exit("measure_house: ctags is missing; install universal-ctags")
    print_row("here" if len(sys.argv) == 1 else arguments.folders[0], paths, functions)
    most, folder = files_a_folder(paths)
    print(f"\nmost files in a folder, tests included: {most} ({folder})")
    if any((ROOT / "src") in path.parents for path in paths):
        print_touches({path: path.read_text(errors="replace") for path in paths})
    if arguments.long:
        for path, name, line, length, parameters in sorted(functions, key=lambda entry: -entry[3]):
            if length > MAX_LINES or parameters > MAX_PARAMETERS:
                print(f"{path}:{line}: {name}: {length} lines, {parameters} parameters")


if __name__ == "__main__":
    main()
