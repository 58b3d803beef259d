"""What no run can be made of is refused where its config is made."""

import math
from dataclasses import fields, is_dataclass, replace

import numpy as np
import pytest

from raffia.algorithms.efficientzero.config import (
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    SearchConfig,
    TargetConfig,
)
from raffia.algorithms.ilql.config import ILQLLossConfig, TrunkConfig
from raffia.algorithms.ilql.config import OptimizerConfig as AdamConfig
from raffia.envs.config import AtariConfig, EnvConfig
from raffia.lm.decoding.config import DecodeConfig
from raffia.recipes import ILQL_PRESETS, PRESETS, EfficientZeroRun, ILQLRun
from raffia.recipes.efficientzero.config import (
    CheckpointConfig,
    CollectConfig,
    EvaluateConfig,
    RecordedDataConfig,
    ReplayConfig,
)
from raffia.recipes.ilql.config import DialogueDataConfig, LoRAConfig, ScriptsConfig, WordleConfig
from raffia.recipes.population_config import PopulationConfig
from raffia.recipes.scale_config import EngineConfig, EvaluatorsConfig, ReanalyzersConfig
from tests.recipes.layouts import MEMBERS, PARTS, SHARDS, SMOKE, SPEAKERS, SPOKEN, WORDLE
from tests.recipes.test_population_runs import POPULATION, RUN, SIZES, played
from tests.recipes.test_settings import VECTOR, with_all

PAIR = PopulationConfig(size=2)
ALONE = replace(  # from recorded episodes
    with_all(SMOKE, targets__reanalyze_ratio=1.0),
    data=RecordedDataConfig(files=("a.jsonl",), num_updates=5),
)
TALK = ILQL_PRESETS["ilql-smoke"]


VALUES = [  # a class, and what it can't hold
    (OptimizerConfig, "name='adam' must be one of 'sgd', 'adamw'; did you mean", {"name": "adam"}),
    (SearchConfig, "policy='alphazero' must be one of 'muzero', 'gumbel'", {"policy": "alphazero"}),
    (TargetConfig, "bootstrap='root' must be one of", {"bootstrap": "root"}),
    (LossConfig, "augmentation=.* must be one of 'shift'", {"augmentation": ("flip",)}),
    (LossConfig, "absorb=.* must be one of 'terminated', 'truncated'", {"absorb": ("done",)}),
    (ModelConfig, "norm_type='bn' must be one of 'BN', 'LN'", {"norm_type": "bn"}),
    (EvaluateConfig, "opponent='best' must be one of", {"opponent": "best"}),
    (AtariConfig, "size=80 must be one of 64, 84, 96", {"size": 80}),
    (EnvConfig, "frame_stack=0 must be at least 1", {"frame_stack": 0}),
    (EnvConfig, "num_envs='4' must be a whole number", {"num_envs": "4"}),
    (ReplayConfig, "batch_size=0 must be at least 1", {"batch_size": 0}),
    (ReplayConfig, "beta=1.5 must be in 0..1", {"beta": 1.5}),
    (ReplayConfig, "shards=0", {"shards": 0}),
    (ReplayConfig, "batch_size=256 .* replay.shards=3: .*batch_size=258", {"shards": 3}),
    (CollectConfig, "updates_per_env_step=0.0 must be above 0", {"updates_per_env_step": 0.0}),
    (CollectConfig, "rollout_length=0 must be at least 1", {"rollout_length": 0}),
    (EvaluateConfig, "every_env_steps=0 must be at least 1", {"every_env_steps": 0}),
    (EvaluateConfig, "num_episodes=0 must be at least 1", {"num_episodes": 0}),
    (CheckpointConfig, "every_updates=0 must be at least 1", {"every_updates": 0}),
    (OptimizerConfig, "learning_rate=-0.1 must be at least 0", {"learning_rate": -0.1}),
    (OptimizerConfig, "learning_rate=nan must be finite", {"learning_rate": math.nan}),
    (LossConfig, "policy_weight=inf must be finite", {"policy_weight": math.inf}),
    (ModelConfig, "head_hidden_channels=.* must be at least 1", {"head_hidden_channels": (-1,)}),
    (ModelConfig, r"latent_norm=\(\) must be one of 'LN', 'SimNorm'", {"latent_norm": ()}),
    (AtariConfig, "frame_skip=-1 must be at least 1", {"frame_skip": -1}),
    (AtariConfig, "sticky=1.5 must be in 0..1", {"sticky": 1.5}),
    (CollectConfig, "updates_per_env_step=inf must be finite", {"updates_per_env_step": math.inf}),
    (EvaluateConfig, "target_return=nan must be finite", {"target_return": math.nan}),
    (AdamConfig, "beta1=1.0 must be below 1", {"beta1": 1.0}),
    (AdamConfig, "beta2=-0.5 must be in 0..1", {"beta2": -0.5}),
    (ILQLLossConfig, "beta=nan must be finite", {"beta": math.nan}),
    (DecodeConfig, "adv_clip=nan must be finite", {"adv_clip": math.nan}),
    (TrunkConfig, r"n_head can be .*768", {"n_head": 10**30}),
    (DialogueDataConfig, "buckets=.* must be at least 1", {"buckets": (8, 0)}),
    (DialogueDataConfig, "token_reward=-inf must be finite", {"token_reward": -math.inf}),
    (PopulationConfig, "nodes=.* must be at least 1", {"nodes": (16, -1)}),
    (OptimizerConfig, "max_grad_norm=0.0 must be above 0", {"max_grad_norm": 0.0}),
    (SearchConfig, "temperatures=.* must all be 0 or more", {"temperatures": (1.0, 0.5, -1.0)}),
    (EfficientZeroRun, "num_threads=0 must be at least 1", {"num_threads": 0}),
    (EvaluatorsConfig, "join_after=-1", {"join_after": -1}),
    (ReanalyzersConfig, "ahead=-1", {"ahead": -1}),
    (
        EngineConfig,
        "address=auto is the address of a Ray cl",
        {"name": "process", "address": "auto"},
    ),
    (PopulationConfig, "activation", {"size": 2, "activation": -1.0}),
    (PopulationConfig, "architecture", {"size": 2, "architecture": -0.5}),
    (PopulationConfig, "new_layer_prob", {"size": 2, "new_layer_prob": 1.5}),
    (WordleConfig, "leaves no secret to learn from", {"num_words": 6, "num_held_out": 6}),
    (
        RecordedDataConfig,
        r"RecordedDataConfig\(complete=True\) describes files of episodes, and data.files names",
        {"complete": True},
    ),
    (LoRAConfig, r"LoRAConfig\(dropout=0.1\) describes adapters, and rank=0", {"dropout": 0.1}),
    (
        ILQLRun,
        "data.files=.* are of a run on data, and the task is 'wordle'",
        {"data": DialogueDataConfig(files=("a.jsonl",))},
    ),
    (DialogueDataConfig, "held_out=0 must be between 0 and 1", {"held_out": 0}),
    (
        ScriptsConfig,
        "no script plays",
        dict.fromkeys(("expert", "fair", "random", "wrong", "stuck", "non_word"), 0),
    ),
]
CHANGES = [  # a run, and what it can't be together with
    (SMOKE, r"actors.num=3: set env.num_envs=6", {"actors__num": 3}),
    (SMOKE, r"without workers: set actors.num, .* evaluators.num or", {"engine__name": "process"}),
    (SMOKE, r"engine.spares=1 are idle proc", {"actors__num": 2, "engine__spares": 1}),
    (
        SMOKE,
        r"actors.device=cuda on a Ray cluster needs actors.gpus",
        {
            "actors__num": 1,
            "actors__device": "cuda",
            "engine__name": "ray",
            "engine__address": "auto",
        },
    ),
    *(
        row
        for kind in ("actors", "reanalyzers", "evaluators")
        for row in (
            (
                SMOKE,
                rf"{kind}.device=cuda has no effect without {kind}: set",
                {f"{kind}__device": "cuda"},
            ),
            (
                SMOKE,
                rf"{kind}.gpus, because Ray gives no GPU with {kind}.gpus=0",
                {f"{kind}__num": 1, f"{kind}__device": "cuda"}
                | {"engine": EngineConfig(name="ray", address="auto")},
            ),
        )
    ),
    (
        SMOKE,
        r"evaluators.* with population.size=2: a population evol",
        {"population": PAIR, "evaluators": EvaluatorsConfig(join_after=5)},
    ),
    (VECTOR, r"num_envs=3 .*shards=2: set env.num_envs=4", {"replay__shards": 2}),
    (SHARDS, r"shards=2 .*divided equally .*num=3.*set reanalyzers.num=2", {"reanalyzers__num": 3}),
    (SHARDS, r"shards=2 .* with population.size=2: .*Leave replay.shards", {"population": PAIR}),
    (
        SMOKE,
        "num_env_steps=1000 leaves no steps to learn from",
        {"collect": CollectConfig(num_env_steps=1_000, random_env_steps=1_000)},
    ),
    (PARTS, r"batch_size=24 cannot be divided equally among learners.num=5", {"learners__num": 5}),
    (
        PARTS,
        r"learners.num=2 .* with learners.state=sharded: .*Leave",
        {"learners__num": 2, "learners__state": "sharded"},
    ),
    *(
        (run, rf"learners.num=2 .* with {words}: .*Leave one", {"learners__num": 2, **change})
        for run in (PARTS, WORDLE)
        for words, change in (
            ("population.size=2", {"population": PAIR}),
            ("compile=True", {"compile": True}),
        )
    ),
    (
        WORDLE,
        r"state=sharded .* there is only one: set learners.num=2",
        {"learners__state": "sharded"},
    ),
    (
        WORDLE,
        "learners.state=sharded on device=cuda: .*Leave one",
        {"learners__num": 2, "device": "cuda", "learners__state": "sharded"},
    ),
    (WORDLE, "state='halved' must be one of", {"learners__num": 2, "learners__state": "halved"}),
    (WORDLE, r"batch_size=6 cannot be divided equally among learners.num=4", {"learners__num": 4}),
    (WORDLE, "use a batch_size that 4 divides", {"learners__num": 2, "num_micro_batches": 2}),
    (WORDLE, "num=0", {"learners__num": 0}),
    (SPOKEN, "evaluators.* with population.size=2", {"population": PAIR, "evaluators__num": 1}),
    (SPOKEN, "without workers: set evaluators.num, .*population", {"engine__name": "process"}),
    (
        SPOKEN,
        "evaluators.device=cuda has no effect without evaluators",
        {"evaluators__device": "cuda"},
    ),
    *(
        row
        for run in (MEMBERS, SPEAKERS)
        for row in (
            (run, r"size=4 .*workers=3: set population.size=6", {"population__workers": 3}),
            (
                run,
                "engine.name=process has no effect without workers: .* population",
                {"engine__name": "process"},
            ),
            (run, "leave compile out", {"compile": True}),
        )
    ),
    (WORDLE, r"size=1 .*workers=2: set population.size=2", {"population__workers": 2}),
    (SPEAKERS, "workers=-1", {"population__workers": -1}),
    (
        RUN,
        "tournament_size=4 is larger than the population",
        {"population__tournament_size": 4},
    ),
    (
        ALONE,
        r"reanalyze_ratio=0.5 .* with data.num_up.* set .*=1.0",
        {"targets__reanalyze_ratio": 0.5},
    ),
    (ALONE, r"num_updates=5 .* with actors.*plays nothing. Leave", {"actors__num": 2}),
    (ALONE, r"num_updates=5 .*data.files names none", {"data__files": ()}),
    (ALONE, r"columns: 'obs' is not NAME=MEANING", {"data__columns": ("obs",)}),
    (ALONE, "num_updates=-1 must be at least 0", {"data__num_updates": -1}),
    *(
        (run, "with targets.bootstrap=search: .* Leave", {"targets__bootstrap": "search"})
        for run in (ALONE, with_all(ALONE, data__num_updates=0))
    ),
    (RUN, "NAME=LOW..HIGH", {"population__ranges": ("tau",)}),
    (RUN, "low must be below high", {"population__ranges": ("tau=0.9..0.5",)}),
    (RUN, "must be in 0..1", {"population__ranges": ("tau=0.5..1.5",)}),
    (
        RUN,
        "all probabilities are 0",
        {"population__hyper": {"hyper": 0.0, "no_mutation": 0.0, "parameters": 0.0}},
    ),
    (RUN, "nothing is played here", {"population__replay": "own"}),
    (
        RUN,
        "allow batch_size up to 12",
        {"num_micro_batches": 2, "batch_size": 8, "population": replace(POPULATION, **SIZES)},
    ),
    (played(), r"cannot be divided equally .*: set env\.num_envs=9", {"env__num_envs": 7}),
    *(
        (
            run,
            rf"population\.{kind}=0\.5 .* set model\.evolvable_heads=True .*{kind}=0",
            {"population": PopulationConfig(size=2, **{kind: 0.5})},
        )
        for run in (TALK, PRESETS["smoke"])
        for kind in ("activation", "architecture")
    ),
    (
        TALK,
        "this agent learns none: set decode.include_adv=False",
        {"loss": ILQLLossConfig(v_weight=0, q_weight=0, cql_weight=0)},
    ),
    (TALK, "cannot be divided into num_micro_batches=3", {"num_micro_batches": 3, "batch_size": 8}),
    (TALK, r"lora.rank=4 needs an existing .* --model FOLDER", {"lora": LoRAConfig(rank=4)}),
    (
        SMOKE,
        "without an LSTM .* set loss.lstm_horizon to 1",
        {"model__lstm_hidden_size": 0},
    ),
    (
        SMOKE,
        "is not a multiple of 8: set it to 24",
        {"model__latent_norm": {"latent_norm": "SimNorm", "latent_state_dim": 20}},
    ),
    (
        TALK,
        "compile=True cannot be combined with dropout",
        {"model__trunk__dropout": 0.1, "compile": True},
    ),
    (SMOKE, "seed='a' must be a whole number", {"seed": "a"}),
    (SMOKE, "seed=True must be a whole number", {"seed": True}),
    (SMOKE, r"seed=np.int64\(3\) must be a whole number; write 3", {"seed": np.int64(3)}),
    (SMOKE, "num_threads='2' must be a whole number", {"num_threads": "2"}),
    (SMOKE, "device=3 must be a text", {"device": 3}),
    (SMOKE, "compile=1 must be True or False", {"compile": 1}),
    (SMOKE, "env='CartPole-v1' must be a EnvConfig", {"env": "CartPole-v1"}),
    (
        SMOKE,
        "temperatures=.* must be a tuple, each a number;",
        {"search__temperatures": {"temperatures": [1.0], "temperature_from": [0.0]}},
    ),
]


@pytest.mark.parametrize(("make", "words", "settings"), VALUES)
def test_values_that_can_not_be_are_refused(make, words, settings):
    with pytest.raises(ValueError, match=words):
        make(**settings)


@pytest.mark.parametrize(("config", "words", "changes"), CHANGES)
def test_settings_that_do_not_go_together_are_refused(config, words, changes):
    with pytest.raises(ValueError, match=words):
        with_all(config, **changes)


def every_field(config, rebuild=lambda changed: changed):
    """A function for each field that makes the whole run again with another value of it."""
    for field in fields(config):

        def change(value, name=field.name):
            return rebuild(replace(config, **{name: value}))

        yield change, field.name
        inner = getattr(config, field.name)
        if is_dataclass(inner):
            yield from every_field(inner, change)


@pytest.mark.parametrize("presets", [PRESETS, ILQL_PRESETS])
def test_every_field_refuses_what_no_setting_is_and_all_presets_can_be(presets):
    """Of every config that a run holds, at any depth."""
    seen = 0
    for rebuild, field in every_field(next(iter(presets.values()))):
        with pytest.raises((ValueError, TypeError)) as caught:
            rebuild(object())
        assert field in str(caught.value), field
        seen += 1
    assert seen > 50
    for run in presets.values():
        assert replace(run) == run
        assert isinstance(run, ILQLRun) or run.num_updates > 0


@pytest.mark.parametrize("presets", [PRESETS, ILQL_PRESETS])
def test_the_nearest_name_of_a_preset_is_told(presets):
    name = list(presets)[1]
    with pytest.raises(KeyError, match=f"did you mean '{name}'"):
        presets[name[:-1]]
    assert presets.get(name[:-1]) is None and name[:-1] not in presets
    with pytest.raises(KeyError, match="there are "):
        presets["?"]
