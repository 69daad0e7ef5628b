"""The native extension. Everything else of the package is in pyproject.toml.

The extension is optional: where there is no compiler or no Gloo (Debian: g++ and libgloo-dev), the package installs
without it, and PyTorch's own Gloo carries the collectives. Variables of the environment:

- ELASTIC_DRIVER_REQUIRE_NATIVE=1 makes its absence an error.
- ELASTIC_DRIVER_WERROR=1 makes warnings of our own sources errors. This project's own builds set it (scripts/setup,
  scripts/build-wheel). Elsewhere a compiler that nobody here has seen yet may warn, and the extension is built.
- ELASTIC_DRIVER_CXXFLAGS adds flags.

Headers of nanobind and Gloo, and nanobind's sources, are taken for the system's (-isystem): they warn of nothing.
"""

import os
import shlex
from pathlib import Path

from setuptools import Extension, setup

NATIVE = Path("native")
GLOO_HEADER = "gloo/context.h"


def gloo_folders() -> list[str] | None:
    """Folders with Gloo's headers that have to be named to the compiler; None where there are no headers."""
    named = [Path(folder) for folder in os.environ.get("CPATH", "").split(":") if folder]
    found = [str(folder) for folder in named if (folder / GLOO_HEADER).is_file()]
    known = any((Path(folder) / GLOO_HEADER).is_file() for folder in ("/usr/include", "/usr/local/include"))
    return found if found or known else None


def extension() -> list[Extension]:
    """The extension, or nothing and a line that says why."""
    required = os.environ.get("ELASTIC_DRIVER_REQUIRE_NATIVE") == "1"
    gloo = gloo_folders()
    if gloo is None:
        text = "no Gloo headers (Debian: apt-get install libgloo-dev); going on without the native extension"
        if required:
            raise SystemExit(f"elastic_driver: {text.split(';')[0]}")
        print(f"elastic_driver: {text}")
        return []
    import nanobind

    source = Path(nanobind.source_dir())
    foreign = [nanobind.include_dir(), str(source.parent / "ext" / "robin_map" / "include"), str(source), *gloo]
    files = [path for path in NATIVE.rglob("*") if path.parent != NATIVE / "tests"]
    return [
        Extension(
            "elastic_driver._native",
            sources=sorted(str(path) for path in files if path.suffix == ".cpp"),
            depends=sorted(str(path) for path in files if path.suffix == ".h"),
            libraries=["gloo"],
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
            extra_link_args=["-Wl,-z,now", "-Wl,--exclude-libs,ALL"],
            language="c++",
            optional=not required,
        )
    ]


setup(ext_modules=extension())
