#!/usr/bin/env python3
"""Checks the documents against the program and the source: usage tests/docs_test.py PROGRAM

- Commands in fenced blocks of README.md and docs/ run, each document's in a folder of its own, on tiny inputs that this
  file makes. A ```toml block that begins with "# NAME.toml" is written to that file. Training is cut to a few steps.
- `<!-- docs-test: parse -->` before a block: its commands need what a test has not (a GPU, many ranks, torchrun, large
  models). Their options must exist, and the configuration that they give must be valid.
- `<!-- docs-test: refused -->`: its commands must end with exit code 2 and the message that stands below each.
- `<!-- docs-test: other -->`: nothing in it is looked at.
- Commands in `inline code` that begin with "tessera" have options that exist.
- Paths of files in documents exist, links lead somewhere, documents keep their lengths and entries of the log theirs.
"""
import concurrent.futures
import functools
import gzip
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MOST_LINES = {"README.md": 150, "design.md": 250}
MOST_LINES_OF_ENTRY = 8
FEW_STEPS = ["--train.steps=8", "--optim.warmup_steps=1", "--run.log_interval=4"]
LAUNCHERS = ("tessera", "mpirun", "torchrun", "srun")
COMMAND = re.compile(rf"(?:{'|'.join(LAUNCHERS)}) |(?:scripts|tools|tests|bench|build)/[\w./-]*\w(?: |$)")
PLACEHOLDERS = {"--section.key": "--train.steps"}
# Phrases that are not a native engineer's.
PHRASES = re.compile(r"\b(by turns|in vain|but for (?:the|one|its|what)|made again|is no (?:weight|part|rank)|made anew|so many of)\b")

problems = []


def report(document, line, what):
    problems.append(f"{document.relative_to(ROOT)}:{line}: {what}")


class Block:
    """A fenced block: its language, what is asked of it, and its lines with the number of the first."""

    def __init__(self, language, mode, first):
        self.language, self.mode, self.first, self.lines = language, mode, first, []

    def commands(self):
        """(line number, words, the line below) of each command; lines that end in a backslash go on."""
        marked = any(line.startswith("$ ") for line in self.lines)
        number = 0
        while number < len(self.lines):
            at, text = number, self.lines[number]
            number += 1
            if marked and not text.startswith("$ "):
                continue
            text = text.removeprefix("$ ")
            if not COMMAND.match(text):
                continue
            while text.endswith("\\") and number < len(self.lines):
                text = text[:-1] + self.lines[number]
                number += 1
            below = self.lines[number] if number < len(self.lines) else ""
            yield self.first + at, shlex.split(text, comments=True), below


def blocks_of(document):
    blocks, mode, block = [], "run", None
    for number, line in enumerate(document.read_text().splitlines(), 1):
        if block is not None:
            if line.startswith("```"):
                blocks.append(block)
                block = None
            else:
                block.lines.append(line)
        elif line.startswith("```"):
            block, mode = Block(line[3:], mode, number + 1), "run"
        elif found := re.fullmatch(r"<!-- docs-test: (\w+) -->", line):
            mode = found.group(1)
    return blocks


# --- Running and parsing -------------------------------------------------------------------------------------------------


def run(program, arguments, folder):
    environment = dict(os.environ, OMP_NUM_THREADS="2", OMP_WAIT_POLICY="passive")
    return subprocess.run([program, *arguments], cwd=folder, env=environment, capture_output=True, text=True,
                          errors="replace", timeout=120)


@functools.lru_cache(maxsize=None)
def options_of(program, subcommand):
    """Every option that the help of a subcommand names, keys of the configuration among them."""
    text = subprocess.run([program, subcommand, "--help"], capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"(?<![\w-])(--?[\w-]+(?:\.\w+)?)", text))


def check_options(program, words, document, line):
    """Whether the subcommand and its options exist. `words` begin behind "tessera"."""
    if not words or words[0].startswith("-"):
        return
    try:
        known = options_of(program, words[0])
    except subprocess.CalledProcessError:
        report(document, line, f"tessera has no subcommand {words[0]}")
        return
    for word in words[1:]:
        name = word.split("=")[0]
        name = PLACEHOLDERS.get(name, name)
        if re.fullmatch(r"--?[a-z][\w.-]*", name) and name not in known:
            report(document, line, f"tessera {words[0]} has no option {name}")


def check_configuration(program, words, folder, document, line):
    """Whether the configuration that a command gives is valid."""
    if words[0] not in ("train", "verify", "bench", "inspect"):
        return
    keys = [word for word in words[1:] if re.match(r"--\w+\.", word)]
    files = [word for word in words[1:] if word.endswith(".toml")]
    result = run(program, ["train", *files, *keys, "--print-config"], folder)
    if result.returncode != 0:
        report(document, line, result.stderr.strip())


def shortened(words):
    """The command with less to do where it trains."""
    trains = words[0] in ("train", "dpo", "rl") and not {"--print-config", "--help"} & set(words)
    validates = ["--train.validation_interval=4"] if words[0] == "train" else []
    return words + FEW_STEPS + validates if trains else words


def check_command(program, block, line, words, below, folder, document):
    if "tessera" not in words:
        if words[0] not in LAUNCHERS and not (ROOT / words[0]).exists() and not words[0].startswith("build"):
            report(document, line, f"{words[0]} does not exist")
        return
    launched = words[0] != "tessera"
    words = words[words.index("tessera") + 1:]
    words = words[:words.index("|")] if "|" in words else words
    if block.mode != "refused":
        check_options(program, words, document, line)
    if block.mode == "parse" or launched:
        check_configuration(program, words, folder, document, line)
        return
    result = run(program, words if block.mode == "refused" else shortened(words), folder)
    if block.mode == "refused":
        if result.returncode != 2 or result.stderr.strip() != below:
            report(document, line, f"ended with {result.returncode} and said\n    {result.stderr.strip()}\n  not\n    {below}")
    elif result.returncode != 0:
        report(document, line, f"`tessera {' '.join(words)}` ended with {result.returncode}: {result.stderr.strip()}")


# --- Inputs --------------------------------------------------------------------------------------------------------------


def make_text(num_lines, seed):
    """Lines of words with some order in them, the same on every machine."""
    words = "and the lord said unto moses speak children of israel that they come out from land in day".split()
    lines, state = [], seed
    for _ in range(num_lines):
        line = []
        for _ in range(10):
            state = (state * 1103515245 + 12345) % 2**31
            line.append(words[(state >> 16) % len(words)])
        lines.append(" ".join(line) + ".")
    return "\n".join(lines) + "\n"


def make_inputs(folder):
    """What the documents' commands read."""
    (folder / "corpus").mkdir(parents=True)
    (folder / "data").mkdir()
    text = make_text(600, 1)
    for name in ("text.txt", "corpus/one.txt", "corpus/two.txt"):
        (folder / name).write_text(text)
    (folder / "book.txt").write_text(make_text(60, 2).replace("\n", "\n\n"))
    with gzip.open(folder / "more.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"text": line}) + "\n" for line in text.splitlines()[:50])
    (folder / "chat.jsonl").write_text(
        '{"prompt": "Who?", "completion": " Moses."}\n'
        '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}\n')
    (folder / "questions.jsonl").write_text('{"context": "the lord", "choices": [" said", " israel"], "answer": 0}\n')
    (folder / "prompts.jsonl").write_text('"and the"\n{"prompt": "the lord"}\n')
    (folder / "pairs.jsonl").write_text('{"prompt": "Who?", "chosen": " Moses.", "rejected": " Me."}\n' * 3)
    (folder / "chat_prompts.jsonl").write_text('{"prompt": "Who?", "solution": "Moses"}\n')
    shutil.copy(ROOT / "tests/data/tokenizers/gpt2_bytelevel.json", folder / "tokenizer.json")
    shutil.copytree(ROOT / "configs", folder / "configs")


def make_models(program, folder):
    """Hugging Face models, one of experts and one dense, exported from runs of one step."""
    for name, experts in (("Mixtral-8x7B-v0.1", 4), ("Llama-dense", 0)):
        first = ["train", "--model.preset=tiny", "--data.text=text.txt", "--data.tokenizer=tokenizer.json",
                 "--data.sequence_length=32", "--train.steps=1", f"--moe.num_experts={experts}", f"--run.folder=runs/{name}"]
        for arguments in (first, ["convert", f"runs/{name}", name]):
            result = run(program, arguments, folder)
            if result.returncode != 0:
                sys.exit(f"docs_test: `tessera {' '.join(arguments)}`: {result.stderr}")


def write_configurations(document, folder):
    """Writes the files that ```toml blocks name in their first line."""
    for block in blocks_of(document):
        named = re.fullmatch(r"# ([\w.-]+\.toml)", block.lines[0]) if block.lines else None
        if block.language == "toml" and named:
            (folder / named.group(1)).write_text("\n".join(block.lines) + "\n")


def check_document(program, document, parent):
    """Runs the commands of one document in their order."""
    folder = parent / document.stem
    make_inputs(folder)
    for other in (DOCUMENTS[0], document):  # the README's configuration is everybody's
        write_configurations(other, folder)
    if document.name == "models.md":
        make_models(program, folder)
    for block in blocks_of(document):
        if block.mode != "other" and block.language == "":
            for line, words, below in block.commands():
                check_command(program, block, line, words, below, folder, document)


# --- The text itself -----------------------------------------------------------------------------------------------------


def check_inline_commands(program, document):
    inside = False
    for number, line in enumerate(document.read_text().splitlines(), 1):
        inside ^= line.startswith("```")
        for code in [] if inside else re.findall(r"`tessera ([^`]*)`", line):
            check_options(program, shlex.split(code.split("|")[0]), document, number)


def file_exists(name):
    """Whether documents may name a file so: from the root, from src/, or the end of a path that is unique enough."""
    if (ROOT / name).exists() or (ROOT / "src" / name).exists():
        return True
    return any(str(path).endswith("/" + name) for path in source_paths())


@functools.lru_cache(maxsize=None)
def source_paths():
    return [path for top in ("src", "bench", "scripts", "tests", "tools", "cmake", "configs", "docs")
            for path in (ROOT / top).rglob("*") if path.is_file()]


def check_paths(document):
    text = document.read_text()
    for number, line in enumerate(text.splitlines(), 1):
        for name in re.findall(r"`([\w./-]+\.(?:cc|h|cu|cuh|py|sh|cmake))`", line):
            if not file_exists(name):
                report(document, number, f"{name} does not exist")
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", line):
            if "://" not in link and not (document.parent / link).exists():
                report(document, number, f"the link to {link} leads nowhere")
        if found := PHRASES.search(line):
            report(document, number, f'"{found.group()}": say it in plain English')


def check_lengths(document):
    lines = document.read_text().splitlines()
    most = MOST_LINES.get(document.name, 10000)
    if len(lines) > most:
        report(document, len(lines), f"{len(lines)} lines; at most {most}")
    if document.name != "log.md":
        return
    start = None
    for number, line in enumerate([*lines, ""], 1):
        if line.strip() and not line.startswith("#") and start is None:
            start = number
        elif (not line.strip() or line.startswith("#")) and start is not None:
            if number - start > MOST_LINES_OF_ENTRY:
                report(document, start, f"an entry of {number - start} lines; at most {MOST_LINES_OF_ENTRY}")
            start = None


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    program = str(pathlib.Path(sys.argv[1]).resolve())
    with tempfile.TemporaryDirectory(prefix="tessera-docs-") as folder, concurrent.futures.ThreadPoolExecutor(2) as pool:
        done = [pool.submit(check_document, program, document, pathlib.Path(folder)) for document in DOCUMENTS]
        for document in DOCUMENTS:
            check_inline_commands(program, document)
            check_paths(document)
            check_lengths(document)
        for one in done:
            one.result()
    if problems:
        sys.exit("\n".join(problems) + f"\n{len(problems)} problems in the documents")
    print(f"{len(DOCUMENTS)} documents hold")


if __name__ == "__main__":
    main()
