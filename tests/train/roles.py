"""What the roles of workers in these tests have in common."""


class Stateless:
    """A role that keeps nothing between its tasks."""

    def __init__(self, config, index):
        pass

    def load(self, state):
        pass
