"""Causal language models of `transformers`: of a folder, or with new weights by its config.json.

Needs the extra: pip install 'raffia[hf]'. Nothing is fetched, nothing unpickled, and no code that
came with a model is run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import nn

from raffia.files import DamagedFileError, foreign_reader
from raffia.functional.trees import is_traced
from raffia.lm.folder import CONFIG, LARGEST, read_config, weight_files
from raffia.lm.transformer_block import recomputed

if TYPE_CHECKING:
    from transformers import DynamicCache, PretrainedConfig, PreTrainedModel

UNBOUNDED = 1 << 20  # tokens of a row where a config names no limit


def hf_sizes(folder: str | os.PathLike[str]) -> dict[str, int]:
    """A model's shape, from its folder's config.json; the weights are not read.

    n_head is 1 where heads are not equal parts of the hidden state, as some models have it.

    >>> hf_sizes("no/such/folder")
    Traceback (most recent call last):
    ...
    FileNotFoundError: there is no folder no/such/folder: a model's folder holds config.json and
    model.safetensors
    """
    folder = Path(folder)
    config = _config(read_config(folder), str(folder / CONFIG))
    with foreign_reader(folder / CONFIG, "it does not have the sizes of a language model"):
        text = config.get_text_config()
        n_embd, n_head = hidden_width(text), int(getattr(text, "num_attention_heads", None) or 1)
        found = {
            "vocab_size": int(text.vocab_size),
            "n_layer": int(getattr(text, "num_hidden_layers", None) or 1),
            "n_head": 1 if n_embd % n_head else n_head,
            "n_embd": n_embd,
            "block_size": int(getattr(text, "max_position_embeddings", None) or UNBOUNDED),
        }
    for name, size in found.items():
        if not 1 <= size <= LARGEST:
            raise DamagedFileError(
                folder / CONFIG, (f"{name} is {size}, but must be in 1..{LARGEST}")
            )
    return found


def hidden_width(config: Any) -> int:
    """The numbers of a hidden state before the output layer, by a text model's config.

    Those of OPT (350M) are projected to the width of its embeddings before it.

    >>> from transformers import OPTConfig
    >>> hidden_width(OPTConfig(hidden_size=1024, word_embed_proj_dim=512))
    512
    """
    return int(getattr(config, "word_embed_proj_dim", None) or config.hidden_size)


def load_hf(
    folder: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
    vocab_size: int | None = None,
    dropout: float | None = None,
) -> PreTrainedModel:
    """The model in a folder, with its weights; for the options see `HFTrunk.from_folder`."""
    folder = Path(folder)
    config = _config(read_config(folder), str(folder / CONFIG))
    files = weight_files(folder)
    _set_dropout(config, dropout)
    _check_memory(folder / CONFIG, config, files)
    with no_bars(), foreign_reader(folder, "transformers cannot read the model"):
        model, loaded = _library().AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=torch.get_default_dtype() if dtype is None else dtype,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    _check_loaded(folder, loaded)
    if vocab_size is not None and vocab_size > config.get_text_config().vocab_size:
        model.resize_token_embeddings(vocab_size, mean_resizing=False)
    return model


def make_hf(
    config: Mapping[str, Any],  # of a folder's config.json
    *,
    dtype: torch.dtype | None = None,
    vocab_size: int | None = None,  # instead of the config's
    dropout: float | None = None,
) -> PreTrainedModel:
    """A model of the same kind, with weights that torch's generator draws.

    >>> make_hf({"model_type": "gpt3"})
    Traceback (most recent call last):
    ...
    ValueError: the config describes a model of the kind 'gpt3', which transformers ... does not ...
    """
    made = _config(config, "the config")
    if vocab_size is not None:
        made.get_text_config().vocab_size = vocab_size
    _set_dropout(made, dropout)
    return _library().AutoModelForCausalLM.from_config(
        made,
        dtype=torch.get_default_dtype() if dtype is None else dtype,
        trust_remote_code=False,
    )


def new_past(model: PreTrainedModel) -> DynamicCache:
    """An empty cache for a model, whose last columns can be removed again."""
    past = _library().DynamicCache(config=model.config)
    for layer in past.layers:
        if hasattr(layer, "activate_past_recording"):  # else a full window forgets the first
            layer.activate_past_recording()
    return past


def recompute_layers(model: PreTrainedModel) -> None:
    """Make each layer keep only its input, and recompute the rest for its gradients.

    As `transformers` itself offers, but with the parameters that `torch.func.functional_call` put
    in for the forward pass, which its own way would not find any more in the backward pass.
    """
    kind = _layer_kind()
    layers = [layer for layer in model.modules() if isinstance(layer, kind)]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no layers whose activations can be recomputed: leave out "
            "gradient_checkpointing"
        )
    for layer in layers:
        layer.forward = partial(_recomputed, layer)


def _recomputed(layer: nn.Module, *inputs: object, **options: object) -> object:
    again = layer.training and torch.is_grad_enabled()
    if not again or (is_traced() and not torch.compiler.is_compiling()):
        return type(layer).forward(layer, *inputs, **options)
    return recomputed(_Plain(layer), *inputs, **options)


class _Plain(nn.Module):
    """Wraps a layer without changing what its class computes."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *inputs: object, **options: object) -> object:
        return type(self.layer).forward(self.layer, *inputs, **options)


def _config(data: Mapping[str, Any], where: str) -> PretrainedConfig:
    """The config that JSON describes, of a causal language model."""
    kind = data.get("model_type")
    library = _library(f"{where} describes a model of the kind {kind!r}, and ")
    if not isinstance(kind, str) or kind not in library.CONFIG_MAPPING:
        raise ValueError(
            f"{where} describes a model of the kind {kind!r}, which transformers "
            f"{library.__version__} does not know: `pip install --upgrade transformers` if it is "
            "a new one; code that comes with a model is not run"
        )
    with foreign_reader(where, f"transformers cannot make a model of the kind {kind!r} from it"):
        config = library.CONFIG_MAPPING[kind].from_dict(_numbers(dict(data)))
    if type(config) not in library.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"{where} describes a model of the kind {kind!r}, which does not generate token by "
            "token: use a causal language model, such as a GPT-2 or a Llama"
        )
    return config


def _numbers(entry: Any) -> Any:
    """An entry of config.json, where transformers writes {"__float__": "Infinity"}."""
    if isinstance(entry, list):
        return [_numbers(part) for part in entry]
    if not isinstance(entry, dict):
        return entry
    if entry.keys() == {"__float__"}:
        return float(entry["__float__"])
    return {name: _numbers(part) for name, part in entry.items()}


def _check_memory(path: Path, config: PretrainedConfig, files: list[Path]) -> None:
    """DamagedFileError if the config is of a model far larger than what its files hold.

    A damaged number there would exhaust the memory.
    """
    num_tensors, num_bytes = 0, sum([file.stat().st_size for file in files])
    for file in files:
        with foreign_reader(file, "it is damaged, or not a safetensors file"):
            with safe_open(file, framework="pt") as tensors:
                num_tensors += len(tensors.keys())
    with foreign_reader(path, "it does not have the sizes of a language model"):
        num_layers = int(getattr(config.get_text_config(), "num_hidden_layers", None) or 1)
    if num_layers > num_tensors:
        raise DamagedFileError(path, f"{num_layers} layers, but {num_tensors} tensors in the files")
    with torch.device("meta"), foreign_reader(path, "transformers cannot make a model from it"):
        made = _library().AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    num = sum([tensor.numel() for tensor in (*made.parameters(), *made.buffers())])
    if num > 8 * num_bytes + (1 << 26):
        raise DamagedFileError(
            path,
            f"it describes a model of {num:,} numbers, but its files have only {num_bytes:,} bytes",
        )


def _check_loaded(folder: Path, loaded: Mapping[str, Any]) -> None:
    """DamagedFileError unless all weights came from the files: others are drawn by chance."""
    lacking = sorted(str(key) for key in loaded["missing_keys"])
    odd = lacking or sorted(str(key) for key in loaded["mismatched_keys"])
    if odd:
        what = "lack" if lacking else "have in another shape"
        raise DamagedFileError(
            folder,
            f"the files {what} {', '.join(odd[:3])}{' ...' if odd[3:] else ''}, {len(odd)} in "
            f"all, of what {CONFIG} describes: they belong to different models",
        )


def _set_dropout(config: PretrainedConfig, rate: float | None) -> None:
    """Set dropout, whose name differs between models; whole layers are never dropped."""
    if rate is None:
        return
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict"):  # a config within
            _set_dropout(value, rate)
        elif type(value) in (int, float) and ("drop" in name):
            setattr(config, name, 0.0 if "layerdrop" in name else rate)


@contextmanager
def no_bars() -> Iterator[None]:
    """Suppress the progress bars of `transformers`.

    >>> with no_bars():
    ...     pass
    """
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _layer_kind() -> Any:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return GradientCheckpointingLayer


def _library(what: str = "") -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            f"{what}transformers, which knows it, is not installed: pip install 'raffia[hf]'"
        ) from error
    return transformers
