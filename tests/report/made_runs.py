"""Makes run folders as a training run leaves them: small, consistent, and made up."""

import hashlib
import json
import math
import random
from pathlib import Path

from tests.draw.test_clean_svg import SVG

# One grey pixel.
GIF = bytes.fromhex("47494638396101000100800000808080ffffff2c00000000010001000002024401003b")
TREE = {
    "root": 0,
    "nodes": [
        {"row": row, "depth": depth, "visits": visits, "value": value, "raw_value": 9.0 + row / 10}
        | {"ended": False}
        for row, depth, visits, value in ((0, 0, 26, 9.5), (1, 1, 18, 9.7), (2, 1, 7, 8.8))
    ],
    "edges": [
        {"source": 0, "target": 1, "action": 1, "name": "right", "visits": 18, "share": 0.72}
        | {"q": 9.75, "prior": 0.6, "reward": 1.0, "discount": 0.997},
        {"source": 0, "target": 2, "action": 0, "name": "left", "visits": 7, "share": 0.28}
        | {"q": 8.85, "prior": 0.4, "reward": 1.0, "discount": 0.997},
    ],
}


def config(seed=0, preset="cartpole", simulations=25, target=195.0, env="CartPole-v1"):
    """A config.json, reduced to the settings that a page reads."""
    versions = {"raffia": "0.6.0", "torch": "2.13.0", "python": "3.11.9"}
    return {
        "seed": seed,
        "device": "cpu",
        "num_threads": 2,
        "env": {"id": env, "num_envs": 8, "frame_stack": 1},
        "search": {"policy": "muzero", "num_simulations": simulations, "temperatures": [1.0, 0.5]},
        "targets": {"discount": 0.997, "n_step": 5},
        "optimizer": {"name": "adamw", "learning_rate": 0.003},
        "collect": {"num_env_steps": 15_000, "random_env_steps": 400},
        "evaluate": {"every_env_steps": 500, "num_episodes": 8, "target_return": target},
        "run": {"preset": preset, "seed": seed, "versions": versions},
    }


def brief_rows(**options):
    """The same rows with few training metrics: quick to draw."""
    names = ("kind", "update", "env_step", "seconds", "loss", "seconds_learn")
    return [
        {name: row[name] for name in names if name in row} if row["kind"] == "train" else row
        for row in rows(**options)
    ]


def rows(seed=0, evaluations=12, speed=30.0, resumed_at=None, end="finished", game=False):
    """The rows of a run of `evaluations` times 500 environment steps, speed steps a second."""
    draw = random.Random(seed)
    middle = draw.uniform(0.3, 0.5)

    def skill(step):
        return 1 / (1 + math.exp(-9 * (step / (500 * evaluations) - middle)))

    found = [{"kind": "start", "update": 0, "env_step": 0, "seconds": 0.0, "torch": "2.13.0"}]
    for step in range(50, 500 * evaluations + 1, 50):
        time = {"update": max(0, step - 400), "env_step": step, "seconds": round(step / speed, 3)}
        length = max(8, round(9 + 191 * skill(step) * draw.uniform(0.5, 1.1)))
        outcome = draw.choice([1.0, -1.0]) if game else min(length, 200)
        found.append({"kind": "episode", **time, "return": outcome, "length": length})
        if resumed_at == step:
            found.append({"kind": "resume", **time, "torch": "2.13.0"})
        if step % 100 == 0 and step > 400:
            found.append({"kind": "train", **time, **_train(draw, skill(step), speed)})
        if step % 500 == 0:
            found.append({"kind": "evaluate", **time, **_evaluate(draw, skill(step), game)})
            path = f"checkpoints/{time['update']:09}"
            found.append({"kind": "checkpoint", **time, "path": path})
    last = {name: found[-1][name] for name in ("update", "env_step", "seconds")}
    return [*found, {"kind": "end", **last, "reason": end}] if end else found


def write_run(folder, rows=(), config=None, extras=True):
    """A run's folder; extras: with checkpoint, episode, tree and evaluation."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config, indent=1))
    text = "".join([json.dumps(row) + "\n" for row in rows])
    (folder / "metrics.jsonl").write_text(text)
    if extras:
        write_checkpoint(folder, update=5600, score=198.5)
        found = {"returns": [200.0, 198.0, 187.0], "lengths": [200, 198, 187], "as_first": None}
        found |= {"checkpoint": "best", "num_simulations": 25, "files": ["episodes/" + EPISODE]}
        _put(folder / "episodes" / EPISODE, GIF)
        _put(folder / "trees/6000.svg", SVG.encode())
        _put(folder / "trees/6000.json", json.dumps(TREE).encode())
        _put(folder / "evaluations/000006000.json", json.dumps(found).encode())
    return folder


EPISODE = "best-seed0-000.gif"


def write_checkpoint(folder, update, score):
    """Two files and the manifest that lists them."""
    path = Path(folder) / "checkpoints" / f"{update:09}"
    files = {}
    for name, content in (("learner.safetensors", b"1" * 4000), ("replay.bin", b"2" * 700)):
        file = name.replace(".", ".raffia-0123456789ab.", 1)
        _put(path / file, content)
        checksum = hashlib.sha256(content).hexdigest()
        files[name] = {"file": file, "bytes": len(content), "sha256": checksum}
    extras = {"update": update, "score": score, "extras": {}}
    manifest = {"format": "raffia", "kind": "checkpoint", "version": 1, "files": files}
    _put(path / "manifest.json", json.dumps({**manifest, "extras": extras}).encode())
    return path


def _train(draw, skill, speed):
    level = 1.2 - skill + draw.uniform(0, 0.15)
    losses = {"": 0.2 + 3 * level, "policy_": level * 0.69, "value_": 0.3 + level * 2}
    losses |= {"value_prefix_": 0.02 * level**2, "consistency_": -0.9 + level * 0.3}
    rates = {"env_steps": speed, "updates": speed, "simulations": 25 * speed}
    fractions = {"collect": 0.12, "targets": 0.21, "learn": 0.55, "evaluate": 0.07}
    return {
        **{f"{name}loss": value for name, value in losses.items()},
        "policy_entropy": 0.69 - 0.4 * skill,
        "grad_norm": 10 ** draw.uniform(-1, 1.2),
        "priority": 4 * level,
        "learning_rate": 0.003,
        "temperature": 1.0 if skill < 0.5 else 0.5,
        **{f"{name}_per_second": rate * draw.uniform(0.9, 1.1) for name, rate in rates.items()},
        **{f"seconds_{name}": fraction * 100 / speed for name, fraction in fractions.items()},
    }


def _evaluate(draw, skill, game):
    if game:
        returns = [draw.choices([1.0, 0.0, -1.0], [skill, 0.4, 1 - skill])[0] for _ in range(8)]
        more = {"as_first": [i % 2 == 0 for i in range(8)]}
    else:
        returns = [round(9 + 191 * min(1, skill * draw.uniform(0.7, 1.15))) for _ in range(8)]
        more = {}
    mean = sum(returns) / len(returns)
    lengths = [int(abs(value)) + 5 for value in returns]
    return {"returns": returns, "lengths": lengths, "mean_return": mean} | more


def _put(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
