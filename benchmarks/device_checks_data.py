"""Whether containers, replay and draws on a device are those on the CPU, bit by bit."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.device_agreement import Agreement, equal
from raffia.data.segment import SegmentReplayBuffer
from raffia.data.storage import TensorStorage
from raffia.tensordict.tensordict import TensorDict

Check = Callable[[torch.device, bool], list[Agreement]]  # (device, small)

NUM_DRAWS = 3


def container(device: torch.device, small: bool) -> list[Agreement]:
    """Copies to the device and back, by file, by page-locked memory; computed values."""
    original = TensorDict(
        frames=torch.arange(96, dtype=torch.uint8).view(4, 24),
        nest=dict(x=torch.arange(8.0).view(4, 2), half=torch.ones(4, dtype=torch.bfloat16)),
        batch_size=[4],
    )
    copied, check = original.to(device), "TensorDict"
    with TemporaryDirectory() as folder:
        path = Path(folder) / "container.safetensors"
        copied.save(path)
        loaded = TensorDict.load(path, device)
        loaded_on_cpu = TensorDict.load(path)
    pinned = original.pin_memory() if device.type == "cuda" else original
    sent = pinned.to(device, non_blocking=True)
    index = torch.tensor([2, 0])
    computed = torch.cat([copied, copied])[index.to(device)].apply(lambda x: x + 1)
    return [
        _equal_on_device(check, "to and from", original, copied, device),
        _equal_on_device(check, "saved and loaded", original, loaded, device),
        equal(check, "loaded on the CPU", original, loaded_on_cpu),
        _equal_on_device(check, "sent while the program goes on", original, sent, device),
        _equal_on_device(
            *(
                check,
                "cat, index, apply",
                torch.cat([original, original])[index].apply(lambda x: x + 1),
            ),
            *(computed, device),
        ),
    ]


def _equal_on_device(
    check: str, what: str, expected: TensorDict, found: TensorDict, device: torch.device
) -> Agreement:
    """Equal bits, on the device, and with that device in the container."""
    kinds = {value.device.type for value in found.values(True, True)}
    if kinds != {device.type}:
        return Agreement(check, what, float("inf"), f"on {device.type}, found {sorted(kinds)}")
    return equal(check, what, expected, found)


def replay(device: torch.device, small: bool) -> list[Agreement]:
    """Windows of stacked frames by priority, and the priorities from the device again."""
    plain, check, worst = _buffer(None), "replay", []
    buffers = {"to the device": _buffer(device), "stored there": _buffer(None, device)}
    if device.type == "cuda":
        buffers["pinned and to the device"] = _buffer(device, pinned=True)
    for _ in range(NUM_DRAWS):
        expected = plain.sample(8)
        priority = expected["action"][:, 0] + 0.5
        plain.update_priority(expected["index"], priority)
        for name, buffer in buffers.items():
            found = buffer.sample(8)
            worst.append(_equal_on_device(check, name, expected, found, device))
            buffer.update_priority(found["index"], priority.to(device))
    return [*_worst_of_each(worst), *_pinned(plain, device)]


def _buffer(
    device: torch.device | None, stored_on: torch.device | str = "cpu", pinned: bool = False
) -> SegmentReplayBuffer:
    """With 40 steps of two environments."""
    buffer = SegmentReplayBuffer(
        TensorStorage(100, device=stored_on),
        unroll_steps=3,
        n_step=2,
        frame_stack=4,
        alpha=0.6,
        beta=0.4,
        device=device,
        pin_memory=pinned,
        generator=torch.Generator().manual_seed(0),
    )
    size, draws = (20, 2), torch.Generator().manual_seed(1)
    frames = torch.randint(256, (21, 2, 3, 8, 8), dtype=torch.uint8, generator=draws)
    ends = torch.zeros(size, dtype=torch.bool)
    ends[12] = True
    buffer.extend(
        TensorDict(
            observation=frames[:-1],
            action=torch.randint(6, size, generator=draws),
            reward=torch.rand(size, generator=draws),
            terminated=ends,
            truncated=torch.zeros(size, dtype=torch.bool),
            next=dict(observation=frames[1:]),
            batch_size=size,
        )
    )
    return buffer


def _worst_of_each(agreements: list[Agreement]) -> list[Agreement]:
    by_what = {agreement.what: agreement for agreement in agreements}
    for agreement in agreements:
        if agreement.difference > by_what[agreement.what].difference:
            by_what[agreement.what] = agreement
    return [*by_what.values()]


def _pinned(plain: SegmentReplayBuffer, device: torch.device) -> list[Agreement]:
    """On a card: batches for the CPU lie in page-locked memory."""
    if device.type != "cuda":
        return []
    batch = _buffer(None, pinned=True).sample(8)
    pinned = all(value.is_pinned() for value in batch.values(True, True))
    difference = 0.0 if pinned else float("inf")
    return [Agreement("replay", "pinned", difference, "page-locked memory")]


CHECKS: dict[str, Check] = {"TensorDict": container, "replay": replay}
