"""A LocalDialler whose process was begun before it was dialled, as the command line does it."""

from __future__ import annotations

from elastic_driver.launch.dial.child import Child
from elastic_driver.launch.dial.early import EarlyAgent
from elastic_driver.launch.dial.local import LocalDialler
from elastic_driver.rendezvous.agent_messages import Bootstrap

MODULE = "standin_agent"


class EarlyDialler:
    """Starts stand-ins for agents; see Dialler."""

    async def dial(self, host: str, bootstrap: Bootstrap) -> Child:
        """See Dialler."""
        return await LocalDialler(module=MODULE, early=EarlyAgent(MODULE)).dial(host, bootstrap)
