"""Learners for several processes, made by name and config; some die in the middle of an update."""

import json
import os
import signal
import time
from pathlib import Path

import torch
from torch import nn
from torch.func import functional_call

from raffia.algorithms.ilql.config import ILQLConfig, ILQLModelConfig, OptimizerConfig
from raffia.algorithms.ilql.learner import ILQLLearner
from raffia.distributed.group import Group
from raffia.functional.gradients import clip_by_global_norm, global_norm, value_and_grad
from raffia.tensordict.tensordict import TensorDict
from tests.algorithms.ilql.small import TRUNK


class Small:
    """Fits a small network by gradients that are clipped, with momentum.

    Of its config: "sleep" seconds in each part; "fail" at a step; "die" as [phase, step, file]: the
    first follower is killed there once, which the file records, or each time without a file.
    """

    applies_shards = True

    def __init__(self, config, index):
        self.config, self.index, self.step = json.loads(config), index, 0
        norm = [nn.BatchNorm1d(7)] if self.config.get("norm") else []
        self.model = nn.Sequential(nn.Linear(5, 7), *norm, nn.Tanh(), nn.Linear(7, 3)).train()
        for phase, name, step in (("sum", "_sum", None), ("join", "__init__", 3)):
            if self._dies(phase):
                setattr(Group, name, self._deadly(phase, getattr(Group, name), step))

    def _deadly(self, phase, call, step):
        def deadly(*args, **options):
            self._die(phase, self.step if step is None else step)
            return call(*args, **options)

        return deadly

    def _dies(self, phase):
        return self.config.get("die", [""])[0] == phase and self.index == 0

    def _die(self, phase, step):
        if not self._dies(phase) or step != self.config["die"][1]:
            return
        file = self.config["die"][2]
        if not file or not Path(file).exists():
            if file:
                Path(file).touch()
            os.kill(os.getpid(), signal.Signals[self.config.get("signal", "SIGKILL")])

    def init(self, seed):
        torch.manual_seed(seed)
        for layer in self.model:
            if hasattr(layer, "reset_parameters"):
                layer.reset_parameters()
        params = TensorDict({name: p.detach().clone() for name, p in self.model.named_parameters()})
        params = params.unflatten_keys(".")
        buffers = {name: b.clone() for name, b in self.model.named_buffers()}
        buffers = TensorDict({**buffers, "never": torch.tensor([float("-inf"), 0.1])})
        return TensorDict(params=params, buffers=buffers, opt=params * 0, step=torch.tensor(0))

    def grads(self, state, batch):
        self.step = int(state["step"])
        self._die("part", self.step)
        time.sleep(self.config.get("sleep", 0))
        if self.config.get("fail") == self.step:
            raise ValueError("this part fails")

        def loss(params):
            buffers = state["buffers"].clone()
            named = {**params.flatten_keys("."), **buffers.exclude("never")}
            out = functional_call(self.model, named, batch["x"])
            error = (out - batch["y"]).square().mean(-1)
            return error.mean(), (error, buffers)

        grads, (value, (error, buffers)) = value_and_grad(loss, state["params"])
        metrics = TensorDict(loss=value, priority=error, grad_norm=global_norm(grads))
        return TensorDict(grads=grads, buffers=buffers), metrics

    def apply(self, state, update):
        self._die("apply", int(state["step"]))
        norm = update.get("grad_norm", None)
        grads, _ = clip_by_global_norm(update["grads"], 0.3, norm=norm)
        opt = state["opt"] * 0.9 + grads
        both = zip(state["params"].values(True, True), opt.values(True, True), strict=True)
        for leaf, step in both:
            leaf.sub_(step, alpha=0.1)  # in the memory of the state
        return state.replace(opt=opt, buffers=update["buffers"], step=state["step"] + 1)


class Wider(Small):
    """Its followers have a wider network than the leader."""

    def __init__(self, config, index):
        super().__init__(config, index)
        self.model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))

    def grads(self, state, batch):
        return super().grads(self.init(0), batch)


def ilql(config, index):
    """ILQL's learner with a small GPT."""
    optimizer = OptimizerConfig(learning_rate=1e-3, max_grad_norm=0.5)
    return ILQLLearner(ILQLConfig(model=ILQLModelConfig(trunk=TRUNK), optimizer=optimizer))
