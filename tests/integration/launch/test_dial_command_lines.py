"""What the diallers' command lines become: through login shells, rsh agents, templates; and errors of usage."""

from __future__ import annotations

import asyncio
import itertools
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_driver.errors import LaunchError, SettingsError
from elastic_driver.launch.dial import agent_command, here
from elastic_driver.launch.dial.agent_command import agent_words, quoted
from elastic_driver.launch.dial.command import CommandDialler, RshDialler
from elastic_driver.launch.dial.here import local_environment, source_folder
from elastic_driver.launch.dial.ssh import SshDialler
from elastic_driver.launch.words import CommandNotFoundError
from elastic_driver.rendezvous.agent_messages import Bootstrap

pytestmark = pytest.mark.integration

BOOTSTRAP = Bootstrap(urls=("http://10.0.0.1:5000",), identity="ticket 7", key="00ff", host="b")
AWKWARD = [
    *("", " ", "a b", "it's", "'", "''", '"', "\\", "\\'", "a\\", "!", "a!b", "!!", "$HOME", "`id`", "$(id)", "*", "?"),
    *(
        "~",
        "~root",
        "=ls",
        "%1",
        "#x",
        "a#b",
        "{a,b}",
        "[a]",
        "a;b",
        "a&b",
        "a|b",
        "<a",
        ">a",
        "(a)",
        "^",
        "-n",
        "é",
        "\t",
    ),
    *("PYTHONPATH=/a b/it's!/\\c", "@", "a=~", ":", "&&", "%self", "1>2", "\\n"),
]


@pytest.mark.parametrize("shell", ["sh", "dash", "bash", "zsh", "csh", "tcsh", "fish"])
def test_every_login_shell_takes_the_line_apart_into_its_words(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell} (scripts/install-test-hosts)")
    script = "import sys; [print(ascii(word)) for word in sys.argv[1:]]"
    done = subprocess.run(
        [shell, "-c", quoted([sys.executable, "-c", script, *AWKWARD])], capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == [ascii(word) for word in AWKWARD]


@pytest.mark.parametrize("word", ["a\nb", "a\rb", "a\0b"])
def test_a_line_break_is_refused(word: str) -> None:
    with pytest.raises(CommandNotFoundError, match="line break"):
        quoted(["env", word])


def test_the_same_python_comes_first_and_finds_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(Path(here.__file__).parents[3])
    assert source_folder() == folder
    assert agent_words() == ["env", f"PYTHONPATH={folder}", sys.executable, "-P", "-m", "elastic_driver.launch.agent"]
    assert agent_words("python3", "/there")[:3] == ["env", "PYTHONPATH=/there", "python3"]
    assert agent_words("python3", "") == ["python3", "-P", "-m", "elastic_driver.launch.agent"]
    monkeypatch.setenv("PYTHONPATH", "/mine")
    assert local_environment()["PYTHONPATH"] == f"{folder}:/mine"
    installed = Path("/venv/lib/site-packages/elastic_driver/launch/dial/here.py")
    monkeypatch.setattr(here, "__file__", str(installed))
    assert agent_words()[0] == sys.executable
    assert local_environment()["PYTHONPATH"] == "/mine"


def words_of(dialler: object, tmp_path: Path) -> list[str]:
    """The words with which the dialler's program was run: it writes them to the file "words"."""

    async def dial() -> None:
        child = await dialler.dial("b", BOOTSTRAP)
        assert "exited with code 0" in (await child.failed).reason

    asyncio.run(dial())
    return (tmp_path / "words").read_text().splitlines()


@pytest.fixture
def program(tmp_path: Path) -> str:
    """A program that writes its words down, a line each."""
    path = tmp_path / "program"
    path.write_text(f'#!/bin/sh\nexec >"{tmp_path}/words"\nfor word; do echo "$word"; done\n')
    path.chmod(0o755)
    return str(path)


AGENT = ["/opt/py 3/bin/python", "-P", "-m", "elastic_driver.launch.agent"]
THERE = {"python": AGENT[0], "pythonpath": ""}


def test_an_rsh_agent_gets_words_for_a_shell(tmp_path: Path, program: str) -> None:
    words = words_of(RshDialler(f"{program} -o 'a b'", **THERE), tmp_path)
    assert words == ["-o", "a b", "b", f"'{AGENT[0]}'", *AGENT[1:], "--given-within", "10"]
    words = words_of(RshDialler(program, bootstrap_on="command", **THERE), tmp_path)
    assert words == ["b", f"'{AGENT[0]}'", *AGENT[1:], "--bootstrap", BOOTSTRAP.to_word()]


def test_a_launcher_has_nothing_that_only_drivers_may_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """srun hands its environment on to other hosts."""
    program = tmp_path / "program"
    program.write_text(f'#!/bin/sh\nenv >"{tmp_path}/words"\n')
    program.chmod(0o755)
    secret = ("ETCDCTL_USER=jobs:secret", "ETCDCTL_KEY=/key", "ELASTIC_DRIVER_AGENTS_ETCDCTL_USER=agents:other")
    for variable in (*secret, "ETCDCTL_API=3"):
        monkeypatch.setenv(*variable.split("="))
    for dialler in (
        RshDialler(str(program), **THERE),
        CommandDialler(f"{program} {{host}}", **THERE),
        SshDialler(program=(str(program),), **THERE),
    ):
        there = words_of(dialler, tmp_path)
        assert "ETCDCTL_API=3" in there
        assert set(there).isdisjoint(secret)
        (tmp_path / "words").unlink()


INPUTS = {"empty": "</dev/null", "closed": "<&-", "silent": "< fifo"}
# Where nothing arrives, what is heard of the agent, where the ticket is to be: in few combinations at a landing.
LOST = list(itertools.product(INPUTS, ("code", "words"), (None, "stdin")))
LOST_AT_A_LANDING = (("empty", "code", None), ("closed", "words", "stdin"), ("silent", "words", None))


@pytest.mark.parametrize(
    ("input_of", "says", "bootstrap_on"),
    [
        pytest.param(
            INPUTS[each[0]],
            *each[1:],
            id="-".join(map(str, each)),
            marks=[pytest.mark.release] * (each not in LOST_AT_A_LANDING),
        )
        for each in LOST
    ],
)
def test_where_nothing_arrives_the_next_agent_has_a_ticket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, input_of: str, says: str, bootstrap_on: str | None
) -> None:
    os.mkfifo(tmp_path / "fifo")
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "rsh"
    # The words are the agent's own, quoted for a shell; its time limit is the test's.
    lost = "2>/dev/null" if says == "code" else "|| exit 1"
    hold = "exec 7<>fifo; " if "fifo" in input_of else ""
    program.write_text(f'#!/bin/sh\nshift\n{hold}sh -c "$*" {input_of} {lost}\n')
    program.chmod(0o755)
    monkeypatch.setattr(agent_command, "_GIVEN_WITHIN_S", 1)

    async def dial() -> None:
        dialler = RshDialler(str(program), bootstrap_on=bootstrap_on)
        child = await dialler.dial("b", BOOTSTRAP)
        assert not dialler.shows_bootstrap("b")
        failure = await child.failed
        assert ("received nothing on standard input" in failure.reason) == (says == "words")
        assert dialler.shows_bootstrap("b") == (bootstrap_on is None)
        assert not dialler.shows_bootstrap("c"), "that is another host"

    asyncio.run(dial())


def test_an_rsh_agent_that_fails_otherwise_gets_no_ticket(tmp_path: Path) -> None:
    program = tmp_path / "rsh"
    program.write_text("#!/bin/sh\necho no such host >&2\nexit 2\n")
    program.chmod(0o755)

    async def dial() -> None:
        dialler = RshDialler(str(program), **THERE)
        assert "no such host" in (await (await dialler.dial("b", BOOTSTRAP)).failed).reason
        assert not dialler.shows_bootstrap("b")

    asyncio.run(dial())


@pytest.mark.parametrize(
    ("template", "filled"),
    [
        ("-w {host}", ["-w", "b", *AGENT]),
        ("--host=x{host}y{host} -- ", ["--host=xbyb", "--", *AGENT]),
        ("-f '{{.Id}}' {host} sh -c {command}", ["-f", "{{.Id}}", "b", "sh", "-c", quoted(AGENT)]),
        ("'cd /x && exec {command}' {host}", [f"cd /x && exec {quoted(AGENT)}", "b"]),
    ],
)
def test_a_template_is_filled(tmp_path: Path, program: str, template: str, filled: list[str]) -> None:
    assert words_of(CommandDialler(f"{program} {template}", **THERE), tmp_path) == filled


def test_a_ticket_on_the_command_line(tmp_path: Path, program: str) -> None:
    dialler = CommandDialler(f"{program} {{host}}", bootstrap_on="command", **THERE)
    assert words_of(dialler, tmp_path) == ["b", *AGENT, "--bootstrap", BOOTSTRAP.to_word()]


@pytest.mark.parametrize(
    ("template", "why"), [("srun -w node", "needs the placeholder {host}"), ("srun 'x", "quot"), (" ", "empty")]
)
def test_a_template_that_cannot_be_is_refused(template: str, why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        CommandDialler(template)


@pytest.mark.parametrize("text", ["", "rsh 'x"])
def test_an_rsh_agent_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="--rsh-agent"):
        RshDialler(text)


def test_ssh_forwards_nothing_and_asks_nobody(tmp_path: Path, program: str) -> None:
    dialler = SshDialler(port=2222, identity_file=program, connect_timeout_s=2.1, program=[program], **THERE)
    *options, line = words_of(dialler, tmp_path)
    assert {"-T", "-x", "-a", "-oBatchMode=yes", "-oClearAllForwardings=yes", "-oConnectTimeout=3"} <= set(options)
    assert options[-6:] == ["-p", "2222", "-i", program, "--", "b"]
    assert line == quoted(AGENT)
    *options, _ = words_of(SshDialler(logins={"a": "you", "b": "me"}, program=[program], **THERE), tmp_path)
    assert options[-4:] == ["-l", "me", "--", "b"]


def test_what_cannot_be_tried_is_an_error(tmp_path: Path) -> None:
    async def dial(dialler: object) -> None:
        await dialler.dial("b", BOOTSTRAP)

    with pytest.raises(CommandNotFoundError, match=r"no-such-srun.*No such file"):
        asyncio.run(dial(CommandDialler("no-such-srun -w {host}")))
    (tmp_path / "rsh").write_text("text")
    with pytest.raises(CommandNotFoundError, match="Permission denied"):
        asyncio.run(dial(RshDialler(str(tmp_path / "rsh"))))
    with pytest.raises(CommandNotFoundError, match=r"cannot read ssh's identity file .*no-such-key"):
        asyncio.run(dial(SshDialler(identity_file=str(tmp_path / "no-such-key"))))


def test_no_free_descriptor_is_an_error_and_leaves_nothing(program: str) -> None:
    # Without a gap below the highest, which may have come from whoever started the tests.
    highest = max(map(int, os.listdir("/proc/self/fd")))
    held = [os.dup(0)]
    while held[-1] < max(120, highest + 1):
        held.append(os.dup(0))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    outcomes = []

    async def dial() -> None:
        await asyncio.to_thread(int)  # what asyncio opens by itself is open now
        before = sorted(os.listdir("/proc/self/fd"))
        for more in range(16):
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, before)) + 1 + more, limits[1]))
            try:
                child = await RshDialler(program, **THERE).dial("b", BOOTSTRAP)
            except LaunchError as error:
                outcomes.append(str(error).rpartition(": ")[2])
            else:
                outcomes.append("started")
                await child.close()
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            assert sorted(os.listdir("/proc/self/fd")) == before

    try:
        asyncio.run(dial())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in held:
            os.close(descriptor)
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {"Too many open files", "started"}
