"""Episodes as GIF and MP4: round trips."""

import importlib.util
import os
import re
import subprocess

import numpy as np
import pytest
import torch

from raffia.envs import video
from raffia.envs.video import require_writer, save_video, shrunk

Image = pytest.importorskip("PIL.Image", reason="extra video is not installed")


def moving_dot(num=6, height=20, width=30):
    frames = torch.full((num, height, width, 3), 250, dtype=torch.uint8)
    for t in range(num):
        frames[t, 5:9, 2 + t : 6 + t] = torch.tensor([4 * t, 0, 200], dtype=torch.uint8)
    return frames


def read_gif(path):
    """The displayed frames, and the duration of each in ms."""
    with Image.open(path) as film:
        frames, times = [], []
        for t in range(film.n_frames):
            film.seek(t)
            times.append(film.info["duration"])
            frames.append(torch.from_numpy(np.array(film.convert("RGB"))))
        assert film.info["loop"] == 0
    return torch.stack(frames), times


def read_mp4(path):
    """The frames, and ffmpeg's description of the file."""
    imageio_ffmpeg = pytest.importorskip("imageio_ffmpeg", reason="extra video is not installed")
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-i", str(path)]
    raw = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    done = subprocess.run([*command, *raw], capture_output=True, check=True)
    about = done.stderr.decode()
    width, height = map(int, re.search(r"yuv420p.*?, (\d+)x(\d+)", about).groups())
    pixels = torch.frombuffer(bytearray(done.stdout), dtype=torch.uint8)
    return pixels.view(-1, height, width, 3), about


def test_a_gif_round_trip(tmp_path):
    frames, path = moving_dot(), tmp_path / "a.gif"
    assert save_video(frames, path, fps=20) == path
    read, times = read_gif(path)
    assert torch.equal(read, frames) and times == [50] * 6
    assert torch.equal(read_gif(save_video(frames.numpy(), path))[0], frames)
    _, times = read_gif(save_video(frames.repeat_interleave(4, 0), path, fps=10))
    assert sum(times) == 2400  # repeated frames included
    read, times = read_gif(
        save_video(moving_dot(7), tmp_path / "b.gif", fps=20, every=3, max_side=15)
    )
    assert read.shape == (3, 10, 15, 3) and times == [150] * 3
    shade = torch.arange(200, dtype=torch.uint8)
    many = torch.broadcast_tensors(shade, shade.flip(0)[:, None], shade[:1, None])
    many = torch.stack(many, -1)  # of colours
    read, _ = read_gif(save_video(many[None], path))
    assert (read[0].int() - many.int()).abs().float().mean() < 8
    first = frames[0]
    assert shrunk(first, 30) is first
    assert shrunk(first.transpose(0, 1), 10).shape == (10, 7, 3)
    assert shrunk(many[:1], 10).shape == (1, 10, 3)


def test_an_mp4(tmp_path):
    frames = moving_dot(12, height=21, width=31)  # odd sides
    path = save_video(frames, tmp_path / "a.mp4", fps=6)
    read, about = read_mp4(path)
    assert read.shape == (12, 22, 32, 3)
    assert "h264" in about and " 6 fps" in about and "Duration: 00:00:02.00" in about
    assert (read[:, :21, :31].float() - frames.float()).abs().mean() < 4
    assert {entry.name for entry in tmp_path.iterdir()} == {"a.mp4"}


@pytest.mark.parametrize("suffix", ["gif", "mp4"])
def test_the_old_file_stays_if_writing_fails(tmp_path, monkeypatch, suffix):
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(b"old")

    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            save_video(moving_dot(), path)
    if suffix == "mp4":
        imageio_ffmpeg = pytest.importorskip("imageio_ffmpeg", reason="extra video is missing")
        monkeypatch.setattr(imageio_ffmpeg, "get_ffmpeg_exe", lambda: "false")
        with pytest.raises(OSError, match="ffmpeg could not write the video"):
            save_video(moving_dot(), path)
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"path": "a.avi"}, r"the name of a video must end in .gif or .mp4, not in '.avi'"),
        ({"path": "a"}, "not in ''"),
        ({"frames": moving_dot()[..., 0]}, r"\[T, H, W, 3\]; got torch.uint8 \[6, 20, 30\]"),
        ({"frames": moving_dot().float()}, "got torch.float32"),
        ({"frames": moving_dot()[:0]}, "show nothing"),
        ({"fps": 0}, "fps=0 must be above 0"),
        ({"fps": 1e-3}, "a frame for 655.35 seconds at most: fps=0.001 must be 0.0015 or more"),
        ({"every": 0}, "every=0 must be at least 1"),
        ({"max_side": -1}, "max_side=-1 must be at least 1"),
    ],
)
def test_errors(tmp_path, change, message):
    options = {"frames": moving_dot(), "path": "a.gif", "fps": 10} | change
    options["path"] = tmp_path / options["path"]
    with pytest.raises(ValueError, match=message):
        save_video(**options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("suffix", "package", "project"),
    [(".gif", "PIL", "Pillow"), (".mp4", "imageio_ffmpeg", "imageio-ffmpeg")],
)
def test_without_the_extra(monkeypatch, tmp_path, suffix, package, project):
    find = importlib.util.find_spec
    found = lambda name: None if name == package else find(name)  # noqa: E731
    monkeypatch.setattr(video.importlib.util, "find_spec", found)
    message = re.escape(f"{suffix} files need {project}: pip install 'raffia[video]'")
    with pytest.raises(ImportError, match=message):
        require_writer(suffix)
    with pytest.raises(ImportError, match=message):
        save_video(moving_dot(), tmp_path / f"a{suffix}")
