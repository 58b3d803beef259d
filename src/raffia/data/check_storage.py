"""Checks of what any storage promises, for custom storage classes too.

    for check in CHECKS:
        check(lambda max_size: MyStorage(max_size))

A check makes storages with `make(max_size)`, empty ones, and raises AssertionError where one of
them breaks its promise. `check_storage` runs all.
"""

import functools
import random
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from raffia.tensordict.tensordict import TensorDict

Make = Callable[[int], Any]  # max_size -> an empty storage


def step(numbers: Iterable[int]) -> TensorDict:
    """Rows that hold these numbers in several entries; `numbers_in` finds them there again.

    >>> numbers_in(step([7, 8]))
    [7, 8]
    """
    n = torch.tensor(list(numbers), dtype=torch.int64)
    below = TensorDict(obs=torch.stack([n, n + 1], 1).float(), done=n % 2 == 0, batch_size=[len(n)])
    return TensorDict(obs=n[:, None, None].expand(-1, 2, 3), next=below, batch_size=[len(n)])


def numbers_in(rows: Any) -> list[int]:
    """The numbers that `step` put into rows [n]; AssertionError if a row is a mixture."""
    rows = rows.cpu()
    numbers = rows["obs"][:, 0, 0]
    expected = step(numbers.tolist())
    for key in ("obs", ("next", "obs"), ("next", "done")):
        same = torch.equal(rows[key], expected[key])
        claim(same, f"{key!r} of rows {numbers.tolist()} is {rows[key].tolist()}")
    return numbers.tolist()


def numbers_at(storage: Any, rows: Any) -> list[int]:
    """The numbers that `step` put into rows [n] of a storage; `read` and `get` have to agree."""
    found, again = storage.read(rows), storage.get(rows)
    if isinstance(again, list):
        again = torch.stack(again)
    equal(numbers_in(again), numbers_in(found), "what get gives, compared with read")
    return numbers_in(found)


def claim(holds: bool, otherwise: str) -> None:
    """AssertionError with this text unless it holds."""
    if not holds:
        raise AssertionError(otherwise)


def equal(found: Any, expected: Any, what: str) -> None:
    """AssertionError unless what was found is what was expected, in value and type."""
    if isinstance(found, Tensor):
        found = found.tolist()
    claim(
        found == expected and type(found) is type(expected),
        f"{what}: expected {expected!r}, got {found!r}",
    )


def refuses(error: type[Exception], words: str, call: Callable[[], Any]) -> None:
    """AssertionError unless the call raises this error, with these words in its text."""
    try:
        call()
    except error as raised:
        claim(words in str(raised), f"the error does not contain {words!r} but: {raised}")
        return
    raise AssertionError(f"expected {error.__name__} with {words!r}, but nothing was raised")


# ------------------------------------------------------------------------------------- the promises


def keeps_structure(make: Make) -> None:
    """Pytrees come out as they went in, one row without the dimension that counts."""
    td = step([3, 4])
    pairs: list[tuple[Any, Callable[[Any], Any]]] = [
        (td, lambda x: (type(x), x.batch_size, numbers_in(x))),
        (torch.tensor([[1.5], [2.5]]), lambda x: (type(x), x.tolist())),
        (
            (td["obs"], {"a": [td["next", "done"]]}),
            lambda x: (x[0].tolist(), x[1]["a"][0].tolist()),
        ),
        ((td,), lambda x: (type(x), numbers_in(x[0]))),
    ]
    for data, view in pairs:
        storage = make(3)
        storage.extend(data)
        equal(view(storage.read(slice(0, 2))), view(data), "what was written")
    storage = make(3)
    storage.extend(td)
    one = storage.get(1)
    equal(list(one.batch_size), [], "the batch size of one row")
    equal(numbers_in(one.unsqueeze(0)), [4], "one row")


def takes_items(make: Make) -> None:
    """A list is one of items, which are stacked; their tensors' first dimension counts nothing."""
    items = [step([n])[0] for n in (3, 4, 5)]
    storage = make(4)
    equal(storage.extend(items), [0, 1, 2], "the numbers of a list of three items")
    equal(numbers_at(storage, slice(0, 3)), [3, 4, 5], "three items of a list")
    equal(storage.extend([]), [], "the numbers of a list of no items")
    refuses(ValueError, "item 1", lambda: storage.extend([items[0], items[1].select("obs")]))
    equal(storage.total, 3, "total after a refusal")


def rings(make: Make) -> None:
    """Check that `extend` and `add` number items without end and overwrite the oldest."""
    for size in (1, 3, 7):
        for lengths in ([1] * 9, [2, 5, 1, 7], [3, 20, 4], [0, 3]):
            storage, total = make(size), 0
            for n in lengths:
                numbers = list(range(total, total + n))
                equal(storage.extend(step(numbers)), numbers, "the numbers that extend gives")
                total += n
                stored = range(max(0, total - size), total)
                equal(storage.total, total, "total")
                equal(len(storage), len(stored), "len")
                if stored:
                    rows = torch.tensor([number % size for number in stored])
                    equal(numbers_at(storage, rows), list(stored), "the items stored")
            equal(storage.add(step([total])[0]), total, "the number that add gives")
            equal(numbers_at(storage, [total % size]), [total], "what was added")


def settles_once(make: Make) -> None:
    """A write of other entries, dtypes or shapes is refused, names the entry, changes nothing."""
    storage, td = make(5), step([1, 2])
    storage.extend(td)
    obs = ("next", "obs")
    wrong: list[tuple[type[Exception], str, Any]] = [
        (ValueError, "('next', 'done')", td.exclude(("next", "done"))),
        (ValueError, "extra", td.copy().update({"extra": torch.zeros(2)})),
        (ValueError, "float64[2]", td.copy().set(obs, td[obs].double())),
        (TypeError, "obs", td.exclude("obs").set("obs", "text")),
        (ValueError, "add(item)", td[0]),
    ]
    if not storage.mixes_shapes:
        wrong.append((ValueError, "float32[1]", td.copy().set(obs, td[obs][:, :1])))
    for error, words, data in wrong:
        refuses(error, words, functools.partial(storage.extend, data))
        refuses(
            error, words.replace("add(item)", "rows"), functools.partial(storage.set, [0, 1], data)
        )
        equal((len(storage), storage.total), (2, 2), "len and total after a refusal")
        equal(numbers_at(storage, [0, 1]), [1, 2], "the rows after a refusal")


def refuses_objects(make: Make) -> None:
    """Check that the error for a non-tensor names its key, and the structure stays unset."""
    storage = make(5)
    bad = step([1, 2]).set(("next", "text"), "words")
    refuses(TypeError, "('next', 'text')", lambda: storage.extend(bad))
    refuses(TypeError, "'a'", lambda: storage.extend({"a": 3}))
    equal(len(storage), 0, "len after a refusal")
    equal(storage.extend(torch.zeros(2)), [0, 1], "the first write that is taken")


def hides_empty_rows(make: Make) -> None:
    """A row that holds nothing is never read; `contains` and `len` tell."""
    storage = make(5)
    refuses(IndexError, "nothing is stored yet", lambda: storage.get(0))
    equal(storage.contains([0, -1, 9]), [False] * 3, "contains in an empty storage")
    storage.set([4, 1], step([4, 1]))
    equal(len(storage), 2, "len")
    equal(storage.rows(), [1, 4], "rows")
    equal(storage.contains([[0, 1], [4, 5]]), [[False, True], [True, False]], "contains")
    equal((storage.contains(4), storage.contains(-1)), (True, False), "contains of one row")
    refuses(IndexError, "0", lambda: storage.get(0))
    refuses(IndexError, "2", lambda: storage.get([1, 2]))
    refuses(IndexError, "hold nothing", lambda: storage.get(slice(0, 2)))
    refuses(IndexError, "out of range", lambda: storage.get(5))
    refuses(IndexError, "out of range", lambda: storage.get([-1]))
    refuses(IndexError, "out of range", lambda: storage.set([5], step([5])))
    storage.set([4], step([40]))
    equal(len(storage), 2, "len after writing a row again")
    storage.erase([4, 0])
    equal((len(storage), storage.contains(4)), (1, False), "len and contains after erasing")
    refuses(IndexError, "hold nothing", lambda: storage.get(4))
    storage.clear()
    equal((len(storage), storage.total, storage.rows().tolist()), (0, 0, []), "after clearing")
    refuses(IndexError, "hold nothing", lambda: storage.get(1))
    equal(storage.extend(step([9])), [0], "the first number after clearing")


def copies(make: Make) -> None:
    """Check that changing what was written or read does not change the storage."""
    storage, data = make(3), step([5, 6])
    data["obs"] = data["obs"].clone()
    storage.extend(data)
    data["obs"].zero_()
    for rows in (1, slice(0, 2), [0, 1]):
        storage.read(rows).apply(lambda leaf: leaf.zero_())
    equal(numbers_at(storage, [0, 1]), [5, 6], "the rows after changes elsewhere")


def reads_into(make: Make) -> None:
    """Check that `get(rows, out=)` fills an existing container."""
    storage = make(9)
    storage.extend(step(range(7)))
    out = storage.read([0, 0, 0])
    address = out["next", "obs"].data_ptr()
    result = storage.get([6, 2, 4], out=out)
    equal(numbers_in(out), [6, 2, 4], "out")
    claim(
        result is out and out["next", "obs"].data_ptr() == address,
        "the memory of out was not filled",
    )
    refuses(ValueError, "out", lambda: storage.get([1, 2], out=out))
    refuses(IndexError, "7", lambda: storage.get([1, 7, 2], out=out))
    equal(numbers_in(out), [6, 2, 4], "out after refusals")


def takes_grids(make: Make) -> None:
    """Check that rows [*batch] read and write data [*batch]."""
    storage = make(9)
    rows = torch.tensor([[8, 1, 3], [0, 2, 5]])
    storage.set(rows, step(rows.flatten().tolist()).view(2, 3))
    found = storage.read(rows.T)
    equal(list(found.batch_size), [3, 2], "the batch size")
    equal(numbers_in(found.reshape(6)), [8, 0, 1, 2, 3, 5], "the rows")
    none = storage.read(torch.zeros(0, dtype=torch.int64))
    equal(len(none["next", "obs"]), 0, "no rows")
    refuses(ValueError, "rows", lambda: storage.set(rows, step(range(6))))


def detaches(make: Make) -> None:
    """Data with gradients is stored without, in any mode of autograd."""
    storage = make(4)
    with torch.inference_mode():
        storage.extend(torch.ones(1, 2))
    storage.extend(torch.full((1, 2), 2.0, requires_grad=True))
    found = storage.read(slice(0, 2))
    equal((found.requires_grad, found.tolist()), (False, [[1.0, 1.0], [2.0, 2.0]]), "the rows")


def remembers(make: Make) -> None:
    """A state, loaded elsewhere, continues as the storage that gave it."""
    for numbers, erased in ([5], []), ([2], []), ([7], [1]), ([0], []):
        storage, other = make(4), make(4)
        storage.extend(step(range(numbers[0])))
        storage.erase(erased)
        state = storage.state_dict()
        other.extend(step([99]))
        other.load_state_dict(state)
        for at in range(3):
            equal(other.total, storage.total, "total")
            equal(other.rows(), storage.rows().tolist(), "rows")
            rows = storage.rows()
            if len(rows):
                equal(numbers_at(other, rows), numbers_at(storage, rows), "the items")
            storage.extend(step([100 + at]))
            other.extend(step([100 + at]))
    refuses(ValueError, "max_size", lambda: make(5).load_state_dict(state))


def follows_a_dictionary(make: Make) -> None:
    """Random operations, with the same done to a dictionary."""
    for seed in range(4):
        draw = random.Random(seed)
        size = draw.randint(1, 40)
        storage, model = make(size), dict[int, int]()
        for number in range(60):
            rows = draw.sample(range(size), draw.randint(0, size))
            values = [100 * number + row for row in rows]
            kind = draw.choice(["set", "set one", "erase", "read", "read", "clear", "reload"])
            if kind == "set":
                storage.set(torch.tensor(rows, dtype=torch.int64), step(values))
                model.update(zip(rows, values, strict=True))
            elif kind == "set one" and rows:
                storage.set(rows[0], step(values)[0])
                model[rows[0]] = values[0]
            elif kind == "erase":
                storage.erase(torch.tensor(rows, dtype=torch.int64))
                model = {row: value for row, value in model.items() if row not in rows}
            elif kind == "clear" and draw.random() < 0.2:
                storage.clear()
                model = {}
            elif kind == "reload" and draw.random() < 0.2:
                state, storage = storage.state_dict(), make(size)
                storage.load_state_dict(state)
            equal(storage.rows(), sorted(model), f"rows after {kind}")
            equal(len(storage), len(model), f"len after {kind}")
            occupied = [row for row in rows if row in model]
            if occupied:
                found = numbers_at(storage, occupied)
                equal(found, [model[row] for row in occupied], f"rows {occupied} after {kind}")


CHECKS: tuple[Callable[[Make], None], ...] = (
    keeps_structure,
    takes_items,
    rings,
    settles_once,
    refuses_objects,
    hides_empty_rows,
    copies,
    reads_into,
    takes_grids,
    detaches,
    remembers,
    follows_a_dictionary,
)


def check_storage(make: Make) -> None:
    """Run a storage class through all checks; the AssertionError names the promise that it breaks.

    make: gives an empty storage for a number of rows.

    >>> from raffia.data.check_storage import check_storage
    >>> from raffia.data.storage import TensorStorage
    >>> check_storage(TensorStorage)
    """
    for check in CHECKS:
        check(make)
