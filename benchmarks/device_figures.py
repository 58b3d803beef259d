"""What a figure is, and the figures of runs: EfficientZero's parts, ILQL's updates and texts."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from benchmarks.device_cost import Cost, cost_of, seconds_per_call
from benchmarks.device_ilql import Language, Precision, Speaker, trunk, wordle
from benchmarks.device_run import Played, played
from raffia.algorithms.efficientzero.observations import as_input


@dataclass(frozen=True)
class Effort:
    """The device and the time of a measurement.

    >>> Effort(torch.device("cpu"), seconds=1.0, small=True).small
    True
    """

    device: torch.device
    seconds: float  # of each measurement, about
    small: bool


@dataclass(frozen=True)
class Figure:
    """A call, its time, and its operations.

    >>> Figure("update", 0.5, {"updates": 1.0}, Cost()).each_second
    {'updates': 2.0}
    """

    name: str
    seconds: float  # of a call
    does: Mapping[str, float]  # in a call, by unit
    cost: Cost = field(default_factory=Cost)
    precision: str = "float32"  # of most products, see `device_limits.PRECISIONS`

    @property
    def each_second(self) -> dict[str, float]:
        """What it does, as rates."""
        return {unit: num / self.seconds for unit, num in self.does.items()}


Measure = Callable[[], Figure]
Group = Callable[[Effort], Iterator[tuple[str, Measure]]]


# -- EfficientZero


def efficientzero(
    preset: str, effort: Effort, *, cudagraphs: bool = False, precision: Precision = "float32"
) -> Iterator[tuple[str, Measure]]:
    """The parts of a run of a preset, each by itself, then its loop; graphs only on a card."""
    if cudagraphs and effort.device.type != "cuda":
        return
    words = [preset, "graphs" * cudagraphs, "bfloat16" * (precision == "bfloat16")]
    label = ", ".join(filter(None, words))
    # As a run has it: on a GPU torch rounds the inputs of convolutions, and of no other product.
    is_rounded = precision == "float32" and preset.startswith("atari")
    of_products = "tf32" if is_rounded else precision

    def figure(
        name: str, call: Callable[[], object], does: Mapping[str, float], cost: Cost
    ) -> Figure:
        seconds = seconds_per_call(call, effort.device, effort.seconds)
        return Figure(f"{label}: {name}", seconds, does, cost, of_products)

    settings = {"cudagraphs": cudagraphs, "precision": precision}
    with played(preset, effort.device, effort.small, **settings) as parts:
        run, num_envs = parts.run, parts.config.env.num_envs
        size, budget = parts.config.replay.batch_size, parts.config.search.num_simulations

        def acting() -> Figure:
            does = {"env steps": num_envs, "simulations": num_envs * budget}
            return figure("acting", parts.collect, does, search_cost(parts, num_envs, budget))

        def windows() -> Figure:
            return figure("windows drawn", parts.windows, {"windows": size}, Cost())

        def targets() -> Figure:
            num_calls, before = 0, run.reanalyze_planner.num_simulations

            def call() -> None:
                nonlocal num_calls
                num_calls += 1
                parts.targets()

            found = figure("batch, with reanalyze", call, {}, Cost())
            # Windows overlap, and end, so that not all batches have as many steps to search.
            num = (run.reanalyze_planner.num_simulations - before) / num_calls
            roots = round(num / budget)
            cost = Cost()
            if roots:  # about as many values close the sums of rewards
                cost = search_cost(parts, roots, budget).plus(root_cost(parts, roots))
            return replace(found, does={"batches": 1.0, "simulations": num}, cost=cost)

        def update() -> Figure:
            # With the networks' own learner: operations within a graph are not counted.
            cost = cost_of(lambda: parts.learn(run.networks))
            return figure("update", parts.learn, {"updates": 1.0}, cost)

        def loop() -> Figure:
            ratio = parts.config.collect.updates_per_env_step
            updates = max(1, round(num_envs * ratio))
            does = {"updates": updates, "env steps": updates / ratio}
            return figure("the whole loop", lambda: parts.train(updates), does, Cost())

        for measure in (acting, windows, targets, update, loop):
            yield f"{label}: {measure.__name__}", measure


def search_cost(parts: Played, num_roots: int, num_simulations: int) -> Cost:
    """Of the networks in a search, as torch computes them; the tree is not counted.

    >>> cpu = torch.device("cpu")
    >>> with played("cartpole", cpu, small=True) as parts:
    ...     search_cost(parts, 2, 4).flops == search_cost(parts, 4, 4).flops / 2
    True
    """
    device, model = parts.device, parts.run.networks.make_model(0).to(parts.device).eval()
    latent = torch.zeros(num_roots, *model.latent_shape, device=device)
    zeros = torch.zeros(1, num_roots, model.lstm_hidden_size, device=device)
    action = torch.zeros(num_roots, dtype=torch.int64, device=device)

    @torch.no_grad()
    def simulation() -> None:
        model.recurrent_inference(latent, (zeros, zeros), action)

    return root_cost(parts, num_roots).plus(cost_of(simulation).times(num_simulations))


def root_cost(parts: Played, num_roots: int) -> Cost:
    """The cost of the networks for this number of observations."""
    model = parts.run.networks.make_model(0).to(parts.device).eval()
    observations = _observations(parts, num_roots)

    @torch.no_grad()
    def root() -> None:
        model.initial_inference(as_input(observations))

    return cost_of(root)


def _observations(parts: Played, num: int) -> torch.Tensor:
    spec, stack = parts.run.env.spec, parts.config.env.frame_stack
    first, *rest = spec.observation_shape
    size = (num, stack * first, *rest)
    return torch.zeros(size, dtype=spec.observation_dtype, device=parts.device)


# -- ILQL


def ilql_wordle(effort: Effort) -> Iterator[tuple[str, Measure]]:
    """The preset `wordle`."""
    language = wordle(effort.device, effort.small)
    yield f"{language.name}: update", partial(_update, language, effort, "float32")
    yield f"{language.name}: texts", partial(_texts, language, effort)


def ilql_trunk(precision: Precision, effort: Effort) -> Iterator[tuple[str, Measure]]:
    """A trunk of GPT-2's shape; texts are generated in float32 alone."""
    language = trunk(effort.device, effort.small, precision)
    yield f"{language.name}: update", partial(_update, language, effort, precision)
    if precision == "float32":
        yield f"{language.name}: texts", partial(_texts, language, effort)


def _update(language: Language, effort: Effort, precision: str) -> Figure:
    cost = cost_of(language.learn)
    seconds = seconds_per_call(language.learn, effort.device, effort.seconds)
    does = {"tokens": float(language.num_tokens), "updates": 1.0}
    return Figure(f"{language.name}: update", seconds, does, cost, precision)


def _texts(language: Language, effort: Effort) -> Figure:
    speaker = language.speaker()
    num = sum(len(text) for texts in speaker().tokens for text in texts)
    seconds = seconds_per_call(speaker, effort.device, effort.seconds)
    does = {"tokens": float(num), "texts": float(len(language.prompts))}
    return Figure(f"{language.name}: texts", seconds, does, texts_cost(speaker, num))


def texts_cost(speaker: Speaker, num_tokens: int) -> Cost:
    """Of the least that texts take: two operations for each token and weight, and all weights read
    for each token of the longest. Attention is not counted, nor how many operations there are.
    """
    longest = speaker.language.decode.max_new_tokens or 0
    return Cost(2 * speaker.num_weights * num_tokens, speaker.num_weight_bytes * longest)


GROUPS: dict[str, Group] = {
    "figures, cartpole": partial(efficientzero, "cartpole"),
    "figures, atari100k": partial(efficientzero, "atari100k"),
    "figures, cartpole by graphs": partial(efficientzero, "cartpole", cudagraphs=True),
    "figures, atari100k by graphs": partial(efficientzero, "atari100k", cudagraphs=True),
    "figures, atari100k by graphs in bfloat16": partial(
        efficientzero, "atari100k", cudagraphs=True, precision="bfloat16"
    ),
    "figures, wordle": ilql_wordle,
    "figures, GPT": partial(ilql_trunk, "float32"),
    "figures, GPT in bfloat16": partial(ilql_trunk, "bfloat16"),
}
