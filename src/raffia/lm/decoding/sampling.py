"""Texts that grow token by token, drawn by probability, or by whatever else chooses the tokens.

Complete texts leave the batch. Each text has a separate stream of random numbers, so it is the same
whatever other texts are generated.

Legend: P prompts, G texts for each, N = P G texts, R of them not complete, V tokens of the
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from raffia.functional.draws import seeded_uniform
from raffia.lm.decoding.generations import Generations, Request
from raffia.lm.decoding.scorer import Choice, Needs, Rows


class Moment(NamedTuple):
    """The information from which the next tokens are chosen.

    >>> choice = Choice(torch.tensor([[0.2, 0.8]]).log(), None, None, None)
    >>> Moment(choice, None, torch.tensor([0]), 0).choice.log_probs.argmax(-1)
    tensor([1])
    """

    choice: Choice
    rows: Rows
    text: Tensor  # int64 [R]: which of the N texts
    step: int  # tokens that each has so far


Choose = Callable[[Moment], Tensor]  # -> int64 [R]


class Step(NamedTuple):
    """The next token of the R texts that are not complete yet.

    >>> Step(torch.tensor([0, 2]), torch.tensor([7, 7]), torch.zeros(2), None, None, None, None,
    ...      torch.tensor([True, False]), torch.tensor([True, False])).text
    tensor([0, 2])
    """

    text: Tensor  # int64 [R]: which of the texts
    token: Tensor  # int64 [R]
    log_prob: Tensor  # [R] under the perturbed policy
    kl: Tensor | None  # [R] log_prob less that of the policy as it is
    value: Tensor | None  # [R] target Q
    advantage: Tensor | None  # [R] target Q - V
    v: Tensor | None  # [R] V before the token
    stopped: Tensor  # bool [R]: by `Stop`
    done: Tensor  # bool [R]: stopped, or at the limit


def token_steps(request: Request, choose: Choose) -> Iterator[Step]:
    """The steps of all texts until they are complete; each prompt is read once.

    The texts of a prompt, as many as `num_generations` says, are adjacent.

    >>> from raffia.lm.decoding.config import DecodeConfig
    >>> from raffia.lm.decoding.generations import Stop
    >>> from raffia.lm.decoding.scorer import NextToken
    >>> class Parrot:  # wants the last token again, and has nothing to remember
    ...     vocab_size, block_size, device = 5, 4, torch.device("cpu")
    ...     def start(self, prompts, needs, max_new_tokens):
    ...         return self, self.advance(torch.tensor([prompt[-1] for prompt in prompts]))
    ...     def advance(self, tokens):
    ...         logits = 10.0 * torch.nn.functional.one_hot(tokens, 5)
    ...         return NextToken(logits, None, None)
    ...     def reorder(self, rows):
    ...         pass
    >>> config = DecodeConfig(include_adv=False)
    >>> best = lambda now: now.choice.log_probs.argmax(-1)
    >>> steps = token_steps(Request(Parrot(), [[3], [4]], config, Stop(tokens=(4,))), best)
    >>> [(step.text.tolist(), step.token.tolist()) for step in steps]
    [([0, 1], [3, 4]), ([0], [3]), ([0], [3])]
    """
    stop, num_generations = request.stop, request.config.num_generations
    limits = request.limits(copies=num_generations)
    most, device = int(limits.max()), limits.device
    ends = set(limits.tolist())  # where texts come to their limits
    rows, outputs = request.scorer.start(request.prompts, Needs.of(request.config), most)
    text = torch.arange(len(limits), device=device)
    if num_generations > 1:
        prompt_of = text // num_generations
        rows.reorder(prompt_of)
        outputs = outputs.at(prompt_of)
    texts = torch.empty((len(limits), most), dtype=torch.int64, device=device)
    for step in range(most):
        choice = request.choice(outputs)
        token = choose(Moment(choice, rows, text, step))
        stopped = torch.zeros_like(token, dtype=torch.bool)
        if stop.condition is not None:
            texts[text, step] = token
        if stop.tokens or stop.condition is not None:
            stopped = stop.ended(token, lambda: texts[text, : step + 1].tolist())  # noqa: B023
        done = stopped | (limits == step + 1) if step + 1 in ends else stopped
        yield Step(text, token, *choice.of_token(token), choice.v, stopped, done)
        if bool(done.any()):
            left = (~done).nonzero().squeeze(-1)
            if not len(left):
                return
            rows.reorder(left)
            text, token, limits = text[left], token[left], limits[left]
        outputs = rows.advance(token)


def gathered(steps: Sequence[Step], num_prompts: int, num_generations: int = 1) -> Generations:
    """The texts of all steps, with the sums over their tokens.

    >>> none, yes = torch.tensor([False, False]), torch.tensor([True, True])
    >>> both, value = torch.tensor([0, 1]), torch.tensor([5.0, 6.0])
    >>> steps = [Step(both, both + 7, -torch.ones(2), None, value, None, None, none, none),
    ...          Step(both, both + 9, -torch.ones(2), None, value + 2, None, None, yes, yes)]
    >>> texts = gathered(steps, num_prompts=2)
    >>> texts.tokens, texts.log_prob.flatten(), texts.value.flatten()
    ([[[7, 9]], [[8, 10]]], tensor([-2., -2.]), tensor([7., 8.]))
    """
    num, shape = num_prompts * num_generations, (num_prompts, num_generations)
    text = torch.cat([step.text for step in steps])
    done = torch.cat([step.done for step in steps])
    last = torch.empty(num, dtype=torch.int64, device=text.device)
    last[text[done]] = done.nonzero().squeeze(-1)  # where each text's last token is

    def parts(name: str) -> Tensor | None:
        found = [getattr(step, name) for step in steps]
        return None if found[0] is None else torch.cat(found)

    def total(name: str) -> Tensor | None:
        part = parts(name)
        return None if part is None else part.new_zeros(num).index_add_(0, text, part).view(shape)

    tokens: list[list[int]] = [[] for _ in range(num)]
    all_tokens = torch.cat([step.token for step in steps])
    for number, token in zip(text.tolist(), all_tokens.tolist(), strict=True):
        tokens[number].append(token)
    value, log_prob = parts("value"), total("log_prob")
    assert log_prob is not None
    return Generations(
        tokens=[tokens[at : at + num_generations] for at in range(0, num, num_generations)],
        log_prob=log_prob,
        stopped=torch.cat([step.stopped for step in steps])[last].view(shape),
        kl=total("kl"),
        advantage=total("advantage"),
        value=None if value is None else value[last].view(shape),
    )


def best_token(now: Moment) -> Tensor:  # int64 [R]
    """The token of the largest score.

    >>> from raffia.lm.decoding.scorer import Choice
    >>> choice = Choice(torch.tensor([[0.2, 0.8]]).log(), None, None, None)
    >>> best_token(Moment(choice, None, torch.tensor([0]), 0))
    tensor([1])
    """
    return now.choice.log_probs.argmax(-1)


def drawing(
    seeds: Tensor,  # int64 [N], one for each text
    most: int,  # tokens that a text may get
) -> Choose:
    """Draws tokens by probability, from the numbers of each text.

    >>> from raffia.lm.decoding.scorer import Choice
    >>> choose = drawing(torch.tensor([5, 6]), 3)
    >>> choice = Choice(torch.tensor([[0.0, 1.0]]).log(), None, None, None)
    >>> choose(Moment(choice, None, torch.tensor([1]), 2))
    tensor([1])
    """
    uniform = _uniform(seeds, most)
    return lambda now: draw_tokens(now.choice.log_probs, uniform[now.step, now.text])


def new_seeds(num: int, generator: torch.Generator | None = None) -> Tensor:
    """Seeds of texts, int64 [num]; drawing them one by one gives the same ones.

    >>> new_seeds(2, torch.Generator().manual_seed(0)).shape
    torch.Size([2])
    """
    device = "cpu" if generator is None else generator.device
    draws = [torch.randint(2**62, (), generator=generator, device=device) for _ in range(num)]
    return torch.stack(draws)


def draw_tokens(
    log_probs: Tensor,  # [R, V]
    uniform: Tensor,  # float64 [R], within (0, 1)
) -> Tensor:  # int64 [R]
    """Tokens drawn by probability: the first at which the summed probabilities pass the number.

    >>> draw_tokens(torch.tensor([[0.2, 0.0, 0.8]]).log(), torch.tensor([0.21]).double())
    tensor([2])
    """
    passed = log_probs.double().exp().cumsum(-1)
    bar = (uniform * passed[:, -1]).unsqueeze(-1)  # rounded sums may not end at 1
    return torch.searchsorted(passed, bar, right=True).squeeze(-1)


def _uniform(seeds: Tensor, num: int) -> Tensor:
    """Numbers within (0, 1) of 46 random bits: int64 [N] -> float64 [num, N]."""
    coarse, fine = seeded_uniform(seeds, 2 * num).double().t().split(num)
    return (coarse + (fine - 0.5) * 2.0**-23).contiguous()
