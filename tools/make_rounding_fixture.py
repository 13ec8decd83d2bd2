#!/usr/bin/env python3
"""Writes tests/data/numerics/rounded: what RoundValues must give, made with numpy and ml_dtypes (pip install numpy
ml_dtypes) by the recipes' own words, block by block: x.bin, F32 [37, 50], and a file of that shape for each case."""
import math
import pathlib

import ml_dtypes
import numpy as np

ROWS, COLUMNS = 37, 50
GROUPS = [0, 5, 5, 37]  # of the cases named "groups"
NUMBERS = {"e4m3": (ml_dtypes.float8_e4m3fn, 448.0), "e5m2": (ml_dtypes.float8_e5m2, 57344.0),
           "e2m1": (ml_dtypes.float4_e2m1fn, 6.0)}
# name: number, rows and columns of a block, nested scales
CASES = {
    "block_1x16": ("e4m3", 1, 16, False),
    "block_16x1": ("e4m3", 16, 1, False),
    "block_8x8": ("e4m3", 8, 8, False),
    "block_1x32_e5m2": ("e5m2", 1, 32, False),
    "row": ("e4m3", 1, COLUMNS, False),
    "tensor_e5m2": ("e5m2", ROWS, COLUMNS, False),
    "nested_1x16": ("e2m1", 1, 16, True),
    "nested_16x16": ("e2m1", 16, 16, True),
    "groups_block_16x1": ("e4m3", 16, 1, False),
    "groups_nested_16x1": ("e2m1", 16, 1, True),
}


def cast(values, number):
    kind, largest = NUMBERS[number]
    return np.clip(values, -largest, largest).astype(kind).astype(np.float64)


def power_of_two(amax, largest):
    exponent = -126
    while math.ldexp(largest, exponent) < amax:
        exponent += 1
    return math.ldexp(1.0, exponent)


def round_group(x, number, rows, columns, nested):
    largest = NUMBERS[number][1]
    unit = power_of_two(np.abs(x).max(initial=0), largest * 448) if nested else 1.0
    result = np.copysign(0.0, x)
    for r in range(0, x.shape[0], rows):
        for c in range(0, x.shape[1], columns):
            block = x[r:r + rows, c:c + columns]
            amax = np.abs(block).max()
            if nested:
                # The two divisions are F32's.
                ratio = np.float32(np.float32(amax) / np.float32(largest)) / np.float32(unit)
                scale = float(cast(np.float64(ratio), "e4m3")) * unit
            else:
                scale = power_of_two(amax, largest)
            if scale > 0:
                scaled = (block.astype(np.float32) / np.float32(scale)).astype(np.float64)
                result[r:r + rows, c:c + columns] = cast(scaled, number) * scale
    return result


def main():
    random = np.random.default_rng(7)
    x = random.standard_normal((ROWS, COLUMNS)) * np.exp(2 * random.standard_normal((ROWS, COLUMNS)))
    x[3] *= 1e-9
    x[:, 7] *= 1e4
    x = x.astype(ml_dtypes.bfloat16).astype(np.float64)
    folder = pathlib.Path(__file__).parent.parent / "tests/data/numerics/rounded"
    folder.mkdir(exist_ok=True)
    x.astype("<f4").tofile(folder / "x.bin")
    for name, (number, rows, columns, nested) in CASES.items():
        ends = GROUPS if name.startswith("groups") else [0, ROWS]
        parts = [round_group(x[a:b], number, rows, columns, nested) for a, b in zip(ends, ends[1:])]
        np.concatenate(parts).astype("<f4").tofile(folder / f"{name}.bin")


if __name__ == "__main__":
    main()
