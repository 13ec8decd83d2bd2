"""Arrays as they come from users and go back to them."""
from __future__ import annotations

import sys
from typing import Any


def as_array(values: Any) -> Any:
    """What the native part takes without a copy: arrays as they are; lists become NumPy arrays."""
    if values is None or hasattr(values, "__dlpack__"):
        return values
    import numpy

    return numpy.asarray(values)


def like(result: Any, given: Any) -> Any:
    """A NumPy array as a tensor of PyTorch where the user gave one; the memory stays."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(given, torch.Tensor):
        return torch.from_numpy(result)
    return result
