"""A Kubernetes API server for tests: strict, over HTTP, on a loopback port, in a thread of its own.

It keeps objects as etcd and the API server do (resource versions, watches, graceful deletion, finalizers, owners,
status subresources, RBAC), checks them against Kubernetes' own schemas, and runs nothing: what a scheduler, a kubelet
or a cloud does is done by the test, through the hooks of :class:`~kubernetes_fake.server.FakeKubernetes`. It is
stricter than the real one where that finds mistakes: an unknown field, or an unknown word in a query, is refused.
"""

from tests.support.clusters.kubernetes_fake.answers import ApiError
from tests.support.clusters.kubernetes_fake.rules import Request
from tests.support.clusters.kubernetes_fake.server import ADMIN, FakeKubernetes

__all__ = ["ADMIN", "ApiError", "FakeKubernetes", "Request"]
