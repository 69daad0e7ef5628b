"""The native extension. Everything else of the package is in pyproject.toml.

The extension is optional: where there is no compiler or no Gloo (Debian: g++ and libgloo-dev), the package installs
without it, says what is lost, and keeps the reason beside the package for ``elasticrun --check-build``. PyTorch's own
Gloo carries the collectives then. Variables of the environment:

- ELASTIC_DRIVER_REQUIRE_NATIVE=1 makes its absence an error.
- ELASTIC_DRIVER_WERROR=1 makes warnings of our own sources errors. This project's own builds set it (scripts/setup,
  scripts/build-wheel). Elsewhere an untested compiler may warn, and the extension is built.
- ELASTIC_DRIVER_CXXFLAGS adds flags.
- ELASTIC_DRIVER_URL is where this version's sources are to be read, for the metadata and for the README's links to
  other files, which have to be whole addresses in an index. scripts/release sets it.

The pages of docs/ are installed inside the package, where ``elasticrun --help`` says they are.

Headers of nanobind and Gloo, and nanobind's sources, are taken for the system's (-isystem): they warn of nothing.
"""

import contextlib
import os
import re
import shlex
import shutil
import sys
import sysconfig
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import nanobind
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import BaseError, CCompilerError, CompileError

NATIVE = Path("native")
GLOO_HEADER = "gloo/context.h"
# From 3.12 on nanobind can do with the stable ABI: one build for all later versions. None without the lock yet.
STABLE_ABI = sys.version_info >= (3, 12) and not sysconfig.get_config_var("Py_GIL_DISABLED")
REQUIRED = os.environ.get("ELASTIC_DRIVER_REQUIRE_NATIVE") == "1"
URL = os.environ.get("ELASTIC_DRIVER_URL", "").rstrip("/")
# worker/engine/native_loader.py reads it.
NOTE = "native_missing.txt"
LOSS = """
elastic_driver: WARNING: the native extension is not built: {reason}.
elastic_driver: What is lost without it: jobs of several workers need PyTorch, whose Gloo carries their collectives,
elastic_driver: several times slower; hangs are found later, and a cut network only at a collective's time limit.
elastic_driver: To have it, install a wheel; or apt-get install g++ python3-dev libgloo-dev (Debian, Ubuntu), then
elastic_driver: install again with pip install --force-reinstall --no-cache-dir.
"""


def gloo_folders() -> list[str] | None:
    """Folders with Gloo's headers that have to be named to the compiler; None where there are no headers."""
    named = [Path(folder) for folder in os.environ.get("CPATH", "").split(":") if folder]
    found = [str(folder) for folder in named if (folder / GLOO_HEADER).is_file()]
    known = any((Path(folder) / GLOO_HEADER).is_file() for folder in ("/usr/include", "/usr/local/include"))
    return found if found or known else None


def what_is_missing() -> str:
    """What there must be before it is worth a try; "" where it is there."""
    compiler = shlex.split(os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "g++")[0]
    if shutil.which(compiler) is None:
        return f"there is no C++ compiler ({compiler})"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return "there are no headers of Python (Debian: python3-dev)"
    if gloo_folders() is None:
        return "there are no headers of Gloo (Debian: libgloo-dev)"
    return ""


def say(text: str) -> None:
    """Shows a text to whoever installs: on the terminal, too, since pip shows what is printed with -v only."""
    print(text, file=sys.stderr, flush=True)
    with contextlib.suppress(OSError), open("/dev/tty", "w") as terminal:
        terminal.write(text)


class BuildExtension(build_ext):
    """Builds the extension, or says what is lost without it and leaves a note beside the package."""

    def build_extension(self, ext: Extension) -> None:
        """Builds it, or not."""
        note = self._note()
        note.unlink(missing_ok=True)
        try:
            if missing := what_is_missing():
                raise CompileError(missing)
            super().build_extension(ext)
            self._remove_rivals(Path(self.build_lib, "elastic_driver"))
        except (BaseError, CCompilerError) as error:
            if REQUIRED:
                raise
            reason = " ".join(str(error).split()) or type(error).__name__
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text(reason + "\n")
            say(LOSS.format(reason=reason))

    def copy_extensions_to_source(self) -> None:
        """The note goes where the extension would."""
        super().copy_extensions_to_source()
        folder = Path(self.get_finalized_command("build_py").get_package_dir("elastic_driver"))
        self._remove_rivals(folder)
        copy = folder / NOTE
        copy.unlink(missing_ok=True)
        if self._note().exists():
            shutil.copyfile(self._note(), copy)

    def _remove_rivals(self, folder: Path) -> None:
        """Removes what an earlier build has left there and this Python would load in place of what is built now.

        One for this version only is found before one of the stable ABI. Those of other Pythons stay.
        """
        built = Path(self.get_ext_filename("elastic_driver._native")).name
        if not (folder / built).exists():
            return
        names = [f"_native{suffix}" for suffix in EXTENSION_SUFFIXES]
        for name in names[: names.index(built)]:
            (folder / name).unlink(missing_ok=True)

    def _note(self) -> Path:
        return Path(self.build_lib, "elastic_driver", NOTE)


class BuildWithPages(build_py):
    """The package's modules, and the pages for users."""

    def run(self) -> None:
        """Copies both; an editable installation finds the pages in the checkout."""
        super().run()
        if not self.editable_mode:
            for page, copy in self._pages():
                copy.parent.mkdir(parents=True, exist_ok=True)
                self.copy_file(str(page), str(copy))

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:  # noqa: FBT001, FBT002 - setuptools'
        """The files that are made."""
        pages = [] if self.editable_mode else [str(copy) for _, copy in self._pages()]
        return [*super().get_outputs(include_bytecode), *pages]

    def _pages(self) -> list[tuple[Path, Path]]:
        return [(page, Path(self.build_lib, "elastic_driver", page)) for page in sorted(Path("docs").rglob("*.md"))]


def readme() -> str:
    """The README; its links to files are addresses where it is known of what."""
    text = Path("README.md").read_text(encoding="utf-8")
    if not URL:
        return text
    # Below /blob/ code hosts show a page about a file, and an image has to be the file itself.
    text = re.sub(r"(!\[[^\]]*\])\((?!https?:)([^)]+)\)", rf"\1({URL.replace('/blob/', '/raw/', 1)}/\2)", text)
    return re.sub(r"\]\((?!https?:|#)([^)]+)\)", rf"]({URL}/\1)", text)


def extension() -> Extension:
    """What there is to build."""
    source = Path(nanobind.source_dir())
    foreign = [
        nanobind.include_dir(),
        str(source.parent / "ext" / "robin_map" / "include"),
        str(source),
        *(gloo_folders() or ()),
    ]
    files = [path for path in NATIVE.rglob("*") if path.parent != NATIVE / "tests"]
    return Extension(
        "elastic_driver._native",
        sources=sorted(str(path) for path in files if path.suffix == ".cpp"),
        depends=sorted(str(path) for path in files if path.suffix in (".h", ".map")),
        libraries=["gloo", "dl"],
        define_macros=[("Py_LIMITED_API", "0x030C0000")] if STABLE_ABI else [],
        py_limited_api=STABLE_ABI,
        extra_compile_args=[
            "-std=c++17",
            f"-iquote{NATIVE}",
            *(f"-isystem{folder}" for folder in foreign),
            "-O3",
            "-g0",
            "-fvisibility=hidden",
            "-fno-strict-aliasing",
            "-DNDEBUG",
            "-DNB_COMPACT_ASSERTIONS",
            "-Wall",
            "-Wextra",
            *(["-Werror"] if os.environ.get("ELASTIC_DRIVER_WERROR") == "1" else []),
            *shlex.split(os.environ.get("ELASTIC_DRIVER_CXXFLAGS", "")),
        ],
        extra_link_args=["-Wl,-z,now", f"-Wl,--version-script={NATIVE / 'exports.map'}"],
        language="c++",
        optional=not REQUIRED,
    )


setup(
    ext_modules=[extension()],
    cmdclass={"build_ext": BuildExtension, "build_py": BuildWithPages},
    long_description=readme(),
    long_description_content_type="text/markdown",
    project_urls={"Source": URL, "Changelog": f"{URL}/CHANGELOG.md", "Documentation": f"{URL}/docs"} if URL else {},
    options={"bdist_wheel": {"py_limited_api": "cp312"}} if STABLE_ABI else {},
)
