"""The model's answers: whether they fit, in the search's dtypes."""

import torch
from torch import Tensor

from raffia.search.outputs import RecurrentOutput, RootOutput
from raffia.search.plain import plain
from raffia.search.state import SearchState


class Answers:
    """Checks a model's answers to one search; quick, since it runs in each simulation."""

    def __init__(self, state: SearchState, root: RootOutput) -> None:
        self._state, self._root = state, root
        self._num_actions, self._device = state.shape[2], state.gamma.device
        self._num = -1
        self._row, self._edges = torch.Size(), torch.Size()  # [m] and [m, A]

    def fitting(self, output: RecurrentOutput, num: int) -> RecurrentOutput:
        """The model's answer for `num` rows in the search's dtypes, once its shapes were found to
        fit."""
        if num != self._num:
            self._num = num
            self._row, self._edges = torch.Size([num]), torch.Size([num, self._num_actions])
        if not isinstance(output, RecurrentOutput):
            raise TypeError(
                f"recurrent_fn gave a {type(output).__name__} instead of a RecurrentOutput: "
                "return RecurrentOutput(reward, value, prior_logits, ...), embedding"
            )
        reward, value, logits, discount, mask, to_play, actions = output
        row, device = self._row, self._device
        if not all(map(_is_tensor, output[:3])) or not all(map(_may_be_given, output[3:])):
            raise TypeError(_not_tensors(output))
        if (
            logits.shape != self._edges
            or value.shape != row
            or reward.shape != row
            or (discount is not None and discount.shape != row)
            or (mask is not None and mask.shape != self._edges)
            or (to_play is not None and to_play.shape != row)
        ):
            raise ValueError(_mismatch(output, num, self._num_actions))
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
        return RecurrentOutput(
            plain(reward, torch.float32, device),
            plain(value, torch.float32, device),
            plain(logits, torch.float32, device),
            None if discount is None else plain(discount, torch.float32, device),
            mask,
            None if to_play is None else plain(to_play, torch.int32, device),
            actions,
        )


def fitting_key(key: Tensor, num: int, device: torch.device) -> Tensor:
    """The keys that `transpositions` gave for `num` embeddings, once found to fit."""
    if not isinstance(key, Tensor):
        raise TypeError(f"transpositions gave a {type(key).__name__}; it must give int64 [{num}]")
    if key.shape != (num,) or key.dtype != torch.int64:
        raise ValueError(
            f"transpositions gave {list(key.shape)}, {key.dtype} for {num} embeddings; it must "
            f"give one number for each, [{num}], torch.int64"
        )
    return plain(key, torch.int64, device)


def _check_actions(actions: Tensor, at_root: Tensor | None, num: int) -> None:
    assert at_root is not None
    needed = [num, *at_root.shape[1:]]
    if list(actions.shape) != needed or actions.dtype != at_root.dtype:
        raise ValueError(
            f"the model gave actions {list(actions.shape)}, {actions.dtype} (needed {needed}, "
            f"{at_root.dtype}, as the root's)"
        )


def _one_sided(name: str, root_has: bool) -> str:
    has, lacks = "the root", "the model's answer"
    if not root_has:
        has, lacks = lacks, has
    return f"{has} has {name} and {lacks} has not: give it in both or in neither"


def _is_tensor(field: object) -> bool:
    return isinstance(field, Tensor)


def _may_be_given(field: object) -> bool:
    return field is None or isinstance(field, Tensor)


def _not_tensors(output: RecurrentOutput) -> str:
    wrong = [
        f"{name} a {type(field).__name__}"
        for name, field in zip(output._fields, output, strict=True)
        if not isinstance(field, Tensor) and (field is not None or name in output._fields[:3])
    ]
    return f"the model's answer must hold tensors and has {', '.join(wrong)}"


def _mismatch(output: RecurrentOutput, num: int, num_actions: int) -> str:
    needed = {
        "reward": [num],
        "value": [num],
        "prior_logits": [num, num_actions],
        "discount": [num],
        "mask": [num, num_actions],
        "to_play": [num],
    }
    wrong = [
        f"{name} {list(tensor.shape)} (needed {shape})"
        for name, shape in needed.items()
        if (tensor := getattr(output, name)) is not None and list(tensor.shape) != shape
    ]
    return f"the model was asked for {num} rows and {num_actions} actions and gave " + ", ".join(
        wrong
    )
