"""The kinds of objects there are, and what an object of each has to be like.

Kubernetes' own are checked against its published schemas (the package kubernetes-validate has them), custom ones
against the schema of their definition.
"""

from __future__ import annotations

import base64
import copy
import functools
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import jsonschema
import referencing

from tests.support.clusters.kubernetes_fake.answers import ApiError

Object = dict[str, Any]

_SCHEMAS = "v1.37.0-local-strict"
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
# Where the name becomes a name of DNS or of a folder.
_LABEL_NAMES = frozenset(("namespaces", "services"))
_PATH_NAMES = frozenset(("roles", "rolebindings", "clusterroles", "clusterrolebindings"))
_QUALIFIED = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")


@dataclass(frozen=True)
class Kind:
    """One kind of object, in one version of its group.

    Attributes:
        fixed: paths in the object that no update may change.
        schema: of a custom kind; Kubernetes' own have theirs in the package.
    """

    group: str
    version: str
    plural: str
    name: str
    namespaced: bool = True
    short_names: tuple[str, ...] = ()
    subresources: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    schema: Mapping[str, Any] | None = field(default=None, compare=False)

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def stored_as(self) -> tuple[str, str]:
        """What it has in common with other versions of it."""
        return self.group, self.plural

    @property
    def is_custom(self) -> bool:
        return self.schema is not None

    @property
    def has_status(self) -> bool:
        return "status" in self.subresources

    def missing(self, name: str) -> ApiError:
        return ApiError("NotFound", f'{self._full} "{name}" not found', name=name, group=self.group, kind=self.plural)

    def invalid(self, name: str, message: str) -> ApiError:
        return ApiError("Invalid", f'{self._full} "{name}" is invalid: {message}', name=name, kind=self.name)

    def conflict(self, name: str, message: str) -> ApiError:
        text = f'Operation cannot be fulfilled on {self._full} "{name}": {message}'
        return ApiError("Conflict", text, name=name, kind=self.plural)

    def exists(self, name: str) -> ApiError:
        return ApiError("AlreadyExists", f'{self._full} "{name}" already exists', name=name, kind=self.plural)

    @property
    def _full(self) -> str:
        return f"{self.plural}.{self.group}" if self.group else self.plural

    def checked(self, given: Any, namespace: str) -> Object:
        """The object as it would be kept: without nulls, custom ones without what their schema does not know.

        Raises:
            ApiError: it cannot be one.
        """
        if not isinstance(given, dict):
            raise ApiError("BadRequest", f"the object is {type(given).__name__}, not a map")
        names = {"apiVersion": self.api_version, "kind": self.name}
        if not self.is_custom:  # the path says what they are
            given = {**names, **{key: value for key, value in given.items() if key not in names or value is not None}}
        for key, expected in names.items():
            if given.get(key) != expected:
                raise ApiError("BadRequest", f"the object's {key} is {given.get(key)!r}, and {expected!r} is expected")
        made: Object = _without_nulls(copy.deepcopy(given))
        metadata = made.get("metadata")
        if not isinstance(metadata, dict):
            raise ApiError("BadRequest", "the object has no metadata")
        if self.schema is None:
            self._check(made, _validator(self.name, self.group, self.version))
        else:
            rest = {key: value for key, value in made.items() if key not in ("apiVersion", "kind", "metadata")}
            rest = _pruned(rest, self.schema)
            self._check(rest, jsonschema.Draft4Validator(self.schema, format_checker=None))
            self._check(
                {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}, _validator("ConfigMap", "", "v1")
            )
            made = {key: made[key] for key in ("apiVersion", "kind", "metadata")} | rest
        self._check_metadata(metadata, namespace)
        return made

    def _check(self, made: Object, validator: Any) -> None:
        errors = sorted(validator.iter_errors(made), key=lambda error: error.validator != "additionalProperties")
        for error in errors:
            said = f"{error.json_path}: {error.message[:300]}"
            if error.validator == "additionalProperties":
                raise ApiError("BadRequest", f"strict decoding error: unknown field: {said}")
            if error.validator == "type" and not self.is_custom:
                raise ApiError("BadRequest", f"{self.name} in version {self.version!r} cannot be handled: {said}")
            raise self.invalid(str(made.get("metadata", {}).get("name", "")), said)

    def _check_metadata(self, metadata: Object, namespace: str) -> None:
        name = str(metadata.get("name", ""))
        if not name and metadata.get("generateName"):
            name = f"{metadata['generateName']}xxxxx"
        if not name:
            raise self.invalid(name, "metadata.name: Required value: name or generateName is required")
        if self.plural in _PATH_NAMES:
            fits = "/" not in name and "%" not in name and name not in (".", "..")
        elif self.plural in _LABEL_NAMES:
            fits = len(name) <= 63 and bool(_LABEL.fullmatch(name))
        else:
            fits = len(name) <= 253 and bool(_SUBDOMAIN.fullmatch(name))
        if not fits:
            raise self.invalid(name, f"metadata.name: Invalid value: {name!r}")
        for key, value in metadata.get("labels", {}).items():
            if not _QUALIFIED.fullmatch(key) or not _LABEL_VALUE.fullmatch(value):
                raise self.invalid(name, f"metadata.labels: Invalid value: {key!r}: {value!r}")
        for key in metadata.get("annotations", {}):
            if not _QUALIFIED.fullmatch(key):
                raise self.invalid(name, f"metadata.annotations: Invalid value: {key!r}")
        if self.is_custom or self.group:
            for finalizer in metadata.get("finalizers", ()):
                if "/" not in finalizer and finalizer not in ("foregroundDeletion", "orphan"):
                    raise self.invalid(name, f"metadata.finalizers: {finalizer!r} is not a qualified name")
        for owner in metadata.get("ownerReferences", ()):
            if not owner.get("uid"):
                raise self.invalid(name, "metadata.ownerReferences.uid: Required value")
        given = metadata.get("namespace")
        if self.namespaced and given not in (None, namespace):
            raise ApiError(
                "BadRequest", f"the namespace of the object ({given}) is not that of the request ({namespace})"
            )
        if not self.namespaced and given:
            raise self.invalid(name, "metadata.namespace: Forbidden: not allowed on this type")

    def with_defaults(self, made: Object) -> Object:
        """What the server fills in."""
        fill = _DEFAULTS.get((self.group, self.plural))
        return made if fill is None else fill(made)

    def discovery(self) -> list[Object]:
        """The entries of its group's resource list."""
        verbs = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
        main = {
            "name": self.plural,
            "singularName": self.name.lower(),
            "namespaced": self.namespaced,
            "kind": self.name,
            "verbs": verbs,
            **({"shortNames": list(self.short_names)} if self.short_names else {}),
        }
        subs = [
            {
                "name": f"{self.plural}/{each}",
                "singularName": "",
                "namespaced": self.namespaced,
                "kind": "Eviction" if each == "eviction" else self.name,
                "verbs": ["create"] if each == "eviction" else ["get", "patch", "update"],
            }
            for each in self.subresources
        ]
        return [main, *subs]


def custom_kinds(crd: Object) -> list[Kind]:
    """The kinds that a CustomResourceDefinition defines: one for each version that is served."""
    spec = crd["spec"]
    if crd["metadata"]["name"] != f"{spec['names']['plural']}.{spec['group']}":
        text = f'metadata.name: must be spec.names.plural+"."+spec.group: {spec["names"]["plural"]}.{spec["group"]}'
        raise _CRD.invalid(crd["metadata"]["name"], text)
    if sum(each["storage"] for each in spec["versions"]) != 1:
        raise _CRD.invalid(crd["metadata"]["name"], "spec.versions: exactly one version must be the storage version")
    made = []
    for version in spec["versions"]:
        schema = version.get("schema", {}).get("openAPIV3Schema")
        if not schema or schema.get("type") != "object":
            raise _CRD.invalid(crd["metadata"]["name"], "spec.versions: a schema of type object is required")
        if version["served"]:
            made.append(
                Kind(
                    spec["group"],
                    version["name"],
                    spec["names"]["plural"],
                    spec["names"]["kind"],
                    namespaced=spec["scope"] == "Namespaced",
                    short_names=tuple(spec["names"].get("shortNames", ())),
                    subresources=tuple(each for each in ("status",) if each in version.get("subresources", {})),
                    schema=_nullable(schema),
                )
            )
    return made


@functools.cache
def _validator(name: str, group: str, version: str) -> Any:
    folder = files("kubernetes_validate") / "kubernetes-json-schema" / _SCHEMAS
    prefix = f"{group.split('.', 1)[0]}-" if group else ""
    schema = json.loads((folder / f"{name.lower()}-{prefix}{version}.json").read_text())
    registry = referencing.Registry()
    for each in (schema, json.loads(_definitions())):
        registry = referencing.Resource.from_contents(each) @ registry
    return jsonschema.Draft202012Validator(schema, registry=registry)


@functools.cache
def _definitions() -> str:
    return (files("kubernetes_validate") / "kubernetes-json-schema" / _SCHEMAS / "_definitions.json").read_text()


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _nullable(schema: Any) -> Any:
    """The schema with OpenAPI's ``nullable`` and int-or-string in JSON schema's words."""
    if isinstance(schema, list):
        return [_nullable(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: _nullable(each) for key, each in schema.items()}
    if made.get("nullable") is True and isinstance(made.get("type"), str):
        made["type"] = [made["type"], "null"]
    if made.get("x-kubernetes-int-or-string") is True:
        made["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    return made


def _pruned(value: Any, schema: Mapping[str, Any]) -> Any:
    """Without what the schema does not know, and with its defaults."""
    if isinstance(value, list):
        return [_pruned(each, schema.get("items", {})) for each in value]
    if not isinstance(value, dict):
        return value
    known: Mapping[str, Any] = schema.get("properties", {})
    more = schema.get("additionalProperties")
    made = {}
    for key, each in value.items():
        if key in known:
            made[key] = _pruned(each, known[key])
        elif isinstance(more, dict):
            made[key] = _pruned(each, more)
        elif more is True or schema.get("x-kubernetes-preserve-unknown-fields"):
            made[key] = each
    for key, its in known.items():
        if key not in made and "default" in its:
            made[key] = _pruned(copy.deepcopy(its["default"]), its)
    return made


def _pod(pod: Object) -> Object:
    spec = pod["spec"]
    spec.setdefault("restartPolicy", "Always")
    spec.setdefault("terminationGracePeriodSeconds", 30)
    spec.setdefault("dnsPolicy", "ClusterFirst")
    spec.setdefault("schedulerName", "default-scheduler")
    spec.setdefault("serviceAccountName", "default")
    for container in spec.get("containers", ()):
        resources = container.get("resources", {})
        if resources.get("limits"):
            resources["requests"] = {**resources["limits"], **resources.get("requests", {})}
    pod.setdefault("status", {}).setdefault("phase", "Pending")
    pod["status"].setdefault("qosClass", "Burstable")
    return pod


def _job(job: Object) -> Object:
    spec = job["spec"]
    for key, value in (("backoffLimit", 6), ("completionMode", "NonIndexed"), ("suspend", False)):
        spec.setdefault(key, value)
    if "completions" not in spec:
        spec.setdefault("parallelism", 1)
        if spec["parallelism"] == 1:
            spec["completions"] = 1
    spec.setdefault("parallelism", 1)
    job.setdefault("status", {})
    if spec["template"]["spec"].get("restartPolicy") not in ("Never", "OnFailure"):
        text = 'spec.template.spec.restartPolicy: Required value: valid values: "OnFailure", "Never"'
        raise _JOB.invalid(job["metadata"].get("name", ""), text)
    return job


def _secret(secret: Object) -> Object:
    texts = secret.pop("stringData", None) or {}
    if texts:
        encoded = {key: base64.b64encode(text.encode()).decode() for key, text in texts.items()}
        secret["data"] = {**secret.get("data", {}), **encoded}
    secret.setdefault("type", "Opaque")
    return secret


_DEFAULTS: dict[tuple[str, str], Callable[[Object], Object]] = {
    ("", "pods"): _pod,
    ("", "secrets"): _secret,
    ("batch", "jobs"): _job,
}

_EVENT_FIELDS = (
    "involvedObject.kind",
    "involvedObject.namespace",
    "involvedObject.name",
    "involvedObject.uid",
    "involvedObject.apiVersion",
    "reason",
    "type",
)
_JOB = Kind(
    "batch",
    "v1",
    "jobs",
    "Job",
    subresources=("status",),
    fixed=("spec.completions", "spec.selector", "spec.template", "spec.completionMode"),
    fields=("status.successful",),
)
_CRD = Kind(
    "apiextensions.k8s.io",
    "v1",
    "customresourcedefinitions",
    "CustomResourceDefinition",
    namespaced=False,
    short_names=("crd", "crds"),
    subresources=("status",),
    fixed=("spec.group", "spec.scope", "spec.names.plural", "spec.names.kind"),
)
_RBAC = "rbac.authorization.k8s.io"

BUILT_IN: tuple[Kind, ...] = (
    Kind(
        "",
        "v1",
        "pods",
        "Pod",
        short_names=("po",),
        subresources=("status", "eviction"),
        fixed=tuple(
            f"spec.{each}"
            for each in (
                "nodeName",
                "restartPolicy",
                "hostname",
                "subdomain",
                "serviceAccountName",
                "nodeSelector",
                "volumes",
                "affinity",
                "priorityClassName",
                "terminationGracePeriodSeconds",
            )
        ),
        fields=(
            "spec.nodeName",
            "spec.restartPolicy",
            "spec.schedulerName",
            "spec.serviceAccountName",
            "status.phase",
            "status.podIP",
        ),
    ),
    Kind("", "v1", "services", "Service", short_names=("svc",), subresources=("status",), fixed=("spec.clusterIP",)),
    Kind("", "v1", "configmaps", "ConfigMap", short_names=("cm",)),
    Kind("", "v1", "secrets", "Secret", fixed=("type",), fields=("type",)),
    Kind("", "v1", "serviceaccounts", "ServiceAccount", short_names=("sa",)),
    Kind(
        "",
        "v1",
        "nodes",
        "Node",
        namespaced=False,
        short_names=("no",),
        subresources=("status",),
        fields=("spec.unschedulable",),
    ),
    Kind("", "v1", "namespaces", "Namespace", namespaced=False, short_names=("ns",), subresources=("status",)),
    Kind("", "v1", "events", "Event", short_names=("ev",), fields=_EVENT_FIELDS),
    Kind("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim", short_names=("pvc",), subresources=("status",)),
    _JOB,
    Kind(_RBAC, "v1", "roles", "Role"),
    Kind(_RBAC, "v1", "rolebindings", "RoleBinding", fixed=("roleRef",)),
    Kind(_RBAC, "v1", "clusterroles", "ClusterRole", namespaced=False),
    Kind(_RBAC, "v1", "clusterrolebindings", "ClusterRoleBinding", namespaced=False, fixed=("roleRef",)),
    Kind("coordination.k8s.io", "v1", "leases", "Lease"),
    Kind("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget", short_names=("pdb",), subresources=("status",)),
    Kind("scheduling.k8s.io", "v1", "priorityclasses", "PriorityClass", namespaced=False, short_names=("pc",)),
    _CRD,
)
