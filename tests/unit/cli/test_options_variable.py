"""Flags that stand in a variable, for whoever starts commands of others."""

from __future__ import annotations

import pytest

from elastic_driver.cli.main import ENV_OPTIONS, _options_of
from elastic_driver.errors import SettingsError


def test_the_variable_is_taken_out_of_the_environment() -> None:
    environ = {ENV_OPTIONS: "--accept-agents --join-token-file '/etc/my token'", "PATH": "/bin"}
    assert _options_of(environ) == ["--accept-agents", "--join-token-file", "/etc/my token"]
    assert environ == {"PATH": "/bin"}
    assert _options_of(environ) == []


@pytest.mark.parametrize(("text", "said"), [("--x 'y", "No closing quotation"), ("python a.py", "'python'")])
def test_what_is_no_flags_is_refused(text: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        _options_of({ENV_OPTIONS: text})
