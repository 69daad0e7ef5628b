"""Puts the .pth file beside the package, where Python looks for it. The rest is in pyproject.toml."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

PATH_FILE = "elastic_driver_horovod.pth"


class BuildWithPathFile(build_py):
    """The package, and the file."""

    def run(self) -> None:
        """Copies both."""
        super().run()
        self.copy_file(PATH_FILE, str(Path(self.build_lib, PATH_FILE)))

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:  # noqa: FBT001, FBT002 - setuptools'
        """The files that are made."""
        return [*super().get_outputs(include_bytecode), str(Path(self.build_lib, PATH_FILE))]


setup(cmdclass={"build_py": BuildWithPathFile})
