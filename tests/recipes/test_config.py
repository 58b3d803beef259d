"""What no run can be made of is refused where its config is made."""

import pytest

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
from raffia.recipes.efficientzero.presets import PRESETS


@pytest.mark.parametrize(
    ("make", "value", "message"),
    [
        (OptimizerConfig, {"name": "adam"}, "name='adam' is none of 'sgd', 'adamw'; did you mean"),
        (SearchConfig, {"policy": "alphazero"}, "policy='alphazero' is none of 'muzero', 'gumbel'"),
        (TargetConfig, {"bootstrap": "root"}, "bootstrap='root' is none of"),
        (LossConfig, {"augmentation": ("flip",)}, "augmentation=.* is none of 'shift'"),
        (LossConfig, {"absorb": ("done",)}, "absorb=.* is none of 'terminated', 'truncated'"),
        (ModelConfig, {"norm_type": "bn"}, "norm_type='bn' is none of 'BN', 'LN'"),
        (EvaluateConfig, {"opponent": "best"}, "opponent='best' is none of"),
        (AtariConfig, {"size": 80}, "size=80 is none of 64, 84, 96"),
        (EnvConfig, {"frame_stack": 0}, "frame_stack=0 must be at least 1"),
        (ReplayConfig, {"batch_size": 0}, "batch_size=0 must be at least 1"),
        (ReplayConfig, {"beta": 1.5}, "beta=1.5 must lie in 0..1"),
        (CollectConfig, {"updates_per_env_step": 0.0}, "updates_per_env_step=0.0 must be above 0"),
        (CollectConfig, {"rollout_length": 0}, "rollout_length=0 must be at least 1"),
        (EvaluateConfig, {"every_env_steps": 0}, "every_env_steps=0 must be at least 1"),
        (EvaluateConfig, {"num_episodes": 0}, "num_episodes=0 must be at least 1"),
        (CheckpointConfig, {"every_updates": 0}, "every_updates=0 must be at least 1"),
        (OptimizerConfig, {"learning_rate": -0.1}, "learning_rate=-0.1 must be at least 0"),
        (OptimizerConfig, {"learning_rate": float("nan")}, "learning_rate=nan must be at least 0"),
        (OptimizerConfig, {"max_grad_norm": 0.0}, "max_grad_norm=0.0 must be above 0"),
        (SearchConfig, {"temperatures": (1.0, 0.5, -1.0)}, "temperatures=.* must be 0 or more"),
        (EfficientZeroRun, {"num_threads": 0}, "num_threads=0 must be at least 1"),
        (
            EfficientZeroRun,
            {"collect": CollectConfig(num_env_steps=1_000, random_env_steps=1_000)},
            "num_env_steps=1000 leaves nothing to learn",
        ),
    ],
)
def test_values_that_cannot_be_are_refused(make, value, message):
    with pytest.raises(ValueError, match=message):
        make(**value)


def test_all_presets_can_be():
    assert all(preset.num_updates > 0 for preset in PRESETS.values())
