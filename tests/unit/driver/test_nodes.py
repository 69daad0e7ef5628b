"""What a node refuses before it does anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastic_driver.driver.nodes import run_node
from elastic_driver.errors import SettingsError
from elastic_driver.settings.nodes import Nodes
from elastic_driver.settings.settings import Settings

pytestmark = pytest.mark.unit

TOKEN = {"ELASTIC_DRIVER_JOIN_TOKEN": "a token of the test's own"}


def _settings(**more: Any) -> Settings:
    return Settings(**({"command": ("true",), "num_proc": 1, "min_num_proc": 1, "accept_agents": True} | more))


@pytest.mark.parametrize(
    ("nodes", "settings", "environ", "why"),
    [
        ({"endpoint": "node0", "nproc_per_node": 10**6}, {}, TOKEN, "--nproc-per-node 1000000 is not between 1 and"),
        ({"endpoint": "a:b"}, {}, {}, "cannot read 'a:b' as the endpoint"),
        ({"endpoint": "node0:29400"}, {}, {}, "nodes that meet at node0:29400 need a shared secret"),
        ({"endpoint": "node0:29400"}, {}, {"ELASTIC_DRIVER_JOIN_TOKEN": "short"}, "it has 5 characters"),
        (
            {"endpoint": "node0:29400"},
            {},
            {"ELASTIC_DRIVER_JOIN_TOKEN_FILE": "/none"},
            "cannot read the join token file /none",
        ),
        ({"endpoint": "node0", "local_addr": "no-such.invalid"}, {}, TOKEN, "--local-addr no-such.invalid does not"),
    ],
)
def test_what_a_node_can_not_be_told(
    nodes: dict[str, Any], settings: dict[str, Any], environ: dict[str, str], why: str
) -> None:
    given = dict(environ)
    with pytest.raises(SettingsError) as error:
        run_node(_settings(**settings), Nodes(**nodes), environ=given)
    assert why in str(error.value)
    assert not given, "workers would inherit it"


def test_a_token_file_of_the_environment_is_one_of_the_flag(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("too short\n")
    for settings, environ in (
        (_settings(join_token_file=file), {}),
        (_settings(), {"ELASTIC_DRIVER_JOIN_TOKEN_FILE": str(file)}),
    ):
        with pytest.raises(SettingsError, match="it has 9 characters"):
            run_node(settings, Nodes(endpoint="node0"), environ=environ)
