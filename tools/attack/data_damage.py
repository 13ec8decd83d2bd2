"""Damaged texts, token files, logs and configurations."""
import glob
import gzip
import json
import lzma
import os

from attack.damage import DAMAGES
from attack.harness import Case, expect
from attack.hostile_json import TEXTS
from attack.stock import LAST, MODEL, QUIET, SMALL, require_digest

RUN_FILES = ("metrics.jsonl", "run.json", "tokens/*.bin", "tokens/*.idx", "tokens/*.json")
SHORT_RUN = {("garbage", "metrics.jsonl"), ("delete", "metrics.jsonl"), ("truncate", "metrics.jsonl"),
             ("truncate", "tokens/*.bin"), ("flip", "tokens/*.bin"), ("garbage", "run.json"),
             ("flip", "tokens/*.idx")}
TOKEN_FLIPS = 20


def cases(_attack):
    found = [Case("run-files", f"{damage}-{name.replace('/*.', '-')}", lambda box, d=damage, n=name: damage_run(box, d, n),
                  short=(damage, name) in SHORT_RUN) for damage in DAMAGES for name in RUN_FILES]
    found += [Case("token-files", f"{damage}-{ending}", lambda box, d=damage, e=ending: damage_tokens(box, d, e),
                   short=damage == "truncate") for damage in DAMAGES for ending in ("bin", "idx")]
    found += [Case("token-files", f"flip-any-{i}", lambda box, i=i: damage_tokens(box, "flip", ("idx", "bin")[i % 2]),
                   short=i < 4) for i in range(TOKEN_FLIPS)]
    found += [Case("token-files", f"header-{i}", lambda box, data=data: forge_index(box, data), short=i < 2)
              for i, data in enumerate(indices())]
    found += [Case("texts", name, lambda box, n=name, d=data: read_text(box, n, d),
                   short=name in ("gz-cut.txt.gz", "bomb.txt.gz", "deep.jsonl", "zero.txt"))
              for name, data in texts().items()]
    found += [Case("texts", f"path-{i}", lambda box, p=path: strange_path(box, p), short=path == "/dev/null")
              for i, path in enumerate(("/dev/zero", "/dev/null", "/dev/full", "/", "/proc/self", "/proc/self/mem", "",
                                        ".", "x" * 300, "x" * 5000, "a\nb", "\x1b[31m", "/etc/shadow/x", "~"))]
    found += [Case("config-files", name, lambda box, d=data: read_config(box, d), short=name in ("deep-list", "twice"))
              for name, data in configs().items()]
    found += [Case("config-files", f"random-{i}", random_config, short=i < 3) for i in range(20)]
    found += [Case("questions", name, lambda box, d=data: read_questions(box, d), short=name == "deep")
              for name, data in questions().items()]
    return found


def damage_run(box, damage, pattern):
    """A run whose log, record or tokens are damaged goes on to the right end, or refuses; a log never blocks it."""
    run = box.copy(box.attack.stock.run, "run")
    path = glob.glob(os.path.join(glob.escape(run), pattern))[0]
    DAMAGES[damage](path, None, box.random)
    never_blocks = pattern == "metrics.jsonl" and damage not in ("directory", "device", "link_to_itself")
    resumed = expect(box.run(*box.attack.stock.resume(run), limits=SMALL), codes=(0,) if never_blocks else (0, 2))
    if resumed.code == 0:
        require_digest(resumed, run, LAST, box.attack.stock.expected)
    expect(box.run("eval", run, limits=SMALL), codes=(0, 2))
    expect(box.run("inspect", "--report", run, limits=SMALL), codes=(0, 2))


def use_tokens(box, prefix):
    command = ["train", f"--data.tokens={prefix}", "--train.steps=3", f"--run.folder={box.path('run')}", *MODEL, *QUIET]
    expect(box.run(*command, limits=SMALL), codes=(0, 2))
    expect(box.run("eval", box.attack.stock.run, "--tokens", prefix, "--max-batches", "2", limits=SMALL), codes=(0, 2))


def damage_tokens(box, damage, ending):
    for each in ("bin", "idx"):
        box.copy(f"{box.attack.stock.tokens}.{each}", f"tokens.{each}")
    DAMAGES[damage](box.path(f"tokens.{ending}"), None, box.random)
    use_tokens(box, box.path("tokens"))


def forge_index(box, change):
    box.copy(box.attack.stock.tokens + ".bin", "tokens.bin")
    with open(box.attack.stock.tokens + ".idx", "rb") as file:
        box.write("tokens.idx", change(bytearray(file.read())))
    use_tokens(box, box.path("tokens"))


def indices():
    """Changes of Megatron's index: magic (9 bytes), version (8), type (1), sequences (8), documents (8), lengths,
    offsets, documents."""
    def put(at, data):
        def change(index):
            index[at:at + len(data)] = data
            return bytes(index)
        return change
    words = [(2**63 - 1).to_bytes(8, "little"), (2**64 - 1).to_bytes(8, "little"), bytes(8), (2**32).to_bytes(8, "little")]
    return ([put(18, word) for word in words] + [put(26, word) for word in words] + [put(17, bytes([t])) for t in
            (0, 1, 2, 3, 6, 7, 9, 255)] + [put(9, word) for word in words] + [put(34, b"\xff\xff\xff\x7f"),
            put(34, b"\xff\xff\xff\xff"), put(38, words[0]), put(38, words[1]), put(46, words[0])])


def texts():
    """Files by name, of what a text may not be."""
    line = b'{"text": "some words of a line"}\n'
    plain = line * 500
    found = {f"{name}.jsonl": plain + data + b"\n" + plain for name, data in TEXTS.items() if name != "spaces"}
    found |= {f"{name}.txt": data for name, data in TEXTS.items()}
    found |= {"gz-cut.txt.gz": gzip.compress(plain)[:-9], "gz-garbage.txt.gz": b"\x1f\x8b" + bytes(range(256)) * 9,
              "gz-plain.txt.gz": plain, "gz-tail.txt.gz": gzip.compress(plain) + b"garbage",
              "gz-empty.txt.gz": b"", "xz-cut.txt.xz": lzma.compress(plain)[:-9], "xz-plain.txt.xz": plain,
              "zst-garbage.txt.zst": b"\x28\xb5\x2f\xfd" + bytes(range(256)) * 9, "zst-empty.txt.zst": b"",
              "zst-window.txt.zst": b"\x28\xb5\x2f\xfd\x00\xff" + b"\xff" * 64,
              "bomb.txt.gz": gzip.compress(bytes(64 * 2**20), 6), "bomb.jsonl.gz": gzip.compress(b"[" * (32 * 2**20)),
              "nested.txt.gz": gzip.compress(gzip.compress(plain)),
              "line.jsonl": b'{"text": "' + b"a" * (16 * 2**20) + b'"}\n', "zero.txt": bytes(10**6),
              "newlines.txt": b"\n" * 10**6, "return.txt": b"a\rb\r\n" * 10**5, "one.txt": b"a",
              "key.jsonl": b'{"other": "x"}\n', "number.jsonl": b'{"text": 5}\n', "escape.jsonl": b'{"text": "\\u12"}\n',
              "lone.jsonl": b'{"text": "\\udc00\\ud800"}\n', "truncated-utf8.txt": "ä".encode() * 1000 + b"\xc3",
              "overlong.txt": b"\xc0\x80" * 100, "blank.jsonl": b"\n\n\n"}
    return found


def read_text(box, name, data):
    path = box.write(name, data)
    expect(box.run("tokenize", path, "--tokenizer", box.attack.stock.tokenizer, "-o", box.path("one"), limits=SMALL),
           codes=(0, 2))
    expect(box.run("tokenize", path, "--train", box.path("learnt.json"), "--vocab-size", "300", limits=SMALL),
           codes=(0, 2))
    if name.endswith((".jsonl", ".jsonl.gz")):
        expect(box.run("tokenize", path, "--tokenizer", "byte", "--skip-invalid", "-o", box.path("two"), limits=SMALL),
               codes=(0, 2))


def strange_path(box, path):
    expect(box.run("tokenize", path, "--tokenizer", "byte", "-o", box.path("one"), limits=SMALL), codes=(0, 2))
    expect(box.run("train", f"--data.text={path}", f"--run.folder={box.path('run')}", "--train.steps=2", *MODEL, *QUIET,
                   limits=SMALL), codes=(0, 2))
    expect(box.run("eval", path, limits=SMALL), codes=(2,))
    expect(box.run("train", path, "--print-config", limits=SMALL), codes=(0, 2))


def configs():
    """Configuration files by name."""
    found = {f"json-{name}": data for name, data in TEXTS.items()}
    found |= {"deep-list": b"[train]\nsteps = " + b"[" * 100_000, "deep-table": b"a = " + b"{a=" * 50_000,
              "deep-closed": b"[train]\nrecompute = " + b"[" * 50_000 + b"]" * 50_000,
              "dotted": b"a" + b".a" * 100_000 + b" = 1", "twice": b"[train]\nsteps = 1\nsteps = 2",
              "table-twice": b"[train]\nsteps = 1\n[train]\nsteps = 2", "array-table": b"[[train]]\nsteps = 1",
              "huge": b"[train]\nsteps = " + b"9" * 5000, "hex": b"[train]\nsteps = 0xffffffffffffffff",
              "inf": b"[optim]\nlearning_rate = inf", "nan": b"[optim]\nlearning_rate = nan",
              "minus-nan": b"[optim]\nlearning_rate = -nan", "date": b"[train]\nsteps = 2024-01-01",
              "float": b"[train]\nsteps = 1.0", "text": b'[train]\nsteps = "1"', "bool": b"[train]\nsteps = true",
              "list": b"[train]\nsteps = [1]", "open-string": b'[run]\nfolder = "abc', "nul": b'[run]\nfolder = "a\0b"',
              "escape": b'[run]\nfolder = "\\u0000"', "not-utf8": b'[run]\nfolder = "\xff"',
              "unicode-key": "[trÄin]\nsteps = 1".encode(), "bidi": '[run]\nfolder = "\u202e"'.encode(),
              "crlf": b"[train]\r\nsteps = 1\r\n", "bom": b"\xef\xbb\xbf[train]\nsteps = 1", "no-end": b"[train]\nsteps = 1",
              "long-line": b"[run]\nfolder = '" + b"a" * 10**6 + b"'", "long-key": b"a" * 10**6 + b" = 1",
              "many-keys": b"\n".join(b"k%d = 1" % i for i in range(50_000)),
              "long-list": b"[train]\nrecompute = [" + b'"a",' * 10**5 + b"]", "section": b"[", "bracket": b"]"}
    return found


def read_config(box, data):
    path = box.write("run.toml", data)
    for arguments in (["train", path, "--print-config"], ["inspect", path], ["inspect", path, "--memory"]):
        expect(box.run(*arguments, limits=SMALL), codes=(0, 2))


def random_config(box):
    """A valid file with bytes changed, taken out and doubled."""
    lines = ["[model]", "hidden_size = 16", "[train]", "steps = 3", 'recompute = ["all"]', "[optim]",
             "learning_rate = 1e-3", "[run]", f'folder = "{box.path("run")}"', "[moe]", "inner_sizes = [1, 2]"]
    for _ in range(8):
        data = bytearray("\n".join(lines).encode())
        for _ in range(box.random.randrange(1, 6)):
            at = box.random.randrange(len(data))
            data[at:at + box.random.randrange(2)] = box.random.choice((box.random.randbytes(2), b"", b"[", b'"', b"=", b"\0"))
        path = box.write("run.toml", bytes(data))
        expect(box.run("train", path, "--print-config", limits=SMALL), codes=(0, 2))


def questions():
    good = {"context": "a", "choices": ["b", "c"], "answer": 0}
    bad = [("answer-huge", {**good, "answer": 2**63}), ("answer-negative", {**good, "answer": -1}),
           ("choices-empty", {**good, "choices": []}), ("choices-text", {**good, "choices": "b"}),
           ("choice-empty", {**good, "choices": ["", ""]}), ("context-long", {**good, "context": "a" * 2000}),
           ("answer-text", {**good, "answer": "0"}), ("choices-many", {**good, "choices": ["b"] * 2000})]
    return {name: json.dumps(value).encode() for name, value in bad} | TEXTS


def read_questions(box, data):
    path = box.write("questions.jsonl", data + b"\n")
    expect(box.run("eval", box.attack.stock.run, "--choices", path, limits=SMALL), codes=(0, 2))
