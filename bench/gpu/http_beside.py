"""`tripool serve` and vLLM's server in one stretch on one GPU, measured over HTTP by the same client.

    python3 bench/gpu/http_beside.py [STAGE ...] [--ours] [--quick] [--json FILE] [--carried FOLDER] [--packages FOLDER]

STAGE is SIDE:SHAPE:KIND:WORK[:SECONDS], such as `vllm:lite:bf16:1,8,64,256+mixed` (see `vllm_beside.py`). Without
stages: both sides of V2-Lite in bf16, every batch size and the mixed load, for about 12 minutes. Requests are streamed
completions with token ids as prompts (`http_side.py`). Rows are kept in `--folder`; with `--ours` vLLM's are those kept
there. `--packages`: what `tripool serve` imports and the machine does not have, unpacked.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import timing
from beside_shapes import TITLES
from beside_stages import Place, Stage, Store, copy_results, run_stage
from timing import REPO, Origin, Row
from vllm_beside import BATCHES, LATENCIES, MIXED, PEER_KIND, Table, peer_rate_of

LIMIT_S = 560
BUSY_CLIENT = 0.8
"""Share of a core above which the client, not the server, may be what is measured."""


class HttpTable(Table):
    def _rows_of(self, shape: str, kind: str, work: str) -> list[Row]:
        ours = self._rows.get(("ours", shape, kind, work))
        peer = self._rows.get(("vllm", shape, PEER_KIND[kind], work))
        title = f"HTTP, {TITLES[shape]} {kind}" + ("" if kind == PEER_KIND[kind] else f" / {PEER_KIND[kind]}")
        fields = {"rate": ("", "requests/s")}
        if work != "closed":
            fields = {name: (f", {name.removesuffix('_ms').replace('_', ' ').upper()}", "ms") for name in LATENCIES}
        if work.startswith("x"):
            fields = {"tok_s": ("", "tok/s")} | fields
        common = {"note": self._note(ours, peer), "details": self._details(ours, peer)}
        return [
            Row(
                name=f"{title}, {work}{label}", ours=(ours or {}).get(name), peer=(peer or {}).get(name), unit=unit,
                target=None if work == "closed" else 1.0, lower_is_better=unit == "ms", **common,
            )
            for name, (label, unit) in fields.items()
        ]  # fmt: skip

    def _note(self, ours: dict[str, Any] | None, peer: dict[str, Any] | None) -> str:
        notes = [super()._note(ours, peer)]
        for name, row in (("our", ours), ("vLLM's", peer)):
            if row and row["client_cpu_share"] > BUSY_CLIENT:
                notes.append(f"the client of {name} row took {row['client_cpu_share']:.0%} of a core")
            if row and row["errors"]:
                notes.append(f"{name} errors: {row['errors']}")
        return "; ".join(filter(None, notes))

    def _details(self, ours: dict[str, Any] | None, peer: dict[str, Any] | None) -> dict[str, Any]:
        names = ("client_cpu_share", "client_lag_p99_ms", "tokens_per_event")
        own = {name: {"ours": (ours or {}).get(name), "vllm": (peer or {}).get(name)} for name in names}
        return super()._details(ours, peer) | own


def main() -> int:
    parser = timing.arguments(__doc__)
    parser.add_argument("stages", nargs="*", type=Stage.of, metavar="STAGE")
    parser.add_argument("--ours", action="store_true", help="our stages only; vLLM's rows as they were kept")
    parser.add_argument("--small", action="store_true", help="our side with narrow shapes on a CPU")
    parser.add_argument("--step-tokens", type=int, help="of our server")
    parser.add_argument("--folder", type=Path, default=REPO / "build" / "beside", help="keeps rows and logs")
    parser.add_argument("--carried", type=Path, help="has vLLM's archive and packages for our side, to be unpacked")
    parser.add_argument("--packages", type=Path, help="packages of our server, unpacked")
    parser.add_argument("--peer-rows", type=Path, help="an earlier http_rows.json: its rows of vLLM count too")
    parser.add_argument("--out", type=Path, help="copy rows and logs there")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    place = Place(asked.folder.resolve(), asked.carried, asked.packages and asked.packages.resolve(), http=True)
    place.unpack()
    store, began_s = Store(place.rows, asked.peer_rows), time.time()
    usual = [Stage.of(f"{side}:{':'.join(MIXED)}:{BATCHES}+mixed:{LIMIT_S}") for side in ("vllm", "ours")]
    stages = [stage for stage in asked.stages or usual if stage.side == "ours" or not asked.ours]
    more = ["--quick"] * asked.quick + ["--small"] * asked.small
    more += [] if asked.step_tokens is None else ["--step-tokens", str(asked.step_tokens)]
    commit, failed = asked.commit or timing.commit(), []
    for stage in stages:
        rate = peer_rate_of(store.rows, stage, small=asked.small)
        if not run_stage(stage, place, store, peer_rate=rate, more=more, commit=commit):
            failed.append(stage.name)
        if asked.out:
            copy_results(place, asked.out)
    origin = Origin("a trial on a CPU", commit) if asked.small else timing.gpu_origin(commit)
    rows = HttpTable(store, stages, began_s).rows()
    timing.print_rows(rows, origin)
    if asked.json:
        timing.write_json(rows, origin, asked.json)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return int(bool(failed) or any(row.ok is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
