"""`generate`: the texts of the agent after prompts: drawn, greedily, by beam search or planned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from raffia.algorithms.ilql.model import ILQLModel, ILQLTarget
from raffia.algorithms.ilql.model_scorer import ModelScorer, evaluating
from raffia.algorithms.ilql.token_planning import planned
from raffia.lm.decoding.beam import beam_search
from raffia.lm.decoding.config import DecodeConfig
from raffia.lm.decoding.generations import Generations, Stop, rerank
from raffia.lm.decoding.sampling import best_token, drawing, new_seeds
from raffia.lm.decoding.scorer import Needs, Scorer, check_prompts
from raffia.lm.decoding.steps import Choose, gathered, limits_of, token_steps
from raffia.lm.tokenizers.tokenizer import Tokenizer

__all__ = ["chooser", "decode", "forbid", "generate", "marks_of"]


def generate(
    model: ILQLModel,
    target: ILQLTarget | None,  # None: no values are wanted (include_adv=False)
    prompts: Sequence[Sequence[int]],  # tokens; of different lengths
    config: DecodeConfig,
    *,
    generator: torch.Generator | None = None,  # of sampling; None: torch's own
    num_generations: int | None = None,  # None: the config's
    tokenizer: Tokenizer | None = None,  # for the tokens of padding and of the end of an utterance
    stop: Stop | None = None,  # None: the tokenizer's end; without one the limits only
    pad_token: int | None = None,  # never generated; None: the tokenizer's
) -> Generations:
    """The agent's texts after the prompts; the model is not changed, and its mode is as before.

    With `config.plan` a token costs one step of the networks and `num_simulations` further ones, in
    which all rows go together; the tokens of `stop` end a branch of the tree, its condition only
    the text.

    >>> from raffia.algorithms.ilql.config import ILQLModelConfig, TrunkConfig
    >>> from raffia.algorithms.ilql.model import make_target
    >>> trunk = TrunkConfig(vocab_size=10, n_layer=1, n_head=2, n_embd=8, block_size=16)
    >>> model = ILQLModel(ILQLModelConfig(trunk=trunk))
    >>> config = DecodeConfig(adv_weight=4.0, max_new_tokens=5)
    >>> texts = generate(model, make_target(model), [[1, 2, 3], [4]], config, num_generations=2,
    ...                  stop=Stop(tokens=(9,)), generator=torch.Generator().manual_seed(0))
    >>> texts.log_prob.shape, len(texts.best())
    (torch.Size([2, 2]), 2)
    """
    stop, pad_token = marks_of(tokenizer, stop, pad_token)
    with evaluating(model, target), torch.no_grad():
        return decode(
            ModelScorer(model, target),
            prompts,
            config,
            generator=generator,
            num_generations=num_generations,
            stop=stop,
            pad_token=pad_token,
        )


def marks_of(
    tokenizer: Tokenizer | None, stop: Stop | None, pad_token: int | None
) -> tuple[Stop | None, int | None]:
    """What ends a text and what is never generated: as given, else as the tokenizer has it.

    >>> from raffia.lm.tokenizers.tokenizer import character_tokenizer
    >>> tokenizer = character_tokenizer(["abc"])
    >>> stop, pad_token = marks_of(tokenizer, None, 0)
    >>> stop.tokens == (tokenizer.eoa_token_id,), pad_token
    (True, 0)
    """
    if tokenizer is None:
        return stop, pad_token
    if stop is None:
        stop = Stop(tokens=(tokenizer.eoa_token_id,))
    return stop, tokenizer.pad_token_id if pad_token is None else pad_token


def decode(
    scorer: Scorer,
    prompts: Sequence[Sequence[int]],
    config: DecodeConfig,
    *,
    generator: torch.Generator | None = None,
    num_generations: int | None = None,
    stop: Stop | None = None,
    pad_token: int | None = None,
) -> Generations:
    """The same with any scorer.

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
    >>> decode(Parrot(), [[3], [1, 4]], DecodeConfig(include_adv=False, num_beams=1)).best()
    [[3, 3, 3], [4, 4]]
    """
    check_prompts(prompts, scorer)
    if num_generations is not None:
        config = replace(config, num_generations=num_generations)
    num_generations = config.num_generations
    if not prompts:
        nothing = torch.zeros(0, num_generations)
        return Generations(tokens=[], log_prob=nothing, stopped=nothing.bool())
    stop = Stop() if stop is None else stop
    forbidden = forbid(pad_token, scorer)
    if config.num_beams is not None and config.num_beams > 1:
        texts = beam_search(scorer, prompts, config, stop=stop, forbidden=forbidden)
        texts = texts.first(num_generations)
    else:
        steps = token_steps(
            *(scorer, prompts, config),
            chooser(
                *(scorer, prompts, config, num_generations, generator),
                stop=stop,
                forbidden=forbidden,
            ),
            needs=Needs.of(config),
            stop=stop,
            num_generations=num_generations,
            forbidden=forbidden,
        )
        texts = gathered(list(steps), len(prompts), num_generations)
    return texts if config.rerank is None else rerank(texts, config.rerank)


def chooser(
    scorer: Scorer,
    prompts: Sequence[Sequence[int]],
    config: DecodeConfig,
    num_generations: int,
    generator: torch.Generator | None,
    *,
    stop: Stop,
    forbidden: Tensor | None,  # see `forbid`
) -> Choose:
    """Draws; the best token where the config wants one beam; what a search finds where it plans.

    >>> greedy = DecodeConfig(num_beams=1)
    >>> chooser(None, [[1]], greedy, 1, None, stop=Stop(), forbidden=None) is best_token
    True
    """
    if config.num_beams is not None:
        return best_token
    seeds = new_seeds(len(prompts) * num_generations, generator).to(scorer.device)
    if config.plans:
        return planned(config, stop, forbidden, seeds)
    return drawing(seeds, int(limits_of(scorer, prompts, config).max()))


def forbid(pad_token: int | None, scorer: Scorer) -> Tensor | None:
    """What is added to the scores [V] so that padding is never generated: 0, and -inf for it.

    >>> from types import SimpleNamespace
    >>> forbid(1, SimpleNamespace(vocab_size=3, device="cpu"))
    tensor([0., -inf, 0.])
    """
    if pad_token is None:
        return None
    if not 0 <= pad_token < scorer.vocab_size:
        raise ValueError(
            f"pad_token={pad_token} is none of the model's {scorer.vocab_size} tokens; pass the "
            "tokenizer's pad_token_id, or None if it has none"
        )
    forbidden = torch.zeros(scorer.vocab_size, device=scorer.device)
    forbidden[pad_token] = -torch.inf
    return forbidden
