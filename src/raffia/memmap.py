"""Re-export of `MemoryMappedTensor` from `raffia`, for programs written for tensordict.

`raffia.memmap` stays the function, also after `from raffia.memmap import ...`.
"""

from raffia.tensordict import MemoryMappedTensor as MemoryMappedTensor
