"""Each setting of a run acts, and acts there: what two runs do differs first where it should."""

import ast
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from raffia.algorithms.efficientzero.config import (
    LossConfig,
    OptimizerConfig,
    SearchConfig,
    TargetConfig,
)
from raffia.envs.config import AtariConfig, EnvConfig
from raffia.envs.make import make_env
from raffia.lm.envs.wordle.vocabulary import Vocabulary
from raffia.recipes.efficientzero.config import (
    CheckpointConfig,
    CollectConfig,
    EfficientZeroRun,
    EvaluateConfig,
    ReplayConfig,
)
from raffia.recipes.efficientzero.presets import PRESETS
from raffia.recipes.ilql.config import ILQLRun
from raffia.recipes.ilql.data import make_wordle
from raffia.recipes.ilql.experiment import ILQLExperiment
from raffia.recipes.population_config import PopulationConfig
from raffia.train.config import setting_names
from raffia.train.session import TrainingSession
from tests.recipes import ilql_settings as spoken
from tests.recipes.runs import Quiet, changed, with_all
from tests.recipes.test_variants import TINY
from tests.recipes.timeline import first_difference, ilql_timeline, timeline

VECTOR = EfficientZeroRun(
    seed=3,
    env=EnvConfig(id="CartPole-v1", num_envs=3),
    model=replace(
        PRESETS["smoke"].model,
        **TINY,
        head_hidden_channels=(8,),
        reward_support_range=(-3.0, 4.0, 1.0),
        value_support_range=(-9.0, 10.0, 1.0),
    ),
    loss=LossConfig(unroll_steps=3, lstm_horizon=2),
    targets=TargetConfig(n_step=3, target_interval=3, reanalyze_ratio=0.25),
    optimizer=OptimizerConfig(
        learning_rate=0.05,
        max_grad_norm=0.5,
        decay_updates=5,
        weight_decay=0.01,
        warmup_fraction=0.2,
    ),
    search=SearchConfig(
        num_simulations=4, temperatures=(1.0, 0.5), temperature_from=(0.0, 0.8), max_considered=2
    ),
    replay=ReplayConfig(capacity=50, batch_size=6),
    collect=CollectConfig(
        num_env_steps=90, random_env_steps=45, updates_per_env_step=0.2, extra_updates=1
    ),
    evaluate=EvaluateConfig(every_env_steps=24, num_episodes=2, max_steps=12),
    checkpoint=CheckpointConfig(every_updates=3),
)


IMAGE = with_all(
    VECTOR,
    env=EnvConfig(id="minatar/breakout", num_envs=2),
    model__flatten=False,
    model__downsample=False,
    model__num_channels=4,
    collect__num_env_steps=60,
)
BOX = with_all(
    VECTOR,
    env__id="Pendulum-v1",
    search__num_sampled_actions=3,
    model__reward_support_range=(-20.0, 21.0, 1.0),
    collect__num_env_steps=66,
)
FILM = with_all(
    IMAGE,
    model__downsample=True,
    collect__extra_updates=0,
    evaluate__num_episodes=1,
    evaluate__max_steps=5,
)
EVOLVING = with_all(VECTOR, collect__random_env_steps=60, evaluate__every_env_steps=12)
BASES = {
    "vector": VECTOR,
    "adamw": with_all(VECTOR, optimizer__name="adamw"),
    "image": IMAGE,
    "stack": with_all(IMAGE, env__frame_stack=2),
    "gumbel": with_all(VECTOR, search__policy="gumbel"),
    "forms": with_all(VECTOR, model__evolvable_heads=True, model__max_head_nodes=16),
    "box": BOX,
    "fixed": with_all(BOX, model__sigma_type="fixed"),
    "board": with_all(VECTOR, env__id="tictactoe", model__flatten=True, evaluate__num_episodes=6),
    "atari": with_all(
        FILM,
        env=EnvConfig(
            id="atari/breakout",
            num_envs=1,
            atari=AtariConfig(size=64, colour=False, max_frames=200, noop_max=5),
        ),
        collect__random_env_steps=50,
    ),
    "points": with_all(
        FILM,
        env=EnvConfig(
            id="atari/alien", num_envs=2, atari=AtariConfig(size=64, colour=False, noop_max=0)
        ),
        collect__random_env_steps=56,
    ),
    "members": with_all(
        EVOLVING,
        population=PopulationConfig(size=3, parameters=0.3, ranges=("learning_rate=1e-3..1",)),
    ),
    "halves": with_all(
        EVOLVING,
        env__num_envs=4,
        population=PopulationConfig(size=4, method="truncation"),
    ),
    "noisy": with_all(
        EVOLVING,
        population=PopulationConfig(size=3, parameters=1.0, hyper=0.0, no_mutation=0.0),
    ),
    "growing": with_all(
        EVOLVING,
        model__evolvable_heads=True,
        model__max_head_nodes=16,
        population=PopulationConfig(
            size=3, architecture=1.0, hyper=0.0, no_mutation=0.0, nodes=(2,), activation=0.5
        ),
    ),
}

DEVICES = "tests/recipes/test_other_device.py::test_workers_search_on_their_device"
RECORDED = "tests/recipes/test_recorded.py::"
REFUSED = "tests/recipes/test_refusals.py::test_settings_that_do_not_go_together_are_refused"
# Of each setting: of which run it is changed, to what, and what `timeline` finds unlike first. In
# place of that the test that sees it act, where no run can be compared.
SETTINGS = {
    "model.num_channels": ("image", 6, "shapes"),
    "model.num_res_blocks": ("image", 2, "shapes"),
    "model.downsample": ("image", True, "shapes"),
    "model.flatten": ("image", True, "shapes"),
    "model.latent_state_dim": ("vector", 24, "shapes"),
    "model.res_connection": ("vector", False, "shapes"),
    "model.latent_norm": ("vector", "SimNorm", "shapes"),
    "model.lstm_hidden_size": ("vector", 12, "shapes"),
    "model.head_hidden_channels": ("vector", (8, 8), "shapes"),
    "model.activation": ("vector", "gelu", "gradient"),
    "model.evolvable_heads": ("vector", True, "shapes"),
    "model.max_head_layers": ("forms", 2, "shapes"),
    "model.max_head_nodes": ("forms", 24, "shapes"),
    "model.reward_support_range": ("vector", (-4.0, 5.0, 1.0), "shapes"),
    "model.value_support_range": ("vector", (-9.0, 11.0, 1.0), "shapes"),
    "model.norm_type": ("vector", "BN", "shapes"),
    "model.projection_norm_type": ("vector", "LN", "shapes"),
    "model.state_norm": ("vector", True, "gradient"),
    "model.action_encoding": ("vector", "not_one_hot", "shapes"),
    "model.sigma_type": ("box", "fixed", "shapes"),
    "model.fixed_sigma": ("fixed", 0.4, "act"),
    "model.gaussian_head": ("box", "reparameterization", "shapes"),
    "model.proj_hid": ("vector", 9, "shapes"),
    "model.proj_out": ("vector", {"proj_out": 9, "pred_out": 9}, "shapes"),
    "model.pred_hid": ("vector", 9, "shapes"),
    "model.pred_out": ("vector", {"proj_out": 9, "pred_out": 9}, "shapes"),
    "loss.unroll_steps": ("vector", 2, "drawn"),
    "loss.lstm_horizon": ("vector", 3, "targets"),
    "precision": ("vector", "bfloat16", "gradient"),
    "loss.policy_weight": ("vector", 0.5, "gradient"),
    "loss.value_weight": ("vector", 0.5, "gradient"),
    "loss.value_prefix_weight": ("vector", 0.5, "gradient"),
    "loss.consistency_weight": ("vector", 1.0, "gradient"),
    "loss.entropy_weight": ("vector", 0.1, "gradient"),
    "loss.gradient_scale": ("vector", 1.0, "gradient"),
    "loss.absorb": ("vector", (), "targets"),
    "loss.augmentation": ("image", ("shift",), "targets"),
    "targets.discount": ("vector", 0.9, "targets"),
    "targets.n_step": ("vector", 2, "drawn"),
    "targets.bootstrap": ("vector", "search", "targets"),
    "targets.target_interval": ("vector", 2, "step"),
    "targets.reanalyze_ratio": ("vector", 0.5, "targets"),
    "targets.reanalyze_noise": ("vector", False, "targets"),
    "targets.correct_horizon": ("vector", False, "targets"),
    "targets.horizon_fraction": ("vector", 0.1, "targets"),
    "optimizer.name": ("vector", "adamw", "shapes"),
    "optimizer.learning_rate": ("vector", 0.04, "step"),
    "optimizer.momentum": ("vector", 0.5, "step"),
    "optimizer.weight_decay": ("vector", 0.1, "step"),
    "optimizer.max_grad_norm": ("vector", 0.25, "step"),
    "optimizer.warmup_fraction": ("vector", 0.3, "step"),
    "optimizer.decay_updates": ("vector", 4, "step"),
    "optimizer.decay_rate": ("vector", 0.5, "step"),
    "search.policy": ("vector", "gumbel", "act"),
    "search.num_simulations": ("vector", 5, "act"),
    "search.dirichlet_alpha": ("vector", 3.0, "act"),
    "search.dirichlet_fraction": ("vector", 0.5, "act"),
    "search.max_considered": ("gumbel", 1, "evaluate"),
    "search.num_sampled_actions": ("box", 4, "random"),
    "search.temperatures": ("vector", (0.01, 0.5), "act"),
    "search.temperature_from": ("vector", (0.0, 0.6), "act"),
    "seed": ("vector", 1, "weights"),
    "device": "tests/recipes/test_other_device.py::test_networks_and_states_lie_on_the_device",
    "num_threads": ("vector", 2, "made"),
    "env.id": ("vector", "Acrobot-v1", "shapes"),
    "env.num_envs": ("vector", 5, "made"),
    "env.num_workers": ("vector", 2, "made"),
    "env.step_timeout_seconds": "tests/recipes/test_settings.py::test_workers_get_the_limit",
    "env.max_episode_steps": ("vector", 5, "stepped"),
    "env.frame_stack": ("vector", 2, "shapes"),
    "env.atari.frame_skip": ("atari", 3, "stepped"),
    "env.atari.noop_max": ("atari", 9, "stepped"),
    "env.atari.size": ("atari", 84, "shapes"),
    "env.atari.colour": ("atari", True, "shapes"),
    "env.atari.episodic_life": ("atari", False, "stepped"),
    "env.atari.clip_reward": ("points", False, "stepped"),
    "env.atari.sticky": ("atari", 0.5, "stepped"),
    "env.atari.press_fire": ("atari", False, "stepped"),
    "env.atari.max_frames": ("atari", 100, "stepped"),
    "env.atari.evaluation_frames": ("atari", 8, "evaluate"),
    "data.files": RECORDED + "test_a_setting_acts_where_it_should",
    "data.columns": RECORDED + "test_a_setting_acts_where_it_should",
    "data.complete": RECORDED + "test_what_files_lack_is_completed_where_that_is_said",
    "data.num_updates": RECORDED + "test_a_setting_acts_where_it_should",
    "replay.capacity": ("vector", 48, "drawn"),
    "replay.batch_size": ("vector", 7, "drawn"),
    "replay.alpha": ("vector", 0.0, "drawn"),
    "replay.beta": ("vector", 0.9, "drawn"),
    "replay.on_disk": ("vector", True, "made"),
    "replay.shards": ("vector", 3, "made"),
    "collect.num_env_steps": ("vector", 96, "step"),
    "collect.random_env_steps": ("vector", 48, "random"),
    "collect.updates_per_env_step": ("vector", 0.5, "drawn"),
    "collect.extra_updates": ("vector", 2, "step"),
    "collect.rollout_length": ("vector", 2, "random"),
    "evaluate.every_env_steps": ("vector", 40, "act"),
    "evaluate.every_updates": RECORDED + "test_a_setting_acts_where_it_should",
    "evaluate.num_episodes": ("vector", 3, "evaluate"),
    "evaluate.num_simulations": ("vector", 5, "evaluate"),
    "evaluate.max_steps": ("vector", 6, "evaluate"),
    "evaluate.target_return": ("vector", 1.0, "end"),
    "evaluate.opponent": ("board", "random", "evaluate"),
    "evaluate.record": ("vector", "gif", "end"),
    "population.size": ("members", 1, "made"),
    "population.method": ("members", "truncation", "generation"),
    "population.tournament_size": ("members", 3, "generation"),
    "population.elitism": ("members", False, "generation"),
    "population.replay": ("members", "own", "made"),
    "population.truncation_fraction": ("halves", 0.5, "generation"),
    "population.eval_loop": ("members", 2, "generation"),
    "population.no_mutation": ("members", 0.0, "generation"),
    "population.hyper": ("members", 0.1, "generation"),
    "population.parameters": ("members", 0.0, "generation"),
    "population.activation": ("growing", 0.0, "generation"),
    "population.architecture": ("growing", 0.0, "generation"),
    "population.new_layer_prob": ("growing", 1.0, "generation"),
    "population.nodes": ("growing", (3,), "generation"),
    "population.mutation_sd": ("noisy", 1.0, "act"),
    "population.ranges": ("members", ("learning_rate=1e-3..0.06",), "generation"),
    "population.grow": ("members", 3.0, "generation"),
    "population.shrink": ("members", 0.4, "generation"),
    "population.resample": ("members", 1.0, "generation"),
    "population.spread": ("members", 5.0, "step"),
    "checkpoint.every_updates": ("vector", 2, "save"),
    "checkpoint.keep": ("vector", 1, "save"),
    **spoken.OF_BOTH,
    "actors.num": spoken.LAYOUTS,
    "actors.ahead": ("vector", 2, "made"),
    "actors.weights_every": ("vector", 2, "made"),
    "actors.device": DEVICES,
    "actors.cpus": spoken.ARRIVED,
    "actors.gpus": spoken.ARRIVED,
    "reanalyzers.num": spoken.LAYOUTS,
    "reanalyzers.ahead": "tests/train/test_ahead.py"
    "::test_a_batch_is_drawn_ahead_and_made_with_the_weights_of_then",
    "reanalyzers.device": DEVICES,
    "reanalyzers.cpus": spoken.ARRIVED,
    "reanalyzers.gpus": spoken.ARRIVED,
    "evaluators.join_after": (
        "tests/recipes/test_layouts.py::test_a_target_ends_the_run_when_it_is_joined"
    ),
    "evaluators.device": DEVICES,
    "learners.state": REFUSED,
    "init_from": "tests/recipes/test_warm_start.py"
    "::test_a_run_starts_with_the_weights_of_another_and_resumes_without_it",
    "compile": "tests/recipes/test_settings.py::test_compile_compiles_the_gradients",
    "cudagraphs": "tests/recipes/test_cudagraphs.py::test_the_setting_records_both",
}
TABLES = {"efficientzero": SETTINGS, "ilql": spoken.SETTINGS}
SLOW = ("atari", "points", "halves", "noisy", "members", "growing", "image", "stack", "planned")


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """The runs of which settings are changed."""
    return {"efficientzero": BASES, "ilql": spoken.make_bases(tmp_path_factory.mktemp("ilql"))}


def played(algorithm, config, folder):
    return (timeline if algorithm == "efficientzero" else ilql_timeline)(config, folder)


@pytest.fixture(scope="module")
def plain(bases, tmp_path_factory):
    """The timelines of the runs that others are compared with, each played once."""
    made = {}

    def find(algorithm, name):
        if (algorithm, name) not in made:
            folder = tmp_path_factory.mktemp("plain") / name
            made[algorithm, name] = played(algorithm, bases[algorithm][name], folder)
        return made[algorithm, name]

    return find


def compared():
    """The settings of which two runs are compared; of small runs one of each kind is fast."""
    seen = set()
    for algorithm, table in TABLES.items():
        for name, entry in table.items():
            if isinstance(entry, tuple):
                base, _, kind = entry
                is_fast = base not in SLOW and kind not in seen and name != "env.num_workers"
                seen |= {kind} if is_fast else set()
                marks = () if is_fast else pytest.mark.slow
                yield pytest.param(algorithm, name, id=f"{algorithm} {name}", marks=marks)


@pytest.mark.parametrize(("algorithm", "name"), [*compared()])
def test_a_setting_acts_where_it_should_and_nowhere_before(algorithm, name, bases, plain, tmp_path):
    base, value, kind = TABLES[algorithm][name]
    if base in ("atari", "points"):
        pytest.importorskip("ale_py")
    run = played(algorithm, changed(bases[algorithm][base], name, value), tmp_path / "run")
    assert first_difference(plain(algorithm, base), run) == kind


@pytest.mark.parametrize(
    ("algorithm", "base"),
    [
        ("efficientzero", "vector"),
        pytest.param("efficientzero", "members", marks=pytest.mark.slow),
        *(("ilql", base) for base in ("wordle", "file", "lora")),
    ],
)
def test_equal_settings_are_the_same_run(algorithm, base, bases, plain, tmp_path):
    """Or differences would say nothing; nor does a setting that is of something else."""
    idle = {"vector": ("env.atari.sticky", 0.5), "wordle": ("data.split_seed", 1)}
    config = bases[algorithm][base]
    same = changed(config, *idle[base]) if base in idle else config
    run = played(algorithm, same, tmp_path / "run")
    assert first_difference(plain(algorithm, base), run) is None


def test_all_settings_of_a_run_are_here():
    """Those of a population's members are the same for both agents."""
    assert sorted(SETTINGS) == sorted(setting_names(EfficientZeroRun))
    mine, theirs = (
        {name for name in names if not name.startswith("population.")}
        for names in (spoken.SETTINGS, setting_names(ILQLRun))
    )
    assert mine == theirs


def test_the_tests_that_are_named_are_there():
    functions = {}
    for table in TABLES.values():
        for name, entry in table.items():
            if isinstance(entry, str):
                path, _, function = entry.partition("::")
                if path not in functions:
                    tree = ast.parse((Path(__file__).parents[2] / path).read_text())
                    found = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
                    functions[path] = {node.name for node in found}
                assert function in functions[path], name


def test_workers_get_the_limit(monkeypatch):
    class Workers:
        def __init__(self, makes, num_workers, step_timeout_seconds):
            self.seen = num_workers, step_timeout_seconds

    monkeypatch.setattr("raffia.envs.workers.WorkerBatch", Workers)
    config = EnvConfig(id="probe/value", num_workers=2, step_timeout_seconds=7.0)
    assert make_env(config).seen == (2, 7.0)


def test_compile_compiles_the_gradients(tmp_path, monkeypatch, plain):
    compiled, called = [], []

    def compiles(function):
        compiled.append(function.__name__)

        def call(*args):
            called.append(args)
            return function(*args)

        return call

    monkeypatch.setattr(torch, "compile", compiles)
    run = timeline(changed(VECTOR, "compile", True), tmp_path / "run")
    assert compiled == ["grads"] and len(called) == VECTOR.num_updates
    assert run[0][0] == "made" and run[1:] == plain("efficientzero", "vector")[1:]


def test_words_come_from_a_file(plain, tmp_path):
    words = [*Vocabulary.built_in()][-12:]
    (tmp_path / "words.txt").write_text("\n".join(words))
    config = changed(spoken.WORDLE, "wordle.words", str(tmp_path / "words.txt"))
    run = ilql_timeline(config, tmp_path / "run")
    assert first_difference(plain("ilql", "wordle"), run) == "data"
    assert sorted(make_wordle(config.wordle).vocabulary) == sorted(words)


def test_networks_lie_on_the_device(tmp_path):
    (tmp_path / "run").mkdir()
    run = ILQLExperiment(changed(spoken.WORDLE, "device", "meta"), tmp_path / "run", Quiet())
    with closing(TrainingSession(run)) as session:
        state, batch = session.start(), next(run._batches(0))
    for tree in (state, batch):
        assert {value.device.type for value in tree.values(True, True)} == {"meta"}
    run.close()
