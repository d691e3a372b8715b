"""How the log names a request that its client has named: as the client does if that can be nothing but an id, else by a
keyed hash. A client may put anything into `X-Request-Id`, also by mistake: its key, or words of a prompt.

| the client's id | in the log |
|---|---|
| up to 32 letters, digits, `_`, `-`; a UUID, trace id or digest, with a word before it (`req_4f...`) | as it is |
| anything else, and what holds something like the beginning of a key | `~` and a hash, the same for the same id |

The hash has a key of its own for each process: nobody who reads the log can try words on it. Whoever knows the id finds
the request by `explain`, which tells the server's own name of it, and every line has that.
"""

from __future__ import annotations

import re
from hashlib import blake2b

_SHORT = re.compile(r"[0-9A-Za-z_-]{1,32}")
"""A key has 43 such characters behind its mark."""
_DIGITS = re.compile(r"(?:[A-Za-z]{1,16}[_-])?[0-9A-Fa-f-]{1,64}")
_LIKE_A_KEY = re.compile(r"(?<!ht)tp-[0-9A-Za-z_-]{8}", re.IGNORECASE)


def shown_id(request_id: str, secret: bytes) -> str:
    shaped = _SHORT.fullmatch(request_id) or _DIGITS.fullmatch(request_id)
    if shaped and not _LIKE_A_KEY.search(request_id):
        return request_id
    return "~" + blake2b(request_id.encode(), key=secret, digest_size=6, person=b"tripool-log").hexdigest()
