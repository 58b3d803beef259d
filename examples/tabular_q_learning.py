"""Q-learning without a network: the table is a `TensorDictMap`, asked by the content of states.

    pip install gymnasium matplotlib
    python examples/tabular_q_learning.py        # half a minute; draws tabular_q_learning.png

Taxi has rewards everywhere, so acting at random now and then finds a way. FrozenLake (8x8) pays at
the far goal only, which random steps hardly ever reach. There it helps to count how often each
action was taken in each state and to be paid a bonus for what is rare, beta / sqrt(n): "MBIE-EB" of
Strehl and Littman (2008). Both tables, values and counts, are maps that learn their keys as they
go: nobody says how many states there are.
"""

import gymnasium as gym
import matplotlib
import torch

from raffia import TensorDict
from raffia.data import TensorDictMap

NUM_ENVS, LEARNING_RATE, DISCOUNT = 32, 0.5, 0.99
ENVS = {  # steps of all environments together, options, the bonus for what was never tried
    "Taxi-v4": (800, {}, 0.05),
    "FrozenLake8x8-v1": (500, {"is_slippery": False}, 0.01),
}


class Table:
    """A number for each pair of state and action, from content to value."""

    def __init__(self, num_actions: int) -> None:
        self.actions = torch.arange(num_actions)
        pair = TensorDict(state=torch.tensor(0), action=torch.tensor(0))
        self.map = TensorDictMap.from_tensordict_pair(
            pair, TensorDict(value=torch.tensor(0.0)), in_keys=["state", "action"]
        )

    def of_state(self, state: torch.Tensor, unseen: float = 0.0) -> torch.Tensor:
        """The values of all actions: [N] -> [N, A]; a pair that was never seen has `unseen`."""
        pairs = TensorDict(
            state=state[:, None].expand(-1, len(self.actions)),
            action=self.actions.expand(len(state), -1),
            batch_size=[len(state), len(self.actions)],
        )
        return self.map.get(pairs, unseen)["value"]

    def update(self, state, action, value, **how) -> None:
        pairs = TensorDict(state=state, action=action, batch_size=state.shape)
        self.map.update(pairs, TensorDict(value=value, batch_size=state.shape), **how)


def explore(env: str, bonus: float, epsilon: float, seed: int) -> list[float]:
    """The mean reward of a step in each twentieth of the run."""
    num_steps, options, _ = ENVS[env]
    envs = gym.make_vec(env, num_envs=NUM_ENVS, vectorization_mode="sync", **options)
    rng = torch.Generator().manual_seed(seed)
    num_actions = int(envs.single_action_space.n)
    q, counts = Table(num_actions), Table(num_actions)
    unseen = bonus / (1 - DISCOUNT)  # as if the bonus of what was never tried were paid for ever
    obs, _ = envs.reset(seed=seed)
    state, ended = torch.as_tensor(obs), torch.zeros(NUM_ENVS, dtype=torch.bool)
    curve, rewards, num_rewards = [], 0.0, 0
    for step in range(1, num_steps + 1):
        value, rare = q.of_state(state, unseen), bonus / (1 + counts.of_state(state)).sqrt()
        noise = 1e-3 * torch.rand(NUM_ENVS, num_actions, generator=rng)  # breaks ties
        action = (value + noise).argmax(-1)
        random = torch.rand(NUM_ENVS, generator=rng) < epsilon
        anything = torch.randint(num_actions, (NUM_ENVS,), generator=rng)
        action = torch.where(random, anything, action)

        obs, reward, terminated, truncated, _ = envs.step(action.numpy())
        next_state, reward = torch.as_tensor(obs), torch.as_tensor(reward).float()
        terminated, truncated = torch.as_tensor(terminated), torch.as_tensor(truncated)
        real = ~ended  # the step after an end only resets, whatever the action was
        best = q.of_state(next_state, unseen).amax(-1)
        target = reward + DISCOUNT * torch.where(terminated, 0.0, best)
        target += rare.gather(1, action[:, None])[:, 0]  # what leads to the rare is worth it, too
        old = value.gather(1, action[:, None])[:, 0]
        new = old + LEARNING_RATE * (target - old)
        # several environments may be in one state: their targets are averaged, their visits added
        q.update(state[real], action[real], new[real], merge="mean")
        one = torch.ones(int(real.sum()))
        counts.update(state[real], action[real], one, merge="sum", accumulate=True)

        ended, state = terminated | truncated, next_state
        rewards, num_rewards = rewards + float(reward[real].sum()), num_rewards + int(real.sum())
        if step % (num_steps // 20) == 0:
            curve.append(rewards / num_rewards)
            rewards, num_rewards = 0.0, 0
    envs.close()
    how = f"bonus {bonus:4.2f}  epsilon {epsilon:.1f}"
    print(f"{env:18s} {how}   reward a step {curve[-1]:6.3f}   {len(q.map)} pairs seen")
    return curve


def main() -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(ENVS), figsize=(10, 4), layout="constrained")
    for axis, (env, (num_steps, _, bonus)) in zip(axes, ENVS.items(), strict=True):
        for label, how in {
            "random one time in five": {"bonus": 0.0, "epsilon": 0.2},
            "bonus for what is rare": {"bonus": bonus, "epsilon": 0.0},
        }.items():
            curve = explore(env, seed=0, **how)
            env_steps = [NUM_ENVS * num_steps * (i + 1) / 20 for i in range(20)]
            axis.plot(env_steps, curve, label=label)
        axis.set(title=env, xlabel="env steps", ylabel="mean reward of a step")
        axis.legend(frameon=False)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig("tabular_q_learning.png", dpi=120)
    print("drawn: tabular_q_learning.png")


if __name__ == "__main__":
    main()
