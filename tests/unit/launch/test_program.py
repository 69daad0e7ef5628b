"""What is seen in a command's script."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from elastic_driver.launch.warm.program import Program

SEEN = {
    "the library": "import elastic_driver as hvd\nhvd.init()\n",
    "one of its modules": "import elastic_driver.torch\nelastic_driver.torch.init()\n",
    "Horovod's": "import horovod.torch as hvd\nhvd.init()\n",
    "from a package": "from horovod import torch as hvd\ndef main():\n    hvd.init()\n",
    "the function": "from elastic_driver.torch import init as begin\nbegin()\n",
    "an import that is late": "def main():\n    import elastic_driver as hvd\n    hvd.init()\n",
    "one way of two": "try:\n    import horovod.torch as hvd\nexcept ImportError:\n    pass\nelse:\n    hvd.init()\n",
}
UNSEEN = {
    "torchrun's": "import torch.distributed as dist\ndist.init_process_group()\n",
    "another init": "import wandb\nimport elastic_driver\nwandb.init()\n",
    "an import alone": "import elastic_driver.torch as hvd\nprint(hvd.rank)\n",
    "an init that is not called": "import elastic_driver as hvd\nstart = hvd.init\n",
    "names made at run time": "import importlib\nimportlib.import_module('elastic_driver').init()\n",
    "a mistake": "import elastic_driver as hvd\nhvd.init(\n",
    "nothing": "",
}


@pytest.mark.parametrize("name", SEEN)
def test_seen(name: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SEEN[name])
    assert Program(["python3", "-u", "train.py", "--epochs", "3"], tmp_path).calls_init()
    assert Program([sys.executable, "-m", "train"], tmp_path).calls_init()


@pytest.mark.parametrize("name", UNSEEN)
def test_unseen(name: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(UNSEEN[name])
    assert not Program(["python3", "train.py"], tmp_path).calls_init()


def test_a_module_beside_the_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("from work import loop\nloop.main()\n")
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "loop.py").write_text("import setup_job\nimport train\n")
    (tmp_path / "setup_job.py").write_text(SEEN["Horovod's"])
    assert Program(["python3", "train.py"], tmp_path).calls_init()
    (tmp_path / "setup_job.py").write_text("")
    assert not Program(["python3", "train.py"], tmp_path).calls_init()


def test_only_so_many_modules_are_read(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("".join(f"import part{number}\n" for number in range(100)))
    for number in range(100):
        (tmp_path / f"part{number}.py").write_text(SEEN["the library"] if number == 99 else "")
    assert not Program(["python3", "train.py"], tmp_path).calls_init()


@pytest.mark.parametrize(
    "command", [["bash", "train.sh"], ["true"], ["python3", "-c", "x"], ["python3", "gone.py"], []]
)
def test_commands_that_cannot_be_read(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SEEN["the library"])
    assert not Program(command, tmp_path).calls_init()


ALONE = {
    "PyTorch": "import torch\nfrom torch import nn\nmodel = nn.Linear(1, 1)\n",
    "with a module beside it": "import beside\nimport json, torch, numpy as np\n",
    "scikit-learn": "from sklearn.linear_model import LinearRegression\n",
}
NOT_ALONE = {
    "of torchrun's": "import torch\nimport torch.distributed as dist\n",
    "by a variable": "import os, torch\nrank = int(os.environ['RANK'])\n",
    "by a library": "import torch, accelerate\n",
    "by a package beside it": "import torch, package\n",
    "by a module beside it": "import torch, finds\n",
    "by another program": "import torch, subprocess\n",
    "no training": "import json\nprint('hello')\n",
    "a mistake": "import torch\ndef (\n",
    "ours": "import torch\nimport elastic_driver.torch as hvd\nhvd.init()\n",
}


@pytest.mark.parametrize("name", [*ALONE, *NOT_ALONE])
def test_a_script_that_knows_of_no_other_workers(name: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text((ALONE | NOT_ALONE)[name])
    (tmp_path / "beside.py").write_text("import math\n")
    (tmp_path / "finds.py").write_text("import torch.distributed\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    assert Program(["python3", "train.py", "--epochs", "3"], tmp_path).trains_alone() == (
        "train.py" if name in ALONE else ""
    )
    assert Program(["bash", "train.sh"], tmp_path).trains_alone() == ""
    assert Program(["python3", "absent.py"], tmp_path).trains_alone() == ""
