"""Files for all packages: written atomically and synced to disk, checked when read, locked.

atomic.py      files and folders that are there as a whole, or not
append_log.py  files that only grow
folder.py      folders with a manifest, which comes last
checksums.py   of files and of records
damage.py      the one error for whatever is not as it should be
json_files.py  JSON that is written and read with care
locks.py       of files and folders, which end with their process
space.py       files to be mapped, made with their room on the disk; temporary ones

Imports nothing but the standard library.
"""

from raffia.files.append_log import AppendLog, JsonLines
from raffia.files.atomic import (
    is_free,
    is_unfinished,
    make_folder,
    new_folder,
    replaced,
    sync,
    write_atomically,
)
from raffia.files.checksums import (
    MANIFEST,
    Checksum,
    check_file,
    check_manifest,
    checksum,
    read_signed,
    signed,
    write_manifest,
)
from raffia.files.damage import (
    DamagedFileError,
    MissingFileError,
    Path,
    brief,
    foreign_reader,
    open_plain,
    shown,
)
from raffia.files.json_files import DEEPEST, dump_json, is_deeper, parse_json, write_json
from raffia.files.locks import Lock, locked
from raffia.files.space import TemporaryFile, TemporaryFolder, make_files, reserve_file

__all__ = [
    "AppendLog",
    "Checksum",
    "DEEPEST",
    "DamagedFileError",
    "JsonLines",
    "Lock",
    "MANIFEST",
    "MissingFileError",
    "Path",
    "TemporaryFile",
    "TemporaryFolder",
    "brief",
    "check_file",
    "check_manifest",
    "checksum",
    "dump_json",
    "foreign_reader",
    "is_deeper",
    "is_free",
    "is_unfinished",
    "locked",
    "make_files",
    "make_folder",
    "new_folder",
    "open_plain",
    "parse_json",
    "read_signed",
    "replaced",
    "reserve_file",
    "shown",
    "signed",
    "sync",
    "write_atomically",
    "write_json",
    "write_manifest",
]
