"""Models that score and write text."""
from __future__ import annotations

import os
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import _tessera
from ._tessera import Error
from .arrays import as_array, like, require_unicode, token_arrays
from .config import Config, Overrides, native_of


@dataclass(frozen=True)
class Generation:
    """What a model wrote after a prompt."""

    text: str
    ids: list[int]
    logprobs: list[float]  #: log-probability of each id under the model, in nats, before temperature and cuts
    ended: bool  #: at the end of a document, before max_tokens


class Parameters(Mapping[str, Any]):
    """The weights by name, each an array that shares the model's memory (see Model.parameters)."""

    def __init__(self, arrays: dict[str, Any]) -> None:
        self._arrays = arrays

    def __getitem__(self, name: str) -> Any:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def numpy(self) -> dict[str, Any]:
        """As NumPy arrays that share the memory. BF16 weights, which NumPy has no type for, need torch()."""
        import numpy

        try:
            return {name: numpy.from_dlpack(array) for name, array in self._arrays.items()}
        except (RuntimeError, BufferError) as error:
            raise Error(f"NumPy cannot share these weights ({error}): it has no BF16 and no memory of GPUs; take "
                        "torch(), or read a checkpoint, which widens BF16") from error

    def torch(self) -> dict[str, Any]:
        """As PyTorch tensors that share the memory."""
        import torch

        return {name: torch.from_dlpack(array) for name, array in self._arrays.items()}


class Model:
    """A language model: weights, tokenizer and the programs that compute with them.

    Model(config) has random weights, those that a training of the configuration starts from (run.seed); Model.load
    opens a trained one. Token arrays are [B, T], whole numbers of any type, of NumPy, PyTorch or whoever speaks DLPack,
    in the host's memory; lists are taken too. Wherever labels can be given, labels[b, t] is the token that follows
    tokens[b, t], or -100 for none: unlike those of transformers they are shifted already.
    """

    def __init__(self, config: Config | Overrides) -> None:
        self._native = _tessera.make_model(native_of(config))
        self._owner: Any = None
        self._like = ""

    @classmethod
    def _wrap(cls, native: Any, owner: Any = None) -> Model:
        model = cls.__new__(cls)
        model._native = native
        model._owner = owner
        model._like = ""
        return model

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: str = "auto", allow_nonfinite: bool = False) -> Model:
        """Opens a run's folder (its newest whole checkpoint), a checkpoint, or a folder of Hugging Face.

        Args:
            path: A folder of Hugging Face is converted on the way, which takes disk space of the model's size for
                the time of the call.
            device: "cpu", "cuda", or "auto": the first GPU where the kernels run on it.
            allow_nonfinite: Takes weights that are NaN or infinite, which are refused otherwise.
        """
        path = os.fspath(path)
        if not os.path.exists(os.path.join(path, "config.json")):
            return cls._wrap(_tessera.load_model(path, device, allow_nonfinite))
        with tempfile.TemporaryDirectory(prefix="tessera-") as folder:
            target = os.path.join(folder, "checkpoint")
            _tessera.convert(path, target, to="tessera", like="", dtype="")
            model = cls._wrap(_tessera.load_model(target, device, allow_nonfinite))
        model._like = os.path.abspath(path)
        return model

    @property
    def vocab_size(self) -> int:
        """Ids are in [0, vocab_size)."""
        return self._native.vocab_size

    @property
    def device(self) -> str:
        """Where the weights are: "cpu" or "cuda:0"."""
        return self._native.device

    @property
    def step(self) -> int:
        """Training steps behind the weights of a loaded checkpoint."""
        return self._native.step

    @property
    def notes(self) -> list[str]:
        """What the user should know of a loaded model: newer checkpoints passed over, weights not finite."""
        return self._native.notes

    def loss(self, tokens: Any, labels: Any = None, documents: Any = None) -> float:
        """Mean cross-entropy in nats per predicted token; NaN where labels are all -100.

        Args:
            tokens: [B, T]. Without labels each token but a row's first is predicted from those before it.
            labels: [B, T], see above.
            documents: [B, T]. Where neighbours in a row differ a new document begins: attention, positions and
                predictions stay within one.
        """
        return self._native.loss(*token_arrays(tokens, labels, documents))[0]

    def logprobs(self, tokens: Any, labels: Any = None, documents: Any = None) -> Any:
        """Log-probability of each predicted token in nats: float32 [B, T - 1], or [B, T] with labels.

        At [b, t] is that of what follows tokens[b, t]; 0 where there is no label. A tensor of PyTorch where tokens are
        one, otherwise of NumPy.
        """
        return like(self._native.logprobs(*token_arrays(tokens, labels, documents)), tokens)

    def logits(self, tokens: Any) -> Any:
        """Scores of every next token: float32 [B, T, vocab_size], at [b, t] of what follows tokens[b, t]."""
        return like(self._native.logits(as_array(tokens)), tokens)

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without tokens for a beginning or an end."""
        return self._native.encode(require_unicode(text, "the text"))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; bytes that are no whole characters become U+FFFD."""
        return self._native.decode([int(id) for id in ids]).decode("utf-8", errors="replace")

    def generate(self, prompt: Any, max_tokens: int = 256, *, temperature: float = 1.0, top_k: int = 0,
                 top_p: float = 1.0, seed: int = 1, on_token: Callable[[int, float], object] | None = None
                 ) -> Generation:
        """Continues a prompt.

        Args:
            prompt: A text, or ids [T]; "" begins a new document.
            max_tokens: Generated at most.
            temperature: 0 always takes the most likely token.
            top_k: Only the k most likely tokens; 0: all.
            top_p: Only the most likely tokens of this total probability.
            seed: The same seed gives the same text.
            on_token: Called with each new id and its log-probability.
        """
        if isinstance(prompt, str):
            prompt = self.encode(prompt) or [self._native.end_of_document]
        result = self._native.generate(as_array(prompt, "prompt"), max_tokens=max_tokens, temperature=temperature,
                                       top_k=top_k, top_p=top_p, seed=seed, on_token=_tell(on_token))
        return Generation(self.decode(result["ids"]), result["ids"], result["logprobs"], result["ended"])

    def parameters(self) -> Parameters:
        """The weights by name, as arrays that share the model's memory and keep it alive.

        Each speaks DLPack: numpy.from_dlpack(array) and torch.from_dlpack(array) copy nothing, and what is written
        there the next call of the model sees. A trainer of BF16 weights has masters in F32 of its own, so what is
        written to its model is lost with the next step.
        """
        return Parameters(dict(self._native.parameters()))

    def save(self, path: str | os.PathLike[str]) -> pathlib.Path:
        """Writes weights, expert biases and configuration as a checkpoint into a folder; returns the checkpoint.

        `tessera generate`, Model.load and, as run.init_from, a new training take it. A run's folder is refused: there
        they would take the run's own checkpoints.
        """
        if (pathlib.Path(path) / "checkpoints").is_dir():
            raise Error(f"{os.fspath(path)} is the folder of a run, whose own checkpoints would be taken in place of "
                        "what is saved; choose another")
        return pathlib.Path(self._native.save(os.fspath(path)))

    def save_huggingface(self, path: str | os.PathLike[str], like: str | os.PathLike[str] | None = None,
                         dtype: str | None = None) -> list[str]:
        """Writes the weights as they are now as a new folder that transformers loads.

        Args:
            path: Must not exist.
            like: A folder of Hugging Face whose config.json, tokenizer and layout to use; where the model was loaded
                from one, that by default.
            dtype: "f32" or "bf16" of matrix weights; default: the model's.

        Returns:
            What the user should know, such as that no tokenizer went along.
        """
        like = os.fspath(like) if like is not None else self._like or self._carried()
        with tempfile.TemporaryDirectory(prefix="tessera-") as folder:
            checkpoint = self._native.save(folder)
            return _tessera.convert(checkpoint, os.fspath(path), to="hf", like=like, dtype=dtype or "")

    def _carried(self) -> str:
        """The checkpoint, where a folder of Hugging Face came with it."""
        path = self._native.path
        return path if path and os.path.isdir(os.path.join(path, "huggingface")) else ""

    def __repr__(self) -> str:
        return f"<tessera.Model {self._native.path or 'in memory'} on {self.device}>"


def _tell(on_token: Callable[[int, float], object] | None) -> Callable[[int, float], bool] | None:
    if on_token is None:
        return None

    def tell(id: int, logprob: float) -> bool:
        on_token(id, logprob)
        return True

    return tell
