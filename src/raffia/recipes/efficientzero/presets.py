"""Presets: runs by name. Imports no torch: help comes at once.

Each is a whole `EfficientZeroRun`; what it does not name has the paper's value.
"""

from __future__ import annotations

from dataclasses import replace

from raffia.algorithms.efficientzero.config import (
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    SearchConfig,
    TargetConfig,
)
from raffia.envs.config import AtariConfig, EnvConfig
from raffia.recipes.efficientzero.config import (
    CheckpointConfig,
    CollectConfig,
    EfficientZeroRun,
    EvaluateConfig,
    ReplayConfig,
)
from raffia.train.settings import Presets

SMALL = ModelConfig(  # for vectors: small enough that the search's compiled loops pay
    latent_state_dim=64,
    lstm_hidden_size=64,
    head_hidden_channels=(32,),
    reward_support_range=(-10.0, 11.0, 1.0),
    value_support_range=(-30.0, 31.0, 1.0),
    norm_type="LN",  # has no running statistics that lag behind what is learnt
    proj_hid=64,
    proj_out=64,
    pred_hid=32,
    pred_out=64,
)
ADAM = OptimizerConfig(
    name="adamw",
    learning_rate=1e-3,
    weight_decay=1e-4,
    max_grad_norm=10.0,
    decay_updates=1_500,
    decay_rate=0.3,
)

CARTPOLE = EfficientZeroRun(
    # Few environments: where episodes are long, what one of them teaches comes in time for the
    # next.
    env=EnvConfig(id="CartPole-v1", num_envs=4),
    model=SMALL,
    # A cart that drifts fails after some hundred steps. With 40 rewards in each target this is
    # known after a few copies of the target network; with 20 some seeds take 5 times as long.
    # But 40 rewards of an early policy make its states look worse than they are by now: unless old
    # data get fewer rewards soon, some seeds never learn to go back to the side where they fell.
    targets=TargetConfig(
        discount=0.99, n_step=40, horizon_fraction=0.01, target_interval=25, reanalyze_ratio=0.25
    ),
    optimizer=replace(ADAM, learning_rate=2e-3, decay_updates=3_000),
    search=SearchConfig(num_simulations=25, temperatures=(0.25,), temperature_from=(0.0,)),
    replay=ReplayConfig(capacity=50_000, batch_size=128),
    collect=CollectConfig(num_env_steps=15_000, random_env_steps=200, updates_per_env_step=0.28),
    evaluate=EvaluateConfig(every_env_steps=1_000, num_episodes=20),
    checkpoint=CheckpointConfig(every_updates=300),
)
SMOKE = replace(
    CARTPOLE,
    model=replace(
        SMALL,
        latent_state_dim=32,
        lstm_hidden_size=32,
        proj_hid=32,
        proj_out=32,
        pred_hid=16,
        pred_out=32,
    ),
    search=replace(CARTPOLE.search, num_simulations=8),
    replay=replace(CARTPOLE.replay, batch_size=32, alpha=0.6),
    targets=replace(CARTPOLE.targets, n_step=5, horizon_fraction=0.3, target_interval=20),
    collect=CollectConfig(num_env_steps=600, random_env_steps=80, updates_per_env_step=0.25),
    evaluate=replace(CARTPOLE.evaluate, every_env_steps=300, num_episodes=4, max_steps=100),
    checkpoint=CheckpointConfig(every_updates=10),
)
LUNARLANDER = replace(
    CARTPOLE,
    env=EnvConfig(id="LunarLander-v3", num_envs=8),
    targets=TargetConfig(discount=0.99, n_step=20, target_interval=50, reanalyze_ratio=0.25),
    optimizer=replace(ADAM, learning_rate=2e-3, decay_updates=15_000),
    search=SearchConfig(num_simulations=30, temperatures=(0.5, 0.25), temperature_from=(0.0, 0.5)),
    replay=ReplayConfig(capacity=200_000, batch_size=128),
    collect=CollectConfig(num_env_steps=200_000, random_env_steps=2_000, updates_per_env_step=0.25),
    evaluate=EvaluateConfig(every_env_steps=5_000, num_episodes=20),
    checkpoint=CheckpointConfig(every_updates=1_000),
)
PENDULUM = replace(
    CARTPOLE,
    env=EnvConfig(id="Pendulum-v1", num_envs=8),
    model=replace(
        SMALL,
        reward_support_range=(-30.0, 31.0, 1.0),
        value_support_range=(-60.0, 61.0, 1.0),
    ),
    loss=LossConfig(entropy_weight=0.02),
    targets=TargetConfig(discount=0.99, n_step=10, target_interval=50, reanalyze_ratio=0.25),
    optimizer=replace(ADAM, learning_rate=2e-3),
    search=SearchConfig(
        policy="gumbel", num_simulations=24, max_considered=12, num_sampled_actions=12
    ),
    replay=ReplayConfig(capacity=100_000, batch_size=128, alpha=0.0),
    collect=CollectConfig(num_env_steps=20_000, random_env_steps=1_000, updates_per_env_step=0.25),
    evaluate=EvaluateConfig(every_env_steps=4_000, num_episodes=64),
    checkpoint=CheckpointConfig(every_updates=500),
)
TICTACTOE = replace(
    CARTPOLE,
    env=EnvConfig(id="tictactoe", num_envs=32),
    model=replace(
        SMALL,
        flatten=True,
        latent_state_dim=128,
        reward_support_range=(-3.0, 4.0, 1.0),
        value_support_range=(-3.0, 4.0, 1.0),
    ),
    loss=LossConfig(unroll_steps=3, lstm_horizon=3),
    targets=TargetConfig(  # a value is what came of the game
        discount=1.0, n_step=9, target_interval=100, reanalyze_ratio=0.0, correct_horizon=False
    ),
    optimizer=replace(ADAM, decay_updates=6_000),
    search=SearchConfig(num_simulations=25, temperatures=(1.0, 0.5), temperature_from=(0.0, 0.75)),
    replay=ReplayConfig(capacity=30_000, batch_size=128, alpha=0.0),
    collect=CollectConfig(num_env_steps=60_000, random_env_steps=1_000, updates_per_env_step=0.3),
    evaluate=EvaluateConfig(every_env_steps=5_000, num_episodes=100, num_simulations=50),
    checkpoint=CheckpointConfig(every_updates=500),
)
CONNECT4 = replace(
    TICTACTOE,
    env=EnvConfig(id="connect4", num_envs=32),
    model=replace(
        SMALL,
        num_channels=32,
        downsample=False,
        reward_support_range=(-3.0, 4.0, 1.0),
        value_support_range=(-3.0, 4.0, 1.0),
    ),
    targets=replace(TICTACTOE.targets, n_step=42, reanalyze_ratio=0.0),
    search=replace(TICTACTOE.search, num_simulations=50),
    replay=ReplayConfig(capacity=200_000, batch_size=128, alpha=0.0),
    collect=CollectConfig(num_env_steps=400_000, random_env_steps=2_000, updates_per_env_step=0.05),
    evaluate=EvaluateConfig(every_env_steps=20_000, num_episodes=32, opponent="rule"),
    checkpoint=CheckpointConfig(every_updates=1_000),
)
MINATAR_BREAKOUT = replace(
    CARTPOLE,
    env=EnvConfig(id="minatar/breakout", num_envs=16),
    # As vectors: a search over convolutions is 20 times slower on two cores.
    model=replace(SMALL, flatten=True, latent_state_dim=128),
    targets=TargetConfig(discount=0.99, n_step=10, target_interval=50, reanalyze_ratio=0.0),
    optimizer=replace(ADAM, learning_rate=2e-3, decay_updates=15_000),
    search=SearchConfig(num_simulations=25, temperatures=(0.5, 0.25), temperature_from=(0.0, 0.5)),
    replay=ReplayConfig(capacity=200_000, batch_size=128),
    collect=CollectConfig(num_env_steps=200_000, random_env_steps=2_000, updates_per_env_step=0.2),
    evaluate=EvaluateConfig(every_env_steps=5_000, num_episodes=32, max_steps=5_000),
    checkpoint=CheckpointConfig(every_updates=1_000),
)
ATARI_100K = EfficientZeroRun(
    env=EnvConfig(id="atari/pong", num_envs=8, frame_stack=4, atari=AtariConfig()),
    loss=LossConfig(augmentation=("shift", "intensity")),
    targets=TargetConfig(discount=0.997**4),
    collect=CollectConfig(
        num_env_steps=100_000,
        random_env_steps=2_000,
        updates_per_env_step=1.0,
        extra_updates=20_000,
    ),
    evaluate=EvaluateConfig(every_env_steps=10_000, num_episodes=32),
)
ATARI_PONG = replace(
    ATARI_100K,
    env=replace(ATARI_100K.env, atari=AtariConfig(size=64, colour=False)),
    model=replace(
        ATARI_100K.model,
        reward_support_range=(-50.0, 51.0, 1.0),
        value_support_range=(-50.0, 51.0, 1.0),
    ),
    targets=replace(ATARI_100K.targets, reanalyze_ratio=0.25),
    evaluate=EvaluateConfig(every_env_steps=10_000, num_episodes=8),
)


def muzero(run: EfficientZeroRun) -> EfficientZeroRun:
    """The run without what EfficientZero adds: prefix, consistency and reanalyze.

    >>> muzero(PRESETS["cartpole"]).loss.consistency_weight
    0.0
    """
    return replace(
        run,
        model=replace(run.model, lstm_hidden_size=0),
        loss=replace(run.loss, lstm_horizon=1, consistency_weight=0.0),
        targets=replace(run.targets, reanalyze_ratio=0.0, correct_horizon=False),
    )


def gumbel(run: EfficientZeroRun) -> EfficientZeroRun:
    """The run with Gumbel MuZero's search.

    >>> gumbel(PRESETS["cartpole"]).search.policy
    'gumbel'
    """
    return replace(run, search=replace(run.search, policy="gumbel"))


# With a line each, shown next to the environment.
_NAMED: dict[str, tuple[EfficientZeroRun, str]] = {
    "smoke": (SMOKE, "tiny networks, a few seconds: a smoke test"),
    "cartpole": (CARTPOLE, "learns to balance the pole in minutes on two cores"),
    "cartpole-muzero": (muzero(CARTPOLE), "... as MuZero: no prefix, consistency or reanalyze"),
    "cartpole-gumbel": (gumbel(CARTPOLE), "... with Gumbel search (sequential halving)"),
    "cartpole-gumbel-muzero": (gumbel(muzero(CARTPOLE)), "... with both changes: Gumbel MuZero"),
    "lunarlander": (LUNARLANDER, "landing between the flags (extra: box2d)"),
    "pendulum": (PENDULUM, "continuous actions; the search samples actions"),
    "tictactoe": (TICTACTOE, "self-play; evaluated against a perfect player"),
    "connect4": (CONNECT4, "self-play; evaluated against a rule-based player"),
    "minatar-breakout": (MINATAR_BREAKOUT, "a 10x10 version of Breakout; needs no extra"),
    "atari-pong": (ATARI_PONG, "64x64 greyscale; GPU recommended (extra: atari)"),
    "atari100k": (ATARI_100K, "paper settings, any atari/<game>; GPU recommended"),
}
PRESETS: Presets[EfficientZeroRun] = Presets({name: run for name, (run, _) in _NAMED.items()})
SUMMARIES = {name: summary for name, (_, summary) in _NAMED.items()}
