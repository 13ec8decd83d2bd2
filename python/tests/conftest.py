"""What tests share. TESSERA_PROGRAM names the program that the module is compared with."""
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import numpy
import pytest

import tessera

TEST_DATA = pathlib.Path(__file__).resolve().parents[2] / "tests" / "data"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Each test has a folder of its own, with a text to train on."""
    monkeypatch.chdir(tmp_path)
    lines = [f"Verse {i}: the {i % 7}th river goes down to the sea, and the sea is not full.\n" for i in range(300)]
    pathlib.Path("text.txt").write_text("".join(lines))
    return tmp_path


def tiny(**overrides):
    """A configuration that trains in a second."""
    values = {"data.text": "text.txt", "data.sequence_length": 32, "train.steps": 4, "train.global_batch": 4,
              "train.micro_batch": 2, "optim.warmup_steps": 1, "run.device": "cpu", "run.report": False,
              "run.tensorboard": False}
    values.update(overrides)
    return tessera.Config("tiny", values)


def run_program(*arguments):
    """What the program prints."""
    program = os.environ.get("TESSERA_PROGRAM")
    if not program:
        pytest.skip("TESSERA_PROGRAM names no program to compare with")
    done = subprocess.run([program, *map(str, arguments)], capture_output=True, encoding="utf-8", errors="replace",
                          check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def weights_of(path, group="model"):
    """Every tensor of a checkpoint's group by name."""
    checkpoint = tessera.read_checkpoint(path)
    return {name: tensor[...] for name, tensor in checkpoint.items() if tensor.group == group}


def same_bits(one, other):
    """Whether two dicts of arrays are equal to the bit."""
    return one.keys() == other.keys() and all(
        numpy.array_equal(one[name].view(numpy.uint8), other[name].view(numpy.uint8)) for name in one)


def interrupt(script, has_begun):
    """What a script prints after "ready" when it gets Ctrl-C once `has_begun`, and after how many seconds it ends."""
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "ready\n"
        end = time.monotonic() + 60
        while not has_begun() and time.monotonic() < end:
            time.sleep(0.02)
        begin = time.monotonic()
        process.send_signal(signal.SIGINT)
        printed = process.communicate(timeout=100)[0]
        return printed, time.monotonic() - begin
    finally:
        process.kill()
