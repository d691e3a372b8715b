"""Numbers with their sources, read from TOML text. Opens no files.

An entry is `name = { value = 1.6, source = "...", kind = "published" }`. Kinds: `published` (default), `measured` (on a
machine of ours), `derived` (from published numbers, the source says how), `assumed`, and `calibrated` (chosen so that
calibration rows come out right).
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tripool.planner.errors import BadDescription

KINDS = ("published", "measured", "derived", "assumed", "calibrated")


@dataclass(frozen=True, slots=True)
class Fact:
    value: float
    source: str
    kind: str


class Facts:
    """Typed access to one description; records every number read, with its source."""

    def __init__(self, text: str, origin: str) -> None:
        self._origin = origin
        try:
            self._tree: dict[str, Any] = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise BadDescription(
                f"{origin} is not TOML: {error}", hint="see the files that `tripool plan` ships"
            ) from None
        self.read: dict[str, Fact] = {}

    @property
    def tree(self) -> Mapping[str, Any]:
        return self._tree

    def text(self, key: str) -> str:
        value = self._tree.get(key)
        if not isinstance(value, str) or not value:
            raise self.error(key, f"is {value!r}, not a text")
        return value

    def number(self, section: str, key: str, *, default: float | None = None, least: float = 0.0) -> float:
        table = self._tree.get(section, {})
        if not isinstance(table, Mapping):
            raise self.error(section, "is not a table")
        return self.entry(section, table, key, default, least=least)

    def optional(self, section: str, key: str) -> float | None:
        """None: the description does not say."""
        table = self._tree.get(section, {})
        return self.number(section, key) if isinstance(table, Mapping) and key in table else None

    def table(self, section: str) -> dict[str, float]:
        """All numbers of a section."""
        found = self._tree.get(section)
        if not isinstance(found, Mapping) or not found:
            raise self.error(section, "is missing or empty")
        return {key: self._fact(f"{section}.{key}", entry, 0.0).value for key, entry in found.items()}

    def sections(self) -> list[str]:
        return list(self._tree)

    def tables(self, section: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """(path for messages, table) of a list of tables."""
        found = self._tree.get(section, [])
        if not isinstance(found, list) or not all(isinstance(entry, Mapping) for entry in found):
            raise self.error(section, "is not a list of tables")
        yield from ((f"{section}[{index}]", entry) for index, entry in enumerate(found))

    def entry(
        self, path: str, table: Mapping[str, Any], key: str, default: float | None = None, *, least: float = 0.0
    ) -> float:
        """A number of a table whose path in messages is `path`."""
        if key not in table:
            if default is None:
                raise self.error(f"{path}.{key}", "is missing")
            return default
        return self._fact(f"{path}.{key}", table[key], least).value

    def _fact(self, path: str, entry: object, least: float) -> Fact:
        if not isinstance(entry, Mapping):
            raise self.error(path, f"is {entry!r}, not {{ value, source }}")
        value, source, kind = entry.get("value"), entry.get("source"), entry.get("kind", "published")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= least:
            raise self.error(path, f"has the value {value!r}, not a number of {least:g} or more")
        if not isinstance(source, str) or not source:
            raise self.error(path, "has no source")
        if kind not in KINDS:
            raise self.error(path, f"is of kind {kind!r}; known: {', '.join(KINDS)}")
        self.read[path] = Fact(float(value), source, str(kind))
        return self.read[path]

    def error(self, path: str, message: str) -> BadDescription:
        hint = 'numbers are written name = { value = 1.0, source = "where it is from" }'
        return BadDescription(f"{self._origin}: '{path}' {message}", hint=hint)
