"""Functions of tensors that learning is made of: no state, no draws, no modules."""

from raffia.functional.losses import negative_cosine_similarity, soft_cross_entropy
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
    "Support",
    "categorical_to_scalar",
    "expected_value",
    "negative_cosine_similarity",
    "scalar_to_categorical",
    "signed_hyperbolic",
    "signed_parabolic",
    "soft_cross_entropy",
    "two_hot",
]
