"""Where programs written for tensordict look for names of `raffia.nn.distributions`."""

from raffia.nn.distributions.onehot import OneHotCategorical, rand_one_hot

__all__ = ["OneHotCategorical", "rand_one_hot"]
