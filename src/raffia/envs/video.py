"""Pictures of an episode as one file: a GIF, which any browser shows, or an MP4, which is smaller.

Files come whole or not at all: what is cut short leaves the old file, or none.
"""

from __future__ import annotations

import importlib.util
import io
import math
import os
import pathlib
import subprocess
import tempfile
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from raffia.envs.resize import area
from raffia.files import write_atomically
from raffia.hints import check_range

if TYPE_CHECKING:
    from PIL.Image import Image

# Arrays below: a few threads for each of many small steps would wait for each other.
Array = npt.NDArray[Any]


SUFFIXES = (".gif", ".mp4")
NUM_COLOURS = 128  # of a GIF; the console of Atari has as many
NUM_SAMPLES = 32  # frames that determine the colours, where there are too many
LONGEST = 2**16 - 1  # hundredths of a second, of two bytes
SHORTEST = 2  # hundredths of a second: browsers show frames that are shorter at a tenth of a second


def save_video(
    frames: Tensor,  # uint8 [T, H, W, 3]
    path: str | os.PathLike[str],
    fps: float = 30,
    *,
    every: int = 1,
    max_side: int = 0,
) -> pathlib.Path:
    """Write frames as a GIF or an MP4, depending on the suffix of the path; return the path.

    fps: frames a second, as they were played. GIFs show at most 50: of more, some are left out.
    every: only each so many-th frame is written; the film lasts as long as before.
    max_side: larger frames are made smaller until neither side has more pixels; 0: as they are.

    A GIF of CartPole, 500 frames of 600 x 400, has 0.3 MB.

    >>> import tempfile
    >>> frames = torch.zeros(3, 20, 30, 3, dtype=torch.uint8)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_video(frames, f"{folder}/dark.gif", fps=10).name
    'dark.gif'
    """
    target = pathlib.Path(path)
    write = _writer(target.suffix)
    frames = torch.as_tensor(frames)  # arrays of numpy, too
    if frames.ndim != 4 or frames.shape[-1] != 3 or frames.dtype != torch.uint8:
        raise ValueError(
            f"frames must be uint8 [T, H, W, 3]; got {frames.dtype} {list(frames.shape)}. Convert "
            "grey ones [T, H, W] by frames.unsqueeze(-1).expand(-1, -1, -1, 3)"
        )
    if 0 in frames.shape:
        raise ValueError(f"frames of {list(frames.shape)} show nothing: no dimension may be 0")
    if not 0 < fps < float("inf"):
        raise ValueError(f"fps={fps} must be above 0")
    check_range("every", every, 1)
    shown = frames[::every].cpu()
    if max_side and max(shown.shape[1:3]) > max_side:
        shown = torch.stack([shrunk(frame, max_side) for frame in shown])
    write_atomically(target, write(shown.numpy(), fps / every))
    return target


def shrunk(
    picture: Tensor,  # uint8 [H, W, 3]
    max_side: int,
) -> Tensor:
    """The picture, smaller if one of its sides is longer than `max_side` pixels.

    >>> shrunk(torch.zeros(400, 600, 3, dtype=torch.uint8), 300).shape
    torch.Size([200, 300, 3])
    """
    check_range("max_side", max_side, 1)
    height, width = picture.shape[:2]
    longest = max(height, width)
    if longest <= max_side:
        return picture
    sides = (max(1, round(side * max_side / longest)) for side in (height, width))
    channels_first = area(picture, *sides).numpy()
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(channels_first, 0, -1)))


def require_writer(suffix: str) -> None:
    """Raise an error early if files with this suffix cannot be written on this machine.

    >>> require_writer(".gif")
    >>> require_writer(".avi")
    Traceback (most recent call last):
        ...
    ValueError: the name of a video must end in .gif or .mp4, not in '.avi'
    """
    _writer(suffix)


def _writer(suffix: str) -> Callable[[Array, float], bytes]:
    match suffix.lower():
        case ".gif":
            write, package = _gif, "PIL"
        case ".mp4":
            write, package = _mp4, "imageio_ffmpeg"
        case _:
            raise ValueError(
                f"the name of a video must end in {' or '.join(SUFFIXES)}, not in {suffix!r}"
            )
    if importlib.util.find_spec(package) is None:
        project = {"PIL": "Pillow", "imageio_ffmpeg": "imageio-ffmpeg"}[package]
        raise ImportError(f"{suffix} files need {project}: pip install 'raffia[video]'")
    return write


def _gif(frames: Array, fps: float) -> bytes:
    if 100 / fps > LONGEST:
        raise ValueError(
            f"a GIF shows a frame for {LONGEST / 100} seconds at most: fps={fps:g} must be "
            f"{100 / LONGEST:.2g} or more"
        )
    every = max(1, math.ceil(fps * SHORTEST / 100))
    frames, step = frames[::every], 100 * every / fps  # the step in hundredths of a second
    ends = [round(step * (t + 1)) for t in range(len(frames))]
    durations = [10 * (end - start) for start, end in zip([0, *ends], ends, strict=False)]
    pictures = _in_few_colours(frames)
    file = io.BytesIO()
    pictures[0].save(
        file, "GIF", save_all=True, append_images=pictures[1:], duration=durations, loop=0
    )
    return file.getvalue()


def _in_few_colours(frames: Array) -> list[Image]:
    """The frames as images with one palette for all: exact if it has room for all colours."""
    from PIL import Image

    number = np.zeros(1 << 24, np.uint8)  # of each colour that there could be
    for frame in frames:
        number[_packed(frame)] = 1
    colours = number.nonzero()[0]
    if len(colours) > 256:
        chosen = np.linspace(0, len(frames) - 1, NUM_SAMPLES).astype(np.int64)
        mosaic = Image.fromarray(frames[np.unique(chosen)].reshape(-1, *frames.shape[2:]))
        palette = mosaic.quantize(NUM_COLOURS, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
        # No dithering: it changes from frame to frame, and only what changes is stored.
        plain = Image.Dither.NONE
        return [Image.fromarray(frame).quantize(palette=palette, dither=plain) for frame in frames]
    number[colours] = np.arange(len(colours))
    parts = np.stack([colours >> 16, colours >> 8 & 255, colours & 255], -1)
    pictures = [Image.fromarray(number[_packed(frame)]) for frame in frames]
    for picture in pictures:
        picture.putpalette(parts.flatten().tolist())
    return pictures


def _packed(frame: Array) -> Array:
    red, green, blue = np.moveaxis(frame.astype(np.int32), -1, 0)
    return red << 16 | green << 8 | blue


def _mp4(frames: Array, fps: float) -> bytes:
    import imageio_ffmpeg

    # Half as many colour points as pixels each way: sides must be even, so a last line may repeat.
    height, width = frames.shape[1:3]
    frames = np.pad(frames, [(0, 0), (0, height % 2), (0, width % 2), (0, 0)], mode="edge")
    height, width = frames.shape[1:3]
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "film.mp4")
        raw = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", str(fps)]
        coded = ["-c:v", "libx264", "-crf", "20", "-pix_fmt", "yuv420p", "-movflags", "+faststart"]
        command = [imageio_ffmpeg.get_ffmpeg_exe(), "-loglevel", "error", *raw, "-i", "-", *coded]
        pixels = frames.tobytes()
        done = subprocess.run([*command, str(path)], input=pixels, capture_output=True)
        if done.returncode:
            raise OSError(f"ffmpeg could not write the video: {done.stderr.decode().strip()}")
        return path.read_bytes()
