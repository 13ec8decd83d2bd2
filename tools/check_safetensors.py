#!/usr/bin/env python3
"""Reads the safetensors files of checkpoints with the reference library and compares them with their manifest.

    python3 -m venv /tmp/venv && /tmp/venv/bin/pip install safetensors numpy ml_dtypes xxhash
    /tmp/venv/bin/python tools/check_safetensors.py runs/demo/checkpoints/step-00000100

Arguments are checkpoint folders or single files. Exit code 1 when anything differs.
"""

import json
import pathlib
import sys

import ml_dtypes  # noqa: F401 (teaches NumPy bfloat16)
import numpy as np
import xxhash
from safetensors import safe_open

NUMPY_TYPES = {"F32": "float32", "F64": "float64", "BF16": "bfloat16", "I32": "int32",
               "I64": "int64", "U8": "uint8", "U16": "uint16"}


def read_file(path):
    """All tensors of a file, by the reference implementation, compared with the bytes that the header points at."""
    data = path.read_bytes()
    header_bytes = int.from_bytes(data[:8], "little")
    header = json.loads(data[8:8 + header_bytes])
    tensors = {}
    with safe_open(path, framework="np") as file:
        for name in file.keys():
            tensors[name] = file.get_tensor(name)
            begin, end = header[name]["data_offsets"]
            raw = data[8 + header_bytes + begin:8 + header_bytes + end]
            assert tensors[name].tobytes() == raw, f"{path}: {name} has other bytes"
            assert list(tensors[name].shape) == header[name]["shape"], f"{path}: {name}"
    assert tensors.keys() == header.keys() - {"__metadata__"}, f"{path}: names differ"
    return tensors


def check_piece(name, record, piece, files):
    array = files[piece["file"]][piece["key"]]
    assert list(array.shape) == piece["shape"], f"{name}: shape {array.shape}"
    assert array.dtype == np.dtype(NUMPY_TYPES[record["dtype"]]), f"{name}: type {array.dtype}"
    return array.size


def check_checkpoint(folder):
    text = (folder / "manifest.json").read_bytes()
    marker = (folder / "COMPLETE").read_text().split()[-1]
    assert marker == xxhash.xxh64(text).hexdigest(), f"{folder}: COMPLETE does not fit the manifest"
    manifest = json.loads(text)
    files = {}
    for name, record in manifest["files"].items():
        data = (folder / name).read_bytes()
        assert len(data) == record["bytes"], f"{name}: {len(data)} bytes"
        assert xxhash.xxh64(data).hexdigest() == record["xxh64"], f"{name}: checksum differs"
        files[name] = read_file(folder / name)
    for name, record in manifest["tensors"].items():
        total = sum(check_piece(name, record, piece, files) for piece in record["pieces"])
        assert total == int(np.prod(record["shape"], dtype=object)), f"{name}: pieces hold {total}"
    print(f"{folder}: {len(manifest['tensors'])} tensors in {len(files)} files agree")


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    try:
        for argument in map(pathlib.Path, sys.argv[1:]):
            if argument.is_dir():
                check_checkpoint(argument)
            else:
                print(f"{argument}: {len(read_file(argument))} tensors agree")
    except (AssertionError, OSError, KeyError) as error:
        sys.exit(f"differs: {error}")


if __name__ == "__main__":
    main()
