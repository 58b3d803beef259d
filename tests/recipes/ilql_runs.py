"""Short runs of ILQL on files, and small language models to start from."""

import json
from dataclasses import replace
from functools import partial

import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from raffia.algorithms.ilql.config import ILQLModelConfig, TrunkConfig
from raffia.lm import CausalLM, save_gpt2
from raffia.recipes.ilql import ILQL_PRESETS, ILQLRun
from raffia.recipes.ilql.config import DialogueDataConfig, ILQLEvaluateConfig
from raffia.train import Checkpoints

NUM_TOKENS = 18  # of the language models' tokenizer: twelve, and six special ones


def write_chats(path, numbers=range(24)):
    """Write dialogues of one question and one answer with reward 0, 1 or 2."""
    lines = []
    for n in numbers:
        utterances = [f"say {n % 10}", f"{n % 7} " * (n % 4 + 1)]
        lines.append(json.dumps({"utterances": utterances, "rewards": [None, float(n % 3)]}))
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


def write_tokenizer(folder):
    """Write a Hugging Face tokenizer of twelve tokens, without special ones."""
    words = {**{str(n): n for n in range(10)}, "say": 10, "[UNK]": 11}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


def write_model(folder, kind="llama", vocab_size=12):
    """A language model of two layers, 16 wide; "gpt2" is ours."""
    folder.mkdir()
    write_tokenizer(folder)
    torch.manual_seed(0)
    if kind == "gpt2":
        model = CausalLM(vocab_size, n_layer=2, n_head=2, n_embd=16, block_size=24)
        save_gpt2(folder, model.settings(), model.state_dict())
        return str(folder)
    import transformers

    size = {"vocab_size": vocab_size, "hidden_size": 16, "intermediate_size": 20}
    size |= {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 24}
    config = {
        "llama": partial(transformers.LlamaConfig, num_key_value_heads=1),
        "gpt_neox": partial(transformers.GPTNeoXConfig, hidden_dropout=0.5),
        "qwen2": partial(transformers.Qwen2Config, num_key_value_heads=1, tie_word_embeddings=True),
    }[kind](**size)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


def of_file(data, model="", **changes) -> ILQLRun:
    """Six updates, saved after each 2, evaluated after each 3; a new model if none is given."""
    smoke = ILQL_PRESETS["ilql-smoke"]
    trunk = TrunkConfig(n_layer=1, n_head=2, n_embd=16, block_size=24)
    tokens = {"tokenizer": model, "add_special_tokens": True} if model else {}
    return replace(
        smoke,
        **{
            "task": "data",
            "num_threads": 1,
            "language_model": model,
            "model": ILQLModelConfig(trunk=trunk),
            "data": DialogueDataConfig(files=(data,), held_out=0.2, **tokens),
            "num_updates": 6,
            "batch_size": 4,
            "evaluate": ILQLEvaluateConfig(every_updates=3, num_episodes=4, batch_size=3),
            "checkpoint": replace(smoke.checkpoint, every_updates=2),
            **changes,
        },
    )


def with_trunk(config, **changes):
    """The config with another trunk."""
    return replace(
        config, model=replace(config.model, trunk=replace(config.model.trunk, **changes))
    )


def last(folder):
    """The newest checkpoint."""
    return Checkpoints(folder / "checkpoints").newest(print)


def brief(**changes) -> ILQLRun:
    """12 updates, saved after each 5, evaluated after each 4, with all random draws."""
    smoke = ILQL_PRESETS["ilql-smoke"]
    trunk = replace(smoke.model.trunk, dropout=0.1)
    return replace(
        smoke,
        **{
            "num_threads": 1,
            "model": replace(smoke.model, trunk=trunk, target="trunk"),
            "num_updates": 12,
            "batch_size": 8,
            "evaluate": ILQLEvaluateConfig(every_updates=4, num_episodes=6, adv_weights=(0.0,)),
            "checkpoint": replace(smoke.checkpoint, every_updates=5),
            **changes,
        },
    )


class OpenDialogue:
    """A dialogue whose next utterance is the agent's."""

    def to_sequence(self):
        return [("say 3", None)], False
