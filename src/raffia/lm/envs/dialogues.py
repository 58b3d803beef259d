"""Dialogues as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

from raffia.files import write_atomically
from raffia.lm.envs.contract import Language_Observation


def dialogue_row(observation: Language_Observation) -> dict[str, Any]:
    """A dialogue as an object of JSON.

    >>> from raffia.lm.envs.wordle.game import WordleObservation
    >>> dialogue_row(WordleObservation((("crane", "ggggg"),)))
    {'sequence': [['crane', 0.0], ['<g><g><g><g><g>', None]], 'terminal': True,
     'metadata': {'won': True, 'num_guesses': 1}}
    """
    utterances, terminal = observation.to_sequence()
    return {
        "sequence": [[text, reward] for text, reward in utterances],
        "terminal": terminal,
        "metadata": observation.metadata(),
    }


def write_dialogues(path: str | Path, dialogues: Iterable[Language_Observation]) -> int:
    """Write dialogues to a file, all at once, one on each line; gives their number.

    >>> import pathlib, tempfile
    >>> from raffia.lm.envs.wordle.game import WordleObservation
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "games.jsonl")
    ...     number = write_dialogues(path, [WordleObservation((("crane", "ggggg"),))])
    ...     print(number, path.read_text()[:44])
    1 {"sequence": [["crane", 0.0], ["<g><g><g><g>
    """
    num_dialogues = 0

    def write(file: BinaryIO) -> None:
        nonlocal num_dialogues
        for dialogue in dialogues:
            row = json.dumps(dialogue_row(dialogue), allow_nan=False, ensure_ascii=False)
            file.write(f"{row}\n".encode())
            num_dialogues += 1

    write_atomically(path, write)
    return num_dialogues
