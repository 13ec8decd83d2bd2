"""Every option with a number with absurd ones, and command lines that make no sense."""
import re
import subprocess

from attack import absurd
from attack.harness import Case, expect
from attack.limits import commands

SUBCOMMANDS = {"train": "train", "verify": "verify", "eval": "eval", "generate": "generate", "tokenize": "tokenize",
               "inspect": "inspect-layout", "convert": "convert", "upcycle": "upcycle", "bench": "bench"}
ENDLESS = {"max-tokens", "steps", "warmup", "max-batches"}  # as long as asked for
NEEDED = {"vocab-size": "tokenize-train", "min-frequency": "tokenize-train"}
IMPORTING = {"vocab-size", "pad-vocab-to"}
SHORT = {"train/ranks", "generate/temperature", "generate/max-tokens", "generate/seed", "eval/batch-size"}


def cases(attack):
    found = [Case("options", f"{name}/{option}",
                  lambda box, n=name, o=option, k=kind: try_option(box, n, o, k), short=f"{name}/{option}" in SHORT,
                  seconds=900) for name in SUBCOMMANDS for option, kind in options(attack, name)]
    found += [Case("nonsense", str(i), lambda box, a=arguments: nonsense(box, a), short=i % 4 == 0)
              for i, arguments in enumerate(lines())]
    return found


def options(attack, name):
    """Options with a number, and whether it is an integer."""
    told = subprocess.run([attack.binary, name, "--help"], capture_output=True, text=True, check=True).stdout
    own = told.split("Any key of the configuration")[0]
    return re.findall(r"--([a-z-]+) (INT|UINT|FLOAT)", own)


def arguments_for(box, name, option):
    key = SUBCOMMANDS[name]
    if name == "tokenize" and option in NEEDED:
        key = NEEDED[option]
    if name == "convert" and option in IMPORTING:
        key = "import"
    words = list(commands(box)[key])
    if f"--{option}" in words:
        at = words.index(f"--{option}")
        del words[at:at + 2]
    return words


def try_option(box, name, option, kind):
    values = absurd.NUMBERS if kind == "FLOAT" else (*absurd.INTEGERS, *absurd.BEYOND)

    def attempt(_number, value):
        child = box.start(*arguments_for(box, name, option), f"--{option}={value}", limits=absurd.QUICK)
        refuse = absurd.is_no_number(value, unsigned=kind == "UINT")
        if (option, value) == ("tolerance", "1e-300"):
            return child.end()  # to disagree is right then
        absurd.expect_quick_end(child, value, must_refuse=refuse, endless=option in ENDLESS)
        return None

    absurd.try_values((*values, *absurd.NO_NUMBERS, *absurd.NOT_FINITE), attempt)


def lines():
    """Command lines that are refused, or that help."""
    return [[], [""], ["--"], ["-"], ["nosuch"], ["train", "--"], ["train", "--model.nosuch=1"], ["train", "--ranks"],
            ["train", "a", "b"], ["train", "--train.steps"], ["train", "--train.steps=1", "--train.steps=2"],
            ["--help", "train", "nosuch"], ["eval"], ["eval", ""], ["generate", "--prompt"], ["x" * 100_000],
            ["train", "--" + "x" * 100_000 + "=1"], ["train"] * 200, ["train", "--model..hidden_size=1"],
            ["train", "--.=1"], ["train", "--=1"], ["train", "--model=1"], ["\x1b[31m"], ["\u00e4"], ["train", "\udcff"],
            ["--version", "--help"], ["inspect", "--report"], ["inspect", "--checkpoint", "/"], ["convert", "/", "/"],
            ["upcycle", ".", "."], ["tokenize"], ["tokenize", "/nonexistent", "--tokenizer", "byte", "-o", "x"],
            ["verify", "--ranks", "3", "--parallel.tp=2"], ["bench", "--layer", "nosuch"], ["eval", "."],
            ["train", "/dev/null", "--print-config"], ["inspect", *["--model.num_heads=1"] * 1000]]


def nonsense(box, arguments):
    expect(box.run(*arguments, limits=absurd.QUICK), codes=(0, 2))
