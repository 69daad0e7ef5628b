"""torchrun's own parser, walked: each of its flags and variables is taken here, or refused in a sentence."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from elastic_driver.cli.flags import build_parser, parse
from elastic_driver.cli.main import main
from elastic_driver.errors import SettingsError
from elastic_driver.settings.assembly import settings_from
from elastic_driver.settings.torchrun_options import OPTIONS

pytestmark = [pytest.mark.unit]

DOCS = (Path(__file__).resolve().parents[3] / "docs/torchrun_flags.md").read_text(encoding="utf-8")

# A value that torchrun takes, where a number will not do; and what else such a job has to say.
VALUES = {
    "rdzv_backend": "c10d",
    "rdzv_endpoint": "localhost:29400",
    "rdzv_conf": "join_timeout=60",
    "start_method": "fork",
    "event_log_handler": "null",
    "master_addr": "localhost",
    "master_port": "29400",
    "logs_specs": "default",
    "numa_binding": "node",
    "signals_to_handle": "SIGTERM,SIGUSR1",
    "node_rank": "0",
}


def torchs() -> list[argparse.Action]:
    run = pytest.importorskip("torch.distributed.run")
    actions: list[argparse.Action] = run.get_args_parser()._actions
    return [action for action in actions if action.option_strings and action.dest != "help"]


def test_the_table_has_all_of_them_and_their_spellings() -> None:
    ours = build_parser()._option_string_actions
    found = torchs()
    assert len(found) > 25
    for action in found:
        assert action.dest in OPTIONS
        for spelling in action.option_strings:
            assert ours[spelling].dest == f"torchrun_{action.dest}", spelling
        assert (action.nargs == 0) == (not OPTIONS[action.dest].metavar), action.dest
    # torchrun has a variable for the one that it has no flag for.
    assert OPTIONS.keys() - {action.dest for action in found} == {"log_line_prefix_template"}


def test_each_is_taken_or_refused_in_a_sentence() -> None:
    for action in torchs():
        value = VALUES.get(action.dest, "1")
        words = [action.option_strings[-1], *([] if action.nargs == 0 else [value])]
        made = settings_from(parse([*words, "train.py"]), {})
        assert made.nodes is not None, action.dest
        assert made == settings_from(parse(["train.py"]), {OPTIONS[action.dest].variable: value}), action.dest


def test_torchruns_choices_and_ours() -> None:
    for action in torchs():
        for choice in action.choices or ():
            settings_from(parse([action.option_strings[-1], choice, "train.py"]), {})
    with pytest.raises(SettingsError):
        settings_from(parse(["--start-method", "thread", "train.py"]), {})


def test_the_documents_have_a_row_for_each() -> None:
    rows = re.findall(r"^\| (`-.*?) \|", DOCS, re.MULTILINE)
    named = {flag for row in rows for flag in re.findall(r"`(--?[a-z-]+)`", row)}
    assert {option.flag for option in OPTIONS.values()} <= named
    assert {option.short for option in OPTIONS.values() if option.short} <= named
    assert named <= build_parser()._option_string_actions.keys(), "a row for a flag that there is not"


def test_the_help_shows_one_spelling() -> None:
    text = build_parser().format_help()
    for option in OPTIONS.values():
        assert option.flag in text
        assert option.flag == option.underscored or option.underscored not in text


def test_a_misspelt_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--nproc-per-nodes", "2", "train.py"]) == 2
    assert "did you mean --nproc-per-node?" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["--local", "--log", "--no", "--rdzv", "-r", "--monitor", "--master", "--tee"])
def test_what_the_command_is_given_is_its_own(word: str) -> None:
    given = parse(["--nproc-per-node", "2", "train.py", word, "1", "--nnodes", "9"])
    assert given["command"] == ("train.py", word, "1", "--nnodes", "9")
    assert given["torchrun"] == {"nproc_per_node": "2"}


def test_a_flag_may_be_cut_short() -> None:
    assert parse(["--nproc", "2", "--monitor", "1", "train.py"])["torchrun"] == {
        "nproc_per_node": "2",
        "monitor_interval": "1",
    }
    with pytest.raises(SettingsError, match="ambiguous option: --local could match --local-addr"):
        parse(["--local", "train.py"])
