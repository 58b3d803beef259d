"""A step as the list of its operations: recorded once, then repeated without what surrounds them.

What `torch.vmap` and the gradients decide for each operation again takes as long on a CPU as the
operations of small networks do. `Traced` has it decided once for inputs of a form.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

Form = tuple[Any, ...]


class Traced:
    """A pure function of containers: its results to the last bit, sooner.

    function: of containers and tensors to containers and tensors. What it reads besides, such as
        attributes, must stay as it is; it draws nothing and writes to none of its inputs.
    after: so many calls of a form are made as they are; recording takes seconds, which few calls
        would not bring in again.
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
        """What the function gives of these."""
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
