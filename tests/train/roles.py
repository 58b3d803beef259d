"""The common base of the workers' roles in these tests."""


class Stateless:
    """A role without state between its tasks."""

    def __init__(self, config, index):
        pass

    def load(self, state):
        pass
