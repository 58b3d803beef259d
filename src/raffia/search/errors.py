"""The error of a model that gives NaN or infinity."""

_WRONG = {
    "discount": "NaN, infinite or negative (two players: to_play, not a negative discount)",
    "prior_logits": "NaN, inf or -inf for all legal actions",
}


class UnfitOutputError(ValueError):
    """The model gave NaN or infinity.

    >>> from raffia.search import RootOutput, search
    >>> search(RootOutput(torch.zeros(1, 2), torch.tensor([torch.nan]), torch.zeros(1)), None,
    ...        num_simulations=1)
    Traceback (most recent call last):
    ...
    raffia.search.errors.UnfitOutputError: root.value is NaN or infinite for root 0 (counted from 0)
    """


def unfit(field: str, root: int, simulation: int) -> UnfitOutputError:
    """The error that names where a model gave NaN or infinity."""
    wrong = _WRONG.get(field, "NaN or infinite")
    return UnfitOutputError(
        f"the model's {field} is {wrong} for root {root} in simulation {simulation} "
        "(both counted from 0): look at recurrent_fn's inputs there, or at its weights"
    )


def unfit_root(field: str, root: int) -> UnfitOutputError:
    """The error that names a root with NaN or infinity."""
    wrong = _WRONG.get(field, "NaN or infinite")
    return UnfitOutputError(f"root.{field} is {wrong} for root {root} (counted from 0)")
