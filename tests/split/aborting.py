"""`tripool` with an engine that really aborts: run as a file in place of the module, by the supervisor of a test.

A request with the seed `KILLER` ends the process that samples its token number `AT`, as a fault in C would.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from tripool.cli.main import main
from tripool.engine.fake_paged import PagedFake

KILLER, AT = 666, 3


def aborting(sample: Any) -> Any:
    def choose(self: PagedFake, task: Any) -> Any:
        if task.seq.request.seed == KILLER and task.seq.num_generated >= AT:
            os.abort()
        return sample(self, task)

    return choose


if __name__ == "__main__":
    PagedFake._sample = aborting(PagedFake._sample)  # type: ignore[method-assign]
    main(sys.argv[1:])
