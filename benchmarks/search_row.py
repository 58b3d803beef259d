"""One row of the table of searches: the sides take turns, block by block, each in its process."""

import statistics
from dataclasses import dataclass, replace

from benchmarks.search_worker import Case, Seconds, Shares, Worker
from benchmarks.timing import paired_ratio


@dataclass(frozen=True)
class Side:
    """A column of the table: which worker does it, with which policy."""

    worker: str
    policy: str = "muzero"
    models: tuple[str, ...] = ("null", "mlp", "sampled", "conv")


SIDES = {
    "ours": Side("ours"),
    "lightzero": Side("lightzero"),
    "mctx": Side("mctx", models=("null", "mlp")),
    "ours gumbel": Side("ours", "gumbel", models=("null", "mlp")),
    "mctx gumbel": Side("mctx", "gumbel", models=("null", "mlp")),
}
COMPARED = {"lightzero": "ours", "mctx": "ours", "mctx gumbel": "ours gumbel"}


@dataclass(frozen=True)
class Effort:
    rounds: int = 9
    seconds: float = 0.05  # of one block
    patience: float = 15.0  # seconds for the rounds of one case, after the first three


QUICK = Effort(rounds=3, seconds=0.02, patience=3.0)


@dataclass(frozen=True)
class Row:
    case: Case
    seconds: dict[str, list[Seconds]]  # of each side, one a round
    shares: dict[str, list[Shares]]
    failures: dict[str, str]
    clock: str = "cpu"  # or wall: what the figures below go by

    def times(self, side: str) -> list[float]:
        return [getattr(seconds, self.clock) for seconds in self.seconds[side]]

    def median(self, side: str) -> float:
        return statistics.median(self.times(side))

    def ratio(self, peer: str) -> tuple[float, float] | None:
        """How many times as fast as the peer ours is, and the spread; None where one is absent."""
        if peer not in self.seconds or COMPARED[peer] not in self.seconds:
            return None
        return paired_ratio(self.times(peer), self.times(COMPARED[peer]))

    @property
    def speed(self) -> dict[str, float]:
        ratios = {peer: self.ratio(peer) for peer in COMPARED}
        return {peer: ratio[0] for peer, ratio in ratios.items() if ratio}

    def share(self, side: str, part: str) -> float:
        return statistics.median(shares[part] for shares in self.shares[side])

    def overhead(self) -> float | None:
        """The fraction of tree and glue in our search."""
        if "ours" not in self.shares:
            return None
        return statistics.median(1 - shares["model"] for shares in self.shares["ours"])


def measure(case: Case, workers: dict[str, Worker], effort: Effort, clock: str) -> Row:
    """Time a case with every available side; one that fails must not hide the others."""
    selected = {
        name: (workers[side.worker], replace(case, policy=side.policy))
        for name, side in SIDES.items()
        if side.worker in workers and case.model in side.models
    }
    row = Row(case, {}, {}, {}, clock)
    lengths: dict[str, int] = {}
    spent = 0.0
    for round_index in range(-1, effort.rounds):  # the first prepares
        if round_index >= 3 and spent > effort.patience:
            break
        names = [name for name in selected if name not in row.failures]
        first = round_index % max(1, len(names))
        for name in names[first:] + names[:first]:
            worker, its_case = selected[name]
            try:
                if round_index < 0:
                    lengths[name] = max(1, round(effort.seconds / worker.make(its_case)))
                    row.seconds[name], row.shares[name] = [], []
                    continue
                row.seconds[name].append(worker.block(its_case, lengths[name]))
                row.shares[name].append(worker.shares(its_case))
                spent += row.seconds[name][-1].wall * (lengths[name] + 1)
            except RuntimeError as error:
                row.failures[name] = str(error)
                row.seconds.pop(name, None)
                row.shares.pop(name, None)
    return row
