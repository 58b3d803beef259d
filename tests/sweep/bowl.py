"""A toy algorithm whose score is best at rate .01 and width 3."""

import math
import time
from dataclasses import dataclass

import torch

from raffia.recipes import Algorithm
from raffia.tensordict.tensordict import TensorDict
from raffia.train.evaluations import Evaluated
from raffia.train.experiment import Experiment, Plan


@dataclass(frozen=True, kw_only=True)
class BowlRun:
    rate: float = 0.1
    width: int = 1
    layers: tuple[int, ...] = ()
    jitter: float = 0.0  # random extra seconds of a run, by its settings
    num_updates: int = 1
    seed: int = 0
    device: str = "cpu"
    num_threads: int = 1
    title: str = "the bowl"

    def __post_init__(self) -> None:
        if self.width > 100:
            raise ValueError(f"width={self.width} is more than 100")


class Counting:
    def init(self, seed):
        return TensorDict(step=torch.tensor(0))

    def grads(self, state, batch):
        return TensorDict(), TensorDict()

    def apply(self, state, update):
        return TensorDict(step=state["step"] + 1)


class Bowl(Experiment):
    def __init__(self, config, folder, view):
        super().__init__(folder, view, seed=config.seed)
        self.config, self.learner = config, Counting()
        self.plan = Plan(title="", num_updates=config.num_updates, evaluate_every=1, save_every=9)

    def step(self, state):
        return self.learn(state, TensorDict())

    def evaluate(self, state, stop):
        run = self.config
        time.sleep(run.jitter * (hash((run.rate, run.seed)) % 100) / 100)
        if run.width == 7:
            raise ArithmeticError("no run is 7 wide")
        distance = (math.log10(run.rate) + 2) ** 2 + abs(run.width - 3) + sum(run.layers)
        score = -distance + 0.001 * run.seed
        return Evaluated(score, {"mean_return": score, "returns": [score]})


bowl = Algorithm(name="bowl", config=BowlRun, make=Bowl, length="num_updates")
