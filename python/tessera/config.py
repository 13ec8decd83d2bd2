"""Configurations: the same keys, files and checks as `tessera train`'s."""
from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Union

from . import _tessera
from ._tessera import ConfigError, Error
from .arrays import require_unicode

Value = Union[bool, int, float, str, None, Sequence[Union[bool, int, float, str]]]
Overrides = Mapping[str, Any]


def _flatten(overrides: Overrides, prefix: str = "") -> dict[str, Value]:
    """{"model": {"num_layers": 2}} and {"model.num_layers": 2} are the same."""
    flat: dict[str, Value] = {}
    if not isinstance(overrides, Mapping):
        raise ConfigError(f"overrides are a {type(overrides).__name__}; expected keys with values, such as "
                          "{\"train.steps\": 100}")
    for key, value in overrides.items():
        if not isinstance(key, str):
            raise ConfigError(f"{prefix}{key!r} is no key of a configuration, which is a text")
        if isinstance(value, Mapping):
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


def _plain(value: Any) -> Any:
    """Python's own number for a scalar of NumPy or PyTorch, and the text of a path."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value


def _as_text(key: str, value: Value) -> str:
    """A value as it would stand on the command line."""
    value = _plain(value)
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, str)):
        return _unicode(key, str(value))
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray, memoryview)):
        return "[" + ", ".join(_as_item(key, _plain(item)) for item in value) + "]"
    raise ConfigError(f"{key} is a {type(value).__name__}; expected a number, a text, true or false, a list or None")


def _as_item(key: str, item: Any) -> str:
    """An element of a list as TOML has it: as JSON, but that TOML knows no surrogates and wants DEL escaped."""
    if not isinstance(item, (bool, int, float, str)):
        raise ConfigError(f"{key} has a {type(item).__name__} in its list; expected numbers or texts")
    return _unicode(key, json.dumps(item, ensure_ascii=False)).replace("\x7f", "\\u007f")


def _unicode(key: str, text: str) -> str:
    """Refuses lone surrogates, which Python's names of files have where they are not UTF-8."""
    try:
        return require_unicode(text, key)
    except Error as error:
        raise ConfigError(str(error)) from error


class Config:
    """All settings of a model and its training. Immutable.

    Args:
        preset: A model's shapes by name, such as "tiny" or "laptop" (`tessera inspect --presets` lists them).
        overrides: Values by key, as {"train.steps": 100} or {"train": {"steps": 100}}. They win over a preset.

    Raises:
        ConfigError: for an unknown key, with the nearest one, and for values of wrong types or out of range.
    """

    def __init__(self, preset: str | None = None, overrides: Overrides | None = None) -> None:
        values = _flatten(overrides or {})
        if preset is not None:
            values = {"model.preset": preset, **values}
        self._native = _tessera.Config("", "", [(key, _as_text(key, value)) for key, value in values.items()])

    @classmethod
    def _make(cls, file: str, text: str, overrides: list[tuple[str, str]]) -> Config:
        config = cls.__new__(cls)
        config._native = _tessera.Config(file, text, overrides)
        return config

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], overrides: Overrides | None = None) -> Config:
        """Reads a TOML file as `tessera train` does, now: later changes of it do not count. Overrides win over it."""
        values = _flatten(overrides or {})
        return cls._make(os.fspath(path), "", [(key, _as_text(key, value)) for key, value in values.items()])

    @classmethod
    def from_toml(cls, text: str, overrides: Overrides | None = None) -> Config:
        """The same from TOML text."""
        values = _flatten(overrides or {})
        return cls._make("", _unicode("the TOML text", text), [(key, _as_text(key, value)) for key, value in values.items()])

    def replace(self, overrides: Overrides) -> Config:
        """This configuration with other values for some keys."""
        file, text, own = self._native.sources()
        values = _flatten(overrides)
        kept = [(key, value) for key, value in own if key not in values]
        return self._make(file, text, kept + [(key, _as_text(key, value)) for key, value in values.items()])

    def __getitem__(self, key: str) -> Value:
        """The value of a key, such as config["train.steps"]."""
        values = json.loads(self._native.to_json())
        if key not in values:
            raise KeyError(key)
        return values[key]["value"]

    def __contains__(self, key: object) -> bool:
        return key in json.loads(self._native.to_json())

    def __iter__(self) -> Iterator[str]:
        """All keys, as "train.steps"."""
        return iter(json.loads(self._native.to_json()))

    def to_toml(self) -> str:
        """Every key with its value and where that came from; reading it gives the same configuration."""
        return self._native.to_toml()

    def to_dict(self) -> dict[str, dict[str, Value]]:
        """Every value, by section and key: {"train": {"steps": 100, ...}, ...}."""
        sections: dict[str, dict[str, Value]] = {}
        for key, entry in json.loads(self._native.to_json()).items():
            section, _, name = key.partition(".")
            sections.setdefault(section, {})[name] = entry["value"]
        return sections

    def origins(self) -> dict[str, str]:
        """Where each value came from: "default", "preset tiny", "run.toml:12", or, overridden, the key itself."""
        return {key: entry["origin"] for key, entry in json.loads(self._native.to_json()).items()}

    def help(self) -> str:
        """Every key with its type, meaning, range and default."""
        return self._native.help()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash(json.dumps(self.to_dict(), sort_keys=True))

    def __reduce__(self) -> tuple[Any, ...]:
        return Config._make, self._native.sources()

    def __repr__(self) -> str:
        set_keys = {key: self[key] for key, origin in self.origins().items() if origin == key}
        return f"<tessera.Config {set_keys}>"


def native_of(config: Config | Overrides) -> _tessera.Config:
    """The native part of a configuration, or of what one is made of."""
    if isinstance(config, Config):
        return config._native
    if isinstance(config, Mapping):
        return Config(overrides=config)._native
    raise ConfigError(f"expected a tessera.Config, found a {type(config).__name__}")
