"""Whole short runs: stopped, resumed, damaged, evaluated."""

import json
from dataclasses import replace

import pytest
import torch

from raffia.envs.batch import SerialBatch
from raffia.envs.env import Discrete, EnvSpec
from raffia.recipes import running
from raffia.recipes.efficientzero import evaluate, load_agent, resume, train
from raffia.recipes.run_folder import read_run
from raffia.tensordict.tensordict import TensorDict
from raffia.train.checkpoint import Checkpoints
from raffia.train.experiment import RunError
from raffia.train.nan_guard import NonFiniteError
from tests.recipes.runs import Quiet, last_state, same, short, terminate


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "straight"
    result = train(short(), folder, view=Quiet(), preset="smoke")
    assert (result.reason, result.env_step, result.update) == ("finished", 160, 30)
    return folder


def rows(folder, *kinds):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return [row for row in found if not kinds or row["kind"] in kinds]


def test_a_run_leaves_what_is_needed_to_go_on_and_to_look_at(finished):
    names = {path.name.split(".raffia")[0] for path in finished.iterdir()}
    assert {"config.json", "metrics.jsonl", "checkpoints", "trees"} <= names
    assert any(name.startswith("events.out.tfevents") for name in names)
    config = json.loads((finished / "config.json").read_text())
    assert config["search"]["num_simulations"] == 4
    assert config["run"]["preset"] == "smoke" and config["run"]["torch"] == torch.__version__
    assert read_run(finished) == short()
    kinds = [row["kind"] for row in rows(finished)]
    assert kinds[0] == "start" and kinds[-1] == "end"
    assert kinds.count("evaluate") == 4  # each 50 steps, and at the end
    train_row = rows(finished, "train")[-1]
    for name in ("loss", "policy_loss", "grad_norm", "learning_rate", "updates_per_second"):
        assert isinstance(train_row[name], float), name
    assert list((finished / "trees").glob("*.svg"))


@pytest.mark.slow
@pytest.mark.parametrize("stops", [[1], [6, 7, 20], [29]])
def test_a_run_that_is_stopped_and_resumed_is_the_same_run(finished, tmp_path, stops):
    folder = tmp_path / "run"
    result = train(short(), folder, view=Quiet({stops[0]: terminate}))
    assert (result.reason, result.update) == ("stopped", stops[0])
    for update in stops[1:]:
        assert resume(folder, view=Quiet({update: terminate})).update == update
    assert resume(folder, view=Quiet()).reason == "finished"
    (_, straight), (_, again) = last_state(finished), last_state(folder)
    assert same(straight["state"], again["state"])
    assert same(straight["stream"], again["stream"])
    assert same(straight["replay"], again["replay"])
    for kind in ("evaluate", "episode"):
        left, right = ([_timeless(row) for row in rows(f, kind)] for f in (finished, folder))
        assert left == right


def test_a_checkpoint_has_the_score_of_its_own_update_or_none(finished):
    found = {one.update: one.score for one in Checkpoints(finished / "checkpoints").available()}
    evaluated = {row["update"]: row["mean_return"] for row in rows(finished, "evaluate")}
    assert found == {update: evaluated.get(update) for update in found}
    assert None in found.values() and set(found.values()) - {None}


def test_the_last_checkpoint_knows_the_last_evaluation(tmp_path):
    config = short()  # its last update, the 30th, is saved before the run is evaluated at its end
    config = replace(config, checkpoint=replace(config.checkpoint, every_updates=30))
    config = replace(config, evaluate=replace(config.evaluate, every_env_steps=10**6))
    result = train(config, tmp_path / "run", view=Quiet())
    found, _ = last_state(tmp_path / "run")
    assert found.update == 30 and found.extras["evaluate"]["latest"] == result.mean_return


def _timeless(row):
    return {name: value for name, value in row.items() if name != "seconds"}


def test_a_run_that_died_goes_on_at_its_last_checkpoint(finished, tmp_path):
    folder = tmp_path / "run"

    def die():
        raise MemoryError("killed")

    with pytest.raises(MemoryError):
        train(short(), folder, view=Quiet({17: die}))
    view = Quiet()
    resume(folder, view=view)
    assert any("update 14" in line for line in view.said)
    assert same(last_state(finished)[1]["state"], last_state(folder)[1]["state"])
    updates = [row["update"] for row in rows(folder, "train")]
    assert updates == sorted(set(updates))  # neither doubled nor missing
    assert updates == [row["update"] for row in rows(finished, "train")]


def test_another_seed_is_another_run(finished, tmp_path):
    train(short(seed=1), tmp_path / "run", view=Quiet())
    assert not same(last_state(finished)[1]["state"], last_state(tmp_path / "run")[1]["state"])


@pytest.mark.slow
def test_a_run_can_be_made_longer(tmp_path):
    train(short(num_env_steps=100), tmp_path / "run", view=Quiet())
    longer = short(num_env_steps=140)
    result = resume(tmp_path / "run", config=longer, view=Quiet())
    assert (result.env_step, result.reason) == (140, "finished")
    assert read_run(tmp_path / "run").collect.num_env_steps == 140


def test_a_run_that_cannot_go_on_with_another_config_keeps_its_own(tmp_path):
    train(short(num_env_steps=100), tmp_path / "run", view=Quiet())
    other = short(num_env_steps=140, env=replace(short().env, num_envs=5))
    with pytest.raises(RunError, match="^env.num_envs: .* was started with other values"):
        resume(tmp_path / "run", config=other, view=Quiet())
    assert read_run(tmp_path / "run") == short(num_env_steps=100)
    assert resume(tmp_path / "run", config=short(num_env_steps=140), view=Quiet()).env_step == 140


def test_a_env_that_is_not_there_leaves_no_folder_behind(tmp_path):
    config = short()
    config = replace(config, env=replace(config.env, id="CartPol-v1"))
    with pytest.raises(ValueError, match="CartPole-v1"):
        train(config, tmp_path / "run", view=Quiet())
    assert not (tmp_path / "run").exists()


def test_a_run_ends_at_its_target(tmp_path):
    config = short()
    config = replace(config, evaluate=replace(config.evaluate, target_return=1.0))
    result = train(config, tmp_path / "run", view=Quiet())
    assert result.reason == "target" and result.env_step <= 60
    assert rows(tmp_path / "run")[-1]["reason"] == "target"


@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over_by_name(finished, tmp_path):
    import shutil

    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    newest = sorted((folder / "checkpoints").iterdir())[-1]
    path = next(newest.glob("state.*"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    view = Quiet()
    resume(folder, view=view)
    assert any(newest.name in line for line in view.said)
    assert same(last_state(finished)[1]["state"], last_state(folder)[1]["state"])


def test_a_full_disk_is_told_and_the_run_goes_on(finished, tmp_path, monkeypatch):
    from raffia.train.checkpoint import CheckpointError

    save, failed = Checkpoints.save, []

    def sometimes(self, update, *args, **kwargs):
        if update in (14, 21):
            failed.append(update)
            raise CheckpointError("there", "was not saved: No space left on device", available=[])
        return save(self, update, *args, **kwargs)

    monkeypatch.setattr(Checkpoints, "save", sometimes)
    view = Quiet()
    result = train(short(), tmp_path / "run", view=view)
    assert result.reason == "finished" and failed[0] == 14
    assert any("No space left" in line for line in view.said)
    assert same(last_state(finished)[1]["state"], last_state(tmp_path / "run")[1]["state"])


def test_a_run_is_evaluated_alike_each_time(finished):
    first = evaluate(finished, episodes=5, seed=3)
    again = evaluate(finished, episodes=5, seed=3)
    assert first == again
    assert len(first.returns) == 5 and first.files == []
    assert evaluate(finished, episodes=5, seed=3, checkpoint="newest").lengths


def test_an_agent_acts_and_shows_its_tree(finished):
    agent = load_agent(finished)
    state = TensorDict(observation=torch.zeros(3, 2, 4), batch_size=[3])
    done = agent.act(state)
    assert done["action"].shape == (3,) and done["policy"].shape == (3, 2)
    assert agent.plan(state).tree.num_simulations == 4


def test_what_can_go_wrong_with_folders_is_said(finished, tmp_path):
    with pytest.raises(RunError, match="holds a run already: go on with it by `raffia resume"):
        train(short(), finished, view=Quiet())
    with pytest.raises(RunError, match="there is no run in"):
        resume(tmp_path / "nothing", view=Quiet())
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "text").write_text("mine")
    with pytest.raises(RunError, match="exists and is no run"):
        train(short(), tmp_path / "other", view=Quiet())
    with pytest.raises(RunError, match="has no checkpoint '999'"):
        evaluate(finished, episodes=1, checkpoint="999")


class Breaks:
    """Says NaN at its fifth step: in the observation, or as a reward."""

    spec = EnvSpec(observation_shape=(2,), action=Discrete(2), name="breaks")

    def __init__(self, place="observation"):
        self.place = place

    def reset(self, seed):
        self.time = 0
        return TensorDict(observation=torch.zeros(2))

    def step(self, action):
        self.time += 1
        number = float("nan") if self.time == 5 else 0.5
        return TensorDict(
            observation=torch.tensor([0.0, number if self.place == "observation" else 0.5]),
            reward=torch.tensor(number if self.place == "reward" else 1.0),
            terminated=torch.tensor(self.time == 7),
            truncated=torch.tensor(False),
        )

    def render(self):
        return None

    def close(self):
        pass


def test_nan_in_an_observation_stops_the_run_with_its_place(tmp_path):
    def envs(config, *, evaluation=False, render=False, num_envs=None):
        return SerialBatch([Breaks() for _ in range(num_envs or config.num_envs)])

    with pytest.raises(NonFiniteError, match="observation: nan in rows 0, 1, 2, 3") as raised:
        train(short(), tmp_path / "run", view=Quiet(), make_env=envs)
    assert (tmp_path / "run" / "nan_dump").exists()
    assert "batch.safetensors" in str(list((tmp_path / "run").rglob("*")))
    assert raised.value.path


@pytest.mark.parametrize("place", ["observation", "reward"])
def test_nan_in_an_evaluation_is_looked_for_where_it_is(place, tmp_path):
    def envs(config, *, evaluation=False, render=False, num_envs=None):
        where = place if evaluation else "nowhere"
        return SerialBatch([Breaks(where) for _ in range(num_envs or config.num_envs)])

    with pytest.raises(NonFiniteError, match=f"batch {place}: nan in rows 0, 1") as raised:
        train(short(), tmp_path / "run", view=Quiet(), make_env=envs)
    saved = TensorDict.load(f"{raised.value.path}/batch.safetensors")
    assert saved[place].isnan().any()


def test_a_run_on_disk_goes_on_in_the_same_process(tmp_path):
    config = short(num_env_steps=80, replay=replace(short().replay, on_disk=True))
    train(config, tmp_path / "run", view=Quiet({3: terminate}))
    assert resume(tmp_path / "run", view=Quiet()).reason == "finished"


def corridor(config, *, evaluation=False, render=False, num_envs=None):
    return SerialBatch([Breaks("nowhere") for _ in range(num_envs or config.num_envs)])


def test_a_run_in_envs_of_ones_own_is_not_resumed_in_others(tmp_path):
    folder, config = (
        tmp_path / "run",
        short(num_env_steps=60),
    )  # whose env.id is of another environment
    train(config, folder, view=Quiet(), make_env=corridor)
    for call in (resume, load_agent, lambda run: evaluate(run, episodes=1)):
        with pytest.raises(RunError, match="started with custom make_env: pass the same"):
            call(folder)
    longer = short(num_env_steps=80)
    assert resume(folder, config=longer, view=Quiet(), make_env=corridor).env_step == 80
    with pytest.raises(RunError, match="custom make_env"):
        resume(folder)
    assert load_agent(folder, make_env=corridor).spec.name == "breaks"


def test_a_run_with_networks_of_ones_own_is_not_resumed_with_others(tmp_path):
    from raffia.algorithms.efficientzero import make_model

    config = short(num_env_steps=60)
    spec = EnvSpec(observation_shape=(4,), action=Discrete(2))

    larger = replace(config.model, latent_state_dim=48)

    def networks():
        return make_model(spec, config.model, frame_stack=2)

    train(config, tmp_path / "run", view=Quiet(), networks=networks)
    with pytest.raises(RunError, match=r"custom networks: .*networks=\.\.\."):
        resume(tmp_path / "run", view=Quiet())
    with pytest.raises(RunError, match="is of other networks or another optimizer"):
        resume(tmp_path / "run", view=Quiet(), networks=lambda: make_model(spec, larger))
    assert resume(tmp_path / "run", view=Quiet(), networks=networks).reason == "finished"


@pytest.mark.parametrize(
    ("env", "evaluation", "message"),
    [
        ({"id": "connect4"}, {"opponent": "perfect"}, "no 'perfect' opponent in connect4"),
        ({"id": "probe/value"}, {"record": "gif"}, "no picture to record"),
    ],
)
def test_what_would_stop_the_first_evaluation_is_said_at_once(env, evaluation, message, tmp_path):
    config = short()
    config = replace(
        config,
        env=replace(config.env, frame_stack=1, **env),
        model=replace(config.model, flatten=True),
        evaluate=replace(config.evaluate, **evaluation),
    )
    with pytest.raises(ValueError, match=message):
        train(config, tmp_path / "run", view=Quiet())
    assert not (tmp_path / "run").exists()


def test_an_opponent_for_one_player_is_refused(finished):
    with pytest.raises(ValueError, match="one player: there is nobody to play with"):
        evaluate(finished, episodes=1, opponent="random")


def test_a_device_that_is_not_there_is_said(tmp_path):
    with pytest.raises(RunError, match="device='gpu' can't be used"):
        train(short(device="gpu"), tmp_path / "run", view=Quiet())
    assert not (tmp_path / "run").exists()


def test_envs_are_closed_if_a_run_cannot_be_made(tmp_path):
    closed = []

    class Closes(SerialBatch):
        def close(self):
            closed.append(self)

    def envs(config, *, evaluation=False, render=False, num_envs=None):
        return Closes([Breaks() for _ in range(num_envs or config.num_envs)])

    with pytest.raises(ValueError, match="is of images"):
        config = short(loss=replace(short().loss, augmentation=("shift",)))
        train(config, tmp_path / "run", view=Quiet(), make_env=envs)
    assert len(closed) == 1


def test_a_full_disk_costs_pictures_but_not_the_run(finished, tmp_path, monkeypatch):
    from raffia.files import JsonLines
    from raffia.recipes.efficientzero import experiment as run

    write, failed = JsonLines.write, []

    def full(self, row):
        if row["kind"] == "train" and len(failed) < 3:
            failed.append(row["update"])
            raise OSError(28, "No space left on device", self.path)
        write(self, row)

    def no_room(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(JsonLines, "write", full)
    monkeypatch.setattr(run, "save_tree", no_room)
    view = Quiet()
    assert train(short(), tmp_path / "run", view=view).reason == "finished"
    assert failed and any("tree of step 5" in line for line in view.said)
    kept = [(row["kind"], row["update"]) for row in rows(tmp_path / "run")]
    assert kept == [(row["kind"], row["update"]) for row in rows(finished)]


@pytest.mark.parametrize("lost", ["checkpoints/*/state*", "replay/rows-*"])
def test_a_run_whose_checkpoints_are_all_damaged_is_not_begun_anew(lost, finished, tmp_path):
    import shutil

    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    for path in folder.glob(lost):
        path.unlink()
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(RunError, match="none of the . checkpoints in .* can be resumed"):
        resume(folder, view=Quiet())
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("part", "change"), [("model", {"latent_state_dim": 48}), ("optimizer", {"name": "sgd"})]
)
def test_a_run_does_not_go_on_with_another_learner(part, change, finished, tmp_path):
    import shutil

    shutil.copytree(finished, tmp_path / "run")
    other = replace(short(num_env_steps=180), **{part: replace(getattr(short(), part), **change)})
    with pytest.raises(RunError, match=f"^{part}.*was started with other values"):
        resume(tmp_path / "run", config=other, view=Quiet())
    assert read_run(tmp_path / "run") == short()


def test_a_run_of_an_earlier_version_is_resumed_with_its_settings(tmp_path):
    """Its settings had other names, and so had what the caller gave."""
    result = train(short(), tmp_path / "run", view=Quiet({6: terminate}))
    assert result.reason == "stopped"
    path = tmp_path / "run" / "config.json"
    config = json.loads(path.read_text())
    config["collect"]["steps_per_turn"] = config["collect"].pop("rollout_length")
    for name in ("ratio", "noise"):
        config["targets"][f"reanalyse_{name}"] = config["targets"].pop(f"reanalyze_{name}")
    config["targets"]["horizon_share"] = config["targets"].pop("horizon_fraction")
    config["optimizer"]["warmup_share"] = config["optimizer"].pop("warmup_fraction")
    config["population"]["share"] = config["population"].pop("truncation_fraction")
    path.write_text(json.dumps(config))
    assert read_run(tmp_path / "run") == short()
    assert resume(tmp_path / "run", view=Quiet()).reason == "finished"
    config["run"]["own"] = ["worlds"]
    path.write_text(json.dumps(config))
    with pytest.raises(RunError, match="started with custom make_env: pass the same"):
        resume(tmp_path / "run", view=Quiet())


@pytest.mark.parametrize("is_exact", [True, False])
def test_a_run_says_where_its_products_depend_on_memory(tmp_path, monkeypatch, is_exact):
    monkeypatch.setattr(running, "request_exact_products", lambda: is_exact)
    view = Quiet()
    train(short(), tmp_path / "run", view=view)
    assert (running.INEXACT in view.said) is not is_exact
    assert "MKL_CBWR=AUTO" in running.INEXACT
