"""Small tokenizers with chat templates of the kinds that are in use, each in a model's folder."""

import json
from pathlib import Path

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA_3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# No generation prompt: "[/INST]" is one; the system's words are in the first question.
LLAMA_2 = (
    "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}"
    "{% set system = '<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n' %}"
    "{% else %}{% set rest = messages %}{% set system = '' %}{% endif %}"
    "{% for m in rest %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{% if m['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + (system if loop.first else '') + m['content'].strip() + ' [/INST]'"
    " }}{% else %}{{ ' ' + m['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
TEMPLATES = {"chatml": CHATML, "llama-3": LLAMA_3, "llama-2": LLAMA_2}
SPECIALS = {
    "chatml": ["<|im_start|>", "<|im_end|>", "<|pad|>"],
    "llama-3": ["<s>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|spare|>"],
    "llama-2": ["<unk>", "<s>", "</s>"],
}
VARIABLES = {
    "chatml": {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>"},  # as many have it
    "llama-3": {"bos_token": "<s>", "eos_token": "<|eot_id|>"},
    "llama-2": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
}
TEXTS = ["well, thanks so so be brief system user assistant question answer how are you? and"] * 3


def write_tokenizer(folder, kind):
    """A byte-level tokenizer, or for Llama 2 a "▁" one, with a template; None: without."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    specials = SPECIALS[kind or "chatml"]
    found = tokenizers.Tokenizer(models.BPE(unk_token=None, byte_fallback=kind == "llama-2"))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if kind == "llama-2":
        marks = normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")
        found.normalizer = normalizers.Sequence([*marks])
        blanks, strip = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
        parts = [blanks, decoders.ByteFallback(), decoders.Fuse(), strip]
        found.decoder = decoders.Sequence(parts)
        alphabet = list("▁éäabcdefghijklmnopqrstuvwxyz,?!<>/[]SYINT\n")
        specials = [*specials, *[f"<0x{byte:02X}>" for byte in range(256)]]
    else:
        found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        found.decoder = decoders.ByteLevel()
    options = {"vocab_size": 700, "initial_alphabet": alphabet, "special_tokens": specials}
    found.train_from_iterator(TEXTS, trainers.BpeTrainer(**options))
    found.save(str(folder / "tokenizer.json"))
    if kind is not None:
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **VARIABLES[kind]}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        (folder / "chat_template.jinja").write_text(TEMPLATES[kind])
    return folder
