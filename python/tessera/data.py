"""Data for training: texts and token files that `tessera train` reads."""
from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from typing import Any

from . import _tessera
from .arrays import as_array, require_unicode, shown


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
        return self._native.encode(require_unicode(text, "the text"))

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
    if vocab_size < 1:
        raise _tessera.Error(f"vocab_size is {vocab_size}; expected at least 1")
    if tokenizer is not None and vocab_size < tokenizer.vocab_size:
        raise _tessera.Error(f"vocab_size is {vocab_size}, but the tokenizer has ids up to {tokenizer.vocab_size - 1}; "
                             "leave it out, or raise it")
    if not os.path.basename(os.fspath(prefix)).strip("."):
        raise _tessera.Error(f"the prefix is \"{os.fspath(prefix)}\"; expected the name of two files without .bin and "
                             ".idx, such as data/train")
    writer = _tessera.TokenWriter(os.fspath(prefix), vocab_size)
    try:
        for number, document in enumerate(_documents(documents, "write_tokens")):
            if not isinstance(document, str):
                writer.add(_as_ids(document, number))
            elif tokenizer is None:
                raise _tessera.Error("write_tokens needs a tokenizer for texts")
            else:
                writer.add_text(tokenizer._native, require_unicode(document, f"document {number}"))
        writer.finish()
        return writer.num_tokens
    finally:  # a traceback that is kept, as notebooks do, would keep the file
        writer.abandon()


def _as_ids(document: Any, number: int) -> Any:
    """A document's ids as an array, whose further rules the native part has."""
    refusal = _tessera.Error(f"document {number} is {shown(document)}; expected a text, or ids as whole numbers")
    if document is None:
        raise refusal
    try:
        ids = as_array(document)
    except _tessera.Error as error:
        raise refusal from error
    if getattr(ids, "ndim", 1) == 0:
        raise refusal
    return ids


def _documents(values: Any, function: str) -> Iterable[Any]:
    """Refuses one text, whose characters would be documents of their own."""
    if isinstance(values, (str, bytes)):
        raise _tessera.Error(f"{function} takes documents, found one text of {len(values)} characters; give a list "
                             "with it")
    return values


def write_jsonl(path: str | os.PathLike[str], texts: Iterable[str], key: str = "text") -> int:
    """Writes texts as JSON lines, for data.text = path: a document a line. Returns their number."""
    count = 0
    partial = f"{os.fspath(path)}.partial"
    try:
        with open(partial, "w", encoding="utf-8") as file:
            for text in _documents(texts, "write_jsonl"):
                if not isinstance(text, str):
                    raise _tessera.Error(f"text {count} is {shown(text)}; expected a str")
                file.write(json.dumps({key: require_unicode(text, f"text {count}")}, ensure_ascii=False) + "\n")
                count += 1
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.remove(partial)
        raise
    return count


def read_parquet(paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], column: str = "text",
                 batch_rows: int = 1024) -> Iterator[Any]:
    """The rows of one column of parquet files, one after the other: texts, or lists of ids.

    A column of bytes is text in UTF-8, as some programs write it. Rows that are null are left out. Raises Error where a
    file cannot be read, and where a column is neither text nor lists of whole numbers, or a row of it is not. Needs
    pyarrow. At any moment `batch_rows` rows are in memory.
    """
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise _tessera.Error("read_parquet needs pyarrow: pip install pyarrow") from error
    if batch_rows < 1:
        raise _tessera.Error(f"batch_rows is {batch_rows}; expected at least 1")
    if isinstance(paths, (str, os.PathLike)):
        paths = [paths]
    for path in paths:
        name = os.fspath(path)
        rows = 0
        try:
            file = parquet.ParquetFile(path)
            _check_column(pyarrow.types, file.schema_arrow, name, column)
            for batch in file.iter_batches(batch_size=batch_rows, columns=[column]):
                values = batch.column(batch.schema.get_field_index(column))
                for value in values:
                    if value.is_valid:
                        yield _document_of(value, f"{name}, row {rows} of \"{column}\"")
                    rows += 1
        except (pyarrow.ArrowException, OSError) as error:
            raise _tessera.Error(f"{name} cannot be read as parquet: {str(error).strip()}") from error


def _check_column(types: Any, schema: Any, name: str, column: str) -> None:
    """Refuses a column that is not there once, or of another type than texts and ids."""
    found = schema.names.count(column)
    if found == 0:
        raise _tessera.Error(f"{name} has no column \"{column}\"; it has {', '.join(schema.names) or 'none'}")
    if found > 1:
        raise _tessera.Error(f"{name} has {found} columns \"{column}\"; expected one")
    kind = schema.field(column).type
    own = kind.value_type if types.is_dictionary(kind) else kind
    is_text = any(of(own) for of in (types.is_string, types.is_large_string, types.is_string_view, types.is_binary,
                                     types.is_large_binary, types.is_binary_view, types.is_null))
    is_list = any(of(own) for of in (types.is_list, types.is_large_list, types.is_fixed_size_list))
    if not is_text and not (is_list and types.is_integer(own.value_type)):
        raise _tessera.Error(f"{name}: column \"{column}\" is of the type {kind}; expected texts, or lists of whole "
                             "numbers")


def _document_of(value: Any, place: str) -> Any:
    try:
        document = value.as_py()
        if isinstance(document, bytes):
            document = document.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _tessera.Error(f"{place} is not valid UTF-8: {error}") from error
    if isinstance(document, list) and None in document:
        raise _tessera.Error(f"{place} has a null among its ids")
    return document


def read_dataset(dataset: Any, column: str = "text") -> Iterator[Any]:
    """One column of a dataset of Hugging Face's `datasets`, streamed or not: texts, or ids such as "input_ids".

    Rows that are None are left out.
    """
    names = getattr(dataset, "column_names", None)
    if names is not None and column not in names:
        found = ", ".join(names) if not isinstance(names, dict) else f"the splits {', '.join(names)}; choose one"
        raise _tessera.Error(f"the dataset has no column \"{column}\"; it has {found}")
    for row in dataset:
        if row[column] is not None:
            yield row[column]
