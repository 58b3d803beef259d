"""Pure functions of tensors for reinforcement learning: losses, returns, optimisers, transforms."""

from raffia.functional.augment import draw_intensity, draw_shift, intensity, random_shift
from raffia.functional.gradients import clip_by_global_norm, global_norm, value_and_grad
from raffia.functional.losses import (
    conservative_loss,
    expectile_loss,
    margin_loss,
    masked_mean,
    negative_cosine_similarity,
    soft_cross_entropy,
)
from raffia.functional.optim import (
    Optimizer,
    Update,
    adamw,
    cosine_decay,
    linear,
    sgd,
    step_decay,
    warmup,
)
from raffia.functional.returns import discounted_sum, lambda_return, n_step_return, value_prefix
from raffia.functional.seeds import derive_seed, generator_for
from raffia.functional.transforms import (
    Support,
    categorical_to_scalar,
    expected_value,
    scalar_to_categorical,
    signed_hyperbolic,
    signed_parabolic,
    two_hot,
)

__all__ = [
    "Optimizer",
    "Support",
    "Update",
    "adamw",
    "categorical_to_scalar",
    "clip_by_global_norm",
    "conservative_loss",
    "cosine_decay",
    "derive_seed",
    "discounted_sum",
    "draw_intensity",
    "draw_shift",
    "expected_value",
    "expectile_loss",
    "generator_for",
    "global_norm",
    "intensity",
    "lambda_return",
    "linear",
    "margin_loss",
    "masked_mean",
    "n_step_return",
    "negative_cosine_similarity",
    "random_shift",
    "scalar_to_categorical",
    "sgd",
    "signed_hyperbolic",
    "signed_parabolic",
    "soft_cross_entropy",
    "step_decay",
    "two_hot",
    "value_and_grad",
    "value_prefix",
    "warmup",
]
