"""The container on one screen: a small batch of episodes, cut, masked, summed and kept.

Run it with  .venv/bin/python examples/container_tour.py
"""

import tempfile
from pathlib import Path

import torch

from raffia import TensorDict


def main() -> None:
    rng = torch.Generator().manual_seed(0)
    num_episodes, num_steps = 3, 5

    # One tree for all episodes: what leads in every tensor, [episode, step], is the batch size.
    episodes = TensorDict(
        {
            "obs": torch.rand(num_episodes, num_steps, 4, generator=rng),
            "action": torch.randint(2, (num_episodes, num_steps), generator=rng),
            "next": {
                "reward": torch.ones(num_episodes, num_steps),
                "terminated": torch.zeros(num_episodes, num_steps, dtype=torch.bool),
            },
        },
        batch_size=[num_episodes, num_steps],
    )
    episodes["next", "terminated"][:, -1] = True
    print(episodes)

    # Nested keys are tuples. A new entry is held to the batch size like the others.
    reward = episodes["next", "reward"]
    episodes["return"] = reward.flip(1).cumsum(1).flip(1)
    print("returns of the first episode:", episodes[0]["return"].tolist())

    # Indexing takes the same rows of every tensor; a mask picks steps out of all episodes.
    left = episodes[episodes["action"] == 0]
    print("steps that went left:", left.batch_size[0], f"mean return {left['return'].mean():.1f}")

    # Shape, maps and arithmetic reach every leaf.
    flat = episodes.reshape(num_episodes * num_steps)
    shuffled = flat[torch.randperm(len(flat), generator=rng)]
    batches = shuffled.split(5)
    print("batches:", [tuple(batch.batch_size) for batch in batches])
    doubled = episodes.select("obs", "return").apply(lambda x: 2 * x)
    print("doubled return:", doubled["return"][0].tolist())

    # A locked tree keeps its entries; its tensors can still be written in place.
    episodes.lock_()
    try:
        episodes["extra"] = reward
    except RuntimeError as error:
        print("locked:", error)

    # On disk and back.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "episodes.safetensors"
        episodes.save(path)
        print("equal after save and load:", bool((TensorDict.load(path) == episodes).all()))


if __name__ == "__main__":
    main()
