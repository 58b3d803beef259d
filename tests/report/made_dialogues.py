"""Makes folders of runs on dialogues as training leaves them: small and made up."""

import json
from pathlib import Path

DECODINGS = ("decode", "adv_weight=0", "adv_weight=2")


def config(seed=0, preset="wordle", task="wordle", **loss):
    """A config.json, reduced to the settings that a page reads."""
    weights = {"v_weight": 1.0, "q_weight": 1.0, "cql_weight": 0.01, "dm_weight": 0.0}
    return {
        "seed": seed,
        "device": "cpu",
        "task": task,
        "wordle": {"num_words": 24, "games": "scripts"},
        "data": {"files": ["chats.jsonl"], "held_out": 0.05},
        "loss": {"tau": 0.8, "beta": 0.0, "awac_weight": 1.0, **weights, **loss},
        "decode": {"include_adv": True, "include_logits": True, "adv_weight": 8.0},
        "keep_best": 1.0,
        "evaluate": {"target_return": None},
        "run": {"algorithm": "ilql", "preset": preset, "raffia": "0.1.0"},
    }


def cloning(seed=0, **changes):
    """The same for behaviour cloning, a policy alone."""
    base = config(seed, "wordle", v_weight=0.0, q_weight=0.0, cql_weight=0.0)
    base["decode"]["include_adv"] = False
    return {**base, **changes}


def rows(means=(-4.0, -1.5, -2.0), decodings=DECODINGS, end="finished"):
    """Training and evaluation rows after each 100 updates."""
    found = [{"kind": "start", "update": 0, "seconds": 0.0}]
    for number, mean in enumerate(means, 1):
        time = {"update": 100 * number, "seconds": 10.0 * number}
        losses = {"loss": 1 / number, "v_loss": 0.1, "token_loss": 0.5, "v_mean": -1.0}
        found.append({"kind": "train", **time, **losses, "tokens_per_second": 2000.0})
        by_name = {
            name: {"mean_return": mean - n, "low": mean - n - 0.2, "high": mean - n + 0.2}
            | {"share_won": 0.5}
            for n, name in enumerate(decodings)
        }
        values = {"returns": [mean - 1, mean + 1], "decodings": by_name}
        found.append({"kind": "evaluate", **time, **by_name["decode"], **values})
    last = {name: found[-1][name] for name in ("update", "seconds")}
    return [*found, {"kind": "end", **last, "reason": end}] if end else found


def held_out_rows(losses=(3.0, 1.0, 2.0)):
    """Evaluation rows of losses on held-out data."""
    found = [{"kind": "start", "update": 0, "seconds": 0.0}]
    for number, loss in enumerate(losses, 1):
        time = {"update": 100 * number, "seconds": 10.0 * number}
        found.append({"kind": "evaluate", **time, "loss": loss, "v_mean": -loss, "token_loss": 0.5})
    return found


def dialogue(advantages=(0.5, -0.25), **changes):
    """A game of one turn: two tokens of the agent, one answer."""
    actions = [
        {"first": 1 + n, "last": 1 + n, "reward": -1.0 * n, "log_prob": -0.5, "v": -2.0}
        | {"q": -2.0 + advantage, "advantage": advantage}
        | {"others": [{"token": "slate", "log_prob": -1.5, "q": -3.25}]}
        for n, advantage in enumerate(advantages)
    ]
    return {
        "source": "own",
        "return": -1.0,
        "ended": True,
        "cut": False,
        "tokens": ["<a>", "crane", "</a>", "bbbbb", "</s>", "</eod>"],
        "marks": [0, 2, 4, 5],
        "actions": actions,
        "states": [0, 1, 5],
        "v": [-2.0, -2.0, None],
        **changes,
    }


def record(*dialogues, update=200, **changes):
    """The content of a file of `dialogues/`."""
    data = {"num_rows": 4000, "mean_return": -3.5, "low": -3.6, "high": -3.4, "share_won": 0.25}
    return {"update": update, "data": data, "dialogues": list(dialogues or [dialogue()]), **changes}


def write_dialogues(run, record):
    """Write a record into the run's folder."""
    path = Path(run) / "dialogues" / f"{record['update']:09}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(record))
    return path


def write_evaluation(run, returns, checkpoint="best", name="a"):
    """Write an evaluation as `raffia evaluate` does."""
    mean = sum(returns) / len(returns)
    result = {"mean_return": mean, "low": mean - 0.1, "high": mean + 0.1, "share_won": 0.9}
    path = Path(run) / "evaluations" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    data = {"checkpoint": checkpoint, "decodings": {"decode": {**result, "returns": returns}}}
    path.write_text(json.dumps(data))
