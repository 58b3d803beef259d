"""Offline episodes from the files that others write: a container for each episode.

>>> from raffia.data.readers import read_episodes, read_json_lines, read_minari, read_parquet
"""

from raffia.data.readers.by_path import read_episodes
from raffia.data.readers.d4rl import read_d4rl
from raffia.data.readers.episode import MalformedDataError
from raffia.data.readers.hugging_face import read_hugging_face, read_lerobot
from raffia.data.readers.json_lines import read_json_lines, write_json_lines
from raffia.data.readers.minari import read_minari
from raffia.data.readers.tables import read_parquet

__all__ = [
    "MalformedDataError",
    "read_d4rl",
    "read_episodes",
    "read_hugging_face",
    "read_json_lines",
    "read_lerobot",
    "read_minari",
    "read_parquet",
    "write_json_lines",
]
