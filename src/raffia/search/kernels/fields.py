"""What of a model's output may hold NaN, as the steps report it; named in raffia.search.errors."""

REWARD, VALUE, PRIOR_LOGITS, DISCOUNT = range(4)
