"""What agents and the driver say to each other is of a form that only changes with the protocol."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_driver import codec
from elastic_driver.errors import RendezvousProtocolError
from elastic_driver.rendezvous import agent_messages
from elastic_driver.rendezvous.agent_messages import PROTOCOL, AgentMessage, Bootstrap, PortLevel, decoded
from tests.support.forms import check_form

pytestmark = pytest.mark.unit

FORM = Path(__file__).parent / f"agent_messages_protocol_{PROTOCOL}.txt"


def form_of_messages() -> str:
    """The name of each message, and the fields of all that it carries."""
    said_here = (kind for kind in AgentMessage.__subclasses__() if kind.__module__ == agent_messages.__name__)
    messages = sorted(said_here, key=lambda kind: kind.name)
    names = [f"{kind.name} is {kind.__name__}\n" for kind in messages]
    return "".join(names) + codec.describe(Bootstrap, *messages)


def test_the_form_of_a_protocol_does_not_change() -> None:
    """An agent of another release with the same protocol has to read all that is said."""
    check_form(FORM, form_of_messages(), "PROTOCOL in rendezvous/agent_messages.py")


@pytest.mark.parametrize(("generation", "port"), [(0, 4000), (1 << 54, 4000), (1, 0), (1, 65536)])
def test_a_port_that_nobody_can_hold_is_refused(generation: int, port: int) -> None:
    """It would be where workers of other hosts are to meet."""
    fine = agent_messages.Levels([], 1, 0, 0.0, [PortLevel(1, 1, 4000)]).message()
    assert decoded(fine).message() == fine
    lie = agent_messages.Levels([], 1, 0, 0.0, [PortLevel(generation, 1, port)]).message()
    with pytest.raises(RendezvousProtocolError):
        decoded(lie)
