"""Data for training: texts and token files that `tessera train` reads."""
from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from typing import Any

from . import _tessera
from .arrays import as_array


class Tokenizer:
    """Turns text into ids and back.

    Args:
        path: "byte", a tokenizer.json, a SentencePiece .model, or a folder with either.
        end_of_document: The token between documents, as text or id; "": the tokenizer's own.
    """

    def __init__(self, path: str | os.PathLike[str] = "byte", end_of_document: str = "") -> None:
        self._native = _tessera.make_tokenizer(os.fspath(path), end_of_document)

    @property
    def vocab_size(self) -> int:
        """Ids are in [0, vocab_size)."""
        return self._native.vocab_size

    @property
    def end_of_document(self) -> int:
        """The id between documents."""
        return self._native.end_of_document

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""
        return self._native.encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; bytes that are no whole characters become U+FFFD."""
        return self._native.decode([int(id) for id in ids]).decode("utf-8", errors="replace")


def write_tokens(prefix: str | os.PathLike[str], documents: Iterable[Any], *, vocab_size: int | None = None,
                 tokenizer: Tokenizer | None = None) -> int:
    """Writes documents as a token file (Megatron's format), for data.tokens = prefix. Returns its tokens.

    Documents are taken one at a time, so any number of them fits. A write that is cut short leaves an older file as it
    was.

    Args:
        prefix: Of the two files, .bin and .idx.
        documents: Texts, which need a tokenizer and get its end-of-document token behind each; or arrays of ids [T],
            which are written as they are.
        vocab_size: Ids are below it; default: the tokenizer's. Decides whether an id takes two or four bytes.
        tokenizer: What texts are encoded with.
    """
    if vocab_size is None:
        if tokenizer is None:
            raise _tessera.Error("write_tokens needs a vocab_size for ids, or a tokenizer for texts")
        vocab_size = tokenizer.vocab_size
    writer = _tessera.TokenWriter(os.fspath(prefix), vocab_size)
    for document in documents:
        if not isinstance(document, str):
            writer.add(as_array(document))
        elif tokenizer is None:
            raise _tessera.Error("write_tokens needs a tokenizer for texts")
        else:
            writer.add_text(tokenizer._native, document)
    writer.finish()
    return writer.num_tokens


def write_jsonl(path: str | os.PathLike[str], texts: Iterable[str], key: str = "text") -> int:
    """Writes texts as JSON lines, for data.text = path: a document a line. Returns their number."""
    count = 0
    partial = f"{os.fspath(path)}.partial"
    with open(partial, "w", encoding="utf-8") as file:
        for text in texts:
            json.dump({key: text}, file, ensure_ascii=False)
            file.write("\n")
            count += 1
    os.replace(partial, path)
    return count


def read_parquet(paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], column: str = "text",
                 batch_rows: int = 1024) -> Iterator[Any]:
    """The rows of one column of parquet files, one after the other: texts, or arrays of ids.

    Needs pyarrow. At any moment `batch_rows` rows are in memory.
    """
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise _tessera.Error("read_parquet needs pyarrow: pip install pyarrow") from error
    if isinstance(paths, (str, os.PathLike)):
        paths = [paths]
    for path in paths:
        file = parquet.ParquetFile(path)
        if column not in file.schema_arrow.names:
            raise _tessera.Error(f"{os.fspath(path)} has no column \"{column}\"; it has "
                                 f"{', '.join(file.schema_arrow.names)}")
        for batch in file.iter_batches(batch_size=batch_rows, columns=[column]):
            yield from (value for value in batch.column(0).to_pylist() if value is not None)


def read_dataset(dataset: Any, column: str = "text") -> Iterator[Any]:
    """One column of a dataset of Hugging Face's `datasets`, streamed or not: texts, or ids such as "input_ids"."""
    names = getattr(dataset, "column_names", None)
    if names is not None and column not in names:
        found = ", ".join(names) if not isinstance(names, dict) else f"the splits {', '.join(names)}; choose one"
        raise _tessera.Error(f"the dataset has no column \"{column}\"; it has {found}")
    for row in dataset:
        yield row[column]
