"""Access to the API server: its address, and the client's credentials.

Owns the reading of kubeconfig files and of a pod's service account, through kubernetes_asyncio. Knows nothing of the
requests.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path

from kubernetes_asyncio.client import ApiClient, Configuration
from kubernetes_asyncio.config import (
    list_kube_config_contexts,
    load_incluster_config,
    load_kube_config,
)

from elastic_driver.errors import DiscoveryError, in_words
from elastic_driver.system.safe_files import read_named

# Kubernetes mounts a pod's credentials for the API here.
_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_ENV_HOST, _ENV_PORT, _ENV_KUBECONFIG = "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT", "KUBECONFIG"
_DEFAULT_KUBECONFIG = "~/.kube/config"
_MOST_BYTES = 1 << 20
# A kubeconfig may name a login program, which may send requests to a cloud provider.
_LOGIN_S = 30.0


class Access:
    """Access to one API server, found as kubectl finds it: from a kubeconfig if there is one, else from the pod.

    Args:
        environ: the environment.
        folder: the folder of the pod's service account.

    Attributes:
        namespace: the default namespace; known once a client was created.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ, folder: Path = _SERVICE_ACCOUNT) -> None:
        self._environ = environ
        self._folder = folder
        self.namespace = "default"

    async def client(self) -> ApiClient:
        """Create a client, which the caller closes. Raises DiscoveryError if there is no usable configuration."""
        try:
            return ApiClient(await self._configuration())
        except OSError as error:  # from the file of a certificate or of its key
            raise DiscoveryError(f"cannot reach Kubernetes: {in_words(error)}") from error

    async def renew(self, client: ApiClient) -> None:
        """Reload a client's credentials: the token has changed, or a login has expired. Raises DiscoveryError."""
        fresh = await self._configuration()
        client.configuration.api_key = fresh.api_key
        client.configuration.refresh_api_key_hook = fresh.refresh_api_key_hook

    async def _configuration(self) -> Configuration:
        made = Configuration()
        # The server's message about a rejected request suffices.
        made.debug = False
        files = self._kubeconfigs()
        try:
            if files:
                await self._load(files, made)
            elif self._environ.get(_ENV_HOST):
                load_incluster_config(  # type: ignore[no-untyped-call]
                    made,
                    token_filename=str(self._folder / "token"),
                    cert_filename=str(self._folder / "ca.crt"),
                    environ=dict(self._environ),
                )
                self.namespace = await asyncio.to_thread(self._own_namespace)
            else:
                named = self._environ.get(_ENV_KUBECONFIG)
                where = f"{named} ({_ENV_KUBECONFIG})" if named else _DEFAULT_KUBECONFIG
                raise DiscoveryError(
                    f"cannot reach Kubernetes: kubeconfig {where} does not exist, and this process does not run in a "
                    f"pod ({_ENV_HOST} is not set)"
                )
        except DiscoveryError:
            raise
        except TimeoutError as error:
            why = f"cannot log in to Kubernetes: no answer within {_LOGIN_S:g} s"
            raise DiscoveryError(why, may_pass=True) from error
        except Exception as error:  # users write these files, and the package checks little of them
            source = ":".join(map(str, files)) if files else f"the service account's files in {self._folder}"
            reason = " ".join(in_words(error).split())[:500]
            raise DiscoveryError(f"cannot reach Kubernetes: cannot use {source}: {reason}") from error
        return made

    async def _load(self, files: list[Path], made: Configuration) -> None:
        joined = os.pathsep.join(map(str, files))
        async with asyncio.timeout(_LOGIN_S):
            await load_kube_config(joined, client_configuration=made, persist_config=False)
            _, context = await asyncio.to_thread(list_kube_config_contexts, joined)
        self.namespace = ((context or {}).get("context") or {}).get("namespace") or "default"

    def _kubeconfigs(self) -> list[Path]:
        """Return the existing kubeconfig files. As in kubectl, naming a file that does not exist is not an error."""
        named = self._environ.get(_ENV_KUBECONFIG) or _DEFAULT_KUBECONFIG
        files = [Path(name).expanduser() for name in named.split(os.pathsep) if name]
        return [file for file in files if file.is_file()]

    def _own_namespace(self) -> str:
        return read_named(self._folder / "namespace", _MOST_BYTES).decode().strip()
