"""`tessera plan` and `tessera verify`."""
from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from . import _tessera
from .config import Config, Overrides, native_of


@contextlib.contextmanager
def _named(config: Config | Overrides) -> Iterator[_tessera.Config]:
    """The configuration as a command takes it: TOML text stands in a file."""
    native = native_of(config)
    file, text, overrides = native.sources()
    if not text:
        yield native
        return
    with tempfile.NamedTemporaryFile("w", suffix=".toml", encoding="utf-8") as written:
        written.write(text)
        written.flush()
        yield _tessera.Config(written.name, "", overrides)


def plan(config: Config | Overrides, *, hardware: str | os.PathLike[str], gpus: int, top: int = 5,
         explain: bool = False, write: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """Finds the fastest layouts of a configuration on hardware that need not be there, by simulating its steps.

    Args:
        config: Keys that it sets stay as they are.
        hardware: A name ("h100-ib", ...; an unknown one lists them), or a file of `tessera bench --calibrate`.
        gpus: Devices, each of which is a rank.
        top: Layouts that are returned.
        explain: Searches nothing: simulates the configuration as it is.
        write: File for the best layout's whole configuration.

    Returns:
        What `tessera plan --json` prints: "layouts", the fastest first, each with "step_seconds", "tokens_per_second",
        "memory_bytes", "mfu" and the "overrides" that give it; and how many were judged.
    """
    with _named(config) as native:
        printed = _tessera.plan(native, hardware=os.fspath(hardware), gpus=gpus, top=top, explain=explain,
                                write=os.fspath(write) if write is not None else "")
    return json.JSONDecoder().raw_decode(printed)[0]  # names of files that were written follow


@dataclass(frozen=True)
class Verification:
    """What verify() found; true where the layout agrees, or is proven."""

    agrees: bool
    details: dict[str, Any]  #: what `tessera verify --json` prints

    def __bool__(self) -> bool:
        return self.agrees


def verify(config: Config | Overrides, *, ranks: int = 0, steps: int = 3, static: bool = False,
           full: bool = False) -> Verification:
    """Compares a configuration's layout over ranks with one rank: losses, gradients and weights.

    Args:
        config: What is checked, shrunk unless `full`. Ranks are threads of this process, on the host.
        ranks: 0: the fewest that the layout needs.
        steps: Optimizer steps that are compared.
        static: Runs nothing: proves how each value is spread over the ranks, at the model's own sizes.
        full: With the model's own sizes.
    """
    with _named(config) as native:
        details = json.loads(_tessera.verify(native, ranks=ranks, steps=steps, proof=static, full=full))
    return Verification(details["proven"] if static else details["agrees"], details)
