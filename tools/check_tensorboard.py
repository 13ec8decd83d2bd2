#!/usr/bin/env python3
"""Reads the TensorBoard files of a run with TensorBoard itself and compares them with its metrics.jsonl.

    python3 -m venv venv && venv/bin/pip install tensorboard
    venv/bin/python tools/check_tensorboard.py RUN_FOLDER

Every step of metrics.jsonl must be there exactly once, with the same numbers to float precision, also where the run
was interrupted and resumed. Exits with 1 and says what differs otherwise.
"""

import json
import math
import pathlib
import struct
import sys

from tensorboard.backend.event_processing import event_accumulator

TAGS = {
    "loss/train": "loss",
    "experts/balance_loss": "balance_loss",
    "experts/z_loss": "z_loss",
    "train/grad_norm": "grad_norm",
    "train/learning_rate": "learning_rate",
    "speed/tokens_per_second": "tokens_per_second",
    "speed/utilisation": "utilisation",
    "memory/used_bytes": "memory_used",
}


def as_float32(value):
    return struct.unpack("f", struct.pack("f", value))[0]


def same(a, b):
    return a == b or (math.isnan(a) and math.isnan(b))


def number(line, key):
    """A number of a line, also where JSON could not hold it; None where it was not measured."""
    if key not in line:
        return None
    return float(line["nonfinite"][key]) if line[key] is None else as_float32(line[key])


def expected_scalars(path):
    """{tag: [(step, value), ...]} as metrics.jsonl tells it."""
    scalars = {}
    for text in path.read_text().splitlines():
        line = json.loads(text)
        pairs = TAGS.items() if line["type"] == "step" else [("loss/validation", "loss")]
        for tag, key in pairs:
            value = number(line, key)
            if value is not None:
                scalars.setdefault(tag, []).append((line["step"], value))
        if line["type"] == "step" and "validation_loss" in line:
            scalars.setdefault("loss/validation", []).append((line["step"], number(line, "validation_loss")))
    return scalars


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    run = pathlib.Path(sys.argv[1])
    events = event_accumulator.EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    tags = events.Tags()["scalars"]
    errors = 0
    for tag, expected in expected_scalars(run / "metrics.jsonl").items():
        found = [(event.step, event.value) for event in events.Scalars(tag)] if tag in tags else []
        agree = len(found) == len(expected) and all(
            f[0] == e[0] and same(f[1], e[1]) for f, e in zip(found, expected)
        )
        print(f"{tag}: {len(found)} of {len(expected)} values, {'as recorded' if agree else 'DIFFERENT'}")
        errors += not agree
    print(f"{len(tags)} tags in all")
    sys.exit(1 if errors else 0)


if __name__ == "__main__":
    main()
