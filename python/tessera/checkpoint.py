"""Checkpoints, tensor by tensor."""
from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from . import _tessera
from .config import Config


class CheckpointTensor:
    """A tensor on the disk. Indexing reads that part of it: tensor[...] all, tensor[10:20] ten rows.

    Indices are whole numbers, slices with step 1 and `...`; what comes is a NumPy array of float32, BF16 being widened
    exactly, or of the type itself. torch() keeps BF16.
    """

    def __init__(self, native: Any, name: str, group: str, dtype: str, shape: tuple[int, ...]) -> None:
        self._native = native
        self.name = name
        self.group = group  #: "model" or "optimizer"
        self.dtype = dtype  #: "f32", "bf16", ...
        self.shape = shape

    def _read(self, index: Any, bits: bool) -> tuple[Any, tuple[int, ...]]:
        """The part as an array that speaks DLPack, with the shape in which indexed dimensions are gone."""
        starts, extents, kept = _resolve(index, self.shape)
        array = self._native.read(self.name, starts, extents, bits)
        return array, tuple(extent for extent, keep in zip(extents, kept) if keep)

    def __getitem__(self, index: Any) -> Any:
        import numpy

        is_bf16 = self.dtype == "bf16"
        array, shape = self._read(index, bits=is_bf16)
        values = numpy.from_dlpack(array).reshape(shape)
        if not is_bf16:
            return values
        # NumPy has no type for BF16, whose bits are the upper half of float32's.
        return (values.astype(numpy.uint32) << 16).view(numpy.float32)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        array = self[...]
        return array if dtype is None else array.astype(dtype)

    def torch(self, index: Any = ...) -> Any:
        """The same part as a tensor of PyTorch, of the type that is stored."""
        import torch

        array, shape = self._read(index, bits=False)
        return torch.from_dlpack(array).reshape(shape)

    def __repr__(self) -> str:
        return f"<tessera.CheckpointTensor {self.name} {self.dtype} {list(self.shape)}>"


def _resolve(index: Any, shape: tuple[int, ...]) -> tuple[list[int], list[int], list[bool]]:
    """First element, extent and whether it stays, of each dimension."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in parts:
        at = parts.index(Ellipsis)
        parts[at:at + 1] = [slice(None)] * (len(shape) - len(parts) + 1)
    parts += [slice(None)] * (len(shape) - len(parts))
    if len(parts) != len(shape):
        raise IndexError(f"{len(parts)} indices for a tensor of {len(shape)} dimensions")
    starts, extents, kept = [], [], []
    for part, length in zip(parts, shape):
        if isinstance(part, slice):
            first, last, step = part.indices(length)
            if step != 1:
                raise IndexError("a checkpoint is read in slices of step 1")
            starts.append(first)
            extents.append(max(0, last - first))
            kept.append(True)
            continue
        place = part + length if part < 0 else part
        if not 0 <= place < length:
            raise IndexError(f"index {part} is outside of {length}")
        starts.append(place)
        extents.append(1)
        kept.append(False)
    return starts, extents, kept


class Checkpoint(Mapping[str, CheckpointTensor]):
    """A checkpoint's tensors by name: weights, and the optimizer's moments and masters. Nothing is read until asked."""

    def __init__(self, path: str | os.PathLike[str], verify: bool = True) -> None:
        self._native = _tessera.Checkpoint(os.fspath(path), verify)
        self._tensors = {name: CheckpointTensor(self._native, name, group, dtype, shape)
                         for name, group, dtype, shape in self._native.tensors()}

    def __getitem__(self, name: str) -> CheckpointTensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def path(self) -> pathlib.Path:
        """The checkpoint's own folder."""
        return pathlib.Path(self._native.path)

    @property
    def step(self) -> int:
        """Training steps behind it."""
        return self._native.step

    @property
    def state(self) -> dict[str, Any]:
        """What a run continues from beside its tensors: position, configuration as TOML, the data's fingerprint."""
        return json.loads(self._native.state)

    @property
    def config(self) -> Config:
        """The configuration that it was trained with."""
        return Config.from_toml(self.state["config"])

    @property
    def skipped(self) -> list[str]:
        """Newer checkpoints of the folder that are unfinished or damaged, each with the reason."""
        return self._native.skipped

    def __repr__(self) -> str:
        return f"<tessera.Checkpoint {self.path}, {len(self)} tensors>"


def read_checkpoint(path: str | os.PathLike[str], verify: bool = True) -> Checkpoint:
    """Opens a checkpoint, or the newest whole one of a run's folder.

    Args:
        path: As Model.load takes, but no folder of Hugging Face.
        verify: Reads all of it once and compares checksums; otherwise sizes alone are compared.
    """
    return Checkpoint(path, verify)
