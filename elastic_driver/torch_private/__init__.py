"""The private parts of PyTorch that this library uses: all of them are in this package, each with a check.

Owns every name that torch does not document, grouped by the feature that needs it, and each feature's behavior in a
torch that has changed (:mod:`~elastic_driver.torch_private.features`). It is not in ``elastic_driver.torch``, whose
import is the whole API: workers without the native extension, and torchrun's agents, need it too.

Four files cannot import it, and handle missing parts of torch themselves: ``launch/warm/hook/sitecustomize.py``
(standard library only), ``launch/warm/preload.py`` (the driver's side), ``compat/init_hook.py`` and
``worker/durable/format.py`` (torch may be missing).
"""
