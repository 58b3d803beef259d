"""Episodes as films: the environment's pictures, with the agent's values and policies below."""

from __future__ import annotations

import os
import pathlib

import torch
from torch import Tensor

from raffia.envs.video import require_writer, save_video, shrunk
from raffia.files import make_folder

SMALLEST = 160  # pixels: smaller pictures, as of boards, are shown in larger squares
PANEL = 48  # lines below the picture
MARGIN = 4  # around the curve and the bars
GROUND = (24, 26, 32)
AXIS = (70, 74, 86)
CURVE = (92, 200, 255)
BAR = (150, 156, 172)
BEST = (255, 176, 60)  # the action with the most visits


def require_picture(picture: Tensor | None) -> Tensor:
    """Return the picture; raise ValueError if there is none.

    >>> require_picture(None)
    Traceback (most recent call last):
    ...
    ValueError: there is no picture to record, because render returned None. Gymnasium ...
    """
    if picture is None:
        raise ValueError(
            "there is no picture to record, because render returned None. Gymnasium environments "
            "draw one if they are made with make_env(config, render=True); other environments "
            "cannot be recorded"
        )
    return picture


class EpisodeRecorder:
    """Collects the pictures of an episode while it is played, and writes them as one file.

    folder: gets the files; made with the first one.
    fps: pictures a second.
    suffix: "gif" or "mp4".
    max_side: larger pictures are made smaller, to so many pixels on the longer side.
    max_frames: of a longer episode every second picture is used, or every fourth and so on; the
        film lasts as long.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     recorder = EpisodeRecorder(folder, fps=10)
    ...     for value in (0.5, 0.8, 1.0):
    ...         picture = torch.zeros(200, 160, 3, dtype=torch.uint8)
    ...         recorder.frame(picture, value=value, policy=torch.tensor([0.9, 0.1]))
    ...     recorder.save("episode").name
    'episode.gif'
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        fps: float = 30,
        suffix: str = "gif",
        *,
        max_side: int = 320,
        max_frames: int = 1000,
    ) -> None:
        self._suffix = "." + suffix.removeprefix(".")
        require_writer(self._suffix)  # now, not after the episode
        if max_frames < 2:
            raise ValueError(f"max_frames={max_frames} must be at least 2")
        self._folder, self._fps = pathlib.Path(folder), fps
        self._max_side, self._max_frames = max_side, max_frames
        self._begin()

    def frame(
        self,
        picture: Tensor | None,  # uint8 [H, W, 3]
        value: float | None = None,
        policy: Tensor | None = None,  # [A], fractions of the visits
    ) -> None:
        """Record the picture of a state, and the agent's value and policy in it.

        picture: what `render` gives; None is refused.
        """
        picture = require_picture(picture)
        self._num_frames += 1
        if (self._num_frames - 1) % self._every:
            return
        scaled = _enlarged(shrunk(picture.cpu(), self._max_side))
        if self._pictures and scaled.shape != self._pictures[0].shape:
            raise ValueError(
                f"a picture of {list(picture.shape)} does not fit the earlier ones, which are "
                f"scaled as {list(self._pictures[0].shape)}: call save() between different "
                "environments"
            )
        self._pictures.append(scaled)
        self._values.append(float("nan") if value is None else float(value))
        self._policies.append(None if policy is None else policy.detach().cpu().float())
        if len(self._pictures) > self._max_frames:
            self._every *= 2
            for frames_of in (self._pictures, self._values, self._policies):
                del frames_of[1::2]

    def save(self, name: str) -> pathlib.Path:
        """Write the episode, and begin the next: the file's path.

        name: of the file, without its suffix.
        """
        if not self._pictures:
            raise ValueError(
                f"save({name!r}): no picture was taken; call frame(picture) at each step"
            )
        pictures, values = torch.stack(self._pictures), torch.tensor(self._values)
        frames = annotated(pictures, values, self._policies)
        make_folder(self._folder)
        path = save_video(frames, self._folder / f"{name}{self._suffix}", self._fps / self._every)
        self._begin()
        return path

    def _begin(self) -> None:
        self._pictures: list[Tensor] = []
        self._values: list[float] = []
        self._policies: list[Tensor | None] = []
        self._num_frames, self._every = 0, 1


def annotated(
    pictures: Tensor,  # uint8 [T, H, W, 3]
    values: Tensor,  # [T], NaN where there is none
    policies: list[Tensor | None],  # T of [A], fractions of the visits
) -> Tensor:
    """The pictures, with a panel below: the values so far, and a bar for each action.

    The curve runs from the lowest to the highest value of the episode; a bar of full height is a
    fraction of 1. Without values there is no curve, without policies no bars, without both no
    panel. Returns uint8 [T, H + 48, W, 3].

    >>> pictures = torch.zeros(2, 20, 30, 3, dtype=torch.uint8)
    >>> annotated(pictures, torch.tensor([1.0, 2.0]), [None, None]).shape
    torch.Size([2, 68, 30, 3])
    >>> annotated(pictures, torch.full((2,), float("nan")), [None, None]) is pictures
    True
    """
    has_values = not bool(values.isnan().all())
    known = [policy for policy in policies if policy is not None]
    if not has_values and not known:
        return pictures
    num, _, width, _ = pictures.shape
    panel = torch.tensor(GROUND, dtype=torch.uint8).expand(num, PANEL, width, 3).clone()
    middle = width // 2 if has_values and known else width if has_values else 0
    if has_values:
        _draw_values(_inside(panel[:, :, :middle]), values)
    if known:
        unknown = torch.zeros_like(known[0])
        policies_shown = torch.stack([unknown if policy is None else policy for policy in policies])
        _draw_policies(_inside(panel[:, :, middle:]), policies_shown)
    return torch.cat([pictures, panel], 1)


def _inside(part: Tensor) -> Tensor:
    """A part of the panel without its margin, and with an axis below."""
    part = part[:, MARGIN:-MARGIN, MARGIN:-MARGIN]
    part[:, -1] = torch.tensor(AXIS, dtype=torch.uint8)
    return part[:, :-1]


def _draw_values(part: Tensor, values: Tensor) -> None:
    """part: uint8 [T, h, w, 3], is drawn on; values: [T]."""
    num, height, width, _ = part.shape
    known = values.isnan().logical_not()
    newest = torch.where(known, torch.arange(num), -1).cummax(0).values
    values = values[
        newest.clamp_min(int(known.int().argmax()))
    ]  # where there is none, the last one
    low, high = values.min(), values.max()
    rise = (values - low) / (high - low) if high > low else torch.full_like(values, 0.5)
    column = torch.arange(width)
    time = column * (num - 1) // max(1, width - 1)  # of each column
    line = ((1 - rise[time]) * (height - 1)).round().long()
    before = torch.cat([line[:1], line[:-1]])
    top, bottom = torch.minimum(line, before), torch.maximum(line, before)
    row = torch.arange(height).unsqueeze(1)
    curve = (top <= row) & (row <= bottom)  # [h, w]
    so_far = time <= torch.arange(num).unsqueeze(1)  # [T, w]
    part[curve & so_far.unsqueeze(1)] = torch.tensor(CURVE, dtype=torch.uint8)


def _draw_policies(part: Tensor, policies_shown: Tensor) -> None:
    """part: uint8 [T, h, w, 3], is drawn on; policies: [T, A]."""
    _, height, width, _ = part.shape
    num_actions = policies_shown.shape[1]
    action = torch.arange(width) * num_actions // width  # of each column
    gap = torch.zeros(width, dtype=torch.bool)
    if width >= 4 * num_actions:
        gap[:-1] = action[1:] != action[:-1]
    tall = (policies_shown.clamp(0, 1) * height).round()[:, action].masked_fill(gap, 0)  # [T, w]
    bars = height - torch.arange(height).unsqueeze(1) <= tall.unsqueeze(1)  # [T, h, w]
    best = action == policies_shown.argmax(1, keepdim=True)  # [T, w]
    part[bars] = torch.tensor(BAR, dtype=torch.uint8)
    part[bars & best.unsqueeze(1)] = torch.tensor(BEST, dtype=torch.uint8)


def _enlarged(picture: Tensor) -> Tensor:
    times = -(-SMALLEST // max(picture.shape[:2]))
    return picture.repeat_interleave(times, 0).repeat_interleave(times, 1)
