"""What a run says of an environment that it cannot learn from, evaluate or repeat exactly."""

import pytest
import torch

from raffia import TensorDict
from raffia.cli import main
from raffia.envs import Discrete, Env, EnvSpec, SerialBatch, env_factory
from raffia.recipes.efficientzero import evaluate, resume, train
from raffia.train import Collector
from tests.recipes.runs import Quiet, rows, short, with_all


class Rich(Env):
    """30 steps with a reward of 5000 each; with `is_fair` the observations follow from the seed."""

    spec = EnvSpec(observation_shape=(4,), action=Discrete(2), name="rich")
    is_fair = True

    def reset(self, seed):
        self.time, self.first = 0, seed if self.is_fair else torch.rand(())
        return self.shown()

    def step(self, action):
        self.time += 1
        after = self.shown()
        after["reward"], after["terminated"] = torch.tensor(5000.0), torch.tensor(False)
        return after.set("truncated", torch.tensor(self.time == 30))

    def shown(self):
        return TensorDict(observation=torch.full((4,), self.time + self.first % 7 / 7))


class Unfair(Rich):
    is_fair = False


def test_clipped_targets_and_cut_episodes_are_told_once_with_the_setting(tmp_path):
    view, config = Quiet(), with_all(short(100), env__frame_stack=1)
    train(config, tmp_path / "run", view=view, make_env=env_factory(Rich))
    value, prefix, cut = (line for line in view.messages if "compiling" not in line)
    assert value.startswith("100 % of the value targets are beyond the range of model.value_supp")
    assert "--model.value_support_range -1210 1215 5; or" in value  # holds 5000 / (1 - 0.99)
    assert "prefix targets" in prefix and "--model.reward_support_range -183 184 1" in prefix
    assert cut.startswith("2 of 2 episodes were cut at evaluate.max_steps=20: ")
    assert {row["value_clipped"] for row in rows(tmp_path / "run", "train")} == {1.0}
    assert {row["num_cut"] for row in rows(tmp_path / "run", "evaluate")} == {2}
    found = evaluate(tmp_path / "run", episodes=3, make_env=env_factory(Rich))
    assert (found.num_cut, found.lengths) == (3, [20] * 3)
    messages, longer = len(view.messages), with_all(config, evaluate__max_steps=30)
    longer = with_all(longer, collect__num_env_steps=120)  # and on resume nothing else is said
    resume(tmp_path / "run", config=longer, view=view, make_env=env_factory(Rich))
    assert not any("cut" in line or "determ" in line for line in view.messages[messages:])
    assert "num_cut" not in rows(tmp_path / "run", "evaluate")[-1]


def test_cut_episodes_are_shown_by_the_command_line(tmp_path, capsys):
    train(with_all(short(60), evaluate__max_steps=5), tmp_path / "run", view=Quiet())
    assert main(["evaluate", str(tmp_path / "run"), "--episodes", "1"]) == 0
    assert "1 of 1 episode was cut at evaluate.max_steps=5" in capsys.readouterr().out


@pytest.mark.parametrize("kind", [Rich, Unfair])
def test_a_resume_tells_of_an_environment_that_is_not_deterministic(kind, tmp_path):
    view, config = Quiet(), with_all(short(60), env__num_envs=2)
    train(config, tmp_path / "run", view=view, make_env=env_factory(kind))
    resume(tmp_path / "run", config=with_all(config, collect__num_env_steps=64), view=view,
           make_env=env_factory(kind))  # fmt: skip
    found = [line for line in view.messages if "not deterministic" in line]
    assert len(found) == (kind is Unfair)
    for line in found:
        assert line.startswith("rich is not deterministic: ") and "of 2 rows (0, 1) came" in line


def test_states_of_earlier_versions_have_no_checksums():
    unfair = Collector(SerialBatch([Unfair()]), seed=0, warn=pytest.fail)
    unfair.collect(lambda states: TensorDict(action=torch.zeros(1).long(), batch_size=[1]), 2)
    unfair.load_state(unfair.state().exclude("checksums"))
