"""Reads and writes the files that options name; what fails is a typed error."""

from __future__ import annotations

from pathlib import Path

from tripool.errors import InvalidRequest, TripoolError


class CannotWrite(TripoolError, code="cannot_write"):
    """A file that an option names cannot be written."""


def read_file(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InvalidRequest(f"cannot read {file}: {reason}", hint="give another file") from None


def check_folder(file: Path | None) -> None:
    """Before a run: a misspelled path must not cost what the run measures."""
    if file is not None and not file.parent.is_dir():
        raise CannotWrite(f"there is no folder {file.parent}", hint="make it, or give another file")


def write_file(file: Path | None, content: str) -> None:
    """None: the option was not given."""
    if file is not None:
        try:
            file.write_text(content, "utf-8")
        except OSError as error:
            raise CannotWrite(f"cannot write {file}: {error.strerror}", hint="give another file") from error
