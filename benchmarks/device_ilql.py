"""ILQL on a device, as it is checked and timed: the Wordle preset, and a trunk like GPT-2."""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from benchmarks.ilql_cases import PROMPT, SIZES, prompts, training
from benchmarks.ilql_ours import batch_of, networks
from raffia.algorithms.ilql.config import DecodeConfig, ILQLConfig
from raffia.algorithms.ilql.generate import generate
from raffia.algorithms.ilql.learner import ILQLLearner, load_networks
from raffia.algorithms.ilql.loss import Loss
from raffia.lm.decoding.generations import Generations
from raffia.recipes.ilql.data import make_corpus
from raffia.recipes.ilql.presets import ILQL_PRESETS
from raffia.tensordict.tensordict import TensorDict

Precision = Literal["float32", "bfloat16"]
NUM_GAMES, NUM_PROMPTS = 300, 64
TRUNK, SMALL_TRUNK = "gpt2 many", "small"  # of `benchmarks.ilql_cases.SIZES`


@dataclass
class Language:
    """A learner with its state, batch and prompts, all on a device."""

    name: str
    learner: ILQLLearner
    state: TensorDict
    batch: TensorDict
    prompts: list[list[int]]
    decode: DecodeConfig
    device: torch.device

    @property
    def num_tokens(self) -> int:
        """Of the batch, without padding."""
        return int(self.batch["attn_mask"].sum())

    def to(self, device: torch.device) -> "Language":
        """The same on another device, with its own copy of the state."""
        moved = {"state": self.state.to(device).clone(), "batch": self.batch.to(device)}
        return replace(self, device=device, **moved)

    def learn(self) -> TensorDict:
        """An update."""
        update, metrics = self.learner.grads(self.state, self.batch)
        self.state = self.learner.apply(self.state, update)
        return metrics

    def speaker(self) -> "Speaker":
        """The networks of the state, to generate with."""
        return Speaker(self)


class Speaker:
    """Generates texts, with draws from the same seed at each call."""

    def __init__(self, language: Language) -> None:
        self.language = language
        model = language.learner.make_model(0)
        networks = Loss(model, language.learner.config.loss).to(language.device)
        load_networks(networks, language.state)
        self.model, self.target = networks.model, networks.target

    def __call__(self) -> Generations:
        draws = torch.Generator().manual_seed(0)
        return generate(
            self.model,
            self.target,
            self.language.prompts,
            self.language.decode,
            generator=draws,
            pad_token=0,
        )

    def _weights(self) -> list[Tensor]:
        """All that a token is multiplied with, or looked up in: Q is the target's."""
        own = [p for name, p in self.model.named_parameters() if name[:2] not in ("q1", "q2")]
        return [*own, *self.target.parameters()]

    @property
    def num_weights(self) -> int:
        """That a token meets."""
        return sum(weight.numel() for weight in self._weights())

    @property
    def num_weight_bytes(self) -> int:
        """Of those."""
        return sum(weight.numel() * weight.element_size() for weight in self._weights())


def wordle(device: torch.device, small: bool) -> Language:
    """The preset `wordle`, with fewer games, which shortens nothing that is timed."""
    config = ILQL_PRESETS["wordle"]
    config = replace(config, wordle=replace(config.wordle, num_games=NUM_GAMES))
    corpus = make_corpus(config, None)
    rows = 8 if small else config.batch_size
    batch = next(corpus.learnt.batches(0, 0, rows, per_token=config.model.per_token))
    learner = ILQLLearner(config, num_updates=config.num_updates)
    draws = torch.Generator().manual_seed(0)
    size = (8 if small else NUM_PROMPTS, PROMPT)
    words = torch.randint(6, config.model.trunk.vocab_size, size, generator=draws)
    # As many tokens as the context holds: games end sooner, by chance.
    decode = replace(config.decode, max_new_tokens=16)
    return Language(
        "wordle", learner, learner.init(0), batch, words.tolist(), decode, torch.device("cpu")
    ).to(device)


def trunk(device: torch.device, small: bool, precision: Precision = "float32") -> Language:
    """Noise for a trunk of GPT-2's shape, of many rows; if small, for the small one."""
    model = SMALL_TRUNK if small else TRUNK
    case = training(model, "shared")
    learner = ILQLLearner(ILQLConfig(model=networks(case), precision=precision))
    state, size = learner.init(0), SIZES[model]
    asked = prompts(model, 4 if small else NUM_PROMPTS)
    decode = DecodeConfig(max_new_tokens=8 if small else size.new)
    return Language(
        f"{'GPT-2-like' if not small else 'small GPT'}, {precision}",
        *(learner, state, batch_of(model), asked, decode, torch.device("cpu")),
    ).to(device)
