#!/usr/bin/env python3
"""Writes what FP16 must agree with into tests/data/numerics, made with torch and numpy: f32_to_f16.bin, the halves that both
cast 65,536 F32 numbers to, and loss_scales.json, the scales that torch.amp.GradScaler has in runs of steps whose gradients are finite
or not."""
import json
import pathlib

import numpy as np
import torch

FOLDER = pathlib.Path(__file__).parent.parent / "tests/data/numerics"
HALFWAY = 45056  # numbers halfway between halves, from 2^-27 to beyond the largest; then numbers from all over F32
SCALERS = [{"initial": 65536.0, "window": 5}, {"initial": 1024.0, "window": 1}, {"initial": 4.0, "window": 3}]
STEPS = 60


def write_casts():
    halfway = 0x32001000 + np.arange(HALFWAY, dtype=np.uint64) * 0x2000
    others = np.arange(65536 - HALFWAY, dtype=np.uint64) * 2654435761 & 0xFFFFFFFF
    values = np.concatenate([halfway, others]).astype(np.uint32).view(np.float32)
    halves = torch.from_numpy(values.copy()).to(torch.float16).numpy()
    with np.errstate(over="ignore", invalid="ignore"):
        agree = values.astype(np.float16).view(np.uint16) == halves.view(np.uint16)
    assert agree[~np.isnan(values)].all(), "torch and numpy differ"
    halves.tofile(FOLDER / "f32_to_f16.bin")


def run_scaler(initial, window, share, seed):
    """The scale of each step, and whether its gradients were finite."""
    draw = np.random.default_rng(seed)
    weight = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=initial, growth_interval=window)
    scales, finite = [], []
    for _ in range(STEPS):
        fails = bool(draw.random() < share) and scaler.get_scale() > 1
        finite.append(not fails)
        scales.append(scaler.get_scale())
        optimizer.zero_grad()
        scaler.scale((weight * (float("inf") if fails else 1.0)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    return {"initial": initial, "window": window, "finite": finite, "scales": scales}


def main():
    write_casts()
    runs = [run_scaler(**scaler, share=share, seed=seed) for seed, scaler in enumerate(SCALERS)
            for share in (0.1, 0.4)]
    (FOLDER / "loss_scales.json").write_text(json.dumps(runs) + "\n")


if __name__ == "__main__":
    main()
