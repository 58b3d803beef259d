"""A run's networks, around the language model that it starts from, and the copy of it in the run's
folder.

The model's own folder is needed once, at the start. From then on the run has, in `language_model/`,
what checkpoints do not hold: of a model of `transformers` its config.json, which defines it;
with LoRA the weights that do not learn, once for all checkpoints. `Networks` are those of a
learner's state, for inspection and decoding.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from raffia.algorithms.ilql.config import ILQLConfig, TrunkConfig
from raffia.algorithms.ilql.learner import load_networks, named_tensors
from raffia.algorithms.ilql.loss import Loss
from raffia.algorithms.ilql.model import ILQLModel, make_trunk
from raffia.algorithms.ilql.policy import ILQL_Policy
from raffia.files import DamagedFileError
from raffia.files.folder import load_folder, write_folder
from raffia.functional.seeds import derive_seed, global_draws
from raffia.learner import module_tree
from raffia.lm.data.utterances import Observation
from raffia.lm.folder import gpt2_settings, load_gpt2, read_config, weight_files
from raffia.lm.hf_models import hf_sizes
from raffia.lm.hf_trunk import HFTrunk
from raffia.lm.lora import add_lora, attention_layers
from raffia.lm.model import LanguageModel
from raffia.lm.tokenizers.tokenizer import Tokenizer
from raffia.lm.transformer import CausalLM
from raffia.recipes.ilql.config import ILQLRun
from raffia.recipes.ilql.data import longest_game, make_tokenizer
from raffia.recipes.run_folder import LANGUAGE_MODEL
from raffia.tensordict.tensordict import TensorDict
from raffia.train.experiment import RunError

KIND, VERSION = "raffia.language_model", 1
ARCHITECTURE, FIXED = "config.json", "fixed.safetensors"


@dataclass(frozen=True)
class Making:
    """How a run's networks are made; of a run that has started, `making_of` gives it.

    >>> from raffia.recipes.ilql.presets import ILQL_PRESETS
    >>> Making(ILQL_PRESETS["ilql-smoke"]).fresh().trunk.n_embd
    16
    """

    config: ILQLRun
    architecture: Mapping[str, Any] | None = None  # config.json of a model of `transformers`
    fixed: TensorDict | None = None  # what does not learn, by the networks' names: {"trunk": ...}
    checksum: str = ""  # of that

    def fresh(self) -> ILQLModel:
        """The networks as they learn, with weights that torch's generator draws."""
        config = self.config.model.trunk
        if config.kind == "gpt":
            return self._around(make_trunk(config))
        assert self.architecture is not None
        return self._around(
            HFTrunk.from_config(
                self.architecture,
                vocab_size=config.vocab_size,
                dropout=config.dropout,
                gradient_checkpointing=config.gradient_checkpointing,
            )
        )

    def first(self) -> ILQLModel:
        """The networks before the first update; torch's own generator stays.

        >>> from raffia.recipes.ilql.presets import ILQL_PRESETS
        >>> making = Making(ILQL_PRESETS["ilql-smoke"])
        >>> torch.equal(making.first().v[0].weight, making.first().v[0].weight)
        True
        """
        with global_draws(self.seed):
            if not self.config.language_model:
                return self.fresh()
            return self._around(starting_model(self.config))

    @property
    def seed(self) -> int:
        """The seed of the initial weights."""
        return derive_seed(self.config.seed, "networks")

    def on(self, device: str) -> Making:
        """A copy whose frozen weights are on a device."""
        return self if self.fixed is None else replace(self, fixed=self.fixed.to(device))

    def _around(self, trunk: nn.Module) -> ILQLModel:
        config, lora = self.config.model, self.config.lora
        if not lora.rank:
            return ILQLModel(config, cast(LanguageModel, trunk))
        add_lora(
            trunk,
            rank=lora.rank,
            alpha=lora.alpha,
            dropout=lora.dropout,
            layers=lora.layers or attention_layers(trunk),
        )
        if lora.learn_embeddings:
            for table in _tables(trunk):
                table.requires_grad_(True)
        policy = None
        if config.policy == "separate":  # its changes are its own; what does not learn is one
            shared = {id(p): p for p in trunk.parameters() if not p.requires_grad}
            policy = cast(LanguageModel, copy.deepcopy(trunk, shared))
        return ILQLModel(config, cast(LanguageModel, trunk), policy)


def begin_making(config: ILQLRun, folder: Path) -> Making:
    """`making_of` at the start of a session, which writes what the run's folder lacks.

    >>> from raffia.recipes.ilql.presets import ILQL_PRESETS
    >>> begin_making(ILQL_PRESETS["ilql-smoke"], Path("nowhere")).fixed is None
    True
    """
    if not keeps_model(config):
        return Making(config)
    try:
        return making_of(config, folder)
    except FileNotFoundError:
        write_model_files(config, folder)
    return making_of(config, folder)


def making_of(config: ILQLRun, folder: str | Path) -> Making:
    """How the networks of the run in a folder are made.

    >>> from raffia.recipes.ilql.presets import ILQL_PRESETS
    >>> making_of(ILQL_PRESETS["ilql-smoke"], "nowhere").architecture is None
    True
    """
    if not keeps_model(config):
        return Making(config)
    path = Path(folder) / LANGUAGE_MODEL
    try:
        return load_folder(path, KIND, VERSION, lambda found: _read(config, found))
    except DamagedFileError as error:
        raise RunError(
            f"{error}. Restore {path} as it was; if no checkpoint has been saved yet, delete it, "
            "and the run writes it again"
        ) from error


def write_model_files(config: ILQLRun, folder: Path) -> None:
    """Write what the run's folder keeps of the language model."""
    architecture = None
    files: dict[str, Any] = {}
    if config.model.trunk.kind == "transformers":
        architecture = read_config(Path(config.language_model))
        files[ARCHITECTURE] = json.dumps(architecture, indent=2).encode()
    if config.lora.rank:
        named = Making(config, architecture).first().named_parameters()
        fixed = module_tree((name, p) for name, p in named if not p.requires_grad)
        files[FIXED] = lambda path: fixed.save(path)
    write_folder(folder / LANGUAGE_MODEL, KIND, VERSION, files)


def starting_model(config: ILQLRun) -> nn.Module:
    """The language model with the weights of its folder.

    Tokens that its vocabulary lacks have fresh ones, which torch's generator draws.

    >>> starting_model(ILQLRun(language_model="no/such/folder"))
    Traceback (most recent call last):
    ...
    FileNotFoundError: there is no folder no/such/folder: a model's folder holds config.json and
    model.safetensors
    """
    refuse_other_sizes(config)
    folder, trunk = Path(config.language_model), config.model.trunk
    if trunk.kind == "transformers":
        return HFTrunk.from_folder(
            folder,
            vocab_size=trunk.vocab_size,
            dropout=trunk.dropout,
            gradient_checkpointing=trunk.gradient_checkpointing,
        )
    model, (_, state) = make_trunk(trunk), load_gpt2(folder)
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in state.items():
            own[name][: len(tensor)] = tensor
    return model


def shape_of(config: ILQLRun) -> dict[str, Any]:
    """The trunk's sizes by the language model's folder; its weights are not read.

    >>> shape_of(ILQLRun(language_model="no/such/folder"))
    Traceback (most recent call last):
    ...
    FileNotFoundError: there is no folder no/such/folder: a model's folder holds config.json and
    model.safetensors
    """
    folder = Path(config.language_model)
    if config.model.trunk.kind == "gpt" and read_config(folder).get("model_type") == "gpt2":
        try:
            return {"kind": "gpt", **gpt2_settings(folder)}
        except ValueError as error:
            raise RunError(f"{error}; for a run, --model.trunk.kind transformers") from error
    return {"kind": "transformers", **hf_sizes(folder)}


def refuse_other_sizes(config: ILQLRun) -> None:
    """RunError unless the trunk has the sizes of the model in the language model's folder.

    >>> refuse_other_sizes(ILQLRun(language_model="no/such/folder"))
    Traceback (most recent call last):
    ...
    FileNotFoundError: there is no folder no/such/folder: a model's folder holds config.json and
    model.safetensors
    """
    trunk, shape = config.model.trunk, shape_of(config)
    ours = {field.name: getattr(trunk, field.name) for field in fields(TrunkConfig)}
    ours["dim_feedfwd"] = trunk.dim_feedfwd or 4 * trunk.n_embd
    free = ("dropout", "vocab_size")
    different = [name for name in shape if name not in free and shape[name] != ours[name]]
    if different or trunk.vocab_size < shape["vocab_size"]:
        name = (different or ["vocab_size"])[0]
        raise RunError(
            f"model.trunk.{name}={ours[name]}, but {config.language_model} holds a model with "
            f"{shape[name]}: `raffia.recipes.ilql.with_sizes(config)` takes all sizes from there"
        )


def keeps_model(config: ILQLRun) -> bool:
    """Whether a run's folder has files of its language model, which making the networks reads.

    >>> from raffia.recipes.ilql.presets import ILQL_PRESETS
    >>> keeps_model(ILQL_PRESETS["ilql-smoke"])
    False
    """
    return config.model.trunk.kind == "transformers" or config.lora.rank > 0


def _read(config: ILQLRun, found: Any) -> Making:
    architecture, fixed = None, None
    if config.model.trunk.kind == "transformers":
        architecture = json.loads(found.read(ARCHITECTURE))
    if config.lora.rank:
        fixed = TensorDict.load(found.path(FIXED))
    return Making(config, architecture, fixed, found.checksums.get(FIXED, ""))


def _tables(trunk: nn.Module) -> list[nn.Module]:
    """The embedding tables of tokens: input and output."""
    if isinstance(trunk, CausalLM):
        return [trunk.wte]
    model: Any = trunk.model
    return [model.get_input_embeddings(), model.get_output_embeddings()]


class Interrupted(Exception):
    """Raised by an agent that was asked to stop.

    >>> raise Interrupted
    Traceback (most recent call last):
    ...
    raffia.recipes.ilql.networks.Interrupted
    """


class Networks:
    """The networks of a learner's state, for inspection and decoding.

    making: of a run's, which may go on from a language model; None for those of the config alone.

    >>> from raffia.algorithms.ilql.config import ILQLModelConfig, TrunkConfig
    >>> from raffia.algorithms.ilql.learner import ILQLLearner
    >>> trunk = TrunkConfig(vocab_size=10, n_layer=1, n_head=2, n_embd=8, block_size=16)
    >>> config = ILQLConfig(model=ILQLModelConfig(trunk=trunk))
    >>> state = ILQLLearner(config).init(seed=3)
    >>> networks = Networks(config)
    >>> networks.refresh(state)
    >>> torch.equal(networks.model.v[0].weight, state["params", "v", "0", "weight"])
    True
    """

    def __init__(
        self, config: ILQLConfig, device: str = "cpu", *, making: Making | None = None
    ) -> None:
        with global_draws(0):  # drawn weights are replaced in any case
            model = ILQLModel(config.model) if making is None else making.fresh()
        self.loss = Loss(model, config.loss, precision=config.precision).to(device).eval()
        self.loss.requires_grad_(False)
        self.model, self.target = model, self.loss.target
        self._fixed: dict[str, Tensor] = {}
        if making is not None and making.fixed is not None:
            self._fixed = named_tensors(TensorDict(), TensorDict(), making.fixed.to(device))
        for name, parameter in self.loss.named_parameters():
            if name in self._fixed:  # the same memory, wherever it is needed
                parameter.data = self._fixed[name]

    def refresh(self, state: TensorDict) -> None:
        """Load the weights of a learner's state."""
        load_networks(self.loss, state, without=self._fixed)


class Stoppable:
    """A policy that raises `Interrupted` instead of an answer, once it is to stop.

    >>> from raffia.recipes.ilql.data import longest_game, make_tokenizer
    >>> from raffia.recipes.ilql.presets import ILQL_PRESETS
    >>> config = ILQL_PRESETS["ilql-smoke"]
    >>> policy = ILQL_Policy(Networks(config), make_tokenizer(config), config.decode)
    >>> Stoppable(policy, lambda: True).act_batch([])
    Traceback (most recent call last):
    ...
    raffia.recipes.ilql.networks.Interrupted
    """

    def __init__(self, policy: ILQL_Policy, stop: Callable[[], bool]) -> None:
        self.policy, self._stop = policy, stop

    def act(self, observation: Observation) -> str:
        """The next utterance in a dialogue."""
        return self.act_batch([observation])[0]

    def act_batch(self, observations: Sequence[Observation]) -> list[str]:
        """The next utterance in each of the dialogues."""
        if self._stop():
            raise Interrupted
        return self.policy.act_batch(observations)


# -- whether networks, tokens and a language model fit together

LARGE = 10_000_000  # parameters of the layers, from which on more threads pay


def with_sizes(
    config: ILQLRun, tell: Callable[[str], None] = lambda line: None, like: ILQLRun | None = None
) -> ILQLRun:
    """The config with the sizes of the trunk as the language model's folder and the tokens require.

    `train` calls it.
    tell: gets a line each few seconds while a tokenizer is made from files.
    like: has the sizes already, of the same model and tokens, so that nothing is read.

    >>> with_sizes(ILQLRun()).model.trunk.vocab_size
    274
    """
    trunk, lora, least = config.model.trunk, config.lora, 0
    if like is not None:
        fixed = like.model.trunk if config.language_model else trunk
        trunk = replace(
            fixed,
            vocab_size=like.model.trunk.vocab_size,
            dropout=trunk.dropout,
            gradient_checkpointing=trunk.gradient_checkpointing,
        )
        if lora.rank and lora.learn_embeddings is None:
            lora = replace(lora, learn_embeddings=like.lora.learn_embeddings)
        if os.path.abspath(config.language_model) == os.path.abspath(like.language_model):
            config = replace(config, language_model=like.language_model)
        return replace(config, model=replace(config.model, trunk=trunk), lora=lora)
    if config.language_model:
        config = replace(config, language_model=os.path.abspath(config.language_model))
        shape = shape_of(config)
        weight_files(Path(config.language_model))
        shape["dropout"] = trunk.dropout
        trunk, least = replace(trunk, **shape), shape["vocab_size"]
    num_tokens = make_tokenizer(config, tell=tell).num_tokens
    if lora.rank and lora.learn_embeddings is None:
        lora = replace(lora, learn_embeddings=num_tokens > least)
    trunk = replace(trunk, vocab_size=max(least, num_tokens))
    return replace(config, model=replace(config.model, trunk=trunk), lora=lora)


def with_threads(config: ILQLRun) -> ILQLRun:
    """The config with a number of threads filled in if it was left open.

    >>> from raffia.recipes.ilql.presets import ILQL_PRESETS
    >>> with_threads(ILQL_PRESETS["wordle"]).num_threads
    1
    """
    if config.num_threads:
        return config
    trunk = config.model.trunk
    large = 12 * trunk.n_layer * trunk.n_embd**2 >= LARGE
    return replace(config, num_threads=torch.get_num_threads() if large else 1)


def refuse_unfit(config: ILQLRun, tokenizer: Tokenizer) -> None:
    """RunError unless the trunk has an embedding for each token, and room for a game.

    >>> from raffia.recipes.ilql.data import longest_game, make_tokenizer
    >>> refuse_unfit(ILQLRun(), make_tokenizer(ILQLRun()))
    Traceback (most recent call last):
    ...
    raffia.train.experiment.RunError: model.trunk.vocab_size=50257, but there are 274 tokens: set it
    to 274, as `raffia.recipes.ilql.with_sizes(config)` does
    """
    trunk, num = config.model.trunk, tokenizer.num_tokens
    fits = trunk.vocab_size >= num if config.language_model else trunk.vocab_size == num
    if not fits:
        raise RunError(
            f"model.trunk.vocab_size={trunk.vocab_size}, but there are {num} tokens: set it to "
            f"{num}, as `raffia.recipes.ilql.with_sizes(config)` does"
        )
    if config.task == "wordle" and trunk.block_size < longest_game(config.wordle):
        raise RunError(
            f"model.trunk.block_size={trunk.block_size} is too short for a game: set it to "
            f"{longest_game(config.wordle)} or more"
        )
