"""Invalid configs are refused when they are created."""

import math
from dataclasses import fields, is_dataclass, replace

import numpy as np
import pytest

from raffia.algorithms.efficientzero.config import (
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    SearchConfig,
)
from raffia.algorithms.ilql.config import ILQLLossConfig, TrunkConfig
from raffia.algorithms.ilql.config import OptimizerConfig as AdamConfig
from raffia.envs import AtariConfig, EnvConfig
from raffia.recipes import ILQL_PRESETS, PRESETS, ILQLRun
from raffia.recipes.efficientzero.config import CollectConfig, RecordedDataConfig, ReplayConfig
from raffia.recipes.ilql.config import DialogueDataConfig, LoRAConfig, ScriptsConfig, WordleConfig
from raffia.recipes.population_config import PopulationConfig
from raffia.recipes.scale_config import EngineConfig, EvaluatorsConfig
from tests.recipes.layouts import (
    ILQL_EVALUATED,
    ILQL_MEMBERS,
    MEMBERS,
    PARTS,
    SHARDS,
    SMOKE,
    WORDLE,
)
from tests.recipes.test_population_runs import POPULATION, RUN, SIZES, efficientzero_config
from tests.recipes.test_settings import VECTOR, with_all

PAIR = PopulationConfig(size=2)
ALONE = replace(  # from recorded episodes
    with_all(SMOKE, targets__reanalyze_ratio=1.0),
    data=RecordedDataConfig(files=("a.jsonl",), num_updates=5),
)
DIALOGUE = ILQL_PRESETS["ilql-smoke"]


AUTO, CHATS = {"address": "auto"}, DialogueDataConfig(files=("a.jsonl",))
NO_SCRIPTS = "expert fair random wrong stuck non_word"
VALUES = [  # a class, the error, and invalid settings; for plain numbers see below
    (OptimizerConfig, "name='adam' must be one of 'sgd', 'adamw'; did you", {"name": "adam"}),
    (LossConfig, "augmentation=.* must be one of 'shift'", {"augmentation": ("flip",)}),
    (AtariConfig, "size=80 must be one of 64, 84, 96", {"size": 80}),
    (EnvConfig, "num_envs='4' must be a whole number", {"num_envs": "4"}),
    (ReplayConfig, "beta=1.5 must be in 0..1", {"beta": 1.5}),
    (ReplayConfig, "batch_size=256 .* replay.shards=3: .*batch_size=258", {"shards": 3}),
    (CollectConfig, "per_env_step=0.0 must be above 0", {"updates_per_env_step": 0.0}),
    (LossConfig, "policy_weight=inf must be finite", {"policy_weight": math.inf}),
    *(
        (ILQLLossConfig, f"{name}=-1", {name: -1.0})
        for name in ("beta", "dm_margin", "clip_weight")
    ),
    (ModelConfig, "hidden_channels=.* must be at least 1", {"head_hidden_channels": (-1,)}),
    (ModelConfig, r"latent_norm=\(\) must be one of 'LN', 'SimNorm'", {"latent_norm": ()}),
    (OptimizerConfig, "momentum=1.0 must be below 1", {"momentum": 1.0}),
    (AdamConfig, "beta1=1.0 must be below 1", {"beta1": 1.0}),
    (TrunkConfig, r"n_head can be .*768", {"n_head": 10**30}),
    (SearchConfig, "temperatures=-1.0 must be at least 0", {"temperatures": (1.0, -1.0)}),
    (EngineConfig, "address=auto is the address of a Ray", {"name": "process"} | AUTO),
    (PopulationConfig, "new_layer_prob", {"size": 2, "new_layer_prob": 1.5}),
    (WordleConfig, "leaves no secret to learn from", {"num_words": 6, "num_held_out": 6}),
    (RecordedDataConfig, r"\(complete=True\) .*, and data.files names", {"complete": True}),
    (LoRAConfig, r"LoRAConfig\(dropout=0.1\) describes .*, and rank=0", {"dropout": 0.1}),
    (type(SMOKE), r"num_threads=5000 must be in 1\.\.1024", {"num_threads": 5000}),
    (ILQLRun, r"num_threads=5000 must be in 0\.\.1024", {"num_threads": 5000}),
    (ILQLRun, "are of a run on data, and the task is 'wordle'", {"data": CHATS}),
    (DialogueDataConfig, "held_out=0 must be between 0 and 1", {"held_out": 0}),
    (ScriptsConfig, "no script plays", dict.fromkeys(NO_SCRIPTS.split(), 0)),
]
TWO, SHARDED = {"learners__num": 2}, {"learners__state": "sharded"}
PROCESS, MEMBERS_OF_2 = {"engine__name": "process"}, {"population": PAIR}
ON_RAY = {"engine": EngineConfig(name="ray", address="auto")}
CUDA = {kind: {f"{kind}__device": "cuda"} for kind in ("actors", "reanalyzers", "evaluators")}
OFF = {"hyper": 0.0, "no_mutation": 0.0, "parameters": 0.0}
CHANGES = [  # a run, the error, and settings that it can't be combined with
    (SMOKE, r"actors.num=3: set env.num_envs=6", {"actors__num": 3}),
    (SMOKE, r"without workers: set actors.num, .* evaluators.num, ", PROCESS),
    (SMOKE, r"engine.spares=1 are idle proc", {"actors__num": 2, "engine__spares": 1}),
    *(
        row
        for kind, settings_of_kind in CUDA.items()
        for row in (
            (SMOKE, rf"{kind}.device=cuda has no effect without {kind}: set", settings_of_kind),
            (SMOKE, rf"{kind}.gpus=0: set", {f"{kind}__num": 1, **settings_of_kind, **ON_RAY}),
        )
    ),
    (SMOKE, r"evaluators.* with population.size=2: a population evol",
     MEMBERS_OF_2 | {"evaluators": EvaluatorsConfig(join_after=5)}),
    (VECTOR, r"num_envs=3 .*shards=2: set env.num_envs=4", {"replay__shards": 2}),
    (SHARDS, r"shards=2 .*num=3.*set reanalyzers.num=2", {"reanalyzers__num": 3}),
    (SHARDS, r"shards=2 .* with population.size=2: .*Leave replay.shards", MEMBERS_OF_2),
    (SMOKE, "num_env_steps=240 leaves no steps to learn from",
     {"collect__random_env_steps": 1_000}),
    (PARTS, r"batch_size=24 .* divided equally .* learners.num=5", {"learners__num": 5}),
    (PARTS, r"learners.num=2 .* with learners.state=sharded: .*Leave", TWO | SHARDED),
    *(
        (run, "learners.num=2 .* with population.size=2: .*Leave one", TWO | MEMBERS_OF_2)
        for run in (PARTS, WORDLE)
    ),
    (WORDLE, r"state=sharded .* there is only one: set learners.num=2", SHARDED),
    (WORDLE, r"batch_size=6 .* divided equally .* learners.num=4", {"learners__num": 4}),
    (WORDLE, r"on device cuda .* learners.gpus=0: set", TWO | ON_RAY | {"device": "cuda"}),
    (WORDLE, "use a batch_size that 4 divides", TWO | {"num_micro_batches": 2}),
    (ILQL_EVALUATED, "evaluators.* with population.size=2", MEMBERS_OF_2 | {"evaluators__num": 1}),
    (ILQL_EVALUATED, "without workers: set evaluators.num, .* learners.num or popu", PROCESS),
    *(
        (run, message, change)
        for run in (MEMBERS, ILQL_MEMBERS)
        for message, change in (
            (r"size=4 .*workers=3: set population.size=6", {"population__workers": 3}),
            ("engine.name=process has no effect without workers: .* population", PROCESS),
            ("leave compile out", {"compile": True}),
        )
    ),
    (WORDLE, r"size=1 .*workers=2: set population.size=2", {"population__workers": 2}),
    (RUN, "tournament_size=4 is larger than the pop", {"population__tournament_size": 4}),
    (ALONE, r"_ratio=0.5 .* with data.num_up.* set .*=1.0", {"targets__reanalyze_ratio": 0.5}),
    (ALONE, r"num_updates=5 .* with actors.*plays nothing. Leave", {"actors__num": 2}),
    (ALONE, r"num_updates=5 .*data.files names none", {"data__files": ()}),
    (ALONE, r"columns: 'obs' is not NAME=MEANING", {"data__columns": ("obs",)}),
    *(
        (run, "with targets.bootstrap=search: .* Leave", {"targets__bootstrap": "search"})
        for run in (ALONE, with_all(ALONE, data__num_updates=0))
    ),
    (RUN, "mean 'learning_rate'", {"population__ranges": ("learning_rat=1e-6..1",)}),
    (RUN, "low must be below high", {"population__ranges": ("tau=0.9..0.5",)}),
    (RUN, "must be in 0..1", {"population__ranges": ("tau=0.5..1.5",)}),
    (RUN, "low must be below high, and both finite", {"population__ranges": ("q_weight=1..inf",)}),
    (RUN, "must start at 0 or more", {"population__ranges": ("learning_rate=-1..1",)}),
    (RUN, "must start at 1 or more", {"population__ranges": ("batch_size=0..8",)}),
    (RUN, "all probabilities are 0", {"population__hyper": OFF}),
    (RUN, "nothing is played here", {"population__replay": "own"}),
    *(
        (RUN, "num_micro_batches=2 cannot be combined with a range of batch_size",
         {"num_micro_batches": 2, "batch_size": size, "population": replace(POPULATION, **SIZES)})
        for size in (8, 12)
    ),
    (efficientzero_config(), r"divided equally .*: set env\.num_envs=9", {"env__num_envs": 7}),
    *(
        (run, rf"\.{kind}=0\.5 .* set model\.evolvable_heads=True .*{kind}=0",
         {"population": PopulationConfig(size=2, **{kind: 0.5})})
        for run, kind in ((DIALOGUE, "activation"), (PRESETS["smoke"], "architecture"))
    ),
    (DIALOGUE, "this agent learns none: set decode.include_adv=False",
     {"loss": ILQLLossConfig(v_weight=0, q_weight=0, cql_weight=0)}),
    (DIALOGUE, "cannot be divided into num_micro_batches=3", {"num_micro_batches": 3}),
    (DIALOGUE, r"rank=4 needs an .* --language_model FOLDER", {"lora": LoRAConfig(rank=4)}),
    (SMOKE, "without an LSTM .* set loss.lstm_horizon to 1", {"model__lstm_hidden_size": 0}),
    (SMOKE, "is not a multiple of 8: set it to 24",
     {"model__latent_norm": {"latent_norm": "SimNorm", "latent_state_dim": 20}}),
    (DIALOGUE, "compile=True cannot be combined with dropout",
     {"model__trunk__dropout": 0.1, "compile": True}),
    (SMOKE, "seed=True must be a whole number", {"seed": True}),
    (SMOKE, r"seed=np.int64\(3\) must be a whole number; write 3", {"seed": np.int64(3)}),
    (SMOKE, "device=3 must be a text", {"device": 3}),
    (SMOKE, "compile=1 must be True or False", {"compile": 1}),
    (SMOKE, "env='CartPole-v1' must be a EnvConfig", {"env": "CartPole-v1"}),
    (SMOKE, "temperatures=.* must be a tuple, each a number;",
     {"search__temperatures": {"temperatures": [1.0], "temperature_from": [0.0]}}),
]  # fmt: skip


@pytest.mark.parametrize(("make", "message", "settings"), VALUES)
def test_invalid_values_are_refused(make, message, settings):
    with pytest.raises(ValueError, match=message):
        make(**settings)


@pytest.mark.parametrize(("config", "message", "changes"), CHANGES)
def test_incompatible_settings_are_refused(config, message, changes):
    with pytest.raises(ValueError, match=message):
        with_all(config, **changes)


def every_field(config, rebuild=lambda changed: changed):
    """For each field: a function that remakes the run with another value, its name, its value."""
    for field in fields(config):

        def change(value, name=field.name):
            return rebuild(replace(config, **{name: value}))

        inner = getattr(config, field.name)
        yield change, field.name, inner
        if is_dataclass(inner):
            yield from every_field(inner, change)


BELOW_0 = ("seed", "data_seed", "split_seed", "token_reward", "beta", "dm_margin")


@pytest.mark.parametrize("presets", [PRESETS, ILQL_PRESETS])
def test_every_field_refuses_invalid_values_and_all_presets_are_valid(presets):
    """For every nested config of a run; numbers are not below 0, nor NaN."""
    num_checked = 0
    for rebuild, field, value in every_field(next(iter(presets.values()))):
        wrong = [object()]
        if type(value) in (int, float) and field not in BELOW_0:
            wrong += [-1]
        if type(value) is float:
            wrong += [math.nan]
        for other in wrong:
            with pytest.raises((ValueError, TypeError)) as caught:
                rebuild(other)
            assert field in str(caught.value), field
            num_checked += 1
    assert num_checked > 100
    for run in presets.values():
        assert replace(run) == run
        assert isinstance(run, ILQLRun) or run.num_updates > 0


@pytest.mark.parametrize("presets", [PRESETS, ILQL_PRESETS])
def test_the_error_for_an_unknown_preset_names_the_nearest(presets):
    name = list(presets)[1]
    with pytest.raises(KeyError, match=f"did you mean '{name}'"):
        presets[name[:-1]]
    assert presets.get(name[:-1]) is None and name[:-1] not in presets
    with pytest.raises(KeyError, match="there are "):
        presets["?"]
