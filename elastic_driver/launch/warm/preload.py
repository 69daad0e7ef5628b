"""Which modules a command's warmed process imports: reads the command line and the script, without running either."""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

# Packages whose import takes long enough to be worth it, starts no thread and reads nothing that a script sets later.
HEAVY = ("torch", "numpy", "scipy", "pandas", "sklearn", "torchvision", "transformers", "elastic_driver", "horovod")

# torch's optimizers import it when the first one is made: it takes longer than torch itself.
OPTIMIZERS_NEED = "torch._dynamo"
# These import torch before everything else, and then read a worker's place, which no warmed process can know.
_ON_TORCH = ("accelerate", "lightning", "pytorch_lightning")
# Common ones that may be imported before: importing them does not affect those above.
_HARMLESS = ("absl", "attr", "filelock", "packaging", "PIL", "psutil", "requests", "tqdm", "typing_extensions", "yaml")

_PYTHON = re.compile(r"python(\d+(\.\d+)*)?")
# Options without a value that leave the start as it is, as far as the warmed process is concerned. Not among them:
# those that ignore PYTHONPATH or site (-E, -I, -S), read the program from elsewhere (-c, -) or stay afterwards (-i).
_PLAIN_OPTIONS = re.compile(r"-[bBdOqsuP]+(?P<last>m)?")


@dataclass(frozen=True, slots=True)
class PythonCommand:
    """A command that runs a Python script or module.

    Attributes:
        files: the files that Python runs, in this order: the script, or the packages of a module and the module. Empty
            if not found (an installed module).
        folder: the one that Python will put first on sys.path.
    """

    files: tuple[Path, ...]
    folder: Path


def is_python(word: str) -> bool:
    """Return whether the first word of a command is the name of a Python."""
    return _PYTHON.fullmatch(os.path.basename(word)) is not None


def read_command(command: Sequence[str], cwd: Path) -> PythonCommand | None:
    """Parse ``python [options] script ...`` or ``-m module``; None for any other command."""
    words = list(command)
    if not words or not is_python(words[0]):
        return None
    place = 1
    while place < len(words) and words[place].startswith("-"):
        word = words[place]
        place += 1
        if word[:2] in ("-W", "-X"):
            place += len(word) == 2
            continue
        if word[:2] == "-m" and len(word) > 2:
            return _module(word[2:], cwd)
        option = _PLAIN_OPTIONS.fullmatch(word)
        if word == "-m" or (option is not None and option["last"]):
            return _module(words[place], cwd) if place < len(words) else None
        if option is None:
            return None
    if place >= len(words):
        return None
    script = cwd / words[place]
    # A folder or an archive with a __main__ puts itself on sys.path, and finds modules in it.
    return PythonCommand((script,), script.resolve().parent) if script.is_file() and script.suffix == ".py" else None


def _module(name: str, cwd: Path) -> PythonCommand:
    place = cwd.joinpath(*name.split("."))
    files = (place.with_name(place.name + ".py"), place / "__main__.py")
    file_of_module = next((file for file in files if file.is_file()), None)
    if file_of_module is None:
        return PythonCommand((), cwd)
    packages = [folder / "__init__.py" for folder in reversed(file_of_module.relative_to(cwd).parents[:-1])]
    return PythonCommand((*(cwd / file for file in packages if (cwd / file).is_file()), file_of_module), cwd)


def heavy_imports(files: Iterable[Path], folder: Path) -> tuple[str, ...]:
    """Return the heavy modules that these files, and the folder's modules that they import, import at their top levels.

    Only those before anything that could affect them: a call, a changed variable, a module not known to be harmless.
    Such an effect would come too late for a module that has been imported already.
    """
    heavy: dict[str, None] = {}
    seen_files: set[Path] = set()
    for file in files:
        if not _collect(file, folder, heavy, seen_files):
            break
    if any("torch" in name.split(".") for name in heavy):
        heavy[OPTIMIZERS_NEED] = None
    return tuple(heavy)


def _collect(file: Path, folder: Path, heavy: dict[str, None], seen_files: set[Path]) -> bool:
    """Read one file, once however many others import it. Returns whether its whole top level is harmless."""
    seen_files.add(file)
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, ValueError, SyntaxError, RecursionError):
        return False
    for statement in _top_level(tree.body):
        names = _imported(statement)
        if names is None:
            if not _is_harmless(statement):
                return False
            continue
        for name in names:
            top = name.partition(".")[0]
            if top in HEAVY:
                heavy[name] = None
                continue
            neighbor = folder / f"{name}.py"
            if neighbor.is_file():
                if neighbor not in seen_files and not _collect(neighbor, folder, heavy, seen_files):
                    return False
            elif top in _ON_TORCH and not (folder / top).is_dir():
                heavy["torch"] = None
                return False
            elif top not in sys.stdlib_module_names and top not in _HARMLESS:
                return False
    return True


def _top_level(statements: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in statements:
        if isinstance(statement, ast.Try):
            yield from _top_level(statement.body)
        else:
            yield statement


def _imported(statement: ast.stmt) -> list[str] | None:
    if isinstance(statement, ast.Import):
        return [alias.name for alias in statement.names]
    if isinstance(statement, ast.ImportFrom):
        return [f"{'.' * statement.level}{statement.module or ''}"]
    return None


def _is_harmless(statement: ast.stmt) -> bool:
    """Return whether it is a string, a definition, or an assignment that calls nothing."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return True
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant)
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        called = any(isinstance(node, ast.Call | ast.Await) for node in ast.walk(statement))
        return not called and all(isinstance(target, ast.Name) for target in targets)
    return isinstance(statement, ast.Pass)


def is_program(path: str | None) -> bool:
    """Return whether this is a compiled program: a script could start Python in a way that bypasses the hook."""
    try:
        with open(path or "", "rb") as file:
            return file.read(4) == b"\x7fELF"
    except OSError:
        return False


def shadowed(names: Iterable[str], folder: Path) -> str | None:
    """Return the first of these modules that a fresh worker would find in the script's own folder instead."""
    try:
        entries = {entry.partition(".")[0] for entry in os.listdir(folder)}
    except OSError:
        return None
    return next((name for name in names if name in entries and _is_module(folder, name)), None)


def _is_module(folder: Path, name: str) -> bool:
    return (folder / name / "__init__.py").is_file() or any(
        path.suffix in (".py", ".pyc", ".so") for path in folder.glob(f"{name}.*")
    )
