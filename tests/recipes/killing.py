"""An engine whose processes are killed."""

import os
import signal

from raffia.distributed import ProcessEngine


class KillingEngine(ProcessEngine):
    """Processes, one of which is killed at each `every`-th task or answer.

    at: "ask", after a task was sent, or "take", before waiting for an answer.
    most: how many are killed in all.
    signal_number: SIGKILL, or SIGSTOP to make them hang.
    """

    def __init__(self, at, every, most=1_000_000, signal_number=signal.SIGKILL):
        super().__init__()
        self.at, self.every, self.most, self.signal_number = at, every, most, signal_number
        self.num_killed = self._num_calls = 0

    def start(self, *arguments):
        worker = super().start(*arguments)
        ask, take = worker.ask, worker.take

        def killing_ask(*task):
            ask(*task)
            self._count(worker)

        def killing_take(seconds):
            self._count(worker)
            return take(seconds)

        if self.at == "ask":
            worker.ask = killing_ask
        else:
            worker.take = killing_take
        return worker

    def _count(self, worker):
        self._num_calls += 1
        if self._num_calls % self.every or self.num_killed == self.most:
            return
        try:
            os.kill(worker.pid, self.signal_number)
        except ProcessLookupError:
            return  # killed before; answers that it had sent still arrive
        self.num_killed += 1
