"""How many files and calls ordinary steps go through: python scripts/walks.py

An observation from an environment to EfficientZero's loss, a step of its optimizer, and a file of
dialogues to ILQL's loss: files of this package, rooms, changes of file, calls.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import raffia
from raffia.recipes import ALGORITHMS
from raffia.recipes.efficientzero.experiment import EfficientZeroExperiment
from raffia.recipes.ilql import with_sizes
from raffia.recipes.ilql.experiment import ILQLExperiment
from raffia.train.view import PlainView

SOURCE = Path(raffia.__file__).parent


def walk(step: Callable[[], Any]) -> str:
    """What a step goes through, in words."""
    files: dict[str, None] = {}
    num_calls = num_changes = 0
    last = ""

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal num_calls, num_changes, last
        name = frame.f_code.co_filename
        if event != "call" or not name.startswith(str(SOURCE)):
            return
        num_calls, num_changes, last = num_calls + 1, num_changes + (name != last), name
        files[name] = None

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(before)
    rooms = {Path(name).relative_to(SOURCE).parts[0] for name in files}
    return (
        f"{len(files)} files, {len(rooms)} rooms, {num_changes:,} changes of file, "
        f"{num_calls:,} calls"
    )


def play_and_learn(folder: Path, view: PlainView) -> None:
    """EfficientZero's steps, once everything was made and called once before."""
    config = ALGORITHMS["efficientzero"].presets["smoke"]
    run = EfficientZeroExperiment(config, folder, view)
    state = run.init()
    for _ in range(3):
        update, _ = run.learner.grads(state, run.next_batch(state))
        state = run.learner.apply(state, update)
    print("env to batch:              ", walk(lambda: run.next_batch(state)))
    batch = run.next_batch(state)
    print("EfficientZero's gradients: ", walk(lambda: run.learner.grads(state, batch)))
    update, _ = run.learner.grads(state, batch)
    print("one step of the optimizer: ", walk(lambda: run.learner.apply(state, update)))
    run.close()


def read_and_learn(folder: Path, view: PlainView) -> None:
    """ILQL's way from a file of dialogues to a loss."""
    file = folder / "chats.jsonl"
    rows = [{"prompt": f"say {i % 7}", "response": f"{i % 7}", "reward": i % 3} for i in range(64)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = ALGORITHMS["ilql"].presets["ilql-smoke"]
    config = replace(config, task="data", data=replace(config.data, files=(str(file),)))
    config = with_sizes(config)
    run = folder / "run"
    run.mkdir()

    def step() -> None:
        experiment = ILQLExperiment(config, run, view)
        state = experiment.init()
        experiment.learner.grads(state, experiment.next_batch(state))

    print("dialogues to ILQL's loss:  ", walk(step))


def main() -> None:
    """Print all walks."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as home, open("/dev/null", "w") as nowhere:
        play_and_learn(Path(home), PlainView(nowhere))
        read_and_learn(Path(home), PlainView(nowhere))


if __name__ == "__main__":
    main()
