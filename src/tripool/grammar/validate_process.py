"""The process in which answers are validated whose schemas have patterns or are large: run as a file, beside
`validate.py`, under limits of CPU time and memory that the kernel enforces.

Reads `{pairs: [[schema, value], ...], steps, cpu_s, memory_bytes}` from standard input and writes, after `CHECKED`, a
list with `{violations, unchecked}` of each pair, or null where it took too many steps.
"""

import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

CHECKED = b"checked:"
_NICE = 10


def main() -> None:
    os.nice(_NICE)
    sys.path.append(str(Path(__file__).parent))
    import validate  # type: ignore[import-not-found]

    task = json.load(sys.stdin.buffer)
    resource.setrlimit(resource.RLIMIT_AS, (task["memory_bytes"], task["memory_bytes"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, task["cpu_s"])  # the unhandled signal ends the process
    found: list[dict[str, Any] | None] = []
    for schema, value in task["pairs"]:
        try:
            findings = validate.validated(schema, value, steps=task["steps"])
            found.append({"violations": findings.violations, "unchecked": findings.unchecked})
        except validate.TooManySteps:
            found.append(None)
    sys.stdout.buffer.write(CHECKED + json.dumps(found).encode())


if __name__ == "__main__":
    main()
