"""Offline episodes from the files that others write: a container for each episode.

>>> from raffia.data.readers import read_episodes, read_json_lines, read_minari, read_parquet
"""

from typing import TYPE_CHECKING

from raffia.data.readers.by_path import read_episodes as read_episodes
from raffia.data.readers.episode import MalformedDataError as MalformedDataError
from raffia.data.readers.hdf5 import read_d4rl as read_d4rl
from raffia.data.readers.json_lines import read_json_lines as read_json_lines
from raffia.data.readers.json_lines import write_json_lines as write_json_lines
from raffia.data.readers.minari import read_minari as read_minari
from raffia.data.readers.tables import read_hugging_face as read_hugging_face
from raffia.data.readers.tables import read_lerobot as read_lerobot
from raffia.data.readers.tables import read_parquet as read_parquet
from raffia.lazy import public_names as _public_names

if not TYPE_CHECKING:
    __all__ = _public_names(__name__)
