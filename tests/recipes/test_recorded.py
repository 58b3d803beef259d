"""Recorded episodes fill the replay of EfficientZero before the first update."""

import json
from contextlib import closing
from dataclasses import replace

import pytest
import torch

from raffia.data import MalformedDataError, write_json_lines
from raffia.envs import Box, Discrete, EnvSpec, make_env
from raffia.recipes import efficientzero
from raffia.recipes.efficientzero import PRESETS
from raffia.recipes.efficientzero.config import RecordedDataConfig
from raffia.recipes.efficientzero.data import recorded_steps
from raffia.report import write_report
from raffia.tensordict import TensorDict
from raffia.train import RunError, TrainingSession
from tests.marks import slow_among
from tests.recipes.diary import Diary
from tests.recipes.layouts import MEMBERS, SHARDS, experiment, layout, trained
from tests.recipes.runs import Quiet, last_state, refused, rows, same, short, terminate, with_all
from tests.recipes.timeline import first_difference, timeline

T = 30  # steps of an episode of `write`
BASE = short(88)


def draws(seed=0):
    return torch.Generator().manual_seed(seed)


def write(path, num=6, steps=T, **columns):
    """Episodes with CartPole's shapes, alternately terminated and truncated, and extra columns."""
    draw = draws()
    with open(path, "w") as file:
        for number in range(num):
            last = [False] * (steps - 1)
            episode = {
                "obs": torch.randn(steps + 1, 4, generator=draw).tolist(),
                "action": torch.randint(2, (steps,), generator=draw).tolist(),
                "reward": [1.0] * steps,
                "terminated": [*last, number % 2 == 0],
                "truncated": [*last, number % 2 == 1],
                **columns,
            }
            file.write(json.dumps({k: v for k, v in episode.items() if v is not None}) + "\n")
    return str(path)


def learning_from(run, *files, num_updates=0, **settings):
    """The run with recorded episodes; from these alone if num_updates is given."""
    data = RecordedDataConfig(files=files, num_updates=num_updates)
    if num_updates:
        run = with_all(run, targets__reanalyze_ratio=1.0, evaluate__every_updates=4)
    return with_all(replace(run, data=data), **settings)


def alone(*files, run=BASE, num_updates=9, **settings):
    return learning_from(run, *files, num_updates=num_updates, **settings)


@pytest.fixture
def file(tmp_path):
    return write(tmp_path / "recorded.jsonl")


# ------------------------------------------------------------------- contents of the replay


def test_a_run_s_own_episodes_round_trip(tmp_path):
    """Except search results: the policy is the taken action, and the value is unknown."""
    config, folder = with_all(short(60), replay__batch_size=4), tmp_path / "own"
    config = with_all(config, env__max_episode_steps=7, collect__rollout_length=1)
    with experiment(config, folder) as run, closing(TrainingSession(run)) as session:
        session.run()
        buffer = run.steps.buffers[0]
        starts = torch.arange(buffer.storage.total)
        segments = buffer.read(starts[buffer.contains(starts)])
    # Each episode once: from a start whose frame before it is the same one.
    stacks = segments["observation"]
    first = (stacks[:, 0, 0] == stacks[:, 0, 1]).flatten(1).all(1)
    episodes = []
    for row in first.nonzero()[:, 0].tolist():
        num = int(segments["valid_step"][row].sum())
        frames = stacks[row, : num + 1, -1]
        flags = {k: segments[k][row, :num] for k in ("action", "reward", "terminated", "truncated")}
        ended = bool(flags["terminated"][-1] | flags["truncated"][-1])
        if ended and num == 7:
            nxt = TensorDict(obs=frames[1:], batch_size=[num])
            episodes.append(TensorDict({"obs": frames[:-1], **flags, "next": nxt}, [num]))
    assert len(episodes) >= 4
    path = tmp_path / "own.jsonl"
    write_json_lines(path, episodes)

    with experiment(learning_from(config, str(path)), tmp_path / "again") as run:
        run.fill_replays()
        again = run.steps.buffers[0]
        chosen = [again.read(torch.tensor([8 * number]))[0] for number in range(len(episodes))]
        assert (again.num_episodes, len(again)) == (len(episodes), 7 * len(episodes))
    firsts = (first & (segments["valid_step"].sum(-1) == 7)).nonzero()[:, 0].tolist()
    for row, segment in zip(firsts, chosen, strict=False):
        for key in ("observation", "action", "reward", "valid", "valid_step", "mask", "discount"):
            assert segment[key].equal(segments[key][row]), key
            assert segment[key].dtype == segments[key].dtype
        taken = torch.nn.functional.one_hot(segment["action"][:7], 2).float()
        assert segment["policy"][:7].equal(taken) and not segment["value"].any()


BOUNDS = (-2.0, 0.0), (2.0, 1.0)
CONTINUOUS = EnvSpec(observation_shape=(2,), action=Box(*BOUNDS))
IMAGES = EnvSpec(
    observation_shape=(3, 4, 5), action=Discrete(3), observation_dtype=torch.uint8, masked=True
)


def episode_of(obs, action, **more):
    no = torch.zeros(len(action), dtype=torch.bool)
    flags = {"reward": torch.ones(len(action)) * 3, "terminated": no, "truncated": no}
    after = {k: v[1:] for k, v in {"obs": obs, **more}.items()}
    before = {k: v[:-1] for k, v in {"obs": obs, **more}.items()}
    return TensorDict({**before, "action": action, **flags, "next": after}, [len(action)])


def test_continuous_actions_are_the_first_sampled_action():
    taken = torch.tensor([[0.5, 0.25], [-2.0005, 1.0]], dtype=torch.float64)
    config = with_all(BASE, search__num_sampled_actions=5)
    steps, again, other = (
        recorded_steps(episode_of(torch.zeros(3, 2), taken), config, CONTINUOUS, draws(seed))
        for seed in (0, 0, 1)
    )
    assert steps["action"].equal(torch.tensor([[0.5, 0.25], [-2.0, 1.0]]))  # clipped
    assert steps["sampled_actions"].shape == (2, 5, 2)
    assert steps["sampled_actions"][:, 0].equal(steps["action"])
    assert steps["policy"].equal(torch.eye(5)[:1].expand(2, 5))
    (low, high), others = map(torch.tensor, BOUNDS), steps["sampled_actions"][:, 1:]
    assert ((others >= low) & (others <= high)).all() and others.std(1).min() > 0.01
    assert same(steps, again) and not same(steps, other)


def test_images_and_masks_are_converted():
    obs = torch.randint(256, (3, 4, 5, 3), generator=draws())
    mask = torch.ones(3, 3, dtype=torch.bool)
    episode = episode_of(obs, torch.tensor([[1], [2]]), action_mask=mask)
    atari = with_all(BASE, env__id="atari/pong")
    for config, reward in ((BASE, 3.0), (atari, 1.0)):
        steps = recorded_steps(episode, config, IMAGES, torch.Generator())
        assert steps["observation"].equal(obs[:2].movedim(-1, 1).to(torch.uint8))
        assert steps["next", "action_mask"].equal(mask[1:])
        assert steps["action"].tolist() == [1, 2] and steps["reward"].tolist() == [reward] * 2


FILLED = {  # the run, its kind of replay, and the steps in each buffer
    "one": (BASE, "shared", [180]),
    "shards": (with_all(SHARDS, replay__capacity=400), "shared", [90, 90]),
    "members": (MEMBERS, "shared", [180]),
    "members with replays": (MEMBERS, "own", [180] * 4),
}


@pytest.mark.parametrize(("base", "replay", "expected"), FILLED.values(), ids=FILLED)
@pytest.mark.parametrize("num_updates", [0, 3])
def test_every_kind_of_replay_is_filled(base, replay, expected, num_updates, file, tmp_path):
    config = learning_from(base, file, num_updates=num_updates, population__replay=replay)
    with experiment(config, tmp_path / "run") as run, closing(TrainingSession(run)) as session:
        state = session.start()
        assert [len(buffer) for buffer in run.steps.buffers] == expected
        run.step(state)
        has_collected = sum(expected) < sum(len(buffer) for buffer in run.steps.buffers)
        assert has_collected is not bool(num_updates)


# ------------------------------------------------------------------------ runs


def test_a_run_reports_the_recorded_episodes(file, tmp_path):
    view = Quiet()
    result = efficientzero.train(alone(file), tmp_path / "run", view=view)
    assert (result.reason, result.update, result.env_step) == ("finished", 9, None)
    message = "6 episodes of 180 steps from "
    assert any(message in line and "mean return 30 (30 to 30)" in line for line in view.messages)
    (start,) = rows(tmp_path / "run", "start")
    assert start["recorded"]["steps"] == 180 and start["recorded"]["mean_return"] == 30.0
    evaluations = rows(tmp_path / "run", "evaluate")
    assert [row["update"] for row in evaluations] == [4, 8, 9]
    assert not rows(tmp_path / "run", "episode")
    page = write_report([tmp_path / "run"]).read_text()
    assert "recorded episodes" in page and "180 steps, mean return 30" in page
    assert "Dialogues" not in page and "at 9 updates" in page and "after 9 updates" in page
    agent = efficientzero.load_agent(tmp_path / "run")
    assert agent.spec.action.n == 2


RUNS = {
    "collects": lambda file: learning_from(short(88), file),
    "alone": alone,
    "on disk": lambda file: alone(file, replay__on_disk=True),
}


@pytest.mark.parametrize("name", slow_among(RUNS, "collects", "on disk"))
def test_a_stopped_run_is_resumed_without_the_files(name, tmp_path):
    path, at = tmp_path / "recorded.jsonl", 5
    config = RUNS[name](write(path))
    efficientzero.train(config, tmp_path / "straight", view=Quiet())
    stopped = efficientzero.train(config, tmp_path / "run", view=Quiet({at: terminate}))
    assert (stopped.reason, stopped.update) == ("stopped", at)
    path.unlink()
    assert efficientzero.resume(tmp_path / "run", view=Quiet()).reason == "finished"
    (expected, parts), (checkpoint, found) = map(
        last_state, (tmp_path / "straight", tmp_path / "run")
    )
    assert expected.update == checkpoint.update and all(same(parts[k], found[k]) for k in parts)
    assert rows(tmp_path / "straight", "evaluate") == rows(tmp_path / "run", "evaluate")


def test_a_run_from_files_can_be_made_longer_but_not_start_collecting(file, tmp_path):
    config, folder = alone(file), tmp_path / "run"
    efficientzero.train(config, folder, view=Quiet())
    longer = with_all(config, collect__extra_updates=3)
    assert efficientzero.resume(folder, config=longer, view=Quiet()).update == 12
    message = "data.num_updates cannot be changed: .* started with other values"
    with pytest.raises(RunError, match=message):
        collecting = with_all(longer, data__num_updates=0)
        efficientzero.resume(folder, config=collecting, view=Quiet())


def renamed(config, path):
    text = (path.parent / "recorded.jsonl").read_text().replace('"action"', '"act"')
    other = path.parent / "renamed.jsonl"
    other.write_text(text)
    return with_all(config, data__files=(str(other),), data__columns=("act=action",))


EFFECTS = {  # for each setting: its change, and the first event that differs
    "data.files": (lambda c, p: with_all(c, data__files=c.data.files * 2), "drawn"),
    "data.columns": (renamed, None),
    "data.num_updates": (lambda c, p: with_all(c, data__num_updates=10), "drawn"),
    "evaluate.every_updates": (lambda c, p: with_all(c, evaluate__every_updates=5), "drawn"),
}


def test_a_setting_takes_effect_at_the_right_event(tmp_path):
    path = tmp_path / "recorded.jsonl"
    config = alone(write(path), num_updates=6)
    unchanged = timeline(config, tmp_path / "plain")
    for name, (change, kind) in EFFECTS.items():
        other = timeline(change(config, path), tmp_path / name)
        assert first_difference(unchanged, other) == kind, name


def test_missing_flags_are_completed_if_the_setting_allows(tmp_path):
    path = write(tmp_path / "a.jsonl", truncated=[False] * T, terminated=None)
    config = with_all(learning_from(short(88), path))
    with experiment(with_all(config, data__complete=True), tmp_path / "run") as run:
        run.fill_replays()
        assert len(run.replay) == 180
    with (
        experiment(config, tmp_path / "refused") as run,
        pytest.raises(MalformedDataError, match="no 'terminated'.*--data.complete"),
    ):
        run.fill_replays()


@pytest.mark.slow
def test_a_run_is_the_same_in_any_layout(file, tmp_path):
    base = with_all(SHARDS, replay__capacity=400, reanalyzers__ahead=3)
    for config, workers in (
        (alone(file, run=base), layout("process", reanalyzers=2, evaluators=1)),
        (learning_from(base, file), layout(reanalyzers=1)),
        (alone(file, run=MEMBERS, reanalyzers__ahead=3), layout(reanalyzers=1)),
    ):
        name = f"{config.is_offline}{config.population.size}"
        expected = trained(config, tmp_path / name)
        assert trained(config, tmp_path / f"{name}-workers", **workers) == expected


# ------------------------------------------------------------------------ refusals

PARTS = {"a": [0.0] * (T + 1), "b": [0.0] * (T + 1)}
WRONG = [  # columns of the file, settings, and the error message
    ({"obs": [[0.0] * 3] * (T + 1)}, {}, r"episode 0: 'obs' has rows of shape \[3\], .* \[4\]"),
    ({"action": [0, 2] * (T // 2)}, {}, "actions are from 0 to 2, but .* has 2, from 0 to 1"),
    ({"action": [0.5] * T}, {}, "'action' has dtype torch.float32, but .* has torch.int"),
    ({"obs": PARTS}, {}, "has parts 'a', 'b'.* choose one"),
    ({"reward": None}, {}, "there is no 'reward'.*--data.columns"),
    ({}, {"replay__capacity": 185}, "replay.capacity=185 .*set --replay.capacity 186"),
    ({}, {"replay__batch_size": 181}, "fewer steps than a batch has.* --replay.batch_size 180"),
    ({"reward": [0.0] * T}, {}, "without a reward other than 0 there is nothing to learn"),
]


@pytest.mark.parametrize(("columns", "settings", "message"), WRONG)
def test_files_that_do_not_fit_are_refused_and_leave_no_folder(
    columns, settings, message, tmp_path
):
    path = write(tmp_path / "recorded.jsonl", **columns)
    for on_disk in (False, True):
        config = alone(path, replay__on_disk=on_disk, **settings)
        refused(config, tmp_path, message, (RunError, MalformedDataError))


def test_missing_and_empty_files_are_refused(file, tmp_path):
    (tmp_path / "empty.jsonl").touch()
    for name, message in (
        ("empty.jsonl", "empty.jsonl: line 1: the file is empty$"),
        ("none.jsonl", "there is no file or folder .*none.jsonl"),
    ):
        config = alone(file, str(tmp_path / name))
        refused(config, tmp_path, message, (RunError, MalformedDataError))


def test_actions_that_are_out_of_bounds_or_illegal_are_refused():
    obs, mask = torch.zeros(2, 4, 5, 3, dtype=torch.uint8), torch.eye(3, dtype=torch.bool)[:2]
    beyond, one = episode_of(torch.zeros(2, 2), torch.tensor([[0.5, 1.5]])), torch.tensor([1])
    for episode, spec, message in (
        (beyond, CONTINUOUS, r"are from \[0.5, 1.5\] to .* from \[-2.0, 0.0\] to \[2"),
        (episode_of(obs, one, action_mask=mask), IMAGES, "its 'action_mask' marks as"),
        (episode_of(obs, one), IMAGES, "no 'action_mask'.* NAME=action_mask"),
    ):
        with pytest.raises(RunError, match=message):
            recorded_steps(episode, BASE, spec, torch.Generator())


# ------------------------------------------------------------------------ learning


def test_policies_learned_from_files_are_searched_again(file, tmp_path):
    """Each target policy was searched with the target network of its update."""
    diary = Diary(alone(file), tmp_path / "run")
    interval = diary.config.targets.target_interval
    versions = [event[1] for event in diary.of("batch")]  # updates of the searching weights
    assert versions == [update - update % interval for update in range(9)]
    drawn = [segments["policy"][segments["valid_step"]] for segments in diary.segments]
    assert (drawn[0].max(-1).values == 1.0).all()  # the recorded actions
    for batch in diary.batches:
        policy = batch["target_policy"][batch["policy_mask"] > 0]
        counts = policy * diary.config.search.num_simulations
        torch.testing.assert_close(counts, counts.round())  # visits
        assert not (policy.max(-1).values == 1.0).all() and len(policy.unique(dim=0)) > 2
        assert len(policy) > len(batch)  # also after the first step
    # Searched policies are written back to the replay.
    assert all((policy.max(-1).values < 1.0).any() for policy in drawn[1:])


def record(path, num_episodes, seed=0):
    """Write episodes of random actions as another program would; the mean return."""
    draw, returns = draws(seed), []
    with closing(make_env(PRESETS["cartpole"].env, num_envs=1)) as env, open(path, "w") as file:
        for number in range(num_episodes):
            obs = [env.reset(torch.tensor([number]))["observation"][0].tolist()]
            columns = {name: [] for name in ("action", "reward", "terminated", "truncated")}
            while not (columns["terminated"] + columns["truncated"]).count(True):
                action = torch.randint(2, (1,), generator=draw)
                after = env.step(action).set("action", action)
                obs.append(after["observation"][0].tolist())
                for name, values in columns.items():
                    values.append(after[name].item())
            file.write(json.dumps({"obs": obs, **columns}) + "\n")
            returns.append(sum(columns["reward"]))
    return sum(returns) / len(returns)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_cartpole_is_learned_from_files_alone(tmp_path):
    """Much better than the recorded random policy: imitation alone would not do."""
    path = tmp_path / "recorded.jsonl"
    assert record(path, num_episodes=400) < 25
    run = with_all(PRESETS["cartpole"], targets__n_step=10)
    config = alone(str(path), run=run, num_updates=750, evaluate__target_return=150.0)
    config = with_all(config, evaluate__every_updates=250)
    result = efficientzero.train(config, tmp_path / "run", view=Quiet())
    assert result.reason == "target"
