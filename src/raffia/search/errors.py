"""The error of a model that gives NaN or infinity."""

_FIELDS = (  # what may hold NaN, in the order of kernels/fields.py, and what is wrong then
    ("reward", "NaN or infinite"),
    ("value", "NaN or infinite"),
    ("prior_logits", "NaN, inf or -inf for all legal actions"),
    ("discount", "NaN, infinite or negative (two players: to_play, not a negative discount)"),
)


class UnfitOutputError(ValueError):
    """The model gave NaN or infinity.

    >>> from raffia.search import RootOutput, search
    >>> search(RootOutput(torch.zeros(1, 2), torch.tensor([torch.nan]), torch.zeros(1)), None,
    ...        num_simulations=1)
    Traceback (most recent call last):
    ...
    raffia.search.errors.UnfitOutputError: root.value is NaN or infinite for root 0 (counted from 0)
    """


def unfit(field: int, root: int, simulation: int) -> UnfitOutputError:
    """The error that names where a model gave NaN or infinity."""
    name, wrong = _FIELDS[field]
    return UnfitOutputError(
        f"the model's {name} is {wrong} for root {root} in simulation {simulation} "
        "(both counted from 0): look at recurrent_fn's inputs there, or at its weights"
    )


def unfit_root(field: int, root: int) -> UnfitOutputError:
    """The error that names a root with NaN or infinity."""
    name, wrong = _FIELDS[field]
    return UnfitOutputError(f"root.{name} is {wrong} for root {root} (counted from 0)")
