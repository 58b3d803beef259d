"""Where new items go, by the names of TorchRL: round and round, or nowhere."""


class Writer:
    """What decides whether items come in; this one takes all, over the oldest where it is full.

    >>> Writer().check()
    """

    def check(self) -> None:
        """Raise RuntimeError if nothing may be written."""


class RoundRobinWriter(Writer):
    """New items take the places of the oldest: what a buffer does without a writer.

    >>> from raffia.data import LazyTensorStorage, ReplayBuffer, RoundRobinWriter
    >>> buffer = ReplayBuffer(storage=LazyTensorStorage(3), writer=RoundRobinWriter())
    """


class TensorDictRoundRobinWriter(RoundRobinWriter):
    """The same: numbers of items are in batches of TensorDicts in any case.

    >>> TensorDictRoundRobinWriter().check()
    """


class ImmutableDatasetWriter(Writer):
    """Nothing is written: the buffer gives batches of what its storage held before.

    >>> from raffia.data import ImmutableDatasetWriter, LazyTensorStorage, ReplayBuffer
    >>> storage = LazyTensorStorage(3)
    >>> _ = storage.extend([1.0, 2.0])
    >>> buffer = ReplayBuffer(storage=storage, writer=ImmutableDatasetWriter())
    >>> buffer.add(3.0)
    Traceback (most recent call last):
    ...
    RuntimeError: this buffer has an ImmutableDatasetWriter, so nothing is added to it. ...
    """

    def check(self) -> None:
        raise RuntimeError(
            "this buffer has an ImmutableDatasetWriter, so nothing is added to it. Make it without "
            "a writer to add items"
        )
