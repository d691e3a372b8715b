"""Small networks with sizes nobody tunes for: 3, 5, 7 heads, widths that no vector register divides, odd vocabularies.

Each case changes several options at once, so that every option of a family is on in one case and off in another.
An rms_norm_eps of 0.01 is nobody's, but large enough that the wrong epsilon in the right place shows.
"""

from __future__ import annotations

from oracle.case import Case
from oracle.deepseek_cases import V2, V2_LITE, V3
from oracle.gqa_cases import LLAMA, QWEN2, QWEN3, QWEN3_MOE

FAMILIES: list[list[Case]] = [V3, V2, V2_LITE, LLAMA, QWEN2, QWEN3, QWEN3_MOE]
CASES: list[Case] = [case for family in FAMILIES for case in family]
