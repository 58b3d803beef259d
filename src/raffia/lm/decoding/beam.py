"""Beam search: the best few texts of each prompt, by the sum of their log-probabilities.

Shapes: P prompts, W beams of each, M live beams of all, V tokens of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from raffia.lm.decoding.generations import Generations, Request
from raffia.lm.decoding.scorer import Choice, Needs


def beam_search(request: Request) -> Generations:
    """`config.num_beams` texts for each prompt, from the likeliest on.

    Beams compete on the sum of the perturbed log-probabilities. Complete texts keep their slot
    among the beams as long as they are among the best, and cost nothing more; sums only fall, so
    that a prompt whose beams are all complete is done.

    >>> from raffia.lm.decoding.config import DecodeConfig
    >>> from raffia.lm.decoding.generations import Stop
    >>> from raffia.lm.decoding.scorer import NextToken
    >>> class Constant:  # whatever the text, token 2 is likelier than 1
    ...     vocab_size, block_size, device = 3, 3, torch.device("cpu")
    ...     def start(self, prompts, needs, max_new_tokens):
    ...         return self, self.advance(torch.zeros(len(prompts)))
    ...     def advance(self, tokens):
    ...         logits = torch.tensor([0.0, 0.3, 0.7]).log().expand(len(tokens), 3)
    ...         return NextToken(logits, None, None)
    ...     def reorder(self, rows):
    ...         pass
    >>> config = DecodeConfig(num_beams=2, include_adv=False)
    >>> found = beam_search(Request(Constant(), [[0]], config, Stop(tokens=(1,))))
    >>> found.tokens, found.log_prob.exp()
    ([[[2, 2], [1]]], tensor([[0.4900, 0.3000]]))
    """
    width, stop = request.config.num_beams or 1, request.stop
    limits = request.limits(copies=width)
    most = int(limits.max())
    rows, outputs = request.scorer.start(request.prompts, Needs.of(request.config), most)
    live = torch.zeros(len(limits), dtype=torch.bool, device=limits.device)
    live[::width] = True  # at first the other beams would be the same one again
    beams: Beams | None = None
    for step in range(most):
        choice = request.choice(outputs)
        if beams is None:
            beams = Beams.begin(len(limits), most, choice, live)
        slots = live.nonzero().squeeze(-1)
        scores, parent, token = most_likely(beams, choice, slots, width)
        beams, row = extended(beams, choice, slots, scores, parent, token, step)
        stopped = stop.ended(token, lambda: beams.tokens[:, : step + 1].tolist())  # noqa: B023
        grew = row >= 0
        beams.stopped |= grew & stopped
        live = grew & ~beams.stopped & (limits > step + 1)
        if not bool(live.any()):
            break
        rows.reorder(row[live])
        outputs = rows.advance(token[live])
    assert beams is not None
    return beams.generations(width)


@dataclass
class Beams:
    """P * W texts; those of a prompt are adjacent, from the likeliest on.

    >>> choice = Choice(torch.zeros(1, 3), None, None, None)
    >>> Beams.begin(2, 4, choice, torch.tensor([True, False])).log_prob
    tensor([0., -inf])
    """

    tokens: Tensor  # int64 [P W, N]
    length: Tensor  # int64 [P W]
    stopped: Tensor  # bool [P W]
    log_prob: Tensor  # [P W]; -inf: no such text
    scores: dict[str, Tensor]  # "kl", "value", "advantage", as far as they are known: [P W]

    @classmethod
    def begin(cls, num: int, most: int, choice: Choice, live: Tensor) -> Beams:
        """Texts without tokens."""
        zeros = choice.log_probs.new_zeros(num)
        known = {"kl": choice.logits, "value": choice.target_q, "advantage": choice.target_q}
        return cls(
            tokens=torch.zeros((num, most), dtype=torch.int64, device=zeros.device),
            length=torch.zeros(num, dtype=torch.int64, device=zeros.device),
            stopped=torch.zeros(num, dtype=torch.bool, device=zeros.device),
            log_prob=zeros.masked_fill(~live, -torch.inf),
            scores={name: zeros.clone() for name, part in known.items() if part is not None},
        )

    def at(self, slots: Tensor) -> Beams:
        """The texts of these slots [P W]."""
        parts = self.tokens, self.length, self.stopped, self.log_prob
        tokens, length, stopped, log_prob = (part[slots] for part in parts)
        scores = {name: score[slots] for name, score in self.scores.items()}
        return Beams(tokens, length, stopped, log_prob, scores)

    def generations(self, width: int) -> Generations:
        """The beams as texts of their prompts."""
        texts = [
            text[:length]
            for text, length in zip(self.tokens.tolist(), self.length.tolist(), strict=True)
        ]
        return Generations(
            tokens=[texts[start : start + width] for start in range(0, len(texts), width)],
            log_prob=self.log_prob.view(-1, width),
            stopped=self.stopped.view(-1, width),
            **{name: score.view(-1, width) for name, score in self.scores.items()},
        )


def most_likely(
    beams: Beams,
    choice: Choice,  # of the live beams, M rows
    slots: Tensor,  # int64 [M], where the live beams are
    width: int,  # W
) -> tuple[Tensor, Tensor, Tensor]:  # [P W] each: log-probability, slot it comes from, token
    """The W best of each prompt: live beams with a further token, and complete ones as they are.

    >>> choice = Choice(torch.tensor([[0.1, 0.9]]).log(), None, None, None)
    >>> beams = Beams.begin(2, 4, choice, torch.tensor([True, False]))
    >>> scores, parent, token = most_likely(beams, choice, torch.tensor([0]), 2)
    >>> parent, token
    (tensor([0, 0]), tensor([1, 0]))
    """
    num, (_, num_tokens) = len(beams.log_prob), choice.log_probs.shape
    candidates = choice.log_probs.new_full((num, num_tokens), -torch.inf)
    candidates[:, 0] = beams.log_prob  # of those without a further token
    candidates[slots] = choice.log_probs + beams.log_prob[slots].unsqueeze(-1)
    scores, flat = candidates.view(num // width, -1).topk(width)
    first = torch.arange(0, num, width, device=flat.device).unsqueeze(-1)
    parent = first + torch.div(flat, num_tokens, rounding_mode="floor")
    return scores.flatten(), parent.flatten(), (flat % num_tokens).flatten()


def extended(
    beams: Beams,
    choice: Choice,  # of the live beams, M rows
    slots: Tensor,  # int64 [M], where the live beams are
    scores: Tensor,  # [P W]
    parent: Tensor,  # int64 [P W]
    token: Tensor,  # int64 [P W]
    step: int,  # of the new token
) -> tuple[Beams, Tensor]:  # ..., int64 [P W]: the model's row that a beam grew from; -1: none
    """The chosen texts, those of live beams with their new token.

    >>> choice = Choice(torch.tensor([[0.1, 0.9]]).log(), None, None, None)
    >>> beams = Beams.begin(2, 4, choice, torch.tensor([True, False]))
    >>> beams, row = extended(beams, choice, torch.tensor([0]), torch.tensor([-0.1, -2.3]),
    ...                       torch.tensor([0, 0]), torch.tensor([1, 0]), 0)
    >>> beams.tokens[:, 0], row
    (tensor([1, 0]), tensor([0, 0]))
    """
    row_of_slot = torch.full_like(parent, -1)
    row_of_slot[slots] = torch.arange(len(slots), device=slots.device)
    row = row_of_slot[parent]
    missing = scores == -torch.inf  # fewer than W texts can follow; these have no tokens
    row = row.masked_fill(missing, -1)
    beams = beams.at(parent)
    beams.log_prob = scores
    beams.length[missing], beams.stopped[missing] = 0, False
    for own in beams.scores.values():
        own[missing] = 0
    grown = (row >= 0).nonzero().squeeze(-1)
    row_of, new = row[grown], token[grown]
    beams.tokens[grown, step] = new
    beams.length[grown] = step + 1
    _, *found = choice.at(row_of).of_token(new)
    for name, score in zip(("kl", "value", "advantage"), found, strict=True):
        if score is None:
            continue
        own = beams.scores[name]
        before = 0 if name == "value" else own[grown]  # values are of the last token
        own[grown] = (before + score).to(own.dtype)  # within autocast scores are of lower precision
    return beams, row
