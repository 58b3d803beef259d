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
    state["step"] = torch.tensor(config.num_updates // 20)  # behind the warmup
    return config, learner, state


def update(name: str, device: torch.device, small: bool) -> list[Agreement]:
    """Gradients of a batch, and the optimiser's step."""
    config, learner, state = subject(name)
    batch = noise_batch(SPECS[name], config, 4 if small else NUM_WINDOWS)
    there, check = state.to(device).clone(), f"update, {name}"
    given, metrics = learner.grads(state, batch)
    found, metrics_there = learner.grads(there, batch.to(device))
    agreements = [
        near(check, what, metrics[what], metrics_there[what], rtol=1e-3, atol=atol)
        for what, atol in (("loss", 0.0), ("priority", 1e-3))
    ]
    agreements += [
        near_as_a_whole(check, what, given[what], found[what], share=2e-2)
        for what in ("grads", "buffers")
    ]
    same = learner.apply(state.clone(), given)["params"]
    same_there = learner.apply(there.clone(), given.to(device))["params"]
    whole = learner.apply(there.clone(), found)["params"]
    return [
        *agreements,
        near_as_a_whole(check, "apply, of the same gradients", same, same_there, share=1e-5),
        near_as_a_whole(
            *(check, "params after the update", step(same, given), step(whole, given)), share=2e-2
        ),
    ]


def step(params: TensorDict, update: TensorDict) -> TensorDict:
    """Parameters, and 0 for those whose gradients say nothing.

    That of a bias before a BatchNorm is 0 but for rounding, as is that of the keys' in attention,
    and by this Adam moves them as far as by any other; so it is of what is small beside the rest.
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

    def there(place: torch.device) -> Planner:
        model, stack = learner.make_model(0).to(place), config.env.frame_stack
        planner = Planner(model, SPECS[name], config, frame_stack=stack)
        planner.refresh(state)
        return planner

    return there(torch.device("cpu")), there(device)


def search(name: str, device: torch.device, small: bool) -> list[Agreement]:
    """Visits and values of roots, with noise, from the same seeds."""
    num, config, check = 4 if small else NUM_ROOTS, preset(name, small=False), f"search, {name}"
    frames = noise_batch(SPECS[name], config, num)["frames"][:, : config.env.frame_stack]
    seen = frames if config.env.frame_stack > 1 else frames[:, 0]
    states = TensorDict(observation=seen, batch_size=[num])
    here, there = (
        planner.plan(states, seed=torch.arange(num)) for planner in planners(name, device)
    )
    visits = (here.tree.visits_of_root(), there.tree.visits_of_root())
    return [
        same_share(check, "visit counts", *visits, allowed=0.02, of="visits"),
        near(check, "root value", here.root_value, there.root_value, rtol=1e-3, atol=1e-3),
    ]


def batches(name: str, device: torch.device, small: bool) -> list[Agreement]:
    """`make_batch` with every policy reanalyzed, of windows that lie on the CPU."""
    with played(name, torch.device("cpu"), small=True) as parts:
        windows = parts.run.replay.sample(4)
        here, there = (
            make_batch(windows, planner, generator=torch.Generator().manual_seed(0))[0]
            for planner in planners(name, device)
        )
    check, searched = f"make_batch, {name}", ("target_policy", "target_value")
    return [
        equal(check, "what is not searched", here.exclude(*searched), there.exclude(*searched)),
        same_share(
            *(check, "target policy", here["target_policy"], there["target_policy"]),
            allowed=0.02,
            of="visits",
        ),
        near(
            check, "target value", *(b["target_value"] for b in (here, there)), rtol=1e-3, atol=1e-3
        ),
    ]


CHECKS: dict[str, Check] = {
    f"{kind}, {name}": partial(check, name)
    for kind, check in (("update", update), ("search", search), ("make_batch", batches))
    for name in NAMES
}
