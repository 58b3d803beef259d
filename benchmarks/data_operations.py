"""The operations that `benchmarks.data` times, as one table.

The floor of each is what memory allows: xxh3 over the buffer, a random gather, a copy. It gives
nothing to compare with; ours and the peer are compared with each other.
"""

import functools
import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from benchmarks.data_parts import container, data_of, gather, nothing, permuted, scatter, seeded
from benchmarks.operation import Aim, Entries, Operation
from benchmarks.replay_operations import NO_SLOWER, Replay, replay, segments, trees
from benchmarks.timing import Call

WIDTHS = (1, 4, 16, 64, 256, 1024)
SETTING = (
    "; rows of float32 to hash; keys of a query or map: 4 float32 and an int64, values 5 float32; "
    "a transition: 7 entries in 4 containers, 192 bytes; replay and trees: 1e6 rows, unless named"
)

FIRST_USE = Aim(0.5, of="seconds")
HASH = {("1e6", 4): Aim(1 / 50), ("1e6", 64): Aim(1 / 7)}


@functools.lru_cache(maxsize=1)  # the three columns hash the same memory: it can be gigabytes
def rows(num_rows: int, width: int) -> Tensor:
    return torch.rand(num_rows, width, generator=seeded(0))


def distinct_hashes(num_rows: int, seed: int = 0) -> Tensor:
    return torch.randint(-(1 << 62), 1 << 62, (num_rows,), generator=seeded(seed))


def hashes_as_known(hashes: Tensor) -> Tensor:
    """The hashes where the peer's are not salted; else, for each row, the first that is equal."""
    if not sys.flags.hash_randomization:  # PYTHONHASHSEED=0
        return hashes
    _, group = hashes.unique(return_inverse=True)
    positions = torch.arange(len(hashes))
    firsts = torch.full_like(hashes, len(hashes)).scatter_reduce(0, group, positions, "amin")
    return firsts[group]


# -------------------------------------------------------------------------------------- hashing


def xxh3(*buffers: Tensor) -> Call:
    digest = import_module("xxhash").xxh3_64_intdigest
    arrays = [buffer.numpy() for buffer in buffers]

    def call() -> None:
        for array in arrays:
            digest(array)

    return call


def siphash(label: str, num_rows: int, width: int) -> Operation:
    def make(package: ModuleType) -> Call:
        module, x = data_of(package).SipHash(), rows(num_rows, width)
        return lambda: module(x)

    return Operation(
        f"SipHash, {label} x {width}",
        make,
        lambda: xxh3(rows(num_rows, width)),
        HASH.get((label, width), NO_SLOWER),
        big=num_rows * width > 1 << 29,
        read=nothing,
        compared=hashes_as_known,
    )


# ------------------------------------------------------------------------ from hash to a number


def extend_new(num_rows: int) -> Callable[[ModuleType], Call]:
    def make(package: ModuleType) -> Call:
        new, hashes = data_of(package).HashToInt, distinct_hashes(num_rows)
        return lambda: new()(hashes, extend=True)

    return make


def ask(num_rows: int, extend: bool, known: bool = True) -> Callable[[ModuleType], Call]:
    def make(package: ModuleType) -> Call:
        module, hashes = data_of(package).HashToInt(), distinct_hashes(num_rows)
        module(hashes, extend=True)
        # In another order than they came: nobody meets the same states again in the same order.
        requested = hashes[permuted(num_rows)] if known else distinct_hashes(num_rows, seed=1)
        return lambda: module(requested, extend=extend)

    return make


# ----------------------------------------------------------------------------- queries and maps


def keys(num_rows: int, num_distinct: int) -> Entries:
    """Content of rows; each distinct one occurs at random positions."""
    obs, action = torch.rand(num_distinct, 4, generator=seeded(2)), torch.arange(num_distinct)
    chosen = permuted(num_rows) % num_distinct
    return {"obs": obs[chosen], "action": action[chosen]}


def values(num_rows: int) -> Entries:
    x = torch.rand(num_rows, 5, generator=seeded(3))
    return {"value": x[:, 0].clone(), "next_obs": x[:, 1:].clone()}


def query(num_rows: int) -> Callable[[ModuleType], Call]:
    def make(package: ModuleType) -> Call:
        module = data_of(package).QueryModule(in_keys=["obs", "action"])
        td = container(package, keys(num_rows, num_rows), num_rows)
        return lambda: module(td)

    return make


def query_floor(num_rows: int) -> Callable[[], Call]:
    def make() -> Call:
        hash_all, look_up = xxh3(*keys(num_rows, num_rows).values()), gather(num_rows)()

        def call() -> None:
            hash_all()
            look_up()

        return call

    return make


def new_map(package: ModuleType, query: Any, value: Any) -> Any:
    return data_of(package).TensorDictMap.from_tensordict_pair(
        query, value, in_keys=["obs", "action"], max_size=len(query)
    )


def pair(package: ModuleType, num_rows: int, num_distinct: int) -> tuple[Any, Any]:
    query = container(package, keys(num_rows, num_distinct), num_rows)
    return query, container(package, values(num_rows), num_rows)


def map_set(num_rows: int, num_distinct: int) -> Callable[[ModuleType], Call]:
    def make(package: ModuleType) -> Call:
        query, value = pair(package, num_rows, num_distinct)

        def call() -> Any:
            map = new_map(package, query, value)
            map[query] = value
            return map[query[:100]]

        return call

    return make


def map_get(num_rows: int) -> Callable[[ModuleType], Call]:
    def make(package: ModuleType) -> Call:
        query, value = pair(package, num_rows, num_rows)
        map = new_map(package, query, value)
        map[query] = value
        return lambda: map[query]

    return make


def map_contains(num_rows: int) -> Callable[[ModuleType], Call]:
    """Half of the requested keys exist."""

    def make(package: ModuleType) -> Call:
        query, value = pair(package, num_rows, num_rows)
        map, half = new_map(package, query, value), num_rows // 2
        map[query[:half]] = value[:half]
        return lambda: map.contains(query)

    return make


def stored(result: Any) -> Entries:
    return {name: result[name] for name in ("value", "next_obs")}


def write_rows(num_rows: int) -> Callable[[], Call]:
    def make() -> Call:
        value, at = values(num_rows), permuted(num_rows)
        store = {name: torch.empty_like(x) for name, x in value.items()}

        def call() -> None:
            for name, x in value.items():
                store[name][at] = x

        return call

    return make


def read_rows(num_rows: int) -> Callable[[], Call]:
    def make() -> Call:
        value, at = values(num_rows), permuted(num_rows)

        def call() -> None:
            for x in value.values():
                x[at]

        return call

    return make


# ------------------------------------------------------------------------------------ first use


def first_use(make: Callable[[ModuleType], Call], *names: str) -> Operation:
    """The first call in a process; importing numba, the floor, is a part of ours."""

    def after_imports(package: ModuleType) -> Call:
        for name in names:
            getattr(data_of(package), name)
        return make(package)

    return Operation(
        f"first use of {names[0]}",
        after_imports,
        lambda: lambda: nothing(import_module("numba")),
        FIRST_USE,
        first=True,
        cached=True,
        read=nothing,
        compared=nothing,
    )


def operations(scale: float = 1.0) -> tuple[Operation, ...]:
    """All of them. `scale` shrinks the numbers of rows, for tests; the names stay what they are."""
    labels = ("1e2", "256", "1e3", "4096", "1e4", "1e5", "1e6")
    num = {label: max(16, round(float(label) * scale)) for label in labels} | {"1": 1}
    million, thousand = num["1e6"], num["1e3"]
    plain = functools.partial(Operation, read=nothing)
    from_map = functools.partial(plain, compared=stored)
    return (
        *[siphash(label, num[label], width) for label in ("1e2", "1e4", "1e6") for width in WIDTHS],
        plain("HashToInt, extend, 1e6 new", extend_new(million), scatter(million), Aim(1 / 12)),
        plain("HashToInt, extend, 1e6 seen", ask(million, True), gather(million), Aim(1 / 70)),
        plain("HashToInt, look up 1e6 seen", ask(million, False), gather(million), Aim(1 / 70)),
        plain("HashToInt, look up 1e6 unseen", ask(million, False, False), gather(million)),
        plain("HashToInt, look up 100 seen", ask(num["1e2"], False), gather(num["1e2"])),
        *[
            plain(
                f"QueryModule, 2 keys, {label} rows",
                query(num[label]),
                query_floor(num[label]),
                aim,
                compared=lambda td: td["_index"],
            )
            for label, aim in (("1e2", NO_SLOWER), ("1e5", Aim(1 / 8)))
        ],
        from_map(
            "TensorDictMap, set 1e5 new",
            map_set(num["1e5"], num["1e5"]),
            write_rows(num["1e5"]),
            Aim(1 / 10),
        ),
        from_map("TensorDictMap, get 1e5", map_get(num["1e5"]), read_rows(num["1e5"])),
        plain(
            "TensorDictMap, contains 1e5",
            map_contains(num["1e5"]),
            gather(num["1e5"], columns=1),
            Aim(1 / 200),
        ),
        from_map(
            "TensorDictMap, set 1e5 rows of 1e3 keys",
            map_set(num["1e5"], thousand),
            write_rows(num["1e5"]),
            Aim(1 / 200),
        ),
        *[
            operation
            for kind in ("uniform", "memmap", "prioritized")
            for operation in replay(kind, million, thousand, num["256"])
        ],
        first_use(siphash("1e2", num["1e2"], 4).make, "SipHash"),
        first_use(extend_new(num["1e2"]), "HashToInt"),
        first_use(map_set(num["1e2"], num["1e2"] // 2), "TensorDictMap"),
        first_use(
            Replay("prioritized", num["1e4"], num["1e2"], num["1e2"]).from_scratch,
            "PrioritizedReplayBuffer",
            "TensorStorage",
        ),
        *segments(max(num["1e5"], 1000), num["1e2"]),
        *trees(million, {label: num[label] for label in ("1", "256", "4096", "1e5")}),
    )


OPERATIONS = operations()
