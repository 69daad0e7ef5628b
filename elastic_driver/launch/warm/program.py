"""Analyses a command's script without running it.

Finds out whether it calls ``init()``, so that its workers reset in place from the start; what it imports; and whether
it can work with no others at all. Anything missed (a shell that runs the script, code in an installed module, names
made at run time) costs only a few lines of output: the job's workers are of the other kind until the first of them
calls ``init()``.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic_driver.launch.warm.preload import PythonCommand, read_command

_OURS = ("elastic_driver", "horovod")
# A script has few neighbors; in a folder of thousands only so many are read.
_MOST_FILES = 64
# Modules with which a script trains, and those that may be used besides by one that knows no other workers; and
# Python's own.
_TRAINS = frozenset({"torch", "sklearn"})
_ALONE = _TRAINS | {"matplotlib", "numpy", "pandas", "PIL", "rich", "scipy", "tqdm", "torchvision", "wandb", "yaml"}
# Modules that may find the others, or run something that does.
_FINDS_OTHERS = frozenset({"ctypes", "importlib", "multiprocessing", "runpy", "socket", "subprocess"})
_KNOWN = sys.stdlib_module_names - _FINDS_OTHERS | _ALONE
_WORDS = re.compile(rb"distributed|RANK|WORLD_SIZE|MASTER_ADDR|TF_CONFIG|elastic_driver|horovod|exec[lv]|__import__")


@dataclass(frozen=True, slots=True)
class _File:
    text: bytes
    tree: ast.AST
    imports: Sequence[ast.Import | ast.ImportFrom]


class Program:
    """The program that ``python [options] script ...`` or ``-m module`` runs.

    That is the script, and the modules beside it that it imports, directly or through others. Each file is read once,
    and only when a question needs it; one that cannot be read, or is not Python, is omitted.

    Args:
        command: the command that each worker runs.
        cwd: its working directory.
    """

    def __init__(self, command: Sequence[str], cwd: Path) -> None:
        self._command = read_command(command, cwd)
        self._have_been_read: list[_File] = []
        self._to_read = iter(()) if self._command is None else _read(self._command)

    @property
    def folder(self) -> Path | None:
        """The folder that Python will put first on sys.path; None if nothing can be read."""
        return None if self._command is None or not self._command.files else self._command.folder

    def calls_init(self) -> bool:
        """Return whether a file imports this library, or Horovod, and calls its ``init()``."""
        return any(_calls_init(file) for file in self._files())

    def imports(self, package: str) -> bool | None:
        """Return whether a file imports a package, given by its name without dots; None if nothing can be read."""
        return None if self.folder is None else any(package in _tops(file) for file in self._files())

    def trains_alone(self) -> str:
        """Return the script's name if it trains, and cannot interact with other workers; else ""."""
        if self._command is None or self.folder is None:
            return ""
        trains = False
        for file in self._files():
            tops = _tops(file)
            if _WORDS.search(file.text) or any(not _is_beside(self.folder, name) for name in tops - _KNOWN):
                return ""
            trains = trains or bool(tops & _TRAINS)
        return self._command.files[-1].name if trains else ""

    def _files(self) -> Iterator[_File]:
        yield from self._have_been_read
        for file in self._to_read:
            self._have_been_read.append(file)
            yield file


def _read(command: PythonCommand) -> Iterator[_File]:
    files, seen = list(command.files), set(command.files)
    for path in files:
        try:
            text = path.read_bytes()
            tree = ast.parse(text)
        except (OSError, ValueError, SyntaxError, RecursionError):
            continue
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        yield _File(text, tree, imports)
        for name in _modules(imports):
            neighbor = command.folder.joinpath(*name.split(".")).with_suffix(".py")
            if neighbor not in seen and len(seen) < _MOST_FILES and neighbor.is_file():
                seen.add(neighbor)
                files.append(neighbor)


def _is_beside(folder: Path, name: str) -> bool:
    """Return whether it is a module beside the script, which is read, too. Of a package not everything may be read."""
    return (folder / name).with_suffix(".py").is_file()


def _tops(file: _File) -> set[str]:
    """Return the packages and modules that a file imports by name, without their submodules."""
    names: set[str] = set()
    for node in file.imports:
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif not node.level and node.module:
            names.add(node.module.partition(".")[0])
    return names


def _calls_init(file: _File) -> bool:
    modules: set[str] = set()  # the file's names for them
    functions: set[str] = set()
    for node in file.imports:
        for alias in node.names:
            origin = alias.name if isinstance(node, ast.Import) else f"{'.' * node.level}{node.module or ''}"
            if origin.partition(".")[0] not in _OURS:
                continue
            is_init = isinstance(node, ast.ImportFrom) and alias.name == "init"
            (functions if is_init else modules).add(alias.asname or alias.name.partition(".")[0])
    called = (node.func for node in ast.walk(file.tree) if isinstance(node, ast.Call))
    return any(
        (isinstance(function, ast.Name) and function.id in functions)
        or (isinstance(function, ast.Attribute) and function.attr == "init" and _root(function) in modules)
        for function in called
    )


def _root(node: ast.expr) -> str:
    """Return the name with which a chain of attributes begins; "" if it begins with something else."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _modules(imports: Sequence[ast.Import | ast.ImportFrom]) -> list[str]:
    """Return the names of modules that may be beside the script."""
    names = []
    for node in imports:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif node.level <= 1:
            names.append(node.module or "")
            names += [f"{node.module}.{alias.name}" if node.module else alias.name for alias in node.names]
    return [name for name in names if name]
