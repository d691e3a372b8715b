"""What a network makes of documents that it never learned from."""

from __future__ import annotations

from math import exp

import torch

from tripool.train.attention import Way
from tripool.train.batch import make_batch
from tripool.train.device import autocast
from tripool.train.loss import token_losses
from tripool.train.network import Network
from tripool.train.rows import Rows


@torch.no_grad()
def evaluate(network: Network, rows: Rows, way: Way, rows_per_pass: int, most_rows: int | None) -> dict[str, float]:
    """Losses in nats: of answers, and of every token. `draft_agreement`: where the MTP layer, reading the text itself,
    finds likeliest after an answer's token what the network then finds likeliest."""
    with torch.compiler.set_stance("force_eager"):  # a few passes of odd sizes: compiling them would take longer
        return _evaluate(network, rows, way, rows_per_pass, most_rows)


def _evaluate(network: Network, rows: Rows, way: Way, rows_per_pass: int, most_rows: int | None) -> dict[str, float]:
    device = network.embed.device
    sums = torch.zeros(6, dtype=torch.float64, device=device)
    numbers = torch.arange(len(rows) if most_rows is None else min(most_rows, len(rows)), device=device)
    for part in numbers.split(rows_per_pass):
        batch = make_batch(rows, part, 1.0, way.sight)
        with autocast(device):
            states = network(batch.tokens, batch.sight, batch.real)
            for row in range(len(part)):  # one at a time: logits of many would not fit
                each = token_losses(states.hidden[row], network.head, batch.next.tokens[row])
                answers, every = batch.answers[row], batch.next.weights[row]
                sums[:4] += torch.stack([(each * answers).sum(), answers.sum(), (each * every).sum(), every.sum()])
                if states.mtp is not None:
                    said, guessed = (network.logits(one[row]).argmax(-1) for one in (states.hidden, states.mtp))
                    place = answers[1:] * batch.after_next.weights[row, :-1]
                    sums[4:] += torch.stack([((guessed[:-1] == said[1:]) * place).sum(), place.sum()])
    answer, num_answers, every_loss, num_every, agreed, drafted = sums.tolist()
    loss = answer / max(num_answers, 1)
    found = {
        "held_out_loss": loss,
        "held_out_perplexity": exp(min(loss, 50.0)),
        "held_out_loss_of_all": every_loss / max(num_every, 1),
        "held_out_tokens": num_answers,
    }
    return found | ({"draft_agreement": agreed / max(drafted, 1)} if network.mtp is not None else {})
