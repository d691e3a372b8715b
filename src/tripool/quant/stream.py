"""The residual stream of the calibration text, carried through the network layer by layer.

Holds one layer's weights at a time. Between layers the stream is the whole state, so a resumed run reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from tripool.checkpoints import Checkpoint
from tripool.checkpoints.write import read_tensors, write_tensors
from tripool.core import BLOCK_TOKENS
from tripool.kernels import CPU, Batch
from tripool.kernels.sequence_rows import SequenceRows
from tripool.models.arch import Arch
from tripool.models.decoder import Layer, join_sublayer
from tripool.models.loader import Loader, Source
from tripool.models.rope import rope_table
from tripool.quant.parts import LayerParts
from tripool.quant.rounding import Seen
from tripool.quant.watched import watched_table

_SAMPLE_ROWS = 2048


class Stream:
    """`states`: one [tokens, hidden] per window, before the next layer."""

    def __init__(self, arch: Arch, windows: Sequence[Sequence[int]], states: list[torch.Tensor]) -> None:
        self.arch, self.windows, self.states = arch, windows, states
        self._cos_sin = rope_table(arch.rope, max(map(len, windows)))

    @classmethod
    @torch.inference_mode()
    def begin(cls, arch: Arch, checkpoint: Checkpoint, windows: Sequence[Sequence[int]]) -> Stream:
        embed = _embedding(arch, checkpoint)
        return cls(arch, windows, [embed[torch.tensor(window)].float() for window in windows])

    @classmethod
    def read(cls, arch: Arch, windows: Sequence[Sequence[int]], path: Path) -> Stream:
        states = read_tensors(path)
        return cls(arch, windows, [states[str(i)] for i in range(len(windows))])

    def write(self, path: Path) -> None:
        write_tensors(path, {str(i): state for i, state in enumerate(self.states)})

    def start(self, num_windows: int, num_tokens: int) -> Stream:
        """The first tokens of the first windows, as another stream; attention is causal, so they are unaffected
        by the rest.
        """
        windows = [window[:num_tokens] for window in self.windows[:num_windows]]
        states = [state[:num_tokens].clone() for state in self.states[:num_windows]]
        return Stream(self.arch, windows, states)

    def batch(self, window: int, *, first: int = 0) -> tuple[Batch, torch.Tensor]:
        """One window's rows, from position `first` on, and a buffer for their KV."""
        tokens, num_tokens = self.windows[window], len(self.windows[window])
        positions = torch.arange(first, num_tokens)
        blocks = -(-num_tokens // BLOCK_TOKENS)
        seq = SequenceRows(0, num_tokens - first, first, list(range(blocks)), first)
        batch = Batch(torch.tensor(tokens[first:]), positions, positions, len(positions), [seq], [])
        batch.cos_sin = self._cos_sin[first:num_tokens]
        return batch, torch.zeros(blocks * BLOCK_TOKENS, self.arch.kv_width)

    @torch.inference_mode()
    def observe(self, parts: LayerParts, source: Source) -> dict[str, Seen]:
        """Run the layer over every window: advances the stream and returns the statistics of each input."""
        recorder = Recorder({one.observed for one in parts.inputs}, len(self.windows))
        loader = Loader(source, watched_table(recorder), torch.float32)
        layer = Layer(loader, parts.prefix, self.arch, moe=parts.moe)
        for i, x in enumerate(self.states):
            batch, kv = self.batch(i, first=int(parts.mtp))
            layer(x, batch, kv)
        return recorder.seen()

    @torch.inference_mode()
    def enter_mtp(self, parts: LayerParts, checkpoint: Checkpoint, source: Source) -> dict[str, Seen]:
        """From the last layer's output to the MTP layer's input: each final state with the next token."""
        recorder = Recorder({"eh"}, len(self.windows))
        join = join_sublayer(Loader(source, watched_table(recorder), torch.float32), parts.prefix, self.arch)
        embed, gain = _embedding(self.arch, checkpoint), torch.empty(self.arch.hidden)
        checkpoint.read("model.norm.weight", gain)
        for i, x in enumerate(self.states):
            final = CPU.rms_norm(x, gain, self.arch.norm_eps)
            self.states[i] = join(embed[torch.tensor(self.windows[i][1:])].float(), final[:-1].clone())
        return recorder.seen()


def _embedding(arch: Arch, checkpoint: Checkpoint) -> torch.Tensor:
    name = "model.embed_tokens.weight"
    dtype = torch.bfloat16 if checkpoint.infos()[name].dtype == "BF16" else torch.float32
    embed = torch.empty(arch.vocab, arch.hidden, dtype=dtype)
    checkpoint.read(name, embed)
    return embed


class Recorder:
    """Accumulates statistics of inputs without storing them.

    A row with a larger norm than usual is scaled to the usual norm. Some networks give the first token of a text a norm
    hundreds of times larger; unscaled, it alone would determine every factor, range and integer, although the stream is
    normalised afterwards.
    """

    def __init__(self, wanted: set[str], num_windows: int) -> None:
        self._wanted = wanted
        self._rows_each = -(-_SAMPLE_ROWS // num_windows)
        self._seen: dict[str, Seen] = {}
        self._usual: dict[str, torch.Tensor] = {}
        self._samples: dict[str, list[torch.Tensor]] = {}

    def __call__(self, label: str, x: torch.Tensor, integers: bool) -> torch.Tensor:
        if label in self._wanted and len(x):
            self._note(label, x)
        return x

    def _note(self, label: str, x: torch.Tensor) -> None:
        lengths = x.norm(dim=1, keepdim=True)
        usual = self._usual.setdefault(label, lengths.median())
        rows = x * (usual / lengths.clamp_min(1e-30)).clamp_max_(1)
        largest = rows.abs().amax(0)
        known = self._seen.get(label)
        if known is None:
            known = Seen(torch.zeros(x.shape[1], x.shape[1]), largest, x[:0], 0)
            self._seen[label], self._samples[label] = known, []
        known.second.addmm_(rows.T, rows)
        known.largest = torch.maximum(known.largest, largest)
        known.count += len(rows)
        step = max(len(rows) // self._rows_each, 1)
        self._samples[label].append(rows[::step][: self._rows_each].clone())

    def seen(self) -> dict[str, Seen]:
        for label, known in self._seen.items():
            known.rows = torch.cat(self._samples[label])
        return self._seen
