"""Where programs written for tensordict look for `MemoryMappedTensor`; it stands in `raffia`.

`raffia.memmap` stays the function, also after `from raffia.memmap import ...`.
"""

from raffia.tensordict import MemoryMappedTensor as MemoryMappedTensor
