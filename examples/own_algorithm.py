"""An algorithm of your own, double DQN, with resume, evaluation and report: docs/own_algorithm.md.

raffia train examples/own_algorithm.py:dqn --seed 1
"""

from contextlib import closing
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from raffia import TensorDict
from raffia.data import SegmentReplayBuffer, TensorStorage
from raffia.envs import EnvConfig, make_env
from raffia.functional import adamw, generator_for, value_and_grad
from raffia.recipes import Algorithm, train
from raffia.train import Collector, Experiment, Plan, Schedule, play_episodes


@dataclass(frozen=True, kw_only=True)
class DQNConfig:
    """Settings: each is a flag of the command line, such as --env.id or --learning_rate."""

    env: EnvConfig = field(default_factory=EnvConfig)
    seed: int = 0
    device: str = "cpu"
    num_threads: int = 1
    num_env_steps: int = 50_000
    random_env_steps: int = 1_000
    capacity: int = 50_000  # of the replay buffer, steps
    batch_size: int = 128
    learning_rate: float = 5e-4
    discount: float = 0.99
    target_rate: float = 0.01  # how far the target network moves to the network in an update
    epsilon: float = 0.05  # probability of a random action ...
    epsilon_fraction: float = 0.1  # ... from this fraction of the steps on; 1 at the start
    evaluate_every: int = 5_000  # environment steps
    target_return: float | None = 475.0  # the run ends at this mean return

    @property
    def title(self) -> str:
        return f"DQN on {self.env.id}"


class DQNLearner:
    """Three functions of one tree of tensors: `init`, `grads` and `apply`."""

    def __init__(self, spec, config: DQNConfig):
        self.config, self.optimizer = config, adamw(weight_decay=0.0)
        self.net = nn.Sequential(
            nn.Flatten(), nn.Linear(torch.Size(spec.observation_shape).numel(), 128), nn.ReLU(),
            nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, spec.action.n),
        )  # fmt: skip

    def init(self, seed: int) -> TensorDict:
        with torch.random.fork_rng([]):
            torch.manual_seed(seed)
            for layer in self.net[1::2]:
                layer.reset_parameters()
        params = TensorDict.from_module(self.net).data.clone()
        opt, step = self.optimizer.init(params), torch.tensor(0)
        return TensorDict(params=params, target=params.clone(), opt=opt, step=step)

    def values(self, params: TensorDict, observation: torch.Tensor) -> torch.Tensor:  # [B, A]
        weights = dict(params.flatten_keys(".").items())
        return torch.func.functional_call(self.net, weights, observation.to(params.device).float())

    @torch.no_grad()
    def greedy(self, params: TensorDict, states: TensorDict) -> TensorDict:
        action = self.values(params, states["observation"]).argmax(-1).cpu()
        return TensorDict(action=action, batch_size=states.batch_size)

    def grads(self, state: TensorDict, batch: TensorDict) -> tuple[TensorDict, TensorDict]:
        """Double Q-learning (van Hasselt, Guez & Silver 2016, equation 4), with Huber's loss."""
        now, after = batch["observation"].unbind(1)  # segments of two rows
        with torch.no_grad():
            best = self.values(state["params"], after).argmax(-1, keepdim=True)
            bootstrap = self.values(state["target"], after).gather(-1, best)[:, 0]
        discount = self.config.discount * batch["discount"][:, 0]  # 0 where the episode terminated
        goal = batch["reward"][:, 0] + discount * bootstrap

        def loss(params: TensorDict):
            value = self.values(params, now).gather(-1, batch["action"][:, :1])[:, 0]
            return nn.functional.smooth_l1_loss(value, goal), {"q": value.mean()}

        grads, (value, metrics) = value_and_grad(loss, state["params"])
        return TensorDict(grads=grads), TensorDict({"loss": value, **metrics})

    def apply(self, state: TensorDict, update: TensorDict) -> TensorDict:
        params, grads, rate = state["params"], update["grads"], self.config.learning_rate
        params, opt = self.optimizer.update(params, grads, state["opt"], learning_rate=rate)
        target = state["target"].lerp(params, self.config.target_rate)
        return TensorDict(params=params, target=target, opt=opt, step=state["step"] + 1)


class DQN(Experiment):
    """The learner with environments, a replay buffer and evaluations."""

    def __init__(self, config: DQNConfig, folder, view):
        super().__init__(folder, view, seed=config.seed)
        self.config, self.env = config, make_env(config.env)
        self.learner = DQNLearner(self.env.spec, config)
        self.collector = Collector(self.env, seed=config.seed)
        self.replay = SegmentReplayBuffer(
            TensorStorage(config.capacity), observation_keys=self.env.spec.state_keys,
            unroll_steps=1, generator=generator_for(config.seed, "replay"),
        )  # fmt: skip
        self.parts, self.replays = {"env": self.collector}, {"replay": self.replay}
        self.schedule = Schedule(
            random_env_steps=config.random_env_steps, num_env_steps=config.num_env_steps,
        )  # fmt: skip
        self.plan = Plan(
            title=f"{config.title}, seed {config.seed}", device=config.device,
            num_updates=self.schedule.num_updates, num_env_steps=config.num_env_steps,
            evaluate_every=config.evaluate_every, target_return=config.target_return,
        )  # fmt: skip

    def step(self, state: TensorDict) -> tuple[TensorDict, TensorDict]:
        """One update: play the steps that are due before it, and learn from a batch of them all."""
        act, due = partial(self.act, state["params"]), self.schedule.steps_due(int(state["step"]))
        while self.collector.num_env_steps < due or not len(self.replay):
            self.replay.extend(self.collector.collect(act, 1))
        return self.learn(state, self.replay.sample(self.config.batch_size).to(self.config.device))

    def act(self, params: TensorDict, states: TensorDict) -> TensorDict:
        """Epsilon-greedy; random in the first steps."""
        config, played = self.config, self.collector.num_env_steps
        draws = generator_for(config.seed, "act", played)
        action = torch.randint(self.env.spec.action.n, states.batch_size, generator=draws)
        if played >= config.random_env_steps:
            annealed = 1 - played / (config.epsilon_fraction * config.num_env_steps)
            explores = torch.rand(len(states), generator=draws) < max(config.epsilon, annealed)
            action = action.where(explores, self.learner.greedy(params, states)["action"])
        return TensorDict(action=action, batch_size=states.batch_size)

    def evaluate(self, state: TensorDict, stop):
        return play(self.config, state, 20, self.collector.num_env_steps, stop)


def play(config: DQNConfig, state: TensorDict, num_episodes: int, seed: int, stop=lambda: False):
    with closing(make_env(config.env, evaluation=True)) as env:
        act = partial(DQNLearner(env.spec, config).greedy, state["params"])
        return play_episodes(env, act, num_episodes=num_episodes, seed=seed, stop=stop)


dqn = Algorithm(name="dqn", title="DQN", config=DQNConfig, make=DQN, play=play)

if __name__ == "__main__":
    train(DQNConfig(num_env_steps=3_000), "runs/dqn-short", algorithm=dqn)
