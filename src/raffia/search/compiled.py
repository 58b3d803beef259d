"""The steps of a simulation by compiled kernels on the CPU; results as in reference.py."""

from array import array
from typing import Any

import torch
from torch import Tensor

from raffia.search import kernels
from raffia.search.base import RecurrentOutput, RootOutput, unfit, unfit_root
from raffia.search.memory import plain
from raffia.search.selection import PUCT, Gumbel
from raffia.search.state import SearchState

SIMULATIONS_PER_CALL = 32  # simulations in one call; between calls Ctrl-C is heard
OF_PUCT = ("min_range", "tie_seed")  # the selections' own fields in the search's record
OF_GUMBEL = ("maxvisit_init", "value_scale", "root_gumbel", "considered")


def possible(select: Any, device: torch.device) -> bool:
    """Whether there are compiled kernels for this selection on this device.

    >>> possible(PUCT(), torch.device("cpu"))
    True
    >>> possible(lambda nodes, carry: None, torch.device("cpu"))
    False
    """
    return type(select) in (PUCT, Gumbel) and device.type == "cpu"


class CompiledSteps:
    """The steps of a simulation, each as one kernel call."""

    def __init__(self, state: SearchState) -> None:
        self.state = state
        module = kernels.steps
        self._simulate, self._backward = module.simulate, module.backward
        self._output = kernels.record.OutputRecord()
        prefix, (roots, rows, actions) = state.rules.value_prefix, state.shape
        self._search = kernels.record.SearchRecord(
            **state.arrays(),
            scores=state.gamma.new_empty(actions),
            roots=roots,
            rows=rows,
            actions=actions,
            horizon=0 if prefix is None else prefix.horizon,
            max_depth=state.max_depth,
        )
        self._address = self._search.address
        self.renew()

    def renew(self) -> None:
        """Pass the addresses of the tree's arrays, and the selection, to the kernels."""
        record, state, select = kernels.record, self.state, self.state.select
        entries = state.entries.copy()
        entries.pop("actions", None)  # what actions stand for, the kernels do not ask
        is_puct = type(select) is PUCT
        own = {name: getattr(select, name) for name in (OF_PUCT if is_puct else OF_GUMBEL)}
        self._has_mask = "mask" in entries
        self._search.update(
            **entries,
            **own,
            gamma=state.gamma,
            exploration=select.exploration(state.shape[1] - 1) if is_puct else None,
            kind=record.PUCT if is_puct else record.GUMBEL,
            normalize=("running", "tree", "siblings").index(select.normalize),
            root_in_range=int(select.root_in_range),
        )

    def instantiate(self, root: RootOutput) -> None:
        """Set the values of trees with roots only."""
        fields = [
            None if field is None else plain(field, dtype, self.state.gamma.device)
            for field, dtype in (
                *((root.value, torch.float32), (root.prior_logits, torch.float32)),
                *((root.mask, torch.bool), (root.to_play, torch.int32)),
            )
        ]
        value, logits, mask, to_play = (0 if x is None else x.data_ptr() for x in fields)
        self._output.set(0, value, logits, 0, mask, to_play, 0)
        counts = self.state.rules.root_value
        unfit_at = kernels.steps.instantiate(
            self._address, self._output.address, int(counts != "exclude"), int(counts == "include")
        )
        if unfit_at >= 0:
            raise unfit_root(unfit_at % 8, unfit_at // 8)

    def clear_unused(self) -> None:
        """Clear the rows that never became nodes."""
        kernels.steps.clear_unused(self._address)

    def simulate(self, simulation: int, num_roots: int) -> int:
        """Descend from each root to an untried action or to a node that ends the simulation.

        Returns how many of the new nodes are resets.
        """
        resets: int = self._simulate(self._address, simulation, num_roots)
        return resets

    def backward(
        self, simulation: int, num_roots: int, output: RecurrentOutput, key: Tensor | None
    ) -> None:
        """Write the new nodes and add their values along the paths."""
        if not self._has_mask and "mask" in self.state.entries:
            self.renew()
        arrays = (*output[:6], key)  # in the order of an `OutputRecord`
        self._output.set(*[0 if array is None else array.data_ptr() for array in arrays])
        unfit_at = self._backward(self._address, simulation, num_roots, self._output.address)
        if unfit_at >= 0:
            raise self._unfit(unfit_at, simulation)

    def run(self, searched: list[int], model: tuple[int, int], output: RecurrentOutput) -> None:
        """Run all simulations, with a model that is a compiled step: see raffia.jit.kernel.

        searched: the number of roots that take part in each simulation. model: its address and
        context.
        output: where it writes.
        """
        self._output.set(*[field.data_ptr() for field in output[:3]], 0, 0, 0, 0)
        for first in range(0, len(searched), SIMULATIONS_PER_CALL):
            some = array("q", searched[first : first + SIMULATIONS_PER_CALL])
            unfit_at = kernels.steps.run(
                *(self._address, self._output.address, first),
                *(some.buffer_info()[0], len(some), *model),
            )
            if unfit_at >= 0:
                raise self._unfit(unfit_at % 2**40, unfit_at // 2**40)

    def _unfit(self, at: int, simulation: int) -> ValueError:
        return unfit(at % 8, int(self.state.order[at // 8]), simulation)
