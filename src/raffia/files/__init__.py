"""Files for all packages: written atomically and synced to disk, checked when read, locked.

atomic.py      files and folders that are there as a whole, or not
append_log.py  files that only grow
folder.py      folders with a manifest, which comes last
checksums.py   of files and of records
damage.py      the one error for whatever is not as it should be
json_files.py  JSON that is written and read with care
locks.py       of files and folders, which end with their process
space.py       files to be mapped, made with their room on the disk; temporary ones

Imports nothing but the standard library and `raffia.lazy`.
"""

from typing import TYPE_CHECKING

from raffia.files.append_log import AppendLog as AppendLog
from raffia.files.append_log import JsonLines as JsonLines
from raffia.files.atomic import is_free as is_free
from raffia.files.atomic import is_unfinished as is_unfinished
from raffia.files.atomic import make_folder as make_folder
from raffia.files.atomic import new_folder as new_folder
from raffia.files.atomic import replaced as replaced
from raffia.files.atomic import sync as sync
from raffia.files.atomic import write_atomically as write_atomically
from raffia.files.checksums import MANIFEST as MANIFEST
from raffia.files.checksums import Checksum as Checksum
from raffia.files.checksums import check_file as check_file
from raffia.files.checksums import check_manifest as check_manifest
from raffia.files.checksums import checksum as checksum
from raffia.files.checksums import read_signed as read_signed
from raffia.files.checksums import signed as signed
from raffia.files.checksums import write_manifest as write_manifest
from raffia.files.damage import DamagedFileError as DamagedFileError
from raffia.files.damage import MissingFileError as MissingFileError
from raffia.files.damage import Path as Path
from raffia.files.damage import brief as brief
from raffia.files.damage import foreign_reader as foreign_reader
from raffia.files.damage import open_plain as open_plain
from raffia.files.damage import shown as shown
from raffia.files.json_files import DEEPEST as DEEPEST
from raffia.files.json_files import dump_json as dump_json
from raffia.files.json_files import is_deeper as is_deeper
from raffia.files.json_files import parse_json as parse_json
from raffia.files.json_files import write_json as write_json
from raffia.files.locks import Lock as Lock
from raffia.files.locks import locked as locked
from raffia.files.space import TemporaryFile as TemporaryFile
from raffia.files.space import TemporaryFolder as TemporaryFolder
from raffia.files.space import make_files as make_files
from raffia.files.space import reserve_file as reserve_file
from raffia.lazy import public_names as _public_names

if not TYPE_CHECKING:
    __all__ = _public_names(__name__)
