"""The multi-token-prediction layer, run by transformers: the layer it keeps beside the network for drafting."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from oracle.quiet import quiet
from oracle.reference import Reference


class DraftReference:
    """`reference` must come from a folder that holds the layer, under the names of published checkpoints."""

    def __init__(self, reference: Reference) -> None:
        self._main = reference.model
        with quiet():
            from transformers.modeling_layers import MtpModel

            # transformers finds the layer by this pattern, which knows the number of layers of one published size.
            self._main._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{self._main.config.num_hidden_layers}\."]
            self._layer = MtpModel.from_pretrained(self._main).eval()

    @torch.no_grad()
    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """Row i, from hidden state i and token i + 1, speaks about token i + 2; one row less than tokens."""
        ids = torch.tensor([tokens])
        positions = torch.arange(1, len(tokens))[None]
        with quiet():
            hidden = self._main.model(ids, use_cache=False).last_hidden_state[:, :-1]
            drafted = self._layer.forward_layer(0, hidden, positions, None, input_ids=ids[:, 1:])
            return self._main.lm_head(drafted)[0]
