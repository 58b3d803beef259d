"""The cases of the sweep: short runs and saves, and what must hold after a fault."""

import io
import json
import os
import sys
from dataclasses import replace

import torch

from raffia.data.memmap_storage import MemmapStorage
from raffia.files import DamagedFileError
from raffia.recipes import efficientzero, ilql
from raffia.recipes.efficientzero.presets import PRESETS
from raffia.recipes.ilql.config import ILQLEvaluateConfig
from raffia.recipes.ilql.presets import ILQL_PRESETS
from raffia.recipes.population_config import PopulationConfig
from raffia.tensordict.tensordict import TensorDict
from raffia.train.checkpoint import CheckpointError, Checkpoints
from raffia.train.experiment import RunError
from raffia.train.view import PlainView

CLEAN = (OSError, RunError, CheckpointError, DamagedFileError)  # errors that are meant for users


class Quiet(PlainView):
    def __init__(self):
        super().__init__(io.StringIO())


class Training:
    """A training run; resumed afterwards, or restarted, it must give the same result."""

    finish_every = 8  # of the states that are looked at, which are resumed

    def __init__(self, recipe, config):
        self.recipe, self.make = recipe, config
        self.config = self.expected = None

    def prepare(self, folder):
        self.config = self.make(folder)

    def run(self, root, mark):
        save = Checkpoints.save

        def save_and_mark(self, update, *arguments, **options):
            path = save(self, update, *arguments, **options)
            mark(update)
            return path

        Checkpoints.save = save_and_mark
        try:
            self.recipe.train(self.config, f"{root}/run", view=Quiet())
        finally:
            Checkpoints.save = save

    def check(self, root, marks, finish):
        run, failed = f"{root}/run", []
        newest = Checkpoints(f"{run}/checkpoints").newest(failed.append)
        if marks:
            assert newest is not None, f"no checkpoint is left of {marks}: {failed}"
            assert newest.update >= max(map(int, marks)), (newest.update, marks, failed)
            assert self.recipe.load_agent(run, "newest") is not None
        if not finish:
            return
        if os.path.exists(f"{run}/config.json"):
            self.recipe.resume(run, view=Quiet())
        else:
            self.recipe.train(self.config, run, view=Quiet())
        if self.expected is not None:
            found, wanted = self.outcome(root), self.expected
            assert found.keys() == wanted.keys(), (sorted(found), sorted(wanted))
            for name in wanted:
                assert bool((found[name] == wanted[name]).all()), name
        left = [name for name in os.listdir(run) if name.endswith(".tmp")]
        assert not left, left

    def outcome(self, root):
        """The final tensors of the run, and the number of its rows of each kind."""
        run = f"{root}/run"
        state = Checkpoints(f"{run}/checkpoints").newest().tensors("state")
        found = {str(key): value for key, value in state.items(True, True)}
        with open(f"{run}/metrics.jsonl") as lines:
            rows = [json.loads(line) for line in lines]
        for kind in ("train", "evaluate", "episode", "end", "generation"):
            found[f"rows of {kind}"] = torch.tensor(sum(row["kind"] == kind for row in rows))
        return found


def _efficientzero(data):
    smoke = PRESETS["smoke"]
    return replace(
        smoke,
        env=replace(smoke.env, id="probe/value", num_envs=2),
        search=replace(smoke.search, num_simulations=2),
        replay=replace(smoke.replay, batch_size=4),
        collect=replace(smoke.collect, num_env_steps=36, random_env_steps=16),
        evaluate=replace(smoke.evaluate, every_env_steps=24, num_episodes=1, max_steps=5),
        checkpoint=replace(smoke.checkpoint, every_updates=5),
    )


def _members(data):
    config = _efficientzero(data)
    return replace(config, population=PopulationConfig(size=2, replay="own"))


def _ilql(data):
    return replace(
        ILQL_PRESETS["ilql-smoke"],
        num_updates=4,
        evaluate=ILQLEvaluateConfig(every_updates=2, num_episodes=1),
        checkpoint=replace(ILQL_PRESETS["ilql-smoke"].checkpoint, every_updates=2),
    )


def _dialogues(data):
    """Dialogue files, and a tokenizer trained on them."""
    os.makedirs(data)
    with open(f"{data}/chats.jsonl", "w") as file:
        for n in range(12):
            texts = [f"say {n % 10}", f"{n % 7} " * (n % 4 + 1)]
            file.write(json.dumps({"utterances": texts, "rewards": [None, float(n % 3)]}) + "\n")
    config = _ilql(data)
    config = replace(
        config,
        task="data",
        data=replace(config.data, files=(f"{data}/chats.jsonl",), tokenizer="characters"),
    )
    return ilql.with_sizes(config)


class Rows:
    """A MemmapStorage that is filled, flushed and overwritten."""

    finish_every = 1
    size = 6

    def prepare(self, folder):
        pass

    def run(self, root, mark):
        storage = MemmapStorage(self.size, f"{root}/rows")
        try:
            for step in range(5):
                numbers = torch.arange(4) + 4 * step
                rows = TensorDict(number=numbers, twice=torch.stack([numbers, 2 * numbers], 1))
                storage.extend(rows.auto_batch_size_(1))
                storage.flush()
                mark(4 * (step + 1))
        finally:
            storage.close()

    def check(self, root, marks, finish):
        if not marks and not os.path.exists(f"{root}/rows/storage.json"):
            MemmapStorage(self.size, f"{root}/rows").close()  # nothing is in the way
            return
        storage = MemmapStorage.open(f"{root}/rows")
        try:
            total = max([*map(int, marks), 0])
            numbers = []
            for index in storage.rows().tolist():
                row = storage.get(index)
                number = int(row["number"])
                assert row["twice"].tolist() == [number, 2 * number], row["twice"]
                assert number % self.size == int(index), (number, index)
                numbers.append(number)
            # Rows flushed last can be read, unless they were being overwritten.
            over = range(total - self.size, total - self.size + 4)
            lacking = {*range(max(0, total - self.size), total)} - {*numbers}
            assert lacking <= {*over}, (sorted(numbers), total)
        finally:
            storage.close()

    def outcome(self, root):
        return {}


class Saved:
    """A container saved repeatedly as one file; the old or the new one can be read."""

    finish_every = 1

    def prepare(self, folder):
        pass

    def run(self, root, mark):
        for step in range(4):
            td = TensorDict(a=torch.full((3 + step,), step), b={"c": torch.full((2,), step)})
            td.save(f"{root}/folder/td.safetensors")
            mark(step)

    def check(self, root, marks, finish):
        path = f"{root}/folder/td.safetensors"
        if not marks and not os.path.exists(path):
            return
        found = TensorDict.load(path)
        step = int(found["a"][0])
        assert step >= max([int(mark) for mark in marks], default=0)
        assert found["a"].tolist() == [step] * (3 + step)
        assert found["b", "c"].tolist() == [step] * 2

    def outcome(self, root):
        return {}


class Mapped:
    """A container mapped to a folder: it loads completely, or an error says that it is damaged.

    It does not promise to be on disk at any time, so nothing is reported as done.
    """

    finish_every = 1

    def prepare(self, folder):
        pass

    def run(self, root, mark):
        for step in range(3):
            TensorDict(a=torch.full((3,), step), b={"c": torch.full((2,), step)}).memmap(
                f"{root}/folder"
            )

    def check(self, root, marks, finish):
        try:
            found = TensorDict.load_memmap(f"{root}/folder")
            assert found["a"].shape == (3,) and found["b", "c"].shape == (2,)
        except (DamagedFileError, FileNotFoundError):
            TensorDict(a=torch.ones(3)).memmap(f"{root}/folder")  # another save is not hindered
            assert TensorDict.load_memmap(f"{root}/folder")["a"].tolist() == [1, 1, 1]

    def outcome(self, root):
        return {}


class Careless(Saved):
    """The same, by a writer that takes no care: the sweep must see it."""

    def run(self, root, mark):
        os.makedirs(f"{root}/folder", exist_ok=True)
        for step in range(4):
            td = TensorDict(a=torch.full((3 + step,), step), b={"c": torch.full((2,), step)})
            td.save(f"{root}/folder/new.safetensors")
            with open(f"{root}/folder/new.safetensors", "rb") as file:
                text = file.read()
            with open(f"{root}/folder/td.safetensors", "wb") as file:
                file.write(text)
            mark(step)


CASES = {
    "careless": Careless(),
    "efficientzero": Training(efficientzero, _efficientzero),
    "members": Training(efficientzero, _members),
    "dialogues": Training(ilql, _dialogues),
    "rows": Rows(),
    "saved": Saved(),
    "mapped": Mapped(),
}
sys.modules.setdefault("cases", sys.modules[__name__])
