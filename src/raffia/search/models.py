"""The model as a search calls it: called on embeddings, or working in the search's own memory."""

from collections.abc import Callable
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from raffia.search.base import RecurrentFn, RecurrentOutput, RootOutput, SearchMemory, ValuePrefix
from raffia.search.embeddings import Embeddings
from raffia.search.memory import plain
from raffia.search.state import SearchState

# (number of roots still searched, how many of the new nodes are resets; None: not known)
# -> the model's output, and the keys of the new states
Expand = Callable[[int, int | None], tuple[RecurrentOutput, Tensor | None]]


def called_model(
    state: SearchState, embeddings: Embeddings, root: RootOutput, recurrent_fn: RecurrentFn
) -> Expand:
    """A model that is called on rows of the embeddings, which are stored again afterwards."""
    actions = None if root.actions is None else state.entries["actions"].transpose(0, 1)
    batch, device = state.shape[0], state.gamma.device
    elsewhere = None if embeddings.device == device else embeddings.device
    output_fits = _OutputCheck(state, root)
    num, searched = -1, state.model_rows()

    def expand(num_roots: int, resets: int | None) -> tuple[RecurrentOutput, Tensor | None]:
        nonlocal num, searched
        if num_roots != num:
            num = num_roots
            parents, children, action, reset = state.model_rows()
            searched = parents[:num], children[:num], action[:num], reset[:num]
        parents, children, action, reset = searched
        rows, new_rows = parents, children
        if actions is not None:
            action = actions[parents // batch, parents % batch, action]
        if elsewhere is not None:  # the trees here, the model there
            rows, new_rows, action, reset = _sent(elsewhere, rows, new_rows, action, reset)
        answer, embedding = _pair(recurrent_fn(embeddings.gather(rows), action))
        output = output_fits(answer, num_roots)
        embeddings.store(new_rows, embedding, None if resets == 0 else reset)
        if actions is not None:
            assert output.actions is not None  # the check saw to that
            actions[children // batch, children % batch] = output.actions.to(device)
        key = None
        if state.rules.transpositions is not None:
            key = fitting_key(state.rules.transpositions(embedding), num_roots, device)
        return output, key

    return expand


def _sent(
    device: torch.device, parents: Tensor, children: Tensor, action: Tensor, reset: Tensor
) -> list[Tensor]:
    """Rows, actions and resets on another device, in as few copies as their dtypes allow.

    >>> rows, resets = torch.arange(2), torch.tensor([True, False])
    >>> _sent(torch.device("cpu"), rows, rows + 2, torch.zeros(2, 3), resets)[1]
    tensor([2, 3])
    """
    of_one_kind = action.shape == parents.shape and action.dtype == parents.dtype
    first, second, third, *fourth = torch.stack(
        [parents, children, reset.to(parents.dtype), *[action] * of_one_kind]
    ).to(device)
    return [first, second, fourth[0] if of_one_kind else action.to(device), third.bool()]


def bound_model(
    state: SearchState, embeddings: Embeddings, root: RootOutput, recurrent_fn: Any
) -> tuple[Any, RecurrentOutput] | None:
    """The model's step in the search's memory and its output; None if it cannot work there."""
    bind, prefix = getattr(recurrent_fn, "bind", None), state.rules.value_prefix
    if bind is None or state.stamp is not None:
        return None  # it writes no keys
    if root.actions is not None and not getattr(recurrent_fn, "writes_actions", False):
        return None
    if prefix is not None and tuple(prefix.reset_keys) != ValuePrefix().reset_keys:
        return None  # it zeroes its own memory of rewards, not other entries
    batch, _, actions = state.shape
    device = state.gamma.device
    reward, value = torch.zeros(2, batch, dtype=torch.float32, device=device)
    logits = torch.zeros(batch, actions, dtype=torch.float32, device=device)
    output = RecurrentOutput(reward, value, logits)
    step = bind(SearchMemory(embeddings.all_rows(), *state.model_rows(), *output[:3]))
    return None if step is None else (step, output)


def in_memory(step: Callable[[int], None], output: RecurrentOutput) -> Expand:
    """A bound model's step, in the form in which a search calls the model."""

    def expand(num_roots: int, resets: int | None) -> tuple[RecurrentOutput, Tensor | None]:
        step(num_roots)
        return RecurrentOutput(*[field[:num_roots] for field in output[:3]]), None

    return expand


def fitting_key(key: Tensor, num: int, device: torch.device) -> Tensor:
    """Check and return the keys that `transpositions` returned for `num` embeddings."""
    if not isinstance(key, Tensor):
        raise TypeError(
            f"transpositions returned a {type(key).__name__}; it must return int64 [{num}]"
        )
    if key.shape != (num,) or key.dtype != torch.int64:
        raise ValueError(
            f"transpositions returned {list(key.shape)}, {key.dtype} for {num} embeddings; it "
            f"must return one number for each, [{num}], torch.int64"
        )
    return plain(key, torch.int64, device)


def _pair(answer: Any) -> tuple[Any, Any]:
    if not isinstance(answer, tuple) or isinstance(answer, RecurrentOutput) or len(answer) != 2:
        raise TypeError(
            f"recurrent_fn returned a {type(answer).__name__}; it must return two things: "
            "RecurrentOutput(reward, value, prior_logits, ...), embedding"
        )
    return answer


_FIELDS: tuple[Any, ...] = (*[Tensor] * 3, *[(Tensor, NoneType)] * 4)  # of a RecurrentOutput


class _OutputCheck:
    """Checks a model's outputs in one search; quick, since it runs in each simulation."""

    def __init__(self, state: SearchState, root: RootOutput) -> None:
        self._state, self._root = state, root
        self._num_actions, self._device = state.shape[2], state.gamma.device
        self._num = -1
        self._row, self._edges = torch.Size(), torch.Size()  # [m] and [m, A]

    def __call__(self, output: RecurrentOutput, num: int) -> RecurrentOutput:
        """Check the model's output for `num` rows, and return it in the search's dtypes."""
        if num != self._num:
            self._num = num
            self._row, self._edges = torch.Size([num]), torch.Size([num, self._num_actions])
        if not isinstance(output, RecurrentOutput):
            raise TypeError(
                f"recurrent_fn returned a {type(output).__name__} instead of a RecurrentOutput: "
                "return RecurrentOutput(reward, value, prior_logits, ...), embedding"
            )
        reward, value, logits, discount, mask, to_play, actions = output
        row, edges, device = self._row, self._edges, self._device
        if not all(map(isinstance, output, _FIELDS)):
            raise TypeError(_not_tensors(output))
        if (
            logits.shape != edges
            or value.shape != row
            or reward.shape != row
            or (discount is not None and discount.shape != row)
            or (mask is not None and mask.shape != edges)
            or (to_play is not None and to_play.shape != row)
        ):
            raise ValueError(_mismatch(output, (row, row, edges, row, edges, row)))
        if to_play is not None and self._root.to_play is None:
            raise ValueError(_one_sided("to_play", False))
        if (actions is None) != (self._root.actions is None):
            raise ValueError(_one_sided("actions", self._root.actions is not None))
        if actions is not None:
            _check_actions(actions, self._root.actions, num)
        if mask is not None:
            if mask.dtype != torch.bool:
                raise TypeError(
                    f"the model's mask is {mask.dtype}; it must be bool: pass mask.bool()"
                )
            self._state.use_mask()
            mask = plain(mask, torch.bool, device)
        if reward.device == value.device == logits.device != device:
            # Each copy would wait for all that is computed there.
            table = torch.cat([reward.unsqueeze(1), value.unsqueeze(1), logits], 1).to(device)
            reward, value, logits = table[:, 0], table[:, 1], table[:, 2:]
        return RecurrentOutput(
            plain(reward, torch.float32, device),
            plain(value, torch.float32, device),
            plain(logits, torch.float32, device),
            None if discount is None else plain(discount, torch.float32, device),
            mask,
            None if to_play is None else plain(to_play, torch.int32, device),
            actions,
        )


def _check_actions(actions: Tensor, at_root: Tensor | None, num: int) -> None:
    assert at_root is not None
    needed = [num, *at_root.shape[1:]]
    if list(actions.shape) != needed or actions.dtype != at_root.dtype:
        raise ValueError(
            f"the model returned actions {list(actions.shape)}, {actions.dtype} (needed {needed}, "
            f"{at_root.dtype}, as at the root)"
        )


def _one_sided(name: str, root_has: bool) -> str:
    has, lacks = "the root", "the model's output"
    if not root_has:
        has, lacks = lacks, has
    return f"{has} has {name}, but {lacks} does not: return it in both or in neither"


def _not_tensors(output: RecurrentOutput) -> str:
    wrong = [
        f"{name} a {type(field).__name__}"
        for name, field, kind in zip(output._fields, output, _FIELDS, strict=True)
        if not isinstance(field, kind)
    ]
    return f"the model's output must hold tensors, but has {', '.join(wrong)}"


def _mismatch(output: RecurrentOutput, shapes: tuple[torch.Size, ...]) -> str:
    wrong = [
        f"{name} {list(field.shape)} (needed {list(shape)})"
        for name, field, shape in zip(output._fields, output, shapes, strict=False)
        if field is not None and field.shape != shape
    ]
    rows, actions = shapes[2]
    return (
        f"the model was called for {rows} rows and {actions} actions, but returned "
        f"{', '.join(wrong)}"
    )
