"""Nothing but a few files of the source writes, makes or removes files."""

import ast
import re
import textwrap
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "raffia"

# Files that may write, and why not by `write_atomically`.
WRITERS = {
    "files/atomic.py": "the writer itself",
    "files/folder.py": "files of folders whose manifest comes last; removes those before",
    "files/append_log.py": "files that only grow; cuts off what is no whole record",
    "files/space.py": "files that stay mapped: made with their room; temporary ones",
    "lm/data/token_store.py": "... files of such a folder, appended to as rows come",
    "data/memmap_files.py": "writes who holds the lock into its file, removes a storage's files",
    "tensordict/folder_writer.py": "removes the record before its files are written",
    "distributed/process.py": "frees shared memory",
    "train/replay_log.py": "removes rows that no checkpoint names",
    "train/checkpoint.py": "removes checkpoints, their manifest first",
    "lm/folder.py": "safetensors to the temporary file of `replaced`",
    "recipes/ilql/export.py": "... in a folder that appears atomically",
    "recipes/run_folder.py": "removes what a killed process left in a new run's folder",
    "algorithms/ilql/agent_files.py": "safetensors within such a folder",
    "draw/scene.py": "matplotlib, into the file that `write_atomically` gives",
    "sweep/session.py": "removes the file that asks its workers to stop",
    "cli/commands.py": "streams of this process: no files",
}
CALLS = {
    *("write_text", "write_bytes", "savefig", "savez", "savetxt", "tofile", "dump_file"),
    *("save_pretrained", "ftruncate", "truncate", "posix_fallocate", "unlink", "rmtree", "rmdir"),
    *("removedirs", "symlink", "link", "mkdtemp", "mkstemp", "NamedTemporaryFile", "copyfile"),
    *("copytree", "copy2", "makedirs", "mkdir", "writelines_to"),
}
DOTTED = {
    *("os.replace", "os.rename", "os.renames", "os.remove", "shutil.move", "shutil.copy"),
    *("np.save", "numpy.save", "torch.save", "json.dump", "safetensors.torch.save_file"),
}
# Names of functions of `safetensors.torch` and of ours; the former is a writer.
NAMES = {"save_file"}
OPENERS = {"open", "io.open", "os.fdopen", "gzip.open", "bz2.open", "lzma.open"}
ANY = CALLS | NAMES | {name.rpartition(".")[2] for name in DOTTED | OPENERS}
WORDS = re.compile(rf"\b({'|'.join(sorted(ANY))})\b")  # a file with none of them need not be parsed


def dotted(node):
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=name):
            return f"{dotted(value)}.{name}"
    return "?"


def writes(text):
    """The calls in a source that write, make or remove files: (line, call)."""
    if not WORDS.search(text):
        return []
    tree, found = ast.parse(text), []
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    from_ours = [node for node in imports if (node.module or "").startswith("raffia.")]
    ours = {alias.asname or alias.name for node in from_ours for alias in node.names}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name, is_method = dotted(node.func), isinstance(node.func, ast.Attribute)
        last = name.rpartition(".")[2]
        position = 0 if is_method and name not in OPENERS else 1
        arguments = [
            *node.args[position : position + 1],
            *[k.value for k in node.keywords if k.arg == "mode"],
        ]
        modes = [argument.value for argument in arguments if isinstance(argument, ast.Constant)]
        if name == "os.open":
            flags = " ".join(map(ast.unparse, node.args[1:]))
            if any(flag in flags for flag in ("O_WRONLY", "O_RDWR", "O_CREAT", "O_TRUNC")):
                found.append((node.lineno, f"os.open(..., {flags})"))
        elif name in OPENERS or (last == "open" and is_method):
            if any(isinstance(m, str) and re.fullmatch("[rbt]*[wax+][rwaxbt+]*", m) for m in modes):
                found.append((node.lineno, f"{name}(..., {modes})"))
        elif last in CALLS and is_method or name in DOTTED or name in NAMES - ours:
            found.append((node.lineno, name))
    return found


def test_no_other_file_writes():
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        if calls := writes(path.read_text()):
            found[path.relative_to(SOURCE).as_posix()] = calls
    others = {name: calls for name, calls in found.items() if name not in WRITERS}
    assert not others, f"write by raffia.files.write_atomically: {others}"
    assert not WRITERS.keys() - found.keys(), "these write no longer"


@pytest.mark.parametrize(
    "line",
    [
        "Path('x').write_text('a')",
        "path.write_bytes(b'a')",
        "open('x', 'w')",
        "open('x', mode='ab')",
        "with path.open('xb') as file: pass",
        "with open(path, 'rb+') as file: pass",
        "os.open('x', os.O_WRONLY | os.O_CREAT)",
        "os.replace('a', 'b')",
        "np.save('x', a)",
        "torch.save(a, 'x')",
        "json.dump(a, file)",
        "from safetensors.torch import save_file\nsave_file(a, 'x')",
        "model.save_pretrained('x')",
        "figure.savefig('x')",
        "shutil.rmtree('x')",
        "gzip.open('x', 'wb')",
    ],
)
def test_the_test_finds_writers(line):
    assert len(writes(line)) == 1


def test_the_test_allows_readers_and_write_atomically():
    text = """
    from raffia.tensordict.safetensors_file import save_file
    open("x"); open("x", "rb"); path.open("r"); os.open("x", os.O_RDONLY); Store.open(folder)
    save_file(td, "x"); "a".replace("b", "w"); open(path, encoding="utf-8"); write_atomically(p, b)
    """
    assert writes(textwrap.dedent(text)) == []
