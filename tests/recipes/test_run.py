"""Short runs of EfficientZero: files, refusals and failures."""

import contextlib
import json
import shutil
import traceback
from dataclasses import replace

import pytest
import torch

from raffia.algorithms.efficientzero import make_model
from raffia.cli.commands import main
from raffia.cli.runs import config_of
from raffia.envs import Discrete, EnvSpec, SerialBatch, env_factory
from raffia.envs.probe import ValueProbe
from raffia.files import JsonLines
from raffia.recipes import read_run, running
from raffia.recipes.efficientzero import evaluate, load_agent, resume, train
from raffia.recipes.efficientzero import experiment as run_module
from raffia.report import summarise, write_report
from raffia.report.folder import read_run as read_report
from raffia.tensordict import TensorDict
from raffia.train import CheckpointError, Checkpoints, NonFiniteError, RunError
from tests.marks import slow_among
from tests.recipes.runs import Quiet, last_state, refused, rows, same, short, terminate, with_all


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "straight"
    result = train(short(), folder, view=Quiet(), preset="smoke")
    assert (result.reason, result.env_step, result.update) == ("finished", 160, 30)
    return folder


def state_of(folder):
    return last_state(folder)[1]["state"]


def test_a_run_writes_its_files(finished):
    names = {path.name.split(".raffia")[0] for path in finished.iterdir()}
    assert {"config.json", "metrics.jsonl", "checkpoints", "trees"} <= names
    assert any(name.startswith("events.out.tfevents") for name in names)
    config = json.loads((finished / "config.json").read_text())
    assert config["search"]["num_simulations"] == 4 and read_run(finished) == short()
    assert config["run"]["preset"] == "smoke" and config["run"]["torch"] == torch.__version__
    assert rows(finished, "start") and rows(finished)[-1]["kind"] == "end"
    assert len(rows(finished, "evaluate")) == 4  # each 50 steps, and at the end
    metrics = rows(finished, "train")[-1]
    names = ("loss", "policy_loss", "grad_norm", "learning_rate")
    assert all(isinstance(metrics[name], float) for name in names)
    assert "updates_per_second" in (finished / "metrics.jsonl").read_text()
    assert list((finished / "trees").glob("*.svg"))


def test_a_checkpoint_has_the_score_of_its_update_or_none(finished):
    found = {one.update: one.score for one in Checkpoints(finished / "checkpoints").available()}
    evaluated = {row["update"]: row["mean_return"] for row in rows(finished, "evaluate")}
    assert found == {update: evaluated.get(update) for update in found}
    assert None in found.values() and set(found.values()) - {None}


def test_the_last_checkpoint_has_the_last_evaluation(tmp_path):
    # Its last update, the fifth, is saved before the run is evaluated at its end.
    config = with_all(short(60), checkpoint__every_updates=5, evaluate__every_env_steps=10**6)
    result = train(config, tmp_path / "run", view=Quiet())
    found, _ = last_state(tmp_path / "run")
    assert found.update == 5 and found.extras["evaluate"]["latest"] == result.mean_return


def test_an_agent_acts_is_evaluated_and_shows_its_tree(finished, monkeypatch):
    agent = load_agent(finished)
    state = TensorDict(observation=torch.zeros(3, 2, 4), batch_size=[3])
    done = agent.act(state)
    assert done["action"].shape == (3,) and done["policy"].shape == (3, 2)
    assert agent.plan(state).tree.num_simulations == 4
    first, again = (evaluate(finished, episodes=5, seed=3) for _ in range(2))
    assert first == again and len(first.returns) == 5 and first.files == []
    assert evaluate(finished, episodes=5, seed=3, checkpoint="newest").lengths
    assert load_agent(finished, agent.update).update == agent.update
    with pytest.raises(RunError, match="device='gpu' cannot be used"):
        evaluate(finished, device="gpu")
    monkeypatch.setattr("raffia.recipes.efficientzero.api.require_device", lambda name: None)
    assert load_agent(finished, device="meta").planner.device.type == "meta"


# ------------------------------------------------------------------------------------- refusals


BY_CONFIG = [  # settings of a new run, the error, and its message
    ({"env__id": "CartPol-v1"}, ValueError, "CartPole-v1"),
    ({"device": "gpu"}, RunError, "device='gpu' cannot be used"),
    ({"env__id": "connect4", "env__frame_stack": 1, "evaluate__opponent": "perfect"},
     ValueError, "connect4 has no opponent 'perfect'"),
    ({"env__id": "probe/value", "env__frame_stack": 1, "evaluate__record": "gif"},
     ValueError, "no picture to record"),
]  # fmt: skip
BY_FOLDER = [  # a call with a folder and a finished run, the error, and its message
    (lambda folder, _: resume(folder / "nothing", view=Quiet()), RunError, "is not a run fol"),
    (lambda folder, _: train(short(), folder), RunError, "exists and is not a run folder"),
    (lambda _, run: train(short(), run), RunError, "already holds a run: resume it with `raff"),
    (lambda _, run: evaluate(run, checkpoint=999), RunError, "has no checkpoint '999'"),
    (lambda _, run: evaluate(run, num_simulations=0), ValueError, "num_simulations=0 must be at"),
    (lambda _, run: load_agent(run, make_env=ValueProbe), TypeError, r"env_factory\(ValueProbe\)"),
    (lambda _, run: evaluate(run, opponent="random"), ValueError, "so it has no opponents"),
]


def test_invalid_runs_are_refused_immediately_and_leave_no_folder(finished, tmp_path):
    for changes, error, message in BY_CONFIG:
        config = with_all(short(), model__flatten=True, **changes)
        refused(config, tmp_path, message, error)
    (tmp_path / "text").touch()
    for call, error, message in BY_FOLDER:
        with pytest.raises(error, match=message):
            call(tmp_path, finished)
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


def test_a_run_is_the_same_within_torch_s_modes(finished, tmp_path):
    with torch.inference_mode(), torch.autocast("cpu"):
        train(short(), tmp_path / "run", view=Quiet())
    assert same(state_of(tmp_path / "run"), state_of(finished))


@pytest.mark.parametrize(
    "outside", [contextlib.nullcontext(), torch.autocast("cpu")], ids=["plain", "autocast"]
)
def test_autocast_keeps_no_casts_of_weights_from_one_update_to_the_next(outside, tmp_path):
    weight, products = torch.ones(1, 1, requires_grad=True), []

    def stop():  # after an update: computes as a loss does, learns as an optimiser does
        with torch.autocast("cpu", torch.bfloat16):
            products.append((torch.ones(1, 1) @ weight).item())
        with torch.no_grad():
            weight.add_(1)
        return len(products) >= 3

    with outside:
        train(short(), tmp_path / "run", stop=stop)
        assert torch.is_autocast_enabled("cpu") == isinstance(outside, torch.autocast)
    assert products[:3] == [1, 2, 3]


@pytest.mark.parametrize(
    ("change", "back", "value"),
    [
        (torch.set_default_dtype, torch.float32, torch.float64),
        (torch.set_default_device, None, "meta"),
    ],
    ids=["dtype", "device"],
)
def test_other_default_tensors_are_refused(change, back, value, finished, tmp_path):
    change(value)
    why = f"torch makes tensors of .*{value}.* by default here"
    try:
        refused(short(), tmp_path, why)
        for use in load_agent, evaluate:
            with pytest.raises(RunError, match=why):
                use(finished)
    finally:
        change(back)


def test_a_refused_config_does_not_change_the_run(finished, tmp_path):
    run, longer = tmp_path / "run", short(num_env_steps=180)
    shutil.copytree(finished, run)
    for part, change in dict(model={"latent_state_dim": 48}, env={"num_envs": 5}).items():
        with pytest.raises(RunError, match=f"^{part}.*was started with other values"):
            resume(run, config=with_all(longer, **{part: change}), view=Quiet())
        assert read_run(run) == short()
    result = resume(run, config=longer, view=Quiet())
    assert (result.env_step, result.reason) == (180, "finished")
    assert read_run(run) == longer


@pytest.mark.parametrize("lost", ["checkpoints/*/state*", "replay/rows-*"])
def test_a_run_with_damaged_checkpoints_is_not_restarted(lost, finished, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    for path in folder.glob(lost):
        path.unlink()
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(RunError, match="none of the . checkpoints in .* can be resumed"):
        resume(folder, view=Quiet())
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_of_an_earlier_version_is_resumed_with_its_settings(tmp_path):
    """Settings and the record of custom environments had other names."""
    result = train(short(60), tmp_path / "run", view=Quiet({3: terminate}))
    assert result.reason == "stopped"
    path = tmp_path / "run" / "config.json"
    config = json.loads(path.read_text())
    for section, old, new in [
        ("collect", "steps_per_turn", "rollout_length"),
        ("targets", "reanalyse_ratio", "reanalyze_ratio"),
        ("targets", "reanalyse_noise", "reanalyze_noise"),
        ("targets", "horizon_share", "horizon_fraction"),
        ("optimizer", "warmup_share", "warmup_fraction"),
        ("population", "share", "truncation_fraction"),
    ]:
        config[section][old] = config[section].pop(new)
    path.write_text(json.dumps(config))
    assert read_run(tmp_path / "run") == config_of(tmp_path / "run")[1] == short(60)
    assert resume(tmp_path / "run", view=Quiet()).reason == "finished"
    config["run"]["own"] = ["worlds"]
    path.write_text(json.dumps(config))
    with pytest.raises(RunError, match="started with custom make_env: pass the same"):
        resume(tmp_path / "run", view=Quiet())


# -------------------------------------------------------------- environments that fail


class Breaks:
    """Returns NaN at one of its steps: in the observation, or as the reward."""

    spec = EnvSpec(observation_shape=(2,), action=Discrete(2), name="breaks")

    def __init__(self, entry, nan_step):
        self.entry, self.nan_step, self.num_steps = entry, nan_step, 0

    def reset(self, seed):
        self.time = 0
        return TensorDict(observation=torch.zeros(2))

    def step(self, action):
        self.time, self.num_steps = self.time + 1, self.num_steps + 1
        number = float("nan") if self.num_steps == self.nan_step else 0.5
        return TensorDict(
            observation=torch.tensor([0.0, number if self.entry == "observation" else 0.5]),
            reward=torch.tensor(number if self.entry == "reward" else 1.0),
            terminated=torch.tensor(self.time == 7),
            truncated=torch.tensor(False),
        )

    def render(self):
        return None

    def close(self):
        pass


def breaking(entry, evaluation_entry=None, batch=SerialBatch):
    def envs(config, *, evaluation=False, render=False, num_envs=None):
        entry_of_batch = evaluation_entry if evaluation and evaluation_entry else entry
        nan_step = 5 if evaluation else 12
        return batch([Breaks(entry_of_batch, nan_step) for _ in range(num_envs or config.num_envs)])

    return envs


SEEN = breaking("observation"), "batch observation: nan in rows 0, 1, 2, 3"
PAID = breaking("nowhere", "reward"), "batch reward: nan in rows 0, 1"


@pytest.mark.parametrize(("envs", "message"), slow_among([SEEN, PAID], SEEN))
def test_nan_of_an_environment_stops_the_run_and_is_named(envs, message, tmp_path):
    """With a fixed environment the run is resumed."""
    config = with_all(short(), checkpoint__every_updates=1, collect__random_env_steps=24)
    run, warnings = tmp_path / "run", []
    with pytest.raises(NonFiniteError, match=message) as raised:
        train(config, run, view=Quiet(), make_env=envs)
    (dump,) = (run / "nan_dump").iterdir()
    assert str(dump) == raised.value.path and "The run failed after" in raised.value.__notes__[-1]
    assert {path.name for path in dump.iterdir()} == {"batch.safetensors", "report.json"}
    saved = TensorDict.load(dump / "batch.safetensors")
    names = [name for name in ("observation", "reward") if name in saved.keys()]
    assert any(saved[name].isnan().any() for name in names)
    assert Checkpoints(run / "checkpoints").newest(warnings.append) and warnings == []
    longer = with_all(config, collect__num_env_steps=100)
    resumed = resume(run, config=longer, view=Quiet(), make_env=breaking("nowhere"))
    assert (resumed.reason, resumed.env_step) == ("finished", 100)


def test_envs_are_closed_if_a_run_can_not_be_made(tmp_path):
    closed = []

    class Closes(SerialBatch):
        def close(self):
            closed.append(self)

    config = with_all(short(), loss__augmentation=("shift",))
    with pytest.raises(ValueError, match="needs images"):
        envs = breaking("observation", batch=Closes)
        train(config, tmp_path / "run", view=Quiet(), make_env=envs)
    assert len(closed) == 1


def test_a_run_with_custom_envs_is_not_resumed_with_others(tmp_path):
    folder, envs = tmp_path / "run", breaking("nowhere")
    train(short(60), folder, view=Quiet(), make_env=envs)  # env.id is of another environment
    for call in (resume, load_agent, lambda run: evaluate(run, episodes=1)):
        with pytest.raises(RunError, match="started with custom make_env: pass the same"):
            call(folder)
    assert resume(folder, config=short(80), view=Quiet(), make_env=envs).env_step == 80
    with pytest.raises(RunError, match="custom make_env"):
        resume(folder)
    assert load_agent(folder, make_env=envs).spec.name == "breaks"


def test_a_run_with_custom_networks_is_not_resumed_with_others(tmp_path):
    config, spec = short(num_env_steps=60), EnvSpec(observation_shape=(4,), action=Discrete(2))
    larger = replace(config.model, latent_state_dim=48)

    def networks():
        return make_model(spec, config.model, frame_stack=2)

    train(config, tmp_path / "run", view=Quiet(), networks=networks)
    with pytest.raises(RunError, match=r"custom networks: .*networks=\.\.\."):
        resume(tmp_path / "run", view=Quiet())
    with pytest.raises(RunError, match="belongs to other networks or another optimizer"):
        resume(tmp_path / "run", view=Quiet(), networks=lambda: make_model(spec, larger))
    assert resume(tmp_path / "run", view=Quiet(), networks=networks).reason == "finished"


# ---------------------------------------------------------------------------- disks and memory


def test_a_full_disk_is_reported_and_the_run_continues(finished, tmp_path, monkeypatch):
    """Checkpoints, rows and trees are lost."""
    save, write, failed, unwritten = Checkpoints.save, JsonLines.write, [], []

    def failing_save(self, update, *args, **kwargs):
        if update in (14, 21):
            failed.append(update)
            raise CheckpointError("there", "was not saved: No space left on device", available=[])
        return save(self, update, *args, **kwargs)

    def full(self, row):
        if row["kind"] == "train" and len(unwritten) < 3:
            unwritten.append(row["update"])
            raise OSError(28, "No space left on device", self.path)
        write(self, row)

    def no_room(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Checkpoints, "save", failing_save)
    monkeypatch.setattr(JsonLines, "write", full)
    monkeypatch.setattr(run_module, "save_tree", no_room)
    view, folder = Quiet(), tmp_path / "run"
    assert train(short(), folder, view=view).reason == "finished" and failed[0] == 14 and unwritten
    assert any("No space left" in line for line in view.messages)
    assert any("tree of step 5" in line for line in view.messages)
    found = [(row["kind"], row["update"]) for row in rows(folder)]
    assert found == [(row["kind"], row["update"]) for row in rows(finished)]
    assert same(state_of(finished), state_of(folder))


@pytest.mark.parametrize("is_exact", [True, False])
def test_a_run_warns_if_its_matrix_products_are_inexact(tmp_path, monkeypatch, is_exact):
    monkeypatch.setattr(running, "request_exact_products", lambda: is_exact)
    view = Quiet()
    train(short(60), tmp_path / "run", view=view)
    assert (running.INEXACT in view.messages) is not is_exact
    assert "MKL_CBWR=AUTO" in running.INEXACT


# ------------------------------------------------------------------------------ a run that fails


class Raises(ValueProbe):
    """Raises at a step."""

    steps = 0

    def step(self, action):
        Raises.steps += 1
        if Raises.steps == 20 * 4:
            raise KeyError("no piece stands there")
        return super().step(action)


def fail(folder, every_updates):
    config = with_all(short(100), env__frame_stack=1, collect__rollout_length=3)
    often = dict(checkpoint__every_updates=every_updates, evaluate__every_env_steps=10_000)
    Raises.steps = 0
    with pytest.raises(KeyError, match="no piece stands there") as caught:
        train(with_all(config, **often), folder, make_env=env_factory(Raises), view=Quiet())
    return caught.value


def test_an_error_is_a_row_and_the_state_of_the_run(tmp_path, capsys):
    """Lists and reports show it, its note names the checkpoint, and a resume clears it."""
    run = tmp_path / "run"
    text = "".join(traceback.format_exception(fail(run, every_updates=2)))
    assert "The run failed after update" in text
    assert f"`raffia resume {run}` continues from there" in text.splitlines()[-1]
    row = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    error, note = row["error"].split("\n")
    assert row["kind"] == "error" and error == "KeyError: 'no piece stands there'"
    assert note.startswith("the run's environment ") and "since the reset with seed" in note
    assert summarise(run).state == read_report(run).state == "failed"
    assert row["update"] > 0 and row["env_step"] > 40
    assert main(["list", "runs", "--in", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "failed" in shown and "killed" not in shown
    page = write_report([run]).read_text()
    assert "✗ failed" in page and "no piece stands there" in page
    Raises.steps = -10_000
    assert resume(run, make_env=env_factory(Raises), view=Quiet()).reason == "finished"
    assert read_report(run).state == "finished" and not read_report(run).failure


def test_a_run_with_a_failing_environment_is_saved_after_its_last_update(tmp_path):
    """The error comes within a rollout, which is dropped."""
    error = fail(tmp_path / "run", every_updates=1_000)
    update = rows(tmp_path / "run", "error")[-1]["update"]
    assert update > 5 and f"The last checkpoint is of update {update}:" in error.__notes__[-1]
    Raises.steps = -10_000
    assert resume(tmp_path / "run", make_env=env_factory(Raises), view=Quiet()).reason == "finished"
    config = read_run(tmp_path / "run")
    Raises.steps = -10_000
    train(config, tmp_path / "straight", make_env=env_factory(Raises), view=Quiet())
    assert rows(tmp_path / "run") == rows(tmp_path / "straight")
    (one, tensors), (other, expected) = map(last_state, (tmp_path / "run", tmp_path / "straight"))
    assert one.update == other.update
    assert all(same(tensors[name], expected[name]) for name in expected)
