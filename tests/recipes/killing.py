"""Processes that are killed on the way."""

import os
import signal

from raffia.distributed import ProcessEngine


class KillingEngine(ProcessEngine):
    """Processes, of which one is killed at each so-manyth task or answer.

    at: "ask", after a task was sent, or "take", before an answer is waited for.
    most: how many are killed in all.
    how: the signal; by SIGSTOP they hang.
    """

    def __init__(self, at, every, most=1_000_000, how=signal.SIGKILL):
        super().__init__()
        self.at, self.every, self.most, self.how = at, every, most, how
        self.num_killed = self._num_calls = 0

    def start(self, *arguments):
        worker = super().start(*arguments)
        ask, take = worker.ask, worker.take

        def deadly_ask(*task):
            ask(*task)
            self._count(worker)

        def deadly_take(seconds):
            self._count(worker)
            return take(seconds)

        if self.at == "ask":
            worker.ask = deadly_ask
        else:
            worker.take = deadly_take
        return worker

    def _count(self, worker):
        self._num_calls += 1
        if self._num_calls % self.every or self.num_killed == self.most:
            return
        try:
            os.kill(worker.pid, self.how)
        except ProcessLookupError:
            return  # killed before; answers that it had sent are still taken
        self.num_killed += 1
