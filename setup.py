"""The native extension. Everything else of the package is in pyproject.toml.

The extension is optional: where there is no compiler or no Gloo (Debian: g++ and libgloo-dev), the package installs
without it, and PyTorch's own Gloo carries the collectives. ELASTIC_DRIVER_REQUIRE_NATIVE=1 makes its absence an error.
ELASTIC_DRIVER_CXXFLAGS adds flags (the sanitizer script uses it).
"""

import os
import shlex
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

NATIVE = Path("native")
GLOO_HEADER = "gloo/context.h"


def extension() -> list[Extension]:
    """The extension, or nothing and a line that says why."""
    required = os.environ.get("ELASTIC_DRIVER_REQUIRE_NATIVE") == "1"
    folders = [Path(folder) for folder in os.environ.get("CPATH", "").split(":") if folder]
    if not any(
        (folder / GLOO_HEADER).is_file() for folder in (*folders, Path("/usr/include"), Path("/usr/local/include"))
    ):
        text = "no Gloo headers (Debian: apt-get install libgloo-dev); going on without the native extension"
        if required:
            raise SystemExit(f"elastic_driver: {text.split(';')[0]}")
        print(f"elastic_driver: {text}")
        return []
    import nanobind

    return [
        Extension(
            "elastic_driver._native",
            sources=sorted(str(path) for path in NATIVE.glob("*/*.cpp") if path.parent != NATIVE / "tests"),
            depends=sorted(str(path) for path in NATIVE.rglob("*.h")),
            include_dirs=[
                nanobind.include_dir(),
                str(Path(nanobind.source_dir()).parent / "ext" / "robin_map" / "include"),
            ],
            libraries=["gloo"],
            extra_compile_args=[
                "-std=c++17",
                f"-iquote{NATIVE}",
                "-O3",
                "-g0",
                "-fvisibility=hidden",
                "-fno-strict-aliasing",
                "-DNDEBUG",
                "-DNB_COMPACT_ASSERTIONS",
                *shlex.split(os.environ.get("ELASTIC_DRIVER_CXXFLAGS", "")),
            ],
            extra_link_args=["-Wl,-z,now", "-Wl,--exclude-libs,ALL"],
            language="c++",
            optional=not required,
        )
    ]


class BuildWithNanobind(build_ext):
    """Compiles nanobind's own code with ours."""

    def build_extension(self, ext: Extension) -> None:
        """Adds the source only here: where setuptools lists a package's sources, it refuses those outside of it."""
        import nanobind

        sources = ext.sources
        ext.sources = [*sources, str(Path(nanobind.source_dir()) / "nb_combined.cpp")]
        try:
            super().build_extension(ext)
        finally:
            ext.sources = sources


setup(ext_modules=extension(), cmdclass={"build_ext": BuildWithNanobind})
