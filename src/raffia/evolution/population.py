"""A population of learners as one learner: all member states form one stacked tree.

Legend: P members, B samples of a batch.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from raffia.evolution.config import BATCH_SIZE, check_hyper_name
from raffia.functional.seeds import derive_seed
from raffia.hints import check_choice, check_range
from raffia.learner import Learner, applies_stacks
from raffia.tensordict.stack import cat, stack
from raffia.tensordict.tensordict import TensorDict

FEW = 2  # members, for whom one program costs more on a CPU than it saves


class Population:
    """A learner whose state is that of P members, stacked; what they learn is one program.

    learner: of each member.
    size: P.
    batches: "shared": a batch [B] is for all of them; "own": batches [P, B].
    hyper: of members that begin with different values, each [P]; of what the learner's "hyper" has,
        and "batch_size": members that take only the first `batch_size` samples of a batch. Those
        with equal sizes are a group, and each group is a program.
    grads: all members' by one "vmap", or "each" for itself; "traced" is vmap, of which after some
        steps the operations are recorded and repeated (see `Traced`: for learners whose `grads`
        reads nothing that changes but its arguments). None: by vmap. On a CPU it is each in any
        case but "vmap", where they are two, or the learner has `learns_faster_alone` set, as ILQL's
        does; and wherever one program fails, as networks with `spectral_norm` or dropout make it.
    apply: how the optimiser steps: by the learner's own step of a "stack", where it has one
        (`applies_stacks`), "each" member for itself in the stack's memory, or all by one "vmap".
        None: the first of these that can be; on a GPU vmap goes before each.

    A population of one makes the steps of the learner alone, bit for bit; the members of a larger
    one make them up to rounding. The metrics are [P]; "priority" is the mean over members, [B],
    where they share a batch. Its state can be indexed: `state[parents]` is a selection.

    Source: Jaderberg et al. (2017), arXiv 1711.09846, trains such populations in processes.

    >>> from raffia.learner import Accumulate
    >>> class Mean:  # the parameter moves to where the data are
    ...     def init(self, seed):
    ...         return TensorDict(params=TensorDict(w=torch.tensor(float(seed % 3))),
    ...                           hyper=TensorDict(rate=torch.tensor(0.5)), buffers=TensorDict())
    ...     def grads(self, state, batch):
    ...         error = state["params", "w"] - batch["x"]
    ...         update = TensorDict(grads=TensorDict(w=error.mean()), buffers=state["buffers"])
    ...         return update, TensorDict(loss=error.square().mean() / 2, priority=error.abs())
    ...     def apply(self, state, update):
    ...         step = update["grads"] * state["hyper", "rate"]
    ...         return state.replace(params=state["params"] - step)
    >>> learner = Population(Mean(), 3, hyper={"rate": [0.0, 0.5, 1.0]})
    >>> state, batch = learner.init(0), TensorDict(x=torch.full((4,), 8.0), batch_size=[4])
    >>> update, metrics = learner.grads(state, batch)
    >>> metrics["loss"].shape, metrics["priority"].shape
    (torch.Size([3]), torch.Size([4]))
    >>> learner.apply(state, update)["params", "w"] == torch.tensor([0.0, 4.5, 8.0])
    tensor([True, True, True])
    """

    def __init__(
        self,
        learner: Learner,
        size: int,
        *,
        batches: Literal["shared", "own"] = "shared",
        hyper: Mapping[str, Sequence[float] | Tensor] | None = None,
        grads: Literal["vmap", "each", "traced"] | None = None,
        apply: Literal["stack", "each", "vmap"] | None = None,
    ) -> None:
        check_range("size", size, 1)
        check_choice("batches", batches, ("shared", "own"))
        check_choice("grads", grads, ("each", "vmap", "traced", None))
        check_choice("apply", apply, ("stack", "each", "vmap", None))
        if apply == "stack" and not applies_stacks(learner):
            raise ValueError(
                f"apply='stack' is not supported by {type(learner).__name__}, which does not set "
                "applies_stacks = True: pass apply='each', or leave it out"
            )
        self.learner, self.size, self.batches = learner, size, batches
        self._hyper = {} if hyper is None else dict(hyper)
        self._grads, self._apply = grads, apply
        self._vmapped = torch.vmap(
            learner.grads, (0, None if batches == "shared" else 0), randomness="error"
        )
        self._traced = Traced(self._vmapped)

    def init(self, seed: int) -> TensorDict:
        """The stacked states [P]; the first member's is that of the learner alone."""
        states = [self.learner.init(s) for s in member_seeds(seed, self.size)]
        return with_hyper(stack(states), self._hyper)

    def grads(self, state: TensorDict, batch: TensorDict) -> tuple[TensorDict, TensorDict]:
        """The update that each member would make, and the metrics of each."""
        self._check(state, batch)
        sizes = _batch_sizes(state)
        if sizes is None or len(set(sizes)) == 1 and sizes[0] == self._length(batch):
            update, metrics = self._of_group(state, batch)
        else:
            update, metrics = self._of_groups(state, batch, sizes)
        if self.batches == "shared" and "priority" in metrics.keys():
            metrics["priority"] = metrics["priority"].nanmean(0)
        return update, metrics

    def apply(self, state: TensorDict, update: TensorDict) -> TensorDict:
        """The step of each member."""
        how = self._apply
        if how is None and len(state) == 1:  # the learner's own program, to the last bit
            how = "each"
        elif how is None and applies_stacks(self.learner):
            how = "stack"
        elif how is None:
            how = "vmap" if _is_on_device(state) else "each"
        if how == "stack":
            return self.learner.apply(state, update)
        if how == "vmap":
            return torch.vmap(self.learner.apply, randomness="error")(state, update)
        after = [self.learner.apply(state[i], update[i]) for i in range(len(state))]
        return _stacked(state, after)

    def _of_group(self, state: TensorDict, batch: TensorDict) -> tuple[TensorDict, TensorDict]:
        """The gradients of members whose batches have one length."""
        own = self.batches == "own"
        if len(state) == 1:  # the learner's own program, to the last bit
            update, metrics = self.learner.grads(state[0], batch[0] if own else batch)
            return update.unsqueeze(0), TensorDict({k: v[None] for k, v in metrics.items()})
        how = self._grads
        if how in (None, "traced") and not _is_on_device(state):
            alone = getattr(self.learner, "learns_faster_alone", False) or len(state) <= FEW
            how = "each" if alone else how
        if how == "each":
            return self._of_each(state, batch)
        grads = self._traced if how == "traced" else self._vmapped
        try:
            update, metrics = grads(state, batch)
        except RuntimeError as error:
            if self._grads == "vmap" or isinstance(error, torch.OutOfMemoryError):
                raise
            if how == "traced":  # maybe the recording fails, and the program itself does not
                self._grads = None
                return self._of_group(state, batch)
            found = self._of_each(state, batch)  # raises what is wrong with a member itself
            self._grads = "each"
            warnings.warn(
                f"the members learn one after the other, since one program of all fails: {error}",
                stacklevel=2,
            )
            return found
        return update, TensorDict(dict(metrics.items()))

    def _of_each(self, state: TensorDict, batch: TensorDict) -> tuple[TensorDict, TensorDict]:
        """The gradients of members, one after the other."""
        batches = batch.unbind(0) if self.batches == "own" else [batch] * len(state)
        results = [self.learner.grads(*pair) for pair in zip(state.unbind(0), batches, strict=True)]
        metrics = stack([metrics for _, metrics in results])
        return stack([update for update, _ in results]), TensorDict(dict(metrics.items()))

    def _of_groups(
        self, state: TensorDict, batch: TensorDict, sizes: list[int]
    ) -> tuple[TensorDict, TensorDict]:
        """The gradients of members whose batches differ in length: a program for each length."""
        length = self._length(batch)
        if max(sizes) > length:
            raise ValueError(
                f"a member's batch_size is {max(sizes)}, but the batch has {length} samples: draw "
                "batches as large as the largest batch_size, or lower it"
            )
        updates, results, order = [], [], []
        for size in sorted(set(sizes)):
            members = [i for i, s in enumerate(sizes) if s == size]
            part = batch[members][:, :size] if self.batches == "own" else batch[:size]
            update, metrics = self._of_group(state[members], part)
            if "priority" in metrics.keys():
                metrics["priority"] = _filled(metrics["priority"], length)
            updates.append(update)
            results.append(TensorDict(dict(metrics.items()), batch_size=[len(members)]))
            order += members
        back = torch.tensor(order).argsort()
        metrics = cat(results)[back]
        return cat(updates)[back], TensorDict(dict(metrics.items()))

    def _length(self, batch: TensorDict) -> int:
        return batch.batch_size[1 if self.batches == "own" else 0]

    def _check(self, state: TensorDict, batch: TensorDict) -> None:
        if not state.batch_size:
            raise ValueError(
                "the state of a population must be [P], but this one is []: start with "
                "population.init(seed), or stack the states of members, torch.stack([...])"
            )
        dims = 2 if self.batches == "own" else 1
        if len(batch.batch_size) < dims or (
            self.batches == "own" and batch.batch_size[0] != len(state)
        ):
            wanted = f"[{len(state)}, B]" if self.batches == "own" else "[B]"
            raise ValueError(
                f"with batches={self.batches!r} a batch must be {wanted}; got one of batch size "
                f"{list(batch.batch_size)}"
            )


def member_seeds(seed: int, size: int) -> list[int]:
    """The seeds of a population of `size` members; the first one is `seed` itself.

    >>> member_seeds(7, 3)[0], len(set(member_seeds(7, 3)))
    (7, 3)
    """
    return [seed, *(derive_seed(seed, "member", i) for i in range(1, size))]


def with_hyper(
    state: TensorDict,  # [P]
    values: Mapping[str, Sequence[float] | Tensor],  # each [P]
) -> TensorDict:
    """The state with these hyper-parameters of its members; "batch_size" may be new.

    >>> state = TensorDict(hyper=TensorDict(rate=torch.zeros(2), batch_size=[2]), batch_size=[2])
    >>> with_hyper(state, {"rate": [0.1, 0.2]})["hyper", "rate"]
    tensor([0.1000, 0.2000])
    >>> with_hyper(state, {"rte": [0.1, 0.2]})
    Traceback (most recent call last):
    ...
    ValueError: this learner has no hyper-parameter 'rte'; did you mean 'rate'? It has: rate
    """
    if not values:  # a learner may have none
        return state.copy()
    hyper = state.get("hyper", TensorDict(batch_size=state.batch_size)).copy()
    for name, given in values.items():
        check_hyper_name(name, [str(key) for key in hyper.keys()])
        like = hyper[name] if name in hyper.keys() else torch.zeros(0, dtype=torch.int64)
        numbers = torch.as_tensor(given, dtype=like.dtype, device=like.device)
        if numbers.shape != (len(state),):
            raise ValueError(
                f"{name} has shape {list(numbers.shape)}, but there are {len(state)} members: "
                f"pass {len(state)} numbers"
            )
        is_whole = like.is_floating_point() or bool((numbers == torch.as_tensor(given)).all())
        if not is_whole or name == BATCH_SIZE and bool((numbers < 1).any()):
            least = " of at least 1" if name == BATCH_SIZE else ""
            raise ValueError(f"{name}={given} must be whole numbers{least}, one for each member")
        hyper[name] = numbers.clone()
    return state.copy().set("hyper", hyper)


def _batch_sizes(state: TensorDict) -> list[int] | None:
    hyper = state["hyper"] if "hyper" in state.keys() else {}
    if BATCH_SIZE not in hyper.keys():
        return None
    found: list[int] = hyper[BATCH_SIZE].tolist()
    return found


def _filled(priority: Tensor, length: int) -> Tensor:
    """The priorities of all steps, NaN where a member did not learn from them."""
    missing = priority.new_full((len(priority), length - priority.shape[1]), torch.nan)
    return torch.cat([priority, missing], 1)


def _is_on_device(state: TensorDict) -> bool:
    return any(leaf.device.type != "cpu" for leaf in state["params"].values(True, True))


def _stacked(old: TensorDict | None, after: list[TensorDict]) -> TensorDict:
    """The states stacked; what the members wrote in the stack's memory stays where it is."""
    out = TensorDict(batch_size=[len(after)])
    for key, first in after[0].items():
        rows, before = [member[key] for member in after], None
        if old is not None and key in old.keys():
            before = old[key]
        if isinstance(first, TensorDict):
            out[key] = _stacked(before, rows)
        elif before is not None and _are_rows(rows, before):
            out[key] = before
        else:
            out[key] = torch.stack(rows)
    return out


def _are_rows(rows: list[Tensor], stack: Tensor) -> bool:
    return all(
        row.data_ptr() == at.data_ptr() and row.shape == at.shape and row.dtype == at.dtype
        for row, at in zip(rows, stack.unbind(), strict=True)
    )


Form = tuple[Any, ...]


class Traced:
    """A pure function of containers whose operations are recorded once, then repeated: same bits.

    What `torch.vmap` and the gradients decide for each operation again takes as long on a CPU as
    the operations of small networks do; here it is decided once for inputs of a form.

    function: of containers and tensors to containers and tensors. What it reads besides, such as
        attributes, must stay as it is; it draws nothing and writes to none of its inputs.
    after: the number of calls of a form before it is recorded; recording takes seconds, which few
        calls would not save.
    max_forms: forms (shapes, types, devices, names) that are remembered; the least recently used
        goes.

    >>> double = Traced(lambda x, y: {"z": 2 * x + y}, after=1)
    >>> one = torch.ones(3)
    >>> double(one, one)["z"], double.num_recorded
    (tensor([3., 3., 3.]), 0)
    >>> double(one, 5 * one)["z"], double.num_recorded
    (tensor([7., 7., 7.]), 1)
    """

    def __init__(
        self, function: Callable[..., Any], *, after: int = 100, max_forms: int = 4
    ) -> None:
        self.function, self.after, self.max_forms = function, after, max_forms
        self.num_recorded = 0
        self._calls: OrderedDict[Form, int] = OrderedDict()
        self._recorded: OrderedDict[Form, tuple[Callable[..., list[Tensor]], Any]] = OrderedDict()

    def __call__(self, *inputs: Any) -> Any:
        """The result of the function for these inputs."""
        leaves, spec = pytree.tree_flatten(inputs)
        form = (spec, tuple([(x.shape, x.dtype, x.device) for x in leaves]))
        if form not in self._recorded and not self._is_worth_it(form):
            return self.function(*inputs)
        with torch.no_grad():  # it holds the gradients that the function takes itself
            if form not in self._recorded:
                self._recorded[form] = self._record(leaves, spec)
                self._drop_oldest(self._recorded)
            self._recorded.move_to_end(form)
            operations, out_spec = self._recorded[form]
            return pytree.tree_unflatten(operations(*leaves), out_spec)

    def _is_worth_it(self, form: Form) -> bool:
        calls = self._calls.pop(form, 0) + 1
        if calls > self.after:
            return True
        self._calls[form] = calls
        self._drop_oldest(self._calls)
        return False

    def _drop_oldest(self, found: OrderedDict[Form, Any]) -> None:
        while len(found) > self.max_forms:
            found.popitem(last=False)

    def _record(self, leaves: list[Tensor], spec: Any) -> tuple[Callable[..., list[Tensor]], Any]:
        out_specs = []

        def flat(*parts: Tensor) -> list[Tensor]:
            with torch.enable_grad():
                out = self.function(*pytree.tree_unflatten(list(parts), spec))
            found, out_spec = pytree.tree_flatten(out)
            out_specs.append(out_spec)
            return found

        operations = make_fx(flat)(*leaves)
        self.num_recorded += 1
        return operations, out_specs[-1]
