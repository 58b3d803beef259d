"""Language models in folders as Hugging Face keeps GPT-2: config.json and model.safetensors.

Nothing is unpickled, and nothing is fetched. A model of another kind is for `hf_trunk.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from raffia.files import (
    MANIFEST,
    DamagedFileError,
    check_manifest,
    foreign_reader,
    make_folder,
    parse_json,
    replaced,
    write_json,
)
from raffia.lm.transformer import CausalLM

CONFIG, WEIGHTS, SHARDS = "config.json", "model.safetensors", "model.safetensors.index.json"
# Layer of theirs -> layer of ours, and whether the weight is stored as [in, out] there.
LAYERS = {
    "ln_1": ("ln1", False),
    "attn.c_attn": ("qkv", True),
    "attn.c_proj": ("proj", True),
    "ln_2": ("ln2", False),
    "mlp.c_fc": ("fc", True),
    "mlp.c_proj": ("out", True),
}
# What else a GPT-2 may be, and ours is not: option -> what it must be.
FIXED = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "tie_word_embeddings": True,
}
# What theirs calls each of `ACTIVATIONS`; of two names of one function the first is written.
THEIR_NAMES = {
    "GELU": ("gelu_new", "gelu_pytorch_tanh"),
    "ReLU": ("relu",),
    "SiLU": ("silu", "swish"),
    "LeakyReLU": ("leaky_relu",),
    "Tanh": ("tanh",),
}
# Setting of ours -> its names in config.json: the first that is there is read, all are written.
NAMES = {
    **{name: (name,) for name in ("vocab_size", "n_layer", "n_head", "n_embd")},
    "block_size": ("n_positions", "n_ctx"),
    "dim_feedfwd": ("n_inner",),
    "dropout": ("resid_pdrop", "attn_pdrop", "embd_pdrop"),
    "layer_norm_eps": ("layer_norm_epsilon",),
}
DEFAULTS = {  # where the file says nothing
    "block_size": 1024,
    "dim_feedfwd": None,  # 4 n_embd
    "dropout": 0.1,
    "layer_norm_eps": 1e-5,
    "bias": True,
    "positions": "learned",
}
OURS = {theirs: ours for ours, names in THEIR_NAMES.items() for theirs in names}
LARGEST = 1 << 31  # of any size in config.json


def gpt2(folder: str | os.PathLike[str], *, dtype: torch.dtype | None = None) -> CausalLM:
    """The model in a folder, with its weights.

    dtype: None for torch's default, whatever the file has.

    >>> import tempfile
    >>> model = CausalLM(7, n_layer=1, n_head=2, n_embd=8, block_size=4).eval()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_gpt2(folder, model.settings(), model.state_dict())
    ...     again = gpt2(folder).eval()
    >>> torch.equal(again(torch.tensor([[1, 2]])), model(torch.tensor([[1, 2]])))
    True
    """
    config, state = load_gpt2(folder)
    model = CausalLM(**config, device="meta", dtype=dtype).to_empty(device="cpu")
    model.load_state_dict(state)  # all of it, so that nothing of the empty memory is left
    return model


def load_gpt2(folder: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the arguments and the state of a `CausalLM` from a folder, checking every shape.

    The dropout is that of the residual stream (`resid_pdrop`), as ours has but one.

    >>> load_gpt2("no/such/folder")
    Traceback (most recent call last):
    ...
    FileNotFoundError: there is no folder no/such/folder: a model's folder holds config.json and
    model.safetensors
    """
    folder = Path(folder)
    config = gpt2_settings(folder)
    tensors = _tensors(folder)
    state = {}
    for ours, theirs, shape, transposed in _names(config):
        tensor = tensors.pop(theirs, None)
        if tensor is None:
            raise ValueError(
                f"{folder}: there is no tensor {theirs!r}, which a GPT-2 of {config['n_layer']} "
                f"layers has: {CONFIG} and {WEIGHTS} belong to different models"
            )
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"{folder}: the tensor {theirs!r} is {list(tensor.shape)}, but according to "
                f"{CONFIG} it is {list(shape)}: the two files belong to different models"
            )
        state[ours] = tensor.t().contiguous() if transposed else tensor
    _check_rest(folder, tensors, state["wte.weight"])
    return config, state


def save_gpt2(
    folder: str | os.PathLike[str],
    config: Mapping[str, Any],  # `model.settings()`
    state: Mapping[str, Tensor],  # `model.state_dict()`
    extra: Mapping[str, Any] | None = None,  # of config.json: eos_token_id, ...
) -> None:
    """Write a folder that `load_gpt2` and `transformers` read as GPT-2.

    A model without biases is written with biases of zero, which is the same function.

    >>> model = CausalLM(7, n_layer=1, n_embd=4, n_head=1, positions="rotary")
    >>> save_gpt2("folder", model.settings(), model.state_dict())
    Traceback (most recent call last):
    ...
    ValueError: GPT-2 has learned positions, but those of this model are rotary, so it cannot be
    saved as a GPT-2
    """
    if config["positions"] != "learned":
        raise ValueError(
            f"GPT-2 has learned positions, but those of this model are {config['positions']}, so "
            "it cannot be saved as a GPT-2"
        )
    tensors = {}
    for ours, theirs, shape, transposed in _names(config):
        tensor = state.get(ours)
        if tensor is None and not config["bias"] and ours.endswith("bias"):
            tensor = torch.zeros(shape, dtype=state["wte.weight"].dtype)
        if tensor is None:
            raise ValueError(f"the state has no {ours!r}: pass all of model.state_dict()")
        tensors[f"transformer.{theirs}"] = (tensor.t() if transposed else tensor).contiguous()
    folder = Path(folder)
    make_folder(folder)
    (folder / MANIFEST).unlink(missing_ok=True)  # of what is replaced now
    with replaced(folder / WEIGHTS) as unfinished:
        save_file(tensors, unfinished, metadata={"format": "pt"})  # transformers asks for that
    write_json(folder / CONFIG, _their_config(config) | dict(extra or {}))


def _names(config: Mapping[str, Any]) -> Iterator[tuple[str, str, tuple[int, ...], bool]]:
    """For each tensor: our name, GPT-2's name and shape, and whether ours is its transpose."""
    size, inner = config["n_embd"], config["dim_feedfwd"]
    shapes = {"qkv": (size, 3 * size), "proj": (size, size), "fc": (size, inner)}
    shapes["out"] = (inner, size)
    yield "wte.weight", "wte.weight", (config["vocab_size"], size), False
    yield "wpe.weight", "wpe.weight", (config["block_size"], size), False
    for i in range(config["n_layer"]):
        for theirs, (ours, transposed) in LAYERS.items():
            shape = shapes.get(ours, (size,))
            yield f"h.{i}.{ours}.weight", f"h.{i}.{theirs}.weight", shape, transposed
            yield f"h.{i}.{ours}.bias", f"h.{i}.{theirs}.bias", shape[-1:], False
    for kind in ("weight", "bias"):
        yield f"ln_f.{kind}", f"ln_f.{kind}", (size,), False


def read_config(folder: Path) -> dict[str, Any]:
    """A model's shape, from its folder's config.json.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = (Path(folder) / "config.json").write_text('{"model_type": "gpt2"}')
    ...     read_config(Path(folder))
    {'model_type': 'gpt2'}
    """
    if not folder.is_dir():
        raise FileNotFoundError(
            f"there is no folder {folder}: a model's folder holds {CONFIG} and {WEIGHTS}"
        )
    path = folder / CONFIG
    if not path.exists():
        raise FileNotFoundError(
            f"{folder} has no {CONFIG} with the model's sizes, only {_entries(folder)}: copy it "
            "there with the rest of the model"
        )
    check_manifest(folder, [CONFIG])
    config = parse_json(path, path.read_bytes())
    if not isinstance(config, dict):
        raise DamagedFileError(path, f"it is not a JSON object but {str(config)[:40]!r}")
    return config


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model's folder, all of which must exist.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     (Path(folder) / "model.safetensors").touch()
    ...     [path.name for path in weight_files(Path(folder))]
    ['model.safetensors']
    """
    if (folder / WEIGHTS).exists():
        check_manifest(folder, [WEIGHTS])
        return [folder / WEIGHTS]
    path = folder / SHARDS
    if path.exists():
        index = parse_json(path, path.read_bytes())
        with foreign_reader(path, "it lists no files of weights"):
            names = sorted({Path(name).name for name in index["weight_map"].values()})
        check_manifest(folder, [SHARDS, *names])
        files = [folder / name for name in names]
        missing = [path.name for path in files if not path.exists()]
        if missing:
            raise FileNotFoundError(
                f"{folder} lacks {missing}, which {SHARDS} names: copy them there, too"
            )
        return files
    pickled = any(name.endswith((".bin", ".pt", ".pth")) for name in _entries(folder))
    fix = (
        "pickled weights are not read, because they can run code: save the folder again with "
        "transformers, AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder)"
        if pickled
        else "copy it there with the rest of the model"
    )
    raise FileNotFoundError(f"{folder} has no {WEIGHTS}, only {_entries(folder)}: {fix}")


def _entries(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def gpt2_settings(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The arguments of a `CausalLM` from a folder's config.json alone, without reading weights.

    >>> gpt2_settings("no/such/folder")
    Traceback (most recent call last):
    ...
    FileNotFoundError: there is no folder no/such/folder: a model's folder holds config.json and
    model.safetensors
    """
    folder = Path(folder)
    path, theirs = folder / CONFIG, read_config(folder)
    if theirs.get("model_type") != "gpt2":
        raise ValueError(
            f"{path} has model_type={theirs.get('model_type')!r}, but only 'gpt2' is read without "
            "transformers: use HFTrunk.from_folder(folder) of raffia.lm.hf_trunk"
        )
    _check_kind(path, theirs)
    found: dict[str, Any] = dict(DEFAULTS)
    for ours, names in NAMES.items():
        there = [theirs[name] for name in names if theirs.get(name) is not None]
        if there:
            found[ours] = there[0]
        elif ours not in found:
            raise ValueError(f"{path} lacks {names[0]!r}, which a GPT-2 needs")
    if found["dim_feedfwd"] is None and type(found["n_embd"]) is int:
        found["dim_feedfwd"] = 4 * found["n_embd"]
    found["activation"] = OURS[theirs.get("activation_function", "gelu_new")]
    return _check_sizes(path, found)


def _check_sizes(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Check the sizes of a config, which if damaged would give torch's errors or exhaust the
    memory.
    """
    for name in ("vocab_size", "n_layer", "n_head", "n_embd", "block_size", "dim_feedfwd"):
        if type(config[name]) is not int or not 1 <= config[name] <= LARGEST:
            raise DamagedFileError(
                path, f"{name} is {config[name]!r:.40}, but must be a whole number in 1..{LARGEST}"
            )
    if config["n_embd"] % config["n_head"]:
        raise DamagedFileError(
            path, f"n_embd={config['n_embd']} must be a multiple of n_head={config['n_head']}"
        )
    rate, epsilon = config["dropout"], config["layer_norm_eps"]
    if type(rate) not in (int, float) or not 0 <= rate <= 1:
        raise DamagedFileError(path, f"resid_pdrop is {rate!r:.40}, but must be in 0..1")
    if type(epsilon) not in (int, float) or not 0 <= epsilon < 1:
        raise DamagedFileError(path, f"layer_norm_epsilon is {epsilon!r:.40}, but must be in 0..1")
    return config


def _check_kind(path: Path, theirs: Mapping[str, Any]) -> None:
    odd = {name: theirs[name] for name in FIXED if theirs.get(name, FIXED[name]) != FIXED[name]}
    activation = theirs.get("activation_function", "gelu_new")
    if not isinstance(activation, str) or activation not in OURS:
        odd["activation_function"] = activation
    if odd:
        raise ValueError(
            f"{path} describes a GPT-2 variant that this one does not support: {odd}. Use "
            "HFTrunk.from_folder(folder) of raffia.lm.hf_trunk"
        )


def _tensors(folder: Path) -> dict[str, Tensor]:
    """Read all tensors, by their names without the prefix "transformer."."""
    found = {}
    for path in weight_files(folder):
        with (
            foreign_reader(path, "it is damaged, or not a safetensors file"),
            safe_open(path, framework="pt") as file,
        ):
            for name in file.keys():  # noqa: SIM118, as it is not a mapping
                found[name.removeprefix("transformer.")] = file.get_tensor(name)
    return found


def _check_rest(folder: Path, tensors: Mapping[str, Tensor], embeddings: Tensor) -> None:
    """Check that leftover entries are only what older files hold in addition to the weights."""
    for name, tensor in tensors.items():
        if name == "lm_head.weight":
            if not torch.equal(tensor, embeddings):
                raise ValueError(
                    f"{folder}: lm_head.weight differs from wte.weight, but the output layer of a "
                    "GPT-2 is its embedding table. Use HFTrunk.from_folder(folder) of "
                    "raffia.lm.hf_trunk"
                )
        elif not name.endswith((".attn.bias", ".attn.masked_bias")):  # causal masks
            raise ValueError(
                f"{folder}: the tensor {name!r} does not belong to a GPT-2 with the layers that "
                f"{CONFIG} describes: the two files belong to different models"
            )


def _their_config(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        **{name: config[ours] for ours, names in NAMES.items() for name in names},
        "activation_function": THEIR_NAMES[config.get("activation", "GELU")][0],
        "tie_word_embeddings": True,
        # GPT-2's own numbers, 50256, are beyond a small vocabulary.
        "bos_token_id": None,
        "eos_token_id": None,
    }
