"""Journal of a quantisation on disk: a killed run resumes after the last finished shard.

It is in a folder of its own inside the target and is removed at the end. config.json is written last, so an unfinished
folder is never taken for a checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tripool.quant.options import QuantizeError

FOLDER = ".quantize"


class Journal:
    def __init__(self, target: Path, plan: Mapping[str, Any]) -> None:
        """`plan` names source and settings; a target started with another plan is refused."""
        self.folder = target / FOLDER
        self._lines = self.folder / "journal.jsonl"
        plan_file = self.folder / "plan.json"
        if not self.folder.exists():
            _refuse_used(target)
            self.folder.mkdir(parents=True)
            _write_durably(plan_file, json.dumps(plan, sort_keys=True))
        elif not plan_file.exists():  # killed before anything was done
            _write_durably(plan_file, json.dumps(plan, sort_keys=True))
        elif json.loads(plan_file.read_text("utf-8")) != json.loads(json.dumps(plan)):
            hint = "give the same source and options to resume it, or remove the folder to start over"
            raise QuantizeError(f"{target} was started from another source or with other options", hint=hint)
        self.done: dict[str, dict[str, Any]] = {}
        """Record of each finished step, by name."""
        for line in self._whole_lines():
            entry = json.loads(line)
            self.done[entry["step"]] = entry["record"]

    def _whole_lines(self) -> list[str]:
        """A truncated last line is removed, so that the next one starts on a new line."""
        text = self._lines.read_text("utf-8") if self._lines.exists() else ""
        whole, _, rest = text.rpartition("\n")
        if rest:
            _write_durably(self._lines, f"{whole}\n" if whole else "")
        return whole.splitlines()

    def finish(self, step: str, record: Mapping[str, Any]) -> None:
        """Call only after the step's output is on disk."""
        with self._lines.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "record": record}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.done[step] = json.loads(json.dumps(record))

    def remove(self) -> None:
        self._lines.unlink(missing_ok=True)  # first: the journal must not outlive the files it records
        shutil.rmtree(self.folder)


def _refuse_used(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        hint = "give a folder that does not exist yet, or an empty one"
        raise QuantizeError(f"{target} is there already, and not from an unfinished run", hint=hint)


def _write_durably(path: Path, text: str) -> None:
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
