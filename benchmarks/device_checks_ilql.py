"""Whether ILQL on a device learns and generates as it does on the CPU."""

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.device_agreement import Agreement, near, near_as_a_whole
from benchmarks.device_checks import Check, step
from benchmarks.device_ilql import Language, trunk, wordle
from raffia.lm.decoding.generations import Generations

MAKERS: dict[str, Callable[[torch.device, bool], Language]] = {
    "wordle": wordle,
    "GPT": lambda device, small: trunk(device, small=True),
}
CPU = torch.device("cpu")
ALLOWED = 0.1  # fraction of texts that may differ


def update(name: str, device: torch.device, small: bool) -> list[Agreement]:
    """Gradients of a batch, and the optimiser's step."""
    here, check = MAKERS[name](CPU, small), f"ILQL update, {name}"
    there = here.to(device)
    learner, warm = here.learner, torch.tensor(100)  # after the warmup
    here.state["step"], there.state["step"] = warm, warm.to(device)
    given, metrics = learner.grads(here.state, here.batch)
    found, metrics_there = learner.grads(there.state, there.batch)
    agreements = [
        near(check, what, metrics[what], metrics_there[what], rtol=1e-3)
        for what in ("loss", "v_loss", "q_loss", "grad_norm")
    ]
    same = learner.apply(here.state.clone(), given)["params"]
    same_there = learner.apply(there.state.clone(), given.to(device))["params"]
    whole = learner.apply(there.state.clone(), found)["params"]
    return [
        *agreements,
        near_as_a_whole(check, "grads", given["grads"], found["grads"], share=1e-2),
        near_as_a_whole(check, "apply, of the same gradients", same, same_there, share=1e-5),
        near_as_a_whole(
            *(check, "params after the update", step(same, given), step(whole, given)), share=2e-2
        ),
    ]


def generation(name: str, device: torch.device, small: bool) -> list[Agreement]:
    """Texts that are drawn from the same seeds: rounding may decide a token, and what follows."""
    here, check = MAKERS[name](CPU, small), f"ILQL generation, {name}"
    one, other = (language.speaker()() for language in (here, here.to(device)))
    tokens, tokens_there = _tokens(one), _tokens(other)
    alike = torch.tensor([a == b for a, b in zip(tokens, tokens_there, strict=True)])
    unlike = 1 - float(alike.float().mean())
    probable, probable_there = one.log_prob.cpu(), other.log_prob.cpu()
    equal = alike.view(probable.shape)
    return [
        Agreement(check, "texts", unlike / ALLOWED, f"{ALLOWED:.0%} of all texts"),
        near(
            *(check, "log-probability of equal texts", probable[equal], probable_there[equal]),
            rtol=1e-3,
            atol=1e-3,
        ),
    ]


def _tokens(texts: Generations) -> list[list[int]]:
    return [text for of_prompt in texts.tokens for text in of_prompt]


CHECKS: dict[str, Check] = {
    **{f"ILQL update, {name}": partial(update, name) for name in MAKERS},
    **{f"ILQL generation, {name}": partial(generation, name) for name in MAKERS},
}
