"""Goal of a plan: model, hardware, chips, workload and SLO."""

from __future__ import annotations

from dataclasses import dataclass

from tripool.errors import InvalidRequest
from tripool.planner.hardware import Hardware
from tripool.planner.models import ModelShape

EIGHT_BITS = ("int8", "fp8")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanGoal:
    model: ModelShape
    hardware: Hardware
    chips: int
    input_tokens: float
    output_tokens: float
    ttft_s: float
    tpot_s: float
    cached_share: float = 0.0
    """Share of a prompt that is found in the cache pool."""
    precision: str | None = None
    """None: the hardware's 8 bits where it has them, and BF16."""
    accept: float | None = None
    """Share of drafts accepted; None: the model's usual."""
    price_per_hour: float | None = None
    """Per chip; None: what the hardware's description says."""
    currency: str | None = None
    keep_s: float = 600.0
    """How long a finished context should stay in the cache pool."""

    def __post_init__(self) -> None:
        wrong = {
            "chips": self.chips < 1, "input-len": not self.input_tokens >= 1, "output-len": not self.output_tokens >= 1,
            "ttft": not self.ttft_s > 0, "tpot": not self.tpot_s > 0, "cached": not 0.0 <= self.cached_share < 1.0,
        }  # fmt: skip
        for name, is_wrong in wrong.items():
            if is_wrong:
                raise InvalidRequest(
                    f"--{name} is out of range", hint="lengths, times and chips are above 0", param=name
                )
        if self.precision is not None and not self.hardware.supports(self.precision):
            hint = f"it has {', '.join(self.hardware.flops)}"
            raise InvalidRequest(f"{self.hardware.title} has no {self.precision}", hint=hint, param="precision")

    @property
    def ranks(self) -> int:
        return self.chips * self.hardware.ranks

    @property
    def precisions(self) -> tuple[str, ...]:
        if self.precision is not None:
            return (self.precision,)
        eight = [name for name in EIGHT_BITS if self.hardware.supports(name)]
        return (*eight[-1:], "bf16")

    @property
    def price(self) -> float:
        return self.hardware.price_per_hour if self.price_per_hour is None else self.price_per_hour

    @property
    def money(self) -> str:
        return self.currency or self.hardware.currency

    @property
    def cached_tokens(self) -> float:
        return min(self.input_tokens * self.cached_share, self.input_tokens - 1)

    @property
    def mean_context(self) -> float:
        return self.input_tokens + self.output_tokens / 2

    def kv_bytes(self) -> float:
        """Moved from prefill to decode for one request."""
        return self.input_tokens * self.model.kv_bytes_per_token()
