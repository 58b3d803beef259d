"""The compiled inner steps of a search; `raffia.search.compiled` calls them."""

# What of a model's output may hold NaN, as the steps report it; named in raffia.search.errors.
REWARD, VALUE, PRIOR_LOGITS, DISCOUNT = range(4)

__all__: list[str] = []
