"""Whether EfficientZero on a device gives what it gives on the CPU: updates, searches, batches.

Products are of float32 as it is (no TF32) on both sides. A device adds in another order, so that
results differ by rounding; where a search meets two actions that are as good, rounding decides, and
so a fraction of visits may differ.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.device_agreement import (
    Agreement,
    equal,
    leaves,
    near,
    near_as_a_whole,
    same_share,
)
from benchmarks.device_run import (
    FRAME,
    NAMES,
    noise_batch,
    played,
    preset,
    shaken,
)
from raffia.algorithms.efficientzero.learner import EfficientZeroLearner
from raffia.algorithms.efficientzero.planning import Planner
from raffia.algorithms.efficientzero.targets import make_batch
from raffia.envs.env import Discrete, EnvSpec
from raffia.recipes.efficientzero.config import EfficientZeroRun
from raffia.tensordict.tensordict import TensorDict

Check = Callable[[torch.device, bool], list[Agreement]]  # (device, small)

SPECS = {"cartpole": EnvSpec(observation_shape=(4,), action=Discrete(2)), "atari100k": FRAME}
NUM_WINDOWS, NUM_ROOTS = 32, 16


def subject(name: str) -> tuple[EfficientZeroRun, EfficientZeroLearner, TensorDict]:
    """A preset's config, its learner, and a state at full rate with noise on all weights.

    >>> int(subject("cartpole")[2]["step"])
    207
    """
    config, spec = preset(name, small=False), SPECS[name]
    learner = EfficientZeroLearner(
        spec, config, num_updates=config.num_updates, frame_stack=config.env.frame_stack
    )
    state = learner.init(0)
    state["params"] = shaken(state["params"])
    state["step"] = torch.tensor(config.num_updates // 20)  # after the warmup
    return config, learner, state


def update(name: str, device: torch.device, small: bool) -> list[Agreement]:
    """Gradients of a batch, and the optimiser's step."""
    config, learner, state = subject(name)
    batch = noise_batch(SPECS[name], config, 4 if small else NUM_WINDOWS)
    state_there, check = state.to(device).clone(), f"update, {name}"
    expected, metrics = learner.grads(state, batch)
    found, metrics_there = learner.grads(state_there, batch.to(device))
    agreements = [
        near(check, what, metrics[what], metrics_there[what], rtol=1e-3, atol=atol)
        for what, atol in (("loss", 0.0), ("priority", 1e-3))
    ]
    agreements += [
        near_as_a_whole(check, what, expected[what], found[what], share=2e-2)
        for what in ("grads", "buffers")
    ]
    applied = learner.apply(state.clone(), expected)["params"]
    applied_there = learner.apply(state_there.clone(), expected.to(device))["params"]
    updated = learner.apply(state_there.clone(), found)["params"]
    return [
        *agreements,
        near_as_a_whole(check, "apply, of the same gradients", applied, applied_there, share=1e-5),
        near_as_a_whole(
            *(check, "params after the update", step(applied, expected), step(updated, expected)),
            share=2e-2,
        ),
    ]


def step(params: TensorDict, update: TensorDict) -> TensorDict:
    """Parameters, and 0 for those with negligible gradients.

    The gradient of a bias before a BatchNorm is rounding error, as is that of attention's keys, but
    Adam moves these as far as others; so it does with gradients that are small beside the rest.
    """
    grads = {name: grad.abs() for name, grad in leaves(update["grads"]).items()}
    largest = max(float(grad.max()) for grad in grads.values())

    def entry(name: str, x: Tensor) -> Tensor:
        least = max(1e-5 * largest, 1e-2 * float(grads[name].max()))
        return torch.where((grads[name] > least).to(x.device), x, 0.0)

    return TensorDict({name: entry(name, x) for name, x in leaves(params).items()})


def planners(name: str, device: torch.device) -> tuple[Planner, Planner]:
    """The same networks on the CPU and on the device."""
    config, learner, state = subject(name)

    def planner_on(target: torch.device) -> Planner:
        model, stack = learner.make_model(0).to(target), config.env.frame_stack
        planner = Planner(model, SPECS[name], config, frame_stack=stack)
        planner.refresh(state)
        return planner

    return planner_on(torch.device("cpu")), planner_on(device)


def search(name: str, device: torch.device, small: bool) -> list[Agreement]:
    """Visits and values of roots, with noise, from the same seeds."""
    num, config, check = 4 if small else NUM_ROOTS, preset(name, small=False), f"search, {name}"
    frames = noise_batch(SPECS[name], config, num)["frames"][:, : config.env.frame_stack]
    observation = frames if config.env.frame_stack > 1 else frames[:, 0]
    states = TensorDict(observation=observation, batch_size=[num])
    expected, found = (
        planner.plan(states, seed=torch.arange(num)) for planner in planners(name, device)
    )
    visits = (expected.tree.visits_of_root(), found.tree.visits_of_root())
    return [
        same_share(check, "visit counts", *visits, allowed=0.02, of="visits"),
        near(check, "root value", expected.root_value, found.root_value, rtol=1e-3, atol=1e-3),
    ]


def batches(name: str, device: torch.device, small: bool) -> list[Agreement]:
    """`make_batch` with every policy reanalyzed, of segments on the CPU."""
    with played(name, torch.device("cpu"), small=True) as parts:
        segments = parts.run.replay.sample(4)
        expected, found = (
            make_batch(segments, planner, generator=torch.Generator().manual_seed(0))[0]
            for planner in planners(name, device)
        )
    check, searched = f"make_batch, {name}", ("target_policy", "target_value")
    return [
        equal(check, "what is not searched", expected.exclude(*searched), found.exclude(*searched)),
        same_share(
            *(check, "target policy", expected["target_policy"], found["target_policy"]),
            allowed=0.02,
            of="visits",
        ),
        near(
            check,
            "target value",
            *(b["target_value"] for b in (expected, found)),
            rtol=1e-3,
            atol=1e-3,
        ),
    ]


CHECKS: dict[str, Check] = {
    f"{kind}, {name}": partial(check, name)
    for kind, check in (("update", update), ("search", search), ("make_batch", batches))
    for name in NAMES
}
