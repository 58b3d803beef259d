"""Pure functions of tensors for reinforcement learning: losses, returns, optimisers, transforms."""

from typing import TYPE_CHECKING

from raffia.functional.augment import draw_intensity as draw_intensity
from raffia.functional.augment import draw_shift as draw_shift
from raffia.functional.augment import intensity as intensity
from raffia.functional.augment import random_shift as random_shift
from raffia.functional.gradients import clip_by_global_norm as clip_by_global_norm
from raffia.functional.gradients import global_norm as global_norm
from raffia.functional.gradients import value_and_grad as value_and_grad
from raffia.functional.losses import conservative_loss as conservative_loss
from raffia.functional.losses import expectile_loss as expectile_loss
from raffia.functional.losses import margin_loss as margin_loss
from raffia.functional.losses import masked_mean as masked_mean
from raffia.functional.losses import negative_cosine_similarity as negative_cosine_similarity
from raffia.functional.losses import soft_cross_entropy as soft_cross_entropy
from raffia.functional.optim import Optimizer as Optimizer
from raffia.functional.optim import Update as Update
from raffia.functional.optim import adamw as adamw
from raffia.functional.optim import cosine_decay as cosine_decay
from raffia.functional.optim import linear as linear
from raffia.functional.optim import sgd as sgd
from raffia.functional.optim import step_decay as step_decay
from raffia.functional.optim import warmup as warmup
from raffia.functional.returns import discounted_sum as discounted_sum
from raffia.functional.returns import lambda_return as lambda_return
from raffia.functional.returns import n_step_return as n_step_return
from raffia.functional.returns import value_prefix as value_prefix
from raffia.functional.seeds import derive_seed as derive_seed
from raffia.functional.seeds import generator_for as generator_for
from raffia.functional.transforms import Support as Support
from raffia.functional.transforms import categorical_to_scalar as categorical_to_scalar
from raffia.functional.transforms import expected_value as expected_value
from raffia.functional.transforms import scalar_to_categorical as scalar_to_categorical
from raffia.functional.transforms import signed_hyperbolic as signed_hyperbolic
from raffia.functional.transforms import signed_parabolic as signed_parabolic
from raffia.functional.transforms import two_hot as two_hot
from raffia.lazy import public_names as _public_names

if not TYPE_CHECKING:
    __all__ = _public_names(__name__)
