"""Each setting takes effect at the right event: where two runs differ first."""

import ast
from contextlib import closing
from pathlib import Path

import pytest
import torch

from raffia.envs import EnvConfig, make_env
from raffia.lm.envs.wordle import Vocabulary
from raffia.recipes.efficientzero import PRESETS, EfficientZeroRun
from raffia.recipes.ilql import ILQLRun
from raffia.recipes.ilql.data import make_wordle
from raffia.recipes.ilql.experiment import ILQLExperiment
from raffia.train import TrainingSession
from raffia.train.config import setting_names
from tests.recipes import ilql_settings as ilql_settings
from tests.recipes.runs import TINY, Quiet, changed, with_all
from tests.recipes.timeline import first_difference, ilql_timeline, timeline

VECTOR = with_all(
    EfficientZeroRun(seed=3, model=PRESETS["smoke"].model),
    env={"id": "CartPole-v1", "num_envs": 3},
    model={**TINY, "head_hidden_channels": (8,), "reward_support_range": (-3.0, 4.0, 1.0)},
    model__value_support_range=(-9.0, 10.0, 1.0),
    loss={"unroll_steps": 3, "lstm_horizon": 2},
    targets={"n_step": 3, "target_interval": 3, "reanalyze_ratio": 0.25},
    optimizer={"learning_rate": 0.05, "max_grad_norm": 0.5, "decay_updates": 5},
    optimizer__weight_decay=0.01,
    optimizer__warmup_fraction=0.2,
    search={"temperatures": (1.0, 0.5), "temperature_from": (0.0, 0.8)},
    search__num_simulations=4,
    search__max_considered=2,
    replay={"capacity": 50, "batch_size": 6},
    collect={"num_env_steps": 90, "random_env_steps": 45, "updates_per_env_step": 0.2},
    collect__extra_updates=1,
    evaluate={"every_env_steps": 24, "num_episodes": 2, "max_steps": 12},
    checkpoint__every_updates=3,
)


IMAGE = with_all(
    VECTOR,
    env=EnvConfig(id="minatar/breakout", num_envs=2),
    model={"flatten": False, "downsample": False, "num_channels": 4},
    collect__num_env_steps=60,
)
BOX = with_all(
    VECTOR,
    env__id="Pendulum-v1",
    search__num_sampled_actions=3,
    model__reward_support_range=(-20.0, 21.0, 1.0),
    collect__num_env_steps=66,
)
FEW = {"num_episodes": 1, "max_steps": 5}
SHORT_IMAGE = with_all(IMAGE, model__downsample=True, collect__extra_updates=0, evaluate=FEW)
ATARI = {"size": 64, "colour": False}


def evolving(size=3, **population):
    """A population with the same number of environments for each member."""
    run = with_all(VECTOR, collect__random_env_steps=60, evaluate__every_env_steps=12)
    return with_all(run, env__num_envs=size, population={"size": size, **population})


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
        SHORT_IMAGE,
        env={"id": "atari/breakout", "num_envs": 1},
        env__atari=ATARI | {"max_frames": 200, "noop_max": 5},
        collect__random_env_steps=50,
    ),
    "points": with_all(
        SHORT_IMAGE,
        env={"id": "atari/alien", "num_envs": 2},
        env__atari=ATARI | {"noop_max": 0},
        collect__random_env_steps=56,
    ),
    "members": evolving(parameters=0.3, ranges=("learning_rate=1e-3..1",)),
    "halves": evolving(4, method="truncation"),
    "noisy": evolving(parameters=1.0, hyper=0.0, no_mutation=0.0),
    "growing": with_all(
        evolving(architecture=0.0, hyper=0.0, nodes=(2,)),
        model={"evolvable_heads": True, "max_head_nodes": 16},
        population={"architecture": 1.0, "no_mutation": 0.0, "activation": 0.5},
    ),
}

TESTED = """
recipes/test_other_device.py
    test_networks_and_states_lie_on_the_device: device
    test_workers_search_on_their_device: actors.device reanalyzers.device evaluators.device
recipes/test_settings.py
    test_workers_get_the_step_timeout: env.step_timeout_seconds
    test_compile_compiles_the_gradients: compile
recipes/test_recorded.py
    test_a_setting_takes_effect_at_the_right_event: data.files data.columns data.num_updates
        evaluate.every_updates
    test_missing_flags_are_completed_if_the_setting_allows: data.complete
recipes/test_layouts.py
    test_a_run_is_the_same_in_any_layout: actors.num reanalyzers.num
    test_a_target_ends_the_run_when_it_is_joined: evaluators.join_after
recipes/test_workers.py
    test_the_settings_of_workers_take_effect: actors.cpus actors.gpus reanalyzers.cpus
        reanalyzers.gpus
train/test_ahead.py
    test_a_batch_is_drawn_ahead_and_made_with_the_weights_of_that_update: reanalyzers.ahead
recipes/test_refusals.py
    test_incompatible_settings_are_refused: learners.state
recipes/test_own_by_name.py
    test_a_run_s_folder_runs_no_file_that_is_not_named_again: networks
recipes/test_warm_start.py
    test_a_run_starts_with_another_run_s_weights_and_resumes_without_it: init_from
recipes/test_cudagraphs.py
    test_the_setting_records_searches_and_gradients: cudagraphs
"""
EFFECTS = """
image shapes: model.num_channels=6 model.num_res_blocks=2 model.downsample=True model.flatten=True
vector shapes: model.latent_state_dim=24 model.res_connection=False model.latent_norm=SimNorm
    model.lstm_hidden_size=12 model.head_hidden_channels=(8,8) model.evolvable_heads=True
    model.reward_support_range=(-4.0,5.0,1.0) model.value_support_range=(-9.0,11.0,1.0)
    model.norm_type=BN model.projection_norm_type=LN model.action_encoding=not_one_hot
    model.proj_hid=9 model.pred_hid=9 optimizer.name=adamw env.id=Acrobot-v1 env.frame_stack=2
forms shapes: model.max_head_layers=2 model.max_head_nodes=24
vector gradient: model.state_norm=True model.activation=gelu precision=bfloat16
    loss.policy_weight=0.5 loss.value_weight=0.5 loss.value_prefix_weight=0.5
    loss.consistency_weight=1.0 loss.entropy_weight=0.1 loss.gradient_scale=1.0
box shapes: model.sigma_type=fixed model.gaussian_head=reparameterization
fixed act: model.fixed_sigma=0.4
vector drawn: loss.unroll_steps=2 targets.n_step=2 replay.capacity=48 replay.batch_size=7
    replay.alpha=0.0 replay.beta=0.9 collect.updates_per_env_step=0.5
vector targets: loss.lstm_horizon=3 loss.absorb=() targets.discount=0.9 targets.bootstrap=search
    targets.reanalyze_ratio=0.5 targets.reanalyze_noise=False targets.correct_horizon=False
    targets.horizon_fraction=0.1
image targets: loss.augmentation=('shift',)
vector step: targets.target_interval=2 optimizer.learning_rate=0.04 optimizer.momentum=0.5
    optimizer.weight_decay=0.1 optimizer.max_grad_norm=0.25 optimizer.warmup_fraction=0.3
    optimizer.decay_updates=4 optimizer.decay_rate=0.5 collect.num_env_steps=96
    collect.extra_updates=2
vector act: search.policy=gumbel search.num_simulations=5 search.dirichlet_alpha=3.0
    search.dirichlet_fraction=0.5 search.temperatures=(0.01,0.5) search.temperature_from=(0.0,0.6)
    evaluate.every_env_steps=40
gumbel evaluate: search.max_considered=1
box random: search.num_sampled_actions=4
vector weights: seed=1
vector layout: num_threads=2 env.num_envs=5 env.num_workers=2 replay.on_disk=True replay.shards=3
    actors.ahead=2 actors.weights_every=2
vector stepped: env.max_episode_steps=5
atari stepped: env.atari.frame_skip=3 env.atari.noop_max=9 env.atari.episodic_life=False
    env.atari.sticky=0.5 env.atari.press_fire=False env.atari.max_frames=100
atari shapes: env.atari.size=84 env.atari.colour=True
points stepped: env.atari.clip_reward=False
atari evaluate: env.atari.evaluation_frames=8
vector random: collect.random_env_steps=48 collect.rollout_length=2
vector evaluate: evaluate.num_episodes=3 evaluate.num_simulations=5 evaluate.max_steps=6
vector end: evaluate.target_return=1.0 evaluate.record=gif
board evaluate: evaluate.opponent=random
members layout: population.size=1 population.replay=own
members generation: population.method=truncation population.tournament_size=3
    population.elitism=False population.eval_loop=2 population.no_mutation=0.0 population.hyper=0.1
    population.parameters=0.0 population.ranges=('learning_rate=1e-3..0.06',) population.grow=3.0
    population.shrink=0.4 population.resample=1.0
halves generation: population.truncation_fraction=0.5
growing generation: population.activation=0.0 population.architecture=0.0
    population.new_layer_prob=1.0 population.nodes=(3,)
noisy act: population.mutation_sd=1.0
members step: population.spread=5.0
vector save: checkpoint.every_updates=2 checkpoint.keep=1
"""
PROJECTED = ("vector", {"proj_out": 9, "pred_out": 9}, "shapes")
SETTINGS = {
    **ilql_settings.effects_of(EFFECTS),
    "model.proj_out": PROJECTED,
    "model.pred_out": PROJECTED,
    **ilql_settings.tested_by(TESTED),
    **ilql_settings.tested_by(ilql_settings.OF_BOTH),
}
TABLES = {"efficientzero": SETTINGS, "ilql": ilql_settings.SETTINGS}
SLOW = ("atari", "points", "halves", "noisy", "members", "growing", "image", "stack", "planned")


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """The runs whose settings are changed."""
    return {
        "efficientzero": BASES,
        "ilql": ilql_settings.make_bases(tmp_path_factory.mktemp("ilql")),
    }


def timeline_of(algorithm, config, folder, against=None):
    play = timeline if algorithm == "efficientzero" else ilql_timeline
    return play(config, folder, against)


@pytest.fixture(scope="module")
def unchanged(bases, tmp_path_factory):
    """Timelines of the unchanged runs; each is made once."""
    timelines = {}

    def find(algorithm, name):
        if (algorithm, name) not in timelines:
            folder = tmp_path_factory.mktemp("plain") / name
            timelines[algorithm, name] = timeline_of(algorithm, bases[algorithm][name], folder)
        return timelines[algorithm, name]

    return find


def compared():
    """The settings for which two runs are compared; one small run of each kind is fast."""
    kinds = set()
    for algorithm, table in TABLES.items():
        for name, entry in table.items():
            if isinstance(entry, tuple):
                base, _, kind = entry
                is_fast = base not in SLOW and kind not in kinds and name != "env.num_workers"
                kinds |= {kind} if is_fast else set()
                marks = () if is_fast else pytest.mark.slow
                yield pytest.param(algorithm, name, id=f"{algorithm} {name}", marks=marks)


@pytest.mark.parametrize(("algorithm", "name"), [*compared()])
def test_a_setting_takes_effect_at_the_right_event(algorithm, name, bases, unchanged, tmp_path):
    base, value, kind = TABLES[algorithm][name]
    if base in ("atari", "points"):
        pytest.importorskip("ale_py")
    config, other = changed(bases[algorithm][base], name, value), unchanged(algorithm, base)
    assert first_difference(other, timeline_of(algorithm, config, tmp_path / "run", other)) == kind


REPEATED = [
    ("efficientzero", "vector"),
    pytest.param("efficientzero", "members", marks=pytest.mark.slow),
    *(("ilql", base) for base in ("wordle", "file", "lora")),
]


@pytest.mark.parametrize(("algorithm", "base"), REPEATED)
def test_equal_settings_are_the_same_run(algorithm, base, bases, unchanged, tmp_path):
    """Shows that differences mean something; a setting of something else has no effect."""
    idle = {"vector": ("env.atari.sticky", 0.5), "wordle": ("data.split_seed", 1)}
    config = bases[algorithm][base]
    same = changed(config, *idle[base]) if base in idle else config
    run = timeline_of(algorithm, same, tmp_path / "run")
    assert first_difference(unchanged(algorithm, base), run) is None


def test_all_settings_are_covered():
    """Settings of populations are the same for both agents."""
    assert sorted(SETTINGS) == sorted(setting_names(EfficientZeroRun))
    covered, all_names = (
        {name for name in names if not name.startswith("population.")}
        for names in (ilql_settings.SETTINGS, setting_names(ILQLRun))
    )
    assert covered == all_names


def test_the_named_tests_exist():
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


def test_workers_get_the_step_timeout(monkeypatch):
    class Workers:
        def __init__(self, makes, num_workers, step_timeout_seconds):
            self.arguments = num_workers, step_timeout_seconds

    monkeypatch.setattr("raffia.envs.workers.WorkerBatch", Workers)
    config = EnvConfig(id="probe/value", num_workers=2, step_timeout_seconds=7.0)
    assert make_env(config).arguments == (2, 7.0)


def test_compile_compiles_the_gradients(tmp_path, monkeypatch, unchanged):
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
    assert run[0][0] == "layout" and run[1:] == unchanged("efficientzero", "vector")[1:]


def test_words_come_from_a_file(unchanged, tmp_path):
    words = [*Vocabulary.built_in()][-12:]
    (tmp_path / "words.txt").write_text("\n".join(words))
    config = changed(ilql_settings.WORDLE, "wordle.words", str(tmp_path / "words.txt"))
    run = ilql_timeline(config, tmp_path / "run")
    assert first_difference(unchanged("ilql", "wordle"), run) == "data"
    assert sorted(make_wordle(config.wordle).vocabulary) == sorted(words)


def test_networks_lie_on_the_device(tmp_path):
    (tmp_path / "run").mkdir()
    run = ILQLExperiment(changed(ilql_settings.WORDLE, "device", "meta"), tmp_path / "run", Quiet())
    with closing(TrainingSession(run)) as session:
        state, batch = session.start(), next(run._batches(0))
    for tree in (state, batch):
        assert {value.device.type for value in tree.values(True, True)} == {"meta"}
    run.close()
