"""The published deployment of DeepSeek-R1 in the cost model: prefill over 32 dies, decode over 320.

Only the ablations say whether two microbatches were used; elsewhere the better of one and two is taken, as for rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from tripool.planner.cost import DecodeModel, PrefillModel, Setup, StepCost, footprint
from tripool.planner.cost.exchange import decode_exchange
from tripool.planner.hardware import Hardware, named_hardware
from tripool.planner.models import ModelShape, named_model

PREFILL_EP, DECODE_EP = 32, 320
PRECISION = "int8"
ACCEPT = 0.7
PROMPT = 4096
CONTEXT = 4096
PREFILL_TOKENS = 16384
"""Per chip and batch."""
EXCHANGE_TOKENS = 128
"""Per rank, of the published dispatch and combine times."""


@dataclass(frozen=True)
class Chosen:
    """The largest batch within a TPOT, per chip."""

    batch: int
    tpot_ms: float
    tok_s: float
    stopped_by: str


@dataclass(frozen=True)
class System:
    hardware: Hardware
    model: ModelShape

    def decode_step(
        self, batch: float, context: float, *, drafts: int = 1, microbatches: int | None = None
    ) -> StepCost:
        """`batch` requests per chip; by default the better of one and two microbatches."""
        counts = (1, 2) if microbatches is None else (microbatches,)
        setups = (self._setup(DECODE_EP, drafts=drafts, microbatches=count) for count in counts)
        models = (DecodeModel(self.hardware, self.model, setup) for setup in setups)
        steps = (model.step(batch / self.hardware.ranks, context) for model in models)
        return min(steps, key=lambda step: step.seconds)

    def decode_rate(self, batch: float, context: float, *, drafts: int = 1, microbatches: int | None = None) -> float:
        """Tokens per second and chip."""
        step = self.decode_step(batch, context, drafts=drafts, microbatches=microbatches)
        return batch * (1 + drafts * ACCEPT) / step.seconds

    def tpot_ms(self, batch: float, context: float) -> float:
        return batch / self.decode_rate(batch, context) * 1e3

    def largest_within(self, tpot_ms: float, context: float, final_context: float) -> Chosen | None:
        """Batches grow by one request per rank; found by bisection, because step time does not fall with more requests.
        None: not even one request per rank meets the TPOT.
        """
        ranks = self.hardware.ranks
        setup = self._setup(DECODE_EP, drafts=1, microbatches=2)
        most = int(footprint(self.hardware, self.model, setup).max_requests(final_context))
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.tpot_ms(middle * ranks, context) <= tpot_ms else (low, middle - 1)
        if not low:
            return None
        batch = low * ranks
        found = self.tpot_ms(batch, context)
        return Chosen(batch, found, batch / found * 1e3, "memory" if low == most else "TPOT")

    def layer_us(self, batch: float, context: float, drafts: int) -> float:
        """One decode layer, from the step without head and fixed cost."""
        step = self.decode_step(batch, context, drafts=drafts, microbatches=2)
        outside_s = sum(seconds for name, seconds in step.parts if name in ("head", "step"))
        return (step.seconds - outside_s) / (self.model.layers + drafts) * 1e6

    def prefill_s(
        self, reused: float = 0.0, *, prompt: float = PROMPT, plane: str = "memory", microbatches: int | None = None
    ) -> float:
        """Time of one batch of prompts, PREFILL_TOKENS per chip, of which a share is `reused` and not computed."""
        tokens = PREFILL_TOKENS / self.hardware.ranks * (1.0 - reused)
        counts = (1, 2) if microbatches is None else (microbatches,)
        setups = (self._setup(PREFILL_EP, drafts=0, microbatches=count) for count in counts)
        models = (PrefillModel(self.hardware, self.model, setup) for setup in setups)
        return min(model.step_s(tokens, prompt, prompt * reused, plane=plane) for model in models)

    def exchange_us(self, ep: int) -> tuple[float, float]:
        """Dispatch and combine of EXCHANGE_TOKENS per rank, routed evenly as in a benchmark of the exchange."""
        assert self.model.moe is not None
        moved = decode_exchange(
            self.hardware, self.model, PRECISION, ep=ep, tokens=EXCHANGE_TOKENS,
            hot_tokens=EXCHANGE_TOKENS * self.model.moe.top_k,
        )  # fmt: skip
        return moved.dispatch_s * 1e6, moved.combine_s * 1e6

    def rank_weight_bytes(self) -> float:
        """Weight bytes of one die of a prefill instance, replicas and copies of attention included."""
        return footprint(self.hardware, self.model, self._setup(PREFILL_EP, drafts=0, microbatches=1)).weights

    def _setup(self, ep: int, *, drafts: int, microbatches: int) -> Setup:
        return Setup(ep=ep, precision=PRECISION, drafts=drafts, accept=ACCEPT * drafts, microbatches=microbatches)


def cloudmatrix() -> System:
    return System(named_hardware("ascend-910c"), named_model("deepseek-r1"))


def h800() -> System:
    """The hardware of DeepEP's published exchange times."""
    return System(named_hardware("h800"), named_model("deepseek-r1"))
