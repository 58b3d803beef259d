"""The two halves of a simulation by compiled kernels on the CPU; results as in reference.py."""

import functools
from array import array
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import raffia.jit
from raffia.search.errors import unfit, unfit_root
from raffia.search.gumbel import Gumbel
from raffia.search.kernels.layout import (
    ENTRIES,
    FIELDS,
    GUMBEL,
    REALS,
    RUNNING,
    SIBLINGS,
    TREE,
    WORDS,
)
from raffia.search.kernels.layout import PUCT as PUCT_KIND
from raffia.search.outputs import RecurrentOutput, RootOutput
from raffia.search.plain import plain
from raffia.search.puct import PUCT
from raffia.search.state import SearchState

SIMULATIONS_PER_CALL = 32  # simulations in one call; between calls Ctrl-C is heard
_RANGES = {"running": RUNNING, "tree": TREE, "siblings": SIBLINGS}
_COUNTED = {"exclude": 0, "include": 1, "zero": 2}
_KINDS = {PUCT: PUCT_KIND, Gumbel: GUMBEL}


@functools.cache
def kernels() -> ModuleType:
    """The compiled steps, imported when first needed."""
    import raffia.search.kernels.steps as module

    return module


def possible(select: Any, device: torch.device) -> bool:
    """Whether there are kernels for this selection here.

    >>> possible(PUCT(), torch.device("cpu")) == raffia.jit.available()
    True
    >>> possible(lambda nodes, carry: None, torch.device("cpu"))
    False
    """
    return type(select) in _KINDS and device.type == "cpu" and raffia.jit.available()


class CompiledSteps:
    """The two halves of a simulation, `SearchSteps`, each as one kernel call."""

    def __init__(self, state: SearchState) -> None:
        self.state = state
        module = kernels()
        self._simulate, self._backup = module.simulate, module.backup
        self._words = array("q", [0] * len(WORDS))
        self._reals = array("d", [0.0] * len(REALS))
        self._referenced: list[Any] = []  # keeps alive what only addresses refer to
        self._has_mask = "mask" in state.entries
        self._write()
        self._addresses = self._words.buffer_info()[0], self._reals.buffer_info()[0]

    def _write(self) -> None:
        """Fill the kernels' blocks with the addresses of all arrays."""
        state, select = self.state, self.state.select
        roots, rows, actions = state.shape
        table = select.exploration(rows - 1) if type(select) is PUCT else None
        prefix = state.settings.value_prefix
        addresses = {name: state.entries.get(name) for name in ENTRIES} | {
            "order": state.order,
            "path_node": state.path_node,
            "path_action": state.path_action,
            "path_length": state.path_length,
            "leaf": state.leaf,
            "stamp": state.stamp,
            "scratch": torch.empty(actions),
            "parent_row": state.parent_row,
            "node_row": state.node_row,
            "leaf_action": state.leaf_action,
            "reset": state.reset,
            "table": table,
            "tie_seed": getattr(select, "tie_seed", None),
            "root_gumbel": getattr(select, "root_gumbel", None),
            "considered": getattr(select, "considered", None),
            "gamma": state.gamma,
        }
        self._referenced = list(addresses.values())
        numbers = {
            "roots": roots,
            "rows": rows,
            "actions": actions,
            "kind": _KINDS[type(select)],
            "normalize": _RANGES[select.normalize],
            "root_in_range": int(select.root_in_range),
            "horizon": 0 if prefix is None else prefix.horizon,
            "max_depth": state.settings.max_depth,
            "table_width": rows - 1,
        }
        for name, tensor in addresses.items():
            self._words[WORDS[name]] = 0 if tensor is None else tensor.data_ptr()
        for name, number in numbers.items():
            self._words[WORDS[name]] = number
        for name, slot in REALS.items():
            self._reals[slot] = getattr(select, name, 0.0)

    def instantiate(self, root: RootOutput) -> None:
        """Set the values of trees with roots only."""
        device = self.state.gamma.device
        given = [
            None if tensor is None else plain(tensor, dtype, device)
            for tensor, dtype in (
                *((root.value, torch.float32), (root.prior_logits, torch.float32)),
                *((root.mask, torch.bool), (root.to_play, torch.int32)),
            )
        ]
        unfit_at = kernels().instantiate(
            self._addresses[0],
            self.state.shape[0],
            *(0 if tensor is None else tensor.data_ptr() for tensor in given),
            _COUNTED[self.state.settings.root_value],
        )
        if unfit_at >= 0:
            raise unfit_root(FIELDS[unfit_at % 8], unfit_at // 8)

    def clear_unused(self) -> None:
        """Clear the rows that never became nodes."""
        kernels().clear_unused(self._addresses[0], self.state.shape[0])

    def simulate(self, simulation: int, num_roots: int) -> int | None:
        """Descend from each root to an untried action or to a node that ends the simulation."""
        words, reals = self._addresses
        resets: int = self._simulate(words, reals, simulation, num_roots)
        return resets

    def backup(
        self, simulation: int, num_roots: int, output: RecurrentOutput, key: Tensor | None
    ) -> None:
        """Write the new nodes and add their values along the paths."""
        if not self._has_mask and "mask" in self.state.entries:
            self._has_mask = True
            self._write()
        reward, value, logits, discount, mask, to_play, _ = output
        unfit_at = self._backup(
            self._addresses[0],
            simulation,
            num_roots,
            reward.data_ptr(),
            value.data_ptr(),
            logits.data_ptr(),
            0 if discount is None else discount.data_ptr(),
            0 if mask is None else mask.data_ptr(),
            0 if to_play is None else to_play.data_ptr(),
            0 if key is None else key.data_ptr(),
        )
        if unfit_at >= 0:
            raise self._unfit(unfit_at, simulation)

    def run(self, searched: list[int], model: tuple[int, int], output: RecurrentOutput) -> None:
        """Run all simulations, with a model that is a compiled step: see raffia.jit.calls.

        searched: the number of roots that take part in each simulation. model: its address and
        context.
        output: where it writes.
        """
        for first in range(0, len(searched), SIMULATIONS_PER_CALL):
            some = array("q", searched[first : first + SIMULATIONS_PER_CALL])
            unfit_at = kernels().run(
                *self._addresses,
                *(first, some.buffer_info()[0], len(some)),
                *model,
                output.reward.data_ptr(),
                output.value.data_ptr(),
                output.prior_logits.data_ptr(),
            )
            if unfit_at >= 0:
                raise self._unfit(unfit_at % 2**40, unfit_at // 2**40)

    def _unfit(self, at: int, simulation: int) -> ValueError:
        return unfit(FIELDS[at % 8], int(self.state.order[at // 8]), simulation)
