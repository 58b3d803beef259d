"""Recorded episodes: the frames of the video, against a drawing by hand."""

import pytest
import torch

from raffia.train import record
from raffia.train.record import CURVE, MARGIN, PANEL, EpisodeRecorder, annotated
from tests.envs.test_video import read_gif


def test_frames_alone_and_save_starts_a_new_episode(tmp_path):
    recorder = EpisodeRecorder(tmp_path / "episodes", fps=10)
    for name, shades in (("000000004_r12.5", (10, 20, 30)), ("b", (1, 2))):
        for shade in shades:
            recorder.frame(picture(shade))
        path = recorder.save(name)
        assert path == tmp_path / "episodes" / f"{name}.gif"
        frames, times = read_gif(path)
        assert torch.equal(frames, torch.stack([picture(shade) for shade in shades]))
        assert times == [100] * len(shades)
    with pytest.raises(ValueError, match=r"no picture was taken; call frame\(picture\)"):
        recorder.save("third")


NONE = float("nan")


def picture(shade, height=170, width=160):
    return torch.full((height, width, 3), shade, dtype=torch.uint8)


def letters(panel):
    """A panel [h, w, 3] as lines of letters."""
    names = dict(GROUND=".", AXIS="_", CURVE="c", BAR="b", BEST="B")
    names = {getattr(record, colour): letter for colour, letter in names.items()}
    return ["".join(names[tuple(pixel.tolist())] for pixel in line) for line in panel]


def test_bars_by_hand():
    pictures = torch.zeros(2, 5, 2 * MARGIN + 10, 3, dtype=torch.uint8)
    policies = [torch.tensor([0.25, 0.75]), None]
    panel = annotated(pictures, torch.full((2,), NONE), policies)[:, 5:]
    room = PANEL - 2 * MARGIN - 1  # 39 lines above the axis
    low, high = round(0.25 * room), round(0.75 * room)
    side = "." * MARGIN
    blank = "." * (2 * MARGIN + 10)
    lines = [blank] * (MARGIN + room - high)
    lines += [side + "....." + "BBBBB" + side] * (high - low)
    lines += [side + "bbbb." + "BBBBB" + side] * low
    lines += [side + "_" * 10 + side] + [blank] * MARGIN
    assert letters(panel[0]) == lines
    lines[MARGIN : MARGIN + room] = [blank] * room
    assert letters(panel[1]) == lines


def test_the_curve_grows():
    pictures = torch.zeros(3, 5, 2 * MARGIN + 3, 3, dtype=torch.uint8)
    panel = annotated(pictures, torch.tensor([0.0, 4.0, 2.0]), [None] * 3)[:, 5:]
    room = PANEL - 2 * MARGIN - 1
    drawn = (panel == torch.tensor(CURVE, dtype=torch.uint8)).all(-1)
    drawn = drawn[:, MARGIN : MARGIN + room, MARGIN:-MARGIN]
    last = torch.zeros(room, 3, dtype=torch.bool)
    last[room - 1, 0] = True  # the lowest value
    last[:, 1] = True  # up to the highest, without a hole
    last[: room // 2 + 1, 2] = True  # and half down
    for t in range(3):
        expected = last.clone()
        expected[:, t + 1 :] = False
        assert torch.equal(drawn[t], expected)
    assert drawn.sum() == drawn[0].sum() + drawn[1].sum() + drawn[2].sum()


def test_frames_of_long_episodes_are_dropped_and_the_duration_stays(tmp_path):
    recorder = EpisodeRecorder(tmp_path, fps=20, max_frames=6)
    for t in range(30):
        recorder.frame(picture(8 * t), value=float(t))
    frames, times = read_gif(recorder.save("a"))
    assert frames[:, 0, 0, 0].tolist() == [0, 64, 128, 192]  # every eighth
    assert times == [400] * 4


def test_sizes(tmp_path):
    recorder = EpisodeRecorder(tmp_path, max_side=300)
    sizes = {(400, 600): (200, 300), (48, 48): (192, 192), (7, 6): (161, 138)}
    for size, expected in sizes.items():
        recorder.frame(picture(3, *size))
        assert read_gif(recorder.save("a"))[0].shape[1:3] == expected


def test_an_mp4(tmp_path):
    pytest.importorskip("imageio_ffmpeg", reason="extra video is not installed")
    recorder = EpisodeRecorder(tmp_path, suffix="mp4")
    recorder.frame(picture(1), value=1.0, policy=torch.full((400,), 1 / 400))  # more than pixels
    path = recorder.save("a")
    assert path.suffix == ".mp4" and path.read_bytes()[4:8] == b"ftyp"


def test_wrong_frames_and_options_are_refused(tmp_path):
    recorder = EpisodeRecorder(tmp_path)
    with pytest.raises(ValueError, match=r"render returned None.*render=True"):
        recorder.frame(None)
    recorder.frame(picture(1))
    with pytest.raises(ValueError, match=r"a picture of \[180, 160, 3\] does not fit"):
        recorder.frame(picture(1, 180))
    for options, message in (
        ({"suffix": "webm"}, "name of a video must end in .gif or .mp4, not in '.webm'"),
        ({"max_frames": 1}, "max_frames=1 must be at least 2"),
    ):
        with pytest.raises(ValueError, match=message):
            EpisodeRecorder(tmp_path, **options)
