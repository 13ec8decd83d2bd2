"""plan and verify are the program's."""
import json
import pathlib
import time

import pytest
from conftest import interrupt, run_program, tiny

import tessera


def test_plan_is_the_programs():
    config = tiny(**{"run.device": "auto"})
    result = tessera.plan(config, hardware="h100-ib", gpus=2, write="best.toml")
    assert result["layouts"] and result["layouts"][0]["step_seconds"] > 0
    options = [f"--{key}={json.dumps(config[key])}".replace('"', "")
               for key, origin in config.origins().items() if origin == key]
    printed = run_program("plan", *options, "--hardware=h100-ib", "--gpus=2", "--json")
    assert json.loads(printed) == result
    assert tessera.plan(tessera.Config.from_toml(config.to_toml()), hardware="h100-ib", gpus=2)["judged"] > 0
    best = tessera.Config.from_file("best.toml")
    assert best["train.global_batch"] == 4
    explained = tessera.plan(best, hardware="h100-ib", gpus=2, explain=True)
    assert len(explained["layouts"]) == 1
    with pytest.raises(tessera.Error, match="h100-ib"):
        tessera.plan(config, hardware="abacus", gpus=2)


def test_ctrl_c_ends_a_search():
    begin = time.monotonic()
    printed, seconds = interrupt("""
        import tessera
        config = tessera.Config("deepseek-v3", {"data.sequence_length": 4096, "train.global_batch": 4096})
        print("ready", flush=True)
        try:
            tessera.plan(config, hardware="epyc-core", gpus=1024, write="best.toml")
        except KeyboardInterrupt:
            print("stopped")
    """, lambda: time.monotonic() > begin + 3)
    assert printed == "stopped\n" and seconds < 10
    assert not pathlib.Path("best.toml").exists()


def test_verify_compares_and_proves():
    found = tessera.verify(tiny(**{"parallel.ep": 2}), ranks=2, steps=1)
    assert found and found.details["worst"] < 1e-4
    proven = tessera.verify(tiny(**{"parallel.ep": 2}), static=True)
    assert proven and proven.details["ranks"] == 2
    with pytest.raises(tessera.Error):
        tessera.verify(tiny(**{"parallel.ep": 3}), ranks=3)
