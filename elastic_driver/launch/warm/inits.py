"""Whether a command can be seen to call ``init()``: then its workers reset in place from the start on. And whether it
can be seen to work with no others at all: then several workers are surely not what its user means.

Reads the script, and runs nothing. What is not seen (a shell that runs the script, code in an installed module, names
that are made at run time) costs nothing but a few lines of output: the job's workers are of the other kind until the
first of them calls ``init()``.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from elastic_driver.launch.warm.preload import PythonCommand, read_command

_OURS = ("elastic_driver", "horovod")
# A script has few neighbours; one that lies in a folder of thousands is not read for long.
_MOST_FILES = 64
# What a script trains with, and what can be beside that in one that knows of no other workers; and Python's own.
_TRAINS = frozenset({"torch", "sklearn"})
_ALONE = _TRAINS | {"matplotlib", "numpy", "pandas", "PIL", "rich", "scipy", "tqdm", "torchvision", "wandb", "yaml"}
# What may find the others, or run something that does.
_FINDS_OTHERS = frozenset({"ctypes", "importlib", "multiprocessing", "runpy", "socket", "subprocess"})
_WORDS = re.compile(rb"distributed|RANK|WORLD_SIZE|MASTER_ADDR|TF_CONFIG|elastic_driver|horovod|exec[lv]|__import__")


def calls_init(command: Sequence[str], cwd: Path) -> bool:
    """Whether ``python [options] script ...`` or ``-m module`` runs a file that imports this library, or Horovod, and
    calls its ``init()``: the script itself, or a module beside it that it imports, directly or through others.

    Args:
        command: what each worker runs.
        cwd: the working directory.
    """
    found = read_command(command, cwd)
    return found is not None and any(_calls_init_of(tree, imports) for tree, imports in _read(found))


def trains_alone(command: Sequence[str], cwd: Path) -> str:
    """The script that a command runs, where that trains, and can have nothing to do with other workers; else "".

    Args:
        command, cwd: see :func:`calls_init`.
    """
    found = read_command(command, cwd)
    if found is None or not found.files:
        return ""
    trains = False
    for file, _, imports in _read_files(found):
        try:
            has_words = _WORDS.search(file.read_bytes()) is not None
        except OSError:
            return ""
        names = {name.partition(".")[0] for node in imports for name in _named(node)}
        known = sys.stdlib_module_names - _FINDS_OTHERS | _ALONE
        strange = {name for name in names - known if not _is_beside(found.folder, name)}
        if has_words or strange:
            return ""
        trains = trains or bool(names & _TRAINS)
    return found.files[-1].name if trains else ""


def _is_beside(folder: Path, name: str) -> bool:
    """Whether it is a module beside the script, which is read, too. A package may have more than what is read."""
    return (folder / name).with_suffix(".py").is_file()


def names_module(command: Sequence[str], cwd: Path, package: str) -> bool | None:
    """Whether what the command runs imports a package by name, or a module beside it does; None: that cannot be read.

    Args:
        command, cwd: see :func:`calls_init`.
        package: without dots.
    """
    found = read_command(command, cwd)
    if found is None or not found.files:
        return None
    return any(
        name.partition(".")[0] == package for _, imports in _read(found) for node in imports for name in _named(node)
    )


def _named(node: ast.Import | ast.ImportFrom) -> list[str]:
    """The modules that an import names from the top."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [] if node.level or not node.module else [node.module]


def _read(found: PythonCommand) -> Iterator[tuple[ast.AST, list[ast.Import | ast.ImportFrom]]]:
    """See below."""
    return ((tree, imports) for _, tree, imports in _read_files(found))


def _read_files(found: PythonCommand) -> Iterator[tuple[Path, ast.AST, list[ast.Import | ast.ImportFrom]]]:
    """Each file that can be read, with its imports: what Python runs, and modules beside it, also through others."""
    files, seen = list(found.files), set(found.files)
    for file in files:
        try:
            tree = ast.parse(file.read_bytes())
        except (OSError, ValueError, SyntaxError, RecursionError):
            continue
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        yield file, tree, imports
        for name in _modules(imports):
            neighbour = found.folder.joinpath(*name.split(".")).with_suffix(".py")
            if neighbour not in seen and len(seen) < _MOST_FILES and neighbour.is_file():
                seen.add(neighbour)
                files.append(neighbour)


def _calls_init_of(tree: ast.AST, imports: Sequence[ast.Import | ast.ImportFrom]) -> bool:
    modules: set[str] = set()  # names that the file has for them
    functions: set[str] = set()
    for node in imports:
        for alias in node.names:
            origin = alias.name if isinstance(node, ast.Import) else f"{'.' * node.level}{node.module or ''}"
            if origin.partition(".")[0] not in _OURS:
                continue
            is_init = isinstance(node, ast.ImportFrom) and alias.name == "init"
            (functions if is_init else modules).add(alias.asname or alias.name.partition(".")[0])
    called = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return any(
        (isinstance(function, ast.Name) and function.id in functions)
        or (isinstance(function, ast.Attribute) and function.attr == "init" and _root(function) in modules)
        for function in called
    )


def _root(node: ast.expr) -> str:
    """The name that a chain of attributes begins with; "" where it begins with something else."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _modules(imports: Sequence[ast.Import | ast.ImportFrom]) -> list[str]:
    """Modules that may lie beside the script."""
    names = []
    for node in imports:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif node.level <= 1:
            names.append(node.module or "")
            names += [f"{node.module}.{alias.name}" if node.module else alias.name for alias in node.names]
    return [name for name in names if name]
