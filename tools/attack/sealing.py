"""Checkpoints whose hashes are made to fit what was changed in them, so that an attack gets past them."""
import glob
import json
import os
import struct

from attack.stock import checkpoints

MASK = 2**64 - 1
P1, P2, P3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
P4, P5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5


def rotate(value, bits):
    return ((value << bits) | (value >> (64 - bits))) & MASK


def mix(lane, word):
    return rotate((lane + word * P2) & MASK, 31) * P1 & MASK


def xxh64(data):
    """XXH64 with seed 0 (github.com/Cyan4973/xxHash, doc/xxhash_spec.md)."""
    lanes, at = [(P1 + P2) & MASK, P2, 0, -P1 & MASK], 0
    for at in range(0, len(data) - 31, 32):
        lanes = [mix(lane, word) for lane, word in zip(lanes, struct.unpack_from("<4Q", data, at))]
    at = len(data) // 32 * 32
    value = P5
    if at > 0:
        value = sum(rotate(lane, bits) for lane, bits in zip(lanes, (1, 7, 12, 18))) & MASK
        for lane in lanes:
            value = ((value ^ mix(0, lane)) * P1 + P4) & MASK
    return avalanche(fold_rest((value + len(data)) & MASK, data[at:]))


def fold_rest(value, rest):
    while len(rest) >= 8:
        value = (rotate(value ^ mix(0, struct.unpack_from("<Q", rest)[0]), 27) * P1 + P4) & MASK
        rest = rest[8:]
    if len(rest) >= 4:
        value = (rotate(value ^ (struct.unpack_from("<I", rest)[0] * P1 & MASK), 23) * P2 + P3) & MASK
        rest = rest[4:]
    for byte in rest:
        value = rotate(value ^ (byte * P5 & MASK), 11) * P1 & MASK
    return value


def avalanche(value):
    value = (value ^ (value >> 33)) * P2 & MASK
    value = (value ^ (value >> 29)) * P3 & MASK
    return value ^ (value >> 32)


def read(path):
    with open(path, "rb") as file:
        return file.read()


def write(path, data):
    with open(path, "wb") as file:
        file.write(data if isinstance(data, bytes) else data.encode())


def newest(run):
    return checkpoints(run)[-1]


def write_manifest(checkpoint, content):
    """Writes the manifest, and the hash of it that says the checkpoint is complete."""
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    write(os.path.join(checkpoint, "manifest.json"), data)
    write(os.path.join(checkpoint, "COMPLETE"), f"manifest xxh64 {xxh64(data):016x}\n")


def read_manifest(checkpoint):
    return json.loads(read(os.path.join(checkpoint, "manifest.json")))


def reseal(checkpoint):
    """Makes all hashes and sizes fit the files."""
    manifest = read_manifest(checkpoint)
    for name, entry in manifest["files"].items():
        data = read(os.path.join(checkpoint, name))
        entry.update(bytes=len(data), xxh64=f"{xxh64(data):016x}")
    write_manifest(checkpoint, manifest)


def model_file(checkpoint):
    return sorted(glob.glob(os.path.join(checkpoint, "model*.safetensors")))[0]


def split_header(data):
    """A safetensors file's header and tensor bytes."""
    length = struct.unpack_from("<Q", data)[0]
    return json.loads(data[8:8 + length]), data[8 + length:]


def join_header(header, tensors, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + tensors


def set_values(path, name, values, at=0):
    """Overwrites F32 elements of a tensor in a safetensors file."""
    header, tensors = split_header(read(path))
    begin = header[name]["data_offsets"][0] + 4 * at
    data = struct.pack(f"<{len(values)}f", *values)
    write(path, join_header(header, tensors[:begin] + data + tensors[begin + len(data):]))
