"""An ensemble of cart-pole models, trained as one keyed tree of stacked parameters.

    python examples/ensemble.py        # ten seconds; writes ensemble.safetensors

Eight networks learn how a cart with a pole moves, each from a resample of the same noisy steps. One
`torch.vmap` runs them all, one optimiser step moves them, one `save` keeps them. Their mean is
better than the best of them, and where they disagree they are wrong: that is what an ensemble is
for when an agent plans with learned models.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from raffia import TensorDict, from_modules


@dataclass(frozen=True, kw_only=True)
class EnsembleConfig:
    seed: int = 0
    num_members: int = 8
    num_transitions: int = 512  # to learn from; as many again, free of noise, to test on
    noise: float = 0.05  # standard deviation of what sensors add to a change that is of order 1
    hidden_size: int = 64
    num_updates: int = 2_000
    batch_size: int = 64  # of each member
    learning_rate: float = 3e-3


def cart_pole_step(obs: Tensor, force: Tensor) -> Tensor:
    """State 0.1 s later, the force held: five Euler steps of 0.02 s.  obs: [B, 4], force: [B].

    obs = (cart position m, cart velocity m/s, pole angle rad, pole velocity rad/s).
    Source: Barto, Sutton & Anderson (1983), without friction; constants of Gymnasium's CartPole.
    """
    gravity, cart_mass, pole_mass, half_length, dt = 9.8, 1.0, 0.1, 0.5, 0.02
    mass = cart_mass + pole_mass
    x, v, angle, w = obs.unbind(-1)
    for _ in range(5):
        sin, cos = angle.sin(), angle.cos()
        push = (force + pole_mass * half_length * w**2 * sin) / mass
        w_dot = (gravity * sin - cos * push) / (half_length * (4 / 3 - pole_mass * cos**2 / mass))
        v_dot = push - pole_mass * half_length * w_dot * cos / mass
        x, v, angle, w = x + dt * v, v + dt * v_dot, angle + dt * w, w + dt * w_dot
    return torch.stack([x, v, angle, w], -1)


def make_transitions(num: int, noise: float, rng: torch.Generator) -> TensorDict:
    """`num` random states and pushes, and the change that noisy sensors saw.  Batch size [num]."""
    spread = torch.tensor([2.4, 3.0, 3.1, 4.0])
    obs = (2 * torch.rand(num, 4, generator=rng) - 1) * spread
    force = (2 * torch.rand(num, generator=rng) - 1) * 10
    change = cart_pole_step(obs, force) - obs
    return TensorDict(
        {
            "input": torch.cat([obs / spread, force[:, None] / 10], -1),
            "change": change + noise * torch.randn(num, 4, generator=rng),
        },
        batch_size=[num],
    )


def make_members(config: EnsembleConfig) -> list[nn.Module]:
    """Members that differ by their first weights alone."""
    width = config.hidden_size
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return [
            nn.Sequential(
                nn.Linear(5, width),
                nn.Tanh(),
                nn.Linear(width, width),
                nn.Tanh(),
                nn.Linear(width, 4),
            )
            for _ in range(config.num_members)
        ]


def predict(model: nn.Module, params: TensorDict, x: Tensor) -> Tensor:
    """Every member's prediction of the same inputs.  params: [M], x: [B, 5] -> [M, B, 4]."""

    def one(params: TensorDict, x: Tensor) -> Tensor:
        with params.to_module(model):
            return model(x)

    return torch.vmap(one, in_dims=(0, None if x.ndim == 2 else 0))(params, x)


def fit(
    model: nn.Module,
    params: TensorDict,
    data: TensorDict,
    config: EnsembleConfig,
    rng: torch.Generator,
) -> Iterator[Tensor]:
    """Train `params` [M] in place on `data` [N]; yields the members' losses after each update.

    Each member learns from a resample of its own, so that they disagree where data is thin.
    """
    optimizer = torch.optim.Adam(list(params.values(True, True)), lr=config.learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, config.num_updates)
    num_members, num_rows = params.shape[0], data.shape[0]
    resample = torch.randint(num_rows, (num_members, num_rows), generator=rng)
    for _ in range(config.num_updates):
        columns = torch.randint(num_rows, (config.batch_size,), generator=rng)
        batch = data[resample[:, columns]]  # [M, B]
        error = predict(model, params, batch["input"]) - batch["change"]
        loss = error.square().mean((1, 2))  # [M]
        optimizer.zero_grad()
        loss.sum().backward()  # members share no parameter: each gets the gradient of its own loss
        optimizer.step()
        schedule.step()
        yield loss.detach()


def ensemble_errors(model: nn.Module, params: TensorDict, data: TensorDict) -> dict[str, float]:
    """Squared errors of the members and of their mean.  params: [M], data: [N]."""
    with torch.no_grad():
        predicted = predict(model, params, data["input"])  # [M, N, 4]
    each = (predicted - data["change"]).square().mean((1, 2))
    mean = (predicted.mean(0) - data["change"]).square().mean(1)
    agree, differ = mean[predicted.var(0).mean(1).argsort()].chunk(2)
    errors = {"one": each.mean(), "best": each.min(), "mean": mean.mean()}
    errors |= {"agree": agree.mean(), "differ": differ.mean()}
    return {name: float(error) for name, error in errors.items()}


def run(config: EnsembleConfig, out: Path, say: Callable[[str], None]) -> None:
    """Make data, fit, test, save into `out`, read back; one line to `say` at each step."""
    rng = torch.Generator().manual_seed(config.seed)
    train = make_transitions(config.num_transitions, config.noise, rng)
    test = make_transitions(config.num_transitions, 0.0, rng)
    say(f"data    {len(train):,} noisy cart-pole steps to learn from, {len(test):,} true to test")

    members = make_members(config)
    params = from_modules(*members)
    num_weights = sum(p.numel() for p in params.values(True, True))
    say(f"model   {len(members)} networks in one tree, {num_weights:,} parameters")

    begun = shown = 0.0
    for done, loss in enumerate(fit(members[0], params, train, config, rng), 1):
        now = time.monotonic()
        if done == 1:  # the first update also loads and plans; it says nothing about the rate
            begun = shown = now
        elif now - shown >= 1 or done == config.num_updates:
            shown, rate = now, (done - 1) / (now - begun)
            say(
                f"update  {done:,}/{config.num_updates:,} | loss {loss.mean():.4f}"
                f" | {rate:,.0f} updates/s | {(config.num_updates - done) / rate:.0f} s left"
            )

    error = ensemble_errors(members[0], params, test)
    say(f"test    squared error of one member {error['one']:.5f}, of the best {error['best']:.5f}")
    say(f"test    squared error of their mean {error['mean']:.5f}")
    say(f"test    where they agree {error['agree']:.5f}, where they do not {error['differ']:.5f}")

    path = out / "ensemble.safetensors"
    params.save(path)
    same = bool((TensorDict.load(path) == params).all())
    say(f"saved   {path} ({path.stat().st_size / 1e3:,.0f} kB); read back, equal: {same}")
    say(f"params  = {params}")


if __name__ == "__main__":
    run(EnsembleConfig(), Path(), print)
