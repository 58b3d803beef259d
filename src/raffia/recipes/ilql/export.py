"""An agent of ILQL as a folder that `transformers` loads, with its values beside the model."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from raffia._version import __version__
from raffia.algorithms.ilql.agent_networks import networks_of
from raffia.algorithms.ilql.config import ILQLModelConfig
from raffia.algorithms.ilql.model import ILQLModel, ILQLTarget, make_target
from raffia.algorithms.ilql.policy import ILQL_Policy
from raffia.files import (
    MANIFEST,
    DamagedFileError,
    check_manifest,
    foreign_reader,
    new_folder,
    parse_json,
    replaced,
    write_atomically,
    write_json,
    write_manifest,
)
from raffia.functional.seeds import generator_for
from raffia.lm.decoding.config import DecodeConfig
from raffia.lm.folder import save_gpt2
from raffia.lm.hf_models import no_bars
from raffia.lm.hf_trunk import HFTrunk
from raffia.lm.lora import merge_lora
from raffia.lm.tokenizers.hf_tokenizer import ChatTokenizer, load_tokenizer
from raffia.lm.tokenizers.tokenizer import Tokenizer
from raffia.lm.transformer import CausalLM
from raffia.lm.transformers_files import TEMPLATE, save_for_transformers, special_tokens_of
from raffia.recipes.devices import require_device
from raffia.recipes.ilql import load_agent
from raffia.recipes.ilql.card import TemplateKind, model_card, scores_at
from raffia.recipes.ilql.config import ILQLRun
from raffia.recipes.run_folder import find_checkpoint, read_run_of
from raffia.train.config import from_json, to_json
from raffia.train.experiment import RunError

DESCRIPTION, HEADS = "raffia_ilql.json", "value_heads.safetensors"
KIND, VERSION = "raffia ILQL agent", 2  # 1 had no checksums
VALUE_TRUNK, TARGET_TRUNK = "value_trunk", "target_trunk"  # folders, where they are not the policy


@dataclass(frozen=True)
class Exported:
    """The files that an export has written.

    >>> Exported(Path("out"), update=100, with_values=True).update
    100
    """

    folder: Path
    update: int  # of the checkpoint
    with_values: bool


@dataclass(frozen=True)
class ExportedAgent:
    """The networks of an agent that was exported.

    >>> [field for field in ExportedAgent.__dataclass_fields__]
    ['model', 'target']
    """

    model: ILQLModel
    target: ILQLTarget


def export(run: str | Path, out: str | Path, checkpoint: str | int = "best") -> Exported:
    """Write the policy of a run, its tokenizer, its values and a card into a new folder.

    out: not there yet, or empty; it appears at once, when all of it is on disk.
    checkpoint: "best", "newest", or one by its number.
    Changes of LoRA are put into the weights. Raises RunError for what no such folder can hold.

    >>> import io, tempfile
    >>> from dataclasses import replace
    >>> from raffia.recipes.ilql import train
    >>> from raffia.recipes.ilql.presets import ILQL_PRESETS
    >>> from raffia.train.view import PlainView
    >>> short = replace(ILQL_PRESETS["ilql-smoke"], num_updates=2)
    >>> with tempfile.TemporaryDirectory() as there:
    ...     _ = train(short, f"{there}/run", view=PlainView(io.StringIO()))
    ...     exported = export(f"{there}/run", f"{there}/model")
    ...     agent = load_exported(exported.folder)
    ...     sorted(path.name for path in exported.folder.iterdir())[3:6]
    ['generation_config.json', 'model.safetensors', 'raffia_ilql.json']
    >>> agent.config.adv_weight == short.decode.adv_weight
    True
    """
    run, out = Path(run), Path(os.path.realpath(out))
    config = read_run_of(ILQLRun, run)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunError(f"{out} already exists and is not empty: give another folder")
    _refuse_rotary(config, run)
    update = find_checkpoint(run, checkpoint).update
    policy = load_agent(run, update)

    with new_folder(out) as unfinished:
        folder = Path(unfinished)
        _write_all(folder, config, policy)
        card = model_card(
            config,
            update=update,
            scores=scores_at(run, update),
            names=special_tokens_of(policy.tokenizer),
            template=_template_in(folder, policy.tokenizer),
        )
        write_atomically(folder / "README.md", card.encode("utf-8"))
        write_manifest(folder, _listed(folder))

    return Exported(out, update, config.loss.needs_values)


def load_exported(
    folder: str | Path,
    *,
    device: str = "cpu",  # of the networks, such as "cuda"
    decode: DecodeConfig | None = None,  # how it decodes; None: as in the run
    seed: int = 0,  # of what is drawn
) -> ILQL_Policy:
    """The agent of a folder that `export` wrote, with its values.

    >>> load_exported("no/such/folder")
    Traceback (most recent call last):
    ...
    FileNotFoundError: there is no no/such/folder/raffia_ilql.json: `raffia export` writes it
    """
    folder = Path(folder)
    path = folder / DESCRIPTION
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}: `raffia export` writes it")
    require_device(device)
    described: Any = parse_json(path, path.read_bytes())
    with foreign_reader(
        path, (f"it is damaged, or from another release of raffia than {__version__}")
    ):
        if described["kind"] != KIND or described["version"] not in (1, VERSION):
            raise KeyError("kind")
        arrangement, with_values = dict(described["model"]), bool(described["with_values"])
        folders = {trunk: _inside(name) for trunk, name in described["trunks"].items()}
        decode = from_json(DecodeConfig, described["decode"]) if decode is None else decode
        is_separate = arrangement["policy"] == "separate"
        value_folder, target_folder = folder / folders["trunk"], folder / folders["target"]
    if described["version"] == VERSION and not (folder / MANIFEST).is_file():
        raise DamagedFileError(folder / MANIFEST, "it is missing; `raffia export` writes it")
    check_manifest(folder)
    values = networks_of(value_folder)
    policy = networks_of(folder).trunk if is_separate else None
    with foreign_reader(path, "it does not describe networks of ILQL"):
        config = ILQLModelConfig(trunk=values.trunk_config, **arrangement)
        model = ILQLModel(config, values.trunk, policy)
        target = make_target(model)
    if config.target == "trunk":
        target.trunk = networks_of(target_folder).trunk
        target.requires_grad_(False).eval()
    if with_values:
        _read_heads(folder / HEADS, model, target)
    agent = ExportedAgent(model.eval().to(device), target.to(device))
    generator = generator_for(seed, "speak")
    return ILQL_Policy(agent, load_tokenizer(folder), decode, generator=generator)


def _template_in(folder: Path, tokenizer: Tokenizer) -> TemplateKind:
    if isinstance(tokenizer, ChatTokenizer):
        return "own"
    return "marks" if (folder / TEMPLATE).exists() else "none"


def _write_all(folder: Path, config: ILQLRun, policy: ILQL_Policy) -> None:
    """Write all files of an export except the model card."""
    model, target = policy.agent.model, policy.agent.target
    tokenizer, decode = policy.tokenizer, policy.config
    trunk = cast(nn.Module, model.policy_trunk)
    block_size = config.model.trunk.block_size
    save_for_transformers(tokenizer, folder, max_length=block_size)
    marks = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eoa_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    _write_trunk(folder, trunk, marks)
    no_text = [tokenizer.pad_token_id, *range(tokenizer.num_tokens, model.trunk.vocab_size)]
    generation = _generation(decode, block_size, no_text)
    write_json(folder / "generation_config.json", marks | generation)
    with_values, folders = config.loss.needs_values, {"trunk": ".", "target": "."}
    arrangement: dict[str, Any] = {
        "policy": config.model.policy if with_values else "shared",
        "target": config.model.target if with_values else "heads",
        "double_q": config.model.double_q,
        "per_token": config.model.per_token,
    }
    if with_values and config.model.evolvable_heads:
        for name in ("evolvable_heads", "max_head_layers", "max_head_nodes"):
            arrangement[name] = getattr(config.model, name)
    if with_values:
        if config.model.policy == "separate":
            folders = dict.fromkeys(folders, VALUE_TRUNK)
            _write_trunk(folder / VALUE_TRUNK, cast(nn.Module, model.trunk), marks)
        if target.trunk is not None:
            folders["target"] = TARGET_TRUNK
            _write_trunk(folder / TARGET_TRUNK, cast(nn.Module, target.trunk), marks)
        heads = {name: tensor.contiguous() for name, tensor in _heads(model, target).items()}
        with replaced(folder / HEADS) as unfinished:
            save_file(heads, unfinished)
    write_json(
        folder / DESCRIPTION,
        {
            "kind": KIND,
            "version": VERSION,
            "raffia": __version__,
            "with_values": with_values,
            "model": arrangement,
            "trunks": folders,
            "decode": to_json(decode),
        },
    )


def _write_trunk(folder: Path, trunk: nn.Module, marks: Mapping[str, int]) -> None:
    plain = merge_lora(copy.deepcopy(trunk))  # frozen weights may be those of another trunk, too
    match plain:
        case CausalLM():
            save_gpt2(folder, plain.settings(), plain.state_dict(), extra=marks)
        case HFTrunk():
            with no_bars():
                plain.model.save_pretrained(folder)
        case _:
            raise RunError(
                f"a {type(plain).__name__} cannot be exported: supported are CausalLM and HFTrunk"
            )


def _generation(decode: DecodeConfig, block_size: int, no_text: list[int]) -> dict[str, Any]:
    """The settings of transformers' `generate`: the part of decoding that concerns the policy
    alone.

    no_text: tokens that are no text, which are never chosen.
    """
    found: dict[str, Any] = {"do_sample": decode.num_beams is None, "suppress_tokens": no_text}
    if decode.num_beams is None:
        found["temperature"] = decode.temperature
        found["top_k"] = decode.top_k or 0
        found["top_p"] = decode.effective_top_p
    else:
        found["num_beams"] = decode.num_beams
    if decode.max_new_tokens is None:
        return {**found, "max_length": block_size}
    return {**found, "max_new_tokens": decode.max_new_tokens}


def _heads(model: ILQLModel, target: ILQLTarget) -> dict[str, Tensor]:
    """The heads' parameters, and the form of those that can change it, by their names there."""
    parts: dict[str, nn.Module] = {"v": model.v}
    for number, (head, slow) in enumerate(zip(model.q_heads, target.q_heads, strict=True), 1):
        parts |= {f"q{number}": head, f"target.q{number}": slow}
    return {
        f"{part}.{name}": tensor.detach()
        for part, head in parts.items()
        for name, tensor in (*head.named_parameters(), *head.named_buffers())
    }


def _read_heads(path: Path, model: ILQLModel, target: ILQLTarget) -> None:
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}, which holds the values, does not exist: copy it there, too"
        )
    with foreign_reader(path, "it is damaged, or not a safetensors file"):
        saved = load_file(path)
    own = _heads(model, target)
    odd = sorted(
        name for name in saved.keys() | own.keys() if _shape(saved, name) != _shape(own, name)
    )
    if odd:
        raise ValueError(
            f"{path} does not belong to the model beside it: {odd[0]} is {_shape(saved, odd[0])} "
            f"in the file, but {_shape(own, odd[0])} here"
        )
    for name, tensor in own.items():
        tensor.copy_(saved[name])


def _shape(tensors: Mapping[str, Tensor], name: str) -> list[int] | None:
    return list(tensors[name].shape) if name in tensors else None


def _refuse_rotary(config: ILQLRun, run: Path) -> None:
    if config.model.trunk.positions != "learned":
        raise RunError(
            f"the language model of {run} has rotary positions, but the folder would be read by "
            "transformers as a GPT-2, which has learned positions. Runs with "
            "--model.trunk.positions learned can be exported"
        )


def _listed(folder: Path) -> list[str]:
    """The files that `load_exported` checks; card and generation settings may be edited."""
    free = (MANIFEST, "README.md", "generation_config.json")
    files = [path for path in folder.rglob("*") if path.is_file() and path.name not in free]
    return [path.relative_to(folder).as_posix() for path in files]


def _inside(name: str) -> str:
    """A folder's name that leads nowhere else."""
    if name not in (".", VALUE_TRUNK, TARGET_TRUNK):
        raise ValueError(f"{name!r} is not the folder of an agent")
    return name
