"""The one table of who may do what."""

from __future__ import annotations

import pytest

from elastic_driver.dialects.ours import OUR_ROUTES
from elastic_driver.rendezvous.credentials import Role
from elastic_driver.rendezvous.routes import ALL, DRIVER_ROUTES, WORKER, Route, table_of

pytestmark = pytest.mark.unit


def allowed(role: Role) -> set[tuple[str, bytes]]:
    table = table_of(OUR_ROUTES)
    return {(name, method) for name, route in table.items() for method, roles in route.methods.items() if role in roles}


def test_who_may_only_look_may_change_nothing() -> None:
    """Its secret travels, so it must be worth nothing to who reads it."""
    assert allowed(Role.READER) == {("status", b"GET")}


def test_an_operator_is_no_worker() -> None:
    assert allowed(Role.OPERATOR) == {("status", b"GET"), ("drain", b"POST"), ("end", b"POST")}


def test_what_the_driver_s_server_has_is_in_the_table() -> None:
    assert allowed(Role.WORKER) == {
        ("next-round", b"POST"),
        ("watch", b"POST"),
        ("running", b"POST"),
        ("leave", b"POST"),
        ("exchange", b"POST"),
        ("key", b"GET"),
        ("key", b"PUT"),
        ("status", b"GET"),
    }


@pytest.mark.parametrize("name", DRIVER_ROUTES)
def test_a_dialect_does_not_take_the_driver_s_routes(name: str) -> None:
    with pytest.raises(ValueError, match=f"the route {name} is the driver's own"):
        table_of({name: Route({b"GET": WORKER})})


def test_a_dialect_s_routes_are_its_workers_alone() -> None:
    with pytest.raises(ValueError, match="the workers' route place is open to others"):
        table_of({"place": Route({b"GET": ALL})})
