"""Who may do what: users by their tokens, rules as Roles have them, and a book of all requests."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.support.clusters.kubernetes_fake.answers import ApiError
from tests.support.clusters.kubernetes_fake.kinds import Object
from tests.support.clusters.kubernetes_fake.storage import Storage

_RBAC = "rbac.authorization.k8s.io"
Rule = Mapping[str, list[str]]


@dataclass(frozen=True, slots=True)
class Request:
    """What somebody has asked for, in RBAC's words; ``code`` is what was answered."""

    user: str
    verb: str
    group: str
    resource: str
    subresource: str
    namespace: str
    name: str
    code: int
    query: Mapping[str, str] = field(default_factory=dict)
    path: str = ""

    def __str__(self) -> str:
        what = f"{self.resource}/{self.subresource}" if self.subresource else self.resource or self.path
        place = f"{self.namespace}/{self.name}".strip("/")
        return f"{self.user}: {self.verb} {what} {place} -> {self.code}"


class Users:
    """Who has which token, and what they may do. Who has the admin's may do everything."""

    def __init__(self, storage: Storage, admin: str) -> None:
        self._storage = storage
        self._admin = admin
        self._lock = threading.Lock()
        self._tokens: dict[str, str] = {}
        self._rules: dict[str, list[tuple[str, Rule]]] = {}  # by user: the namespace ("" for all), and the rule

    def add(self, user: str, rules: Iterable[Rule], namespace: str) -> str:
        """Gives a user a new token, and these rules beside those that Roles and bindings in the store give."""
        token = secrets.token_urlsafe(16)
        with self._lock:
            self._tokens[token] = user
            self._rules.setdefault(user, []).extend((namespace, rule) for rule in rules)
        return token

    def forbid_all(self, user: str) -> None:
        """Takes back what was given with tokens."""
        with self._lock:
            self._rules.pop(user, None)

    def revoke(self, token: str) -> None:
        with self._lock:
            self._tokens.pop(token, None)

    def of_token(self, header: str) -> str:
        """Raises ApiError: Unauthorized."""
        word, _, token = header.partition(" ")
        with self._lock:
            user = self._tokens.get(token.strip()) if word.lower() == "bearer" else None
        if user is None:
            raise ApiError("Unauthorized", "Unauthorized")
        return user

    def check(self, user: str, verb: str, group: str, resource: str, namespace: str, name: str) -> None:
        """``resource`` with its subresource. Raises ApiError: Forbidden."""
        if not self.may(user, verb, group, resource, namespace, name):
            plural = resource.partition("/")[0]
            where = f' in the namespace "{namespace}"' if namespace else " at the cluster scope"
            what = (f"{plural}.{group}" if group else plural) + (f' "{name}"' if name else "")
            text = f'User "{user}" cannot {verb} resource "{resource}" in API group "{group}"{where}'
            raise ApiError("Forbidden", f"{what} is forbidden: {text}", name=name, kind=plural)

    def may(self, user: str, verb: str, group: str, resource: str, namespace: str, name: str) -> bool:
        """By any rule."""
        if user == self._admin:
            return True
        return any(_allows(rule, verb, group, resource, name) for rule in self._rules_of(user, namespace))

    def check_escalation(self, user: str, made: Object, namespace: str) -> None:
        """Nobody may give what they have not. Raises ApiError: Forbidden."""
        kind = made["kind"]
        plural = f"{kind.lower()}s"
        if kind in ("Role", "ClusterRole"):
            rules = made.get("rules") or []
            exempt = self.may(user, "escalate", _RBAC, plural, namespace, "")
        else:
            ref = made["roleRef"]
            rules = list(self._rules_of_role(ref, namespace))
            exempt = self.may(user, "bind", _RBAC, f"{ref['kind'].lower()}s", namespace, ref["name"])
        if exempt:
            return
        for rule in rules:
            for verb, group, resource, name in _spread(rule):
                if not self.may(user, verb, group, resource, namespace, name):
                    text = f'{plural}.{_RBAC} "{made["metadata"].get("name", "")}" is forbidden: user "{user}" is '
                    text += f"attempting to grant RBAC permissions not currently held: {resource} {verb}"
                    raise ApiError("Forbidden", text)

    def _rules_of(self, user: str, namespace: str) -> Iterator[Rule]:
        with self._lock:
            given = list(self._rules.get(user, ()))
        yield from (rule for where, rule in given if where in ("", namespace))
        for plural, within in (("clusterrolebindings", ""), ("rolebindings", namespace)):
            if plural == "rolebindings" and not namespace:
                continue
            for binding in self._storage.every(self._storage.kind(_RBAC, "v1", plural), within):
                if any(_is(subject, user, within) for subject in binding.get("subjects", ())):
                    yield from self._rules_of_role(binding["roleRef"], within)

    def _rules_of_role(self, ref: Object, namespace: str) -> Iterator[Rule]:
        plural, within = ("roles", namespace) if ref["kind"] == "Role" else ("clusterroles", "")
        try:
            role = self._storage.get(self._storage.kind(_RBAC, "v1", plural), within, ref["name"])
        except ApiError:
            return  # as with the real one: a binding to nothing gives nothing
        yield from role.get("rules") or ()


class Book:
    """All requests, in the order in which they were answered; a watch is answered at its beginning."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._requests: list[Request] = []

    def add(self, request: Request) -> None:
        with self._changed:
            self._requests.append(request)
            self._changed.notify_all()

    def clear(self) -> None:
        with self._changed:
            self._requests.clear()

    def all(self) -> list[Request]:
        with self._changed:
            return list(self._requests)

    def wait(self, is_it: Callable[[Request], bool], limit_s: float, *, count: int = 1) -> Request:
        """Blocks until there are so many of these, and returns the last of them. Raises TimeoutError."""
        with self._changed:
            found = lambda: [request for request in self._requests if is_it(request)]  # noqa: E731
            if not self._changed.wait_for(lambda: len(found()) >= count, limit_s):
                raise TimeoutError(f"{len(found())} of {count} such requests in {limit_s:g} s; {self._requests[-20:]}")
            return found()[count - 1]


def _allows(rule: Rule, verb: str, group: str, resource: str, name: str) -> bool:
    return (
        bool({verb, "*"} & set(rule.get("verbs", ())))
        and bool({group, "*"} & set(rule.get("apiGroups", ())))
        and bool({resource, "*"} & set(rule.get("resources", ())))
        and (not rule.get("resourceNames") or name in rule["resourceNames"])
    )


def _spread(rule: Rule) -> Iterator[tuple[str, str, str, str]]:
    for verb in rule.get("verbs", ()):
        for group in rule.get("apiGroups", ()):
            for resource in rule.get("resources", ()):
                for name in rule.get("resourceNames") or ("",):
                    yield verb, group, resource, name


def _is(subject: Any, user: str, namespace: str) -> bool:
    if subject["kind"] == "ServiceAccount":
        return user == f"system:serviceaccount:{subject.get('namespace', namespace)}:{subject['name']}"
    return bool(subject["kind"] == "User" and subject["name"] == user)
