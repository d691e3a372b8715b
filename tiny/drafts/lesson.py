"""The MTP layer learning from answers, while the network that gave them is frozen.

What is to be foretold is the network's own distribution at every place of an answer, not the one token that was drawn
there. Final states of the frozen part are computed once and kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from math import isfinite
from operator import add
from pathlib import Path

import torch

from tiny.drafts.loss import Found, Scores, compare
from tripool.train.attention import Way
from tripool.train.batch import wanted
from tripool.train.config import TrainError
from tripool.train.device import Tell, autocast
from tripool.train.encode import ANSWER
from tripool.train.learner import adamw
from tripool.train.metrics import Metrics, said
from tripool.train.network import Network
from tripool.train.plan import Optimise, learning_rate, progress_by_time
from tripool.train.rows import NO_DOCUMENT, Rows, rows_of_step

ROW_TOKENS = 512
_HELD_OUT, _FEW = 32, 16
"""One row in so many, the last ones, is not learned from; of few rows more, up to a quarter."""
_NOTED_STEPS = 10
LINE_S = 10.0
"""Between printed lines."""


class Lesson:
    def __init__(self, network: Network, way: Way, rows: Rows, plan: Optimise, out: Path) -> None:
        """All on the network's device; metrics go into `out`."""
        assert network.mtp is not None and len(rows) > 1
        self._network, self._mtp, self._way, self._rows, self._plan = network, network.mtp, way, rows, plan
        self._device, self._out = network.embed.device, out
        self._num_learned = len(rows) - max(1, min(len(rows) // 4, _FEW), len(rows) // _HELD_OUT)
        network.requires_grad_(False)
        self._mtp.requires_grad_(True)
        self._optimiser = adamw(plan, network, self._mtp)
        self._states = self._final_states()

    def run(self, ends_s: float | None, tell: Tell, clock: Callable[[], float]) -> int:
        """Until `ends_s`; without it, as many steps as planned. How many there were."""
        began_s = told_s = clock()
        step, progress = 0, 0.0
        metrics = Metrics(self._out, 0)
        try:
            while progress < 1:
                lr = learning_rate(self._plan, step, progress)
                found = self._step(step, lr)
                step, now_s = step + 1, clock()
                progress = step / self._plan.steps if ends_s is None else progress_by_time(now_s, began_s, ends_s)
                if step % _NOTED_STEPS == 0 or now_s - told_s >= LINE_S:
                    scores = found.scores()
                    if not isfinite(scores.divergence):
                        raise TrainError(f"the loss is not a number at step {step}", file=self._out)
                    metrics.put({"step": step, "progress": round(progress, 6), "lr": lr, **scores.as_dict()})
                    if now_s - told_s >= LINE_S:
                        told_s = now_s
                        left_s = (now_s - began_s) * (1 - progress) / max(progress, 1e-9)
                        tell(f"step {step}  {progress:.1%}  {scores}  lr {lr:.1e}  {said(left_s)} left")
        finally:
            metrics.close()
        return step

    @torch.no_grad()
    def held_out(self) -> Scores:
        numbers = torch.arange(self._num_learned, len(self._rows), device=self._device)
        return reduce(add, map(self._pass, numbers.split(self._plan.rows_per_pass))).scores()

    def layer(self) -> dict[str, torch.Tensor]:
        """The MTP layer's weights, a copy."""
        return {name: values.clone() for name, values in self._mtp.state_dict().items()}

    def put_back(self, layer: Mapping[str, torch.Tensor]) -> None:
        self._mtp.load_state_dict(dict(layer))

    def _step(self, step: int, lr: float) -> Found:
        for group in self._optimiser.param_groups:
            group["lr"] = lr
        numbers = rows_of_step(self._num_learned, self._plan.rows_per_step, step, self._plan.seed)
        found = self._pass(numbers.to(self._device))
        found.loss().backward()
        torch.nn.utils.clip_grad_norm_(self._mtp.parameters(), self._plan.clip)
        self._optimiser.step()
        self._optimiser.zero_grad(set_to_none=True)
        return found

    def _pass(self, numbers: torch.Tensor) -> Found:
        """Over these rows, wherever both the token that was just said and the one to be foretold are an answer's."""
        network, states = self._network, self._states[numbers]
        tokens, documents = self._rows.tokens[numbers].long(), self._rows.documents[numbers]
        answers = (self._rows.kinds[numbers] == ANSWER).float()
        said_next, foretold = (wanted(tokens, documents, answers, distance).weights > 0 for distance in (1, 2))
        where = said_next & foretold
        with autocast(self._device):
            sight, real = self._way.sight(documents), documents != NO_DOCUMENT
            ahead, _ = network.ahead(states.float(), tokens, sight, real)
            with torch.no_grad():
                says = network.logits(states.roll(-1, 1)[where].float())
            return compare(says, network.logits(ahead[where]))

    @torch.no_grad()
    def _final_states(self) -> torch.Tensor:
        """[rows, row_tokens, hidden], in the type that products are computed in."""
        kept = torch.bfloat16 if self._device.type == "cuda" else torch.float32
        out = torch.empty(*self._rows.tokens.shape, self._network.arch.hidden, dtype=kept, device=self._device)
        for part in torch.arange(len(out), device=self._device).split(self._plan.rows_per_pass):
            tokens, documents = self._rows.tokens[part].long(), self._rows.documents[part]
            with autocast(self._device):
                states, _ = self._network.trunk(tokens, self._way.sight(documents), documents != NO_DOCUMENT)
            out[part] = states.to(kept)
        return out
