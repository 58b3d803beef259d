"""Populations on a device: members that learn one after the other, and joined in one program."""

from collections.abc import Callable, Iterator
from functools import partial

from benchmarks.device_cost import Cost, cost_of, seconds_per_call
from benchmarks.device_figures import Effort, Figure, Group, Measure
from benchmarks.population_cases import KINDS
from benchmarks.population_ours import Searches, Steps, subject
from raffia.evolution.population import Population
from raffia.recipes.devices import NUM_WARM, GraphedLearner

SIZES = {kind.name: kind.aim[0] if kind.aim else 8 for kind in KINDS if not kind.big}
ROWS = 8  # environments of each member
READS = ("params", "buffers", "target", "hyper")  # what gradients read of a state


def learning(kind: str, effort: Effort) -> Iterator[tuple[str, Measure]]:
    """An update of all members from one batch."""
    members = 2 if effort.small else SIZES[kind]
    learner, batch = subject(kind)
    batch = batch.to(effort.device)
    joined = Population(learner, members)
    state = joined.init(0).to(effort.device)
    alone = [state[i].clone() for i in range(members)]
    sides = {"one after the other": Steps(learner, alone, batch)}
    sides["joined"] = Steps(joined, [state.clone()], batch)
    if effort.device.type == "cuda" and kind != "wordle":
        reads = [name for name in READS if name in state.keys()]
        graphed = sides["joined, as a graph"] = Steps(GraphedLearner(joined, reads), [state], batch)
        for _ in range(NUM_WARM + 2):
            graphed()
    for side, steps in sides.items():
        name = f"{members} members, {kind}: update, {side}"
        # Operations within a graph are not counted, nor those of a compiled search below.
        call = partial(_measured, name, steps, effort, {"updates": 1.0})
        yield name, partial(call, counts="graph" not in side)


def acting(effort: Effort) -> Iterator[tuple[str, Measure]]:
    """A move of all members, each in its environments."""
    members = 2 if effort.small else SIZES["cartpole"]
    plain = Searches(members, ROWS, effort.device)
    sides = {"one after the other": plain.searches, "joined": plain.vmapped}
    if effort.device.type == "cuda":
        graphed = Searches(members, ROWS, effort.device, cudagraphs=True)
        sides["joined, as graphs"] = graphed.vmapped
    for side, call in sides.items():
        name = f"{members} members, cartpole: acting, {side}"
        yield name, partial(_measured, name, call, effort, {"env steps": float(members * ROWS)})


def _measured(
    name: str,
    call: Callable[[], object],
    effort: Effort,
    does: dict[str, float],
    *,
    counts: bool = False,  # its operations
) -> Figure:
    cost = cost_of(call) if counts else Cost()
    return Figure(name, seconds_per_call(call, effort.device, effort.seconds), does, cost)


GROUPS: dict[str, Group] = {
    **{f"figures, members of {kind}": partial(learning, kind) for kind in SIZES},
    "figures, members that act": acting,
}
