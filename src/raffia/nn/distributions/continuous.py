"""Where programs written for tensordict look for names of `raffia.nn.distributions`."""

from raffia.nn.distributions.delta import Delta
from raffia.nn.distributions.normal import (
    AddStateIndependentNormalScale,
    NormalParamExtractor,
    NormalParamWrapper,
)
from raffia.nn.distributions.truncated import TruncatedNormal

__all__ = [
    "AddStateIndependentNormalScale",
    "Delta",
    "NormalParamExtractor",
    "NormalParamWrapper",
    "TruncatedNormal",
]
