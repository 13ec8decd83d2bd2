"""JSON that is not what it says: texts that are hard to parse, forged manifests and forged safetensors headers."""
import copy

from attack.sealing import join_header

HUGE = 2**63 - 1
TEXTS = {"empty": b"", "open": b"[", "null": b"null", "list": b"[]", "deep": b"[" * 200_000, "number": b"1e999",
         "deep-objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "text": b"checkpoint", "nul": b"\0" * 4096,
         "not-utf8": b'{"format": "\xff\xfe"}', "surrogate": b'{"format": "\\ud800"}', "spaces": b" " * 5_000_000,
         "bom": b"\xef\xbb\xbf{}", "twice": b'{"step": 1, "step": 2}', "long-number": b'{"step": ' + b"9" * 100_000 + b"}",
         "comma": b'{"step": 1,}', "utf16": '{"step": 1}'.encode("utf-16")}


def setting(key, value):
    def edit(manifest):
        manifest[key] = value
    return edit


def first_tensor(manifest, group="model"):
    return next(entry for entry in manifest["tensors"].values() if entry["group"] == group)


def tensor(key, value):
    def edit(manifest):
        first_tensor(manifest)[key] = value
    return edit


def piece(key, value):
    def edit(manifest):
        first_tensor(manifest)["pieces"][0][key] = value
    return edit


def file_entry(key, value):
    def edit(manifest):
        next(iter(manifest["files"].values()))[key] = value
    return edit


def rename_file(name):
    def edit(manifest):
        first = next(iter(manifest["files"]))
        manifest["files"][name] = manifest["files"].pop(first)
        for entry in manifest["tensors"].values():
            for part in entry["pieces"]:
                part["file"] = name if part["file"] == first else part["file"]
    return edit


def drop_tensor(manifest):
    del manifest["tensors"]["embedding.weight"]


def add_tensor(manifest):
    manifest["tensors"]["layers.9.attn.k.weight"] = copy.deepcopy(first_tensor(manifest))


def piece_twice(manifest):
    entry = first_tensor(manifest)
    entry["pieces"].append(copy.deepcopy(entry["pieces"][0]))


def drop_pieces(manifest):
    first_tensor(manifest)["pieces"].clear()


def edits_of_manifest():
    """(name, edit in place of a manifest that must be refused or make no difference)."""
    found = [(f"step-{name}", setting("step", value)) for name, value in
             (("2^63-1", HUGE), ("2^63", HUGE + 1), ("2^64", 2**64), ("negative", -1), ("half", 10.5), ("text", "10"),
              ("null", None), ("other", 11), ("zero", 0))]
    found += [(f"{key}-{i}", setting(key, value)) for key, value, i in
              (("version", 2, 0), ("version", "1", 1), ("version", -1, 2), ("format", "other", 0), ("files", {}, 0),
               ("files", [], 1), ("tensors", {}, 0), ("tensors", [], 1), ("tensors", None, 2))]
    found += [(f"bytes-{value}", file_entry("bytes", value)) for value in (-1, 0, HUGE, "many", 1.5)]
    found += [("hash-text", file_entry("xxh64", "x" * 16)), ("hash-long", file_entry("xxh64", "0" * 1000))]
    found += [(f"file-{i}", rename_file(name)) for i, name in
              enumerate(("../../../../etc/passwd", "/etc/passwd", "", ".", "a" * 5000, "manifest.json", "nul\0byte"))]
    found += [(f"shape-{i}", tensor("shape", value)) for i, value in
              enumerate(([-1, 16], [2**62, 2**62], [], [HUGE], [320], [0, 16], [320.5, 16], "320", [320, 16, 1]))]
    found += [(f"dtype-{value}", tensor("dtype", value)) for value in ("F64", "BF16", "I64", "X", "")]
    found += [(f"offset-{i}", piece("offset", value)) for i, value in
              enumerate(([-1, 0], [HUGE, 0], [1, 0], [0], [], [2**64, 0]))]
    found += [(f"piece-shape-{i}", piece("shape", value)) for i, value in
              enumerate(([321, 16], [-320, -16], [2**32, 2**32], [1, 16], [320]))]
    found += [("piece-file", piece("file", "missing.safetensors")), ("piece-key", piece("key", "missing")),
              ("group", tensor("group", "x")), ("drop-tensor", drop_tensor), ("add-tensor", add_tensor),
              ("piece-twice", piece_twice), ("drop-pieces", drop_pieces)]
    return found


def header_edit(key, value):
    def make(header, tensors):
        name = next(name for name in header if name != "__metadata__")
        header[name][key] = value
        return join_header(header, tensors)
    return make


def header_text(text, length=None):
    return lambda _header, tensors: join_header(text, tensors, length)


def header_length(length):
    return lambda header, tensors: join_header(header, tensors, length)


def overlapping(header, tensors):
    """Two tensors that share bytes."""
    one, other = sorted((name for name in header if name != "__metadata__"),
                        key=lambda name: header[name]["data_offsets"])[:2]
    size = header[other]["data_offsets"][1] - header[other]["data_offsets"][0]
    begin = header[one]["data_offsets"][0]
    header[other]["data_offsets"] = [begin, begin + size]
    return join_header(header, tensors)


def missing(header, tensors):
    del header[next(name for name in header if name != "__metadata__")]
    return join_header(header, tensors)


def headers():
    """(name, function of a safetensors file's header and bytes that gives a file which must be refused)."""
    found = [(f"length-{name}", header_length(value)) for name, value in
             (("2^63-1", HUGE), ("2^64-1", 2**64 - 1), ("2^63", 2**63), ("zero", 0), ("short", 5), ("2^31", 2**31))]
    found += [(f"offsets-{i}", header_edit("data_offsets", value)) for i, value in
              enumerate(([-8, 8], [HUGE - 1, HUGE], [2**63, 2**64], [100, 4], [0], [], [0, 1], "0", [0.5, 4.5]))]
    found += [(f"shape-{i}", header_edit("shape", value)) for i, value in
              enumerate(([-1], [2**62, 4], [2**32, 2**32], [], [0], "x", [1.5]))]
    found += [(f"dtype-{value}", header_edit("dtype", value)) for value in ("F64", "BF16", "X", "", "I64")]
    found += [(f"text-{name}", header_text(text)) for name, text in TEXTS.items() if name != "spaces"]
    found += [("overlapping", overlapping), ("missing", missing),
              ("cut", lambda header, tensors: join_header(header, tensors[:len(tensors) // 2])),
              ("longer", lambda header, tensors: join_header(header, tensors + bytes(64))),
              ("tiny", lambda header, tensors: b"\x01\0\0"), ("no-file", lambda header, tensors: b"")]
    return found
