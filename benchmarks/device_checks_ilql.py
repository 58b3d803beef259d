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
    language, check = MAKERS[name](CPU, small), f"ILQL update, {name}"
    language_there = language.to(device)
    learner, warm = language.learner, torch.tensor(100)  # after the warmup
    language.state["step"], language_there.state["step"] = warm, warm.to(device)
    expected, metrics = learner.grads(language.state, language.batch)
    found, metrics_there = learner.grads(language_there.state, language_there.batch)
    agreements = [
        near(check, what, metrics[what], metrics_there[what], rtol=1e-3)
        for what in ("loss", "v_loss", "q_loss", "grad_norm")
    ]
    applied = learner.apply(language.state.clone(), expected)["params"]
    applied_there = learner.apply(language_there.state.clone(), expected.to(device))["params"]
    updated = learner.apply(language_there.state.clone(), found)["params"]
    return [
        *agreements,
        near_as_a_whole(check, "grads", expected["grads"], found["grads"], share=1e-2),
        near_as_a_whole(check, "apply, of the same gradients", applied, applied_there, share=1e-5),
        near_as_a_whole(
            *(check, "params after the update", step(applied, expected), step(updated, expected)),
            share=2e-2,
        ),
    ]


def generation(name: str, device: torch.device, small: bool) -> list[Agreement]:
    """Texts that are drawn from the same seeds: rounding may decide a token, and what follows."""
    subject, check = MAKERS[name](CPU, small), f"ILQL generation, {name}"
    expected, found = (language.speaker()() for language in (subject, subject.to(device)))
    tokens, tokens_there = _tokens(expected), _tokens(found)
    is_equal = torch.tensor([a == b for a, b in zip(tokens, tokens_there, strict=True)])
    fraction = 1 - float(is_equal.float().mean())
    probable, probable_there = expected.log_prob.cpu(), found.log_prob.cpu()
    equal = is_equal.view(probable.shape)
    return [
        Agreement(check, "texts", fraction / ALLOWED, f"{ALLOWED:.0%} of all texts"),
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
