"""Arrays as they come from users and go back to them."""
from __future__ import annotations

import sys
from typing import Any

from ._tessera import Error


def as_array(values: Any, name: str = "tokens") -> Any:
    """What the native part takes without a copy: arrays as they are; lists become NumPy arrays.

    NumPy's of a byte order that DLPack does not know are copied. Raises Error, with `name`, for what is no array of
    numbers.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(values, torch.Tensor):
        if values.layout != torch.strided or values.is_meta:
            raise _refusal(values, name)
        return values.resolve_neg()  # DLPack has no mark for numbers that are yet to be negated
    if values is None or (hasattr(values, "__dlpack__") and not _is_numpy(values)):
        return values
    import numpy

    try:
        array = numpy.asarray(values)
    except ValueError as error:  # rows of several lengths
        raise _refusal(values, name, f": {error}") from error
    if array.ndim > 0 and array.size == 0 and not _is_numpy(values):
        return array.astype(numpy.int64)  # NumPy takes an empty list for floating-point numbers
    if array.dtype.kind not in "iufbc":
        raise _refusal(values, name)
    if isinstance(values, numpy.ma.MaskedArray) and numpy.ma.is_masked(values):
        raise Error(f"{name} is a masked array, whose masked numbers would count as tokens; fill it, or give documents "
                    "of their own")
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def token_arrays(tokens: Any, labels: Any, documents: Any) -> tuple[Any, Any, Any]:
    """What a step or a score is given, each as as_array has it."""
    return as_array(tokens), as_array(labels, "labels"), as_array(documents, "documents")


def _is_numpy(values: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(values, (numpy.ndarray, numpy.generic))


def _refusal(values: Any, name: str, reason: str = "") -> Error:
    return Error(f"{name}: expected an array of whole numbers, found {shown(values)}{reason}")


def shown(value: Any) -> str:
    """A value and its type, not too long."""
    text = repr(value)
    return f"{text if len(text) <= 40 else text[:40] + '...'} ({type(value).__name__})"


def require_unicode(text: str, name: str) -> str:
    """Refuses lone surrogates, as decoding with `surrogateescape` makes them: no text in UTF-8 has them."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Error(f"{name} is no Unicode: {error}") from error
    return text


def like(result: Any, given: Any) -> Any:
    """A NumPy array as a tensor of PyTorch where the user gave one; the memory stays."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(given, torch.Tensor):
        return torch.from_numpy(result)
    return result
