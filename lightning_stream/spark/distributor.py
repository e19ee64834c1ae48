"""Training functions on Spark's workers by `TorchDistributor`: their environment and devices.

Processes that TorchDistributor starts inherit neither the driver's environment nor a notebook's login. A store that
the driver can read is then refused to the workers: on Databricks with ``default auth: cannot configure default
credentials``. The remedy is to set ``DATABRICKS_HOST`` and ``DATABRICKS_TOKEN`` inside the training function, which
`with_env` does, for these and for the variables of every other store::

    TorchDistributor(num_processes=2, local_mode=False, use_gpu=True).run(with_env(train), "dbfs:/Volumes/...")
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

# Prefixes of the variables that configure stores and this package.
_STORES = (
    "AWS_", "S3_ENDPOINT_URL", "GOOGLE_", "GCS_", "STORAGE_EMULATOR_HOST", "AZURE_", "DATABRICKS_", "OCI_", "HF_",
    "LIGHTNING_STREAM_", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE",
)  # fmt: skip
# These describe the driver's own machine or process, and are wrong in a worker.
_NOT_CARRIED = ("DATABRICKS_RUNTIME_VERSION", "DATABRICKS_ROOT_VIRTUALENV_ENV", "DATABRICKS_CLUSTER_LIBS")


def distributor_env(also: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables of this process that stores read, for processes on other machines.

    They hold secrets: do not print them.

    Args:
        also: More variables, or other values, e.g. ``{"DATABRICKS_HOST": ..., "DATABRICKS_TOKEN": ...}``.
    """
    names = [name for name in os.environ if name.startswith(_STORES) and not name.startswith(_NOT_CARRIED)]
    return {**{name: os.environ[name] for name in names}, **(also or {})}


def with_env(function: Callable[..., Any], also: Mapping[str, str] | None = None) -> Callable[..., Any]:
    """Return a training function that sets the variables of stores before it runs, on any machine.

    Pass it to ``TorchDistributor.run`` in place of the function. Spark writes it to a private temporary file on each
    machine, so these variables, secrets among them, are in that file until the training ends.

    Args:
        function: The training function.
        also: More variables; see `distributor_env`.
    """

    env = distributor_env(also)

    def train(*args: Any, **kwargs: Any) -> Any:
        os.environ.update(env)
        return function(*args, **kwargs)

    return train


def lightning_trainer_kwargs() -> dict[str, int]:
    """Return ``devices`` and ``num_nodes`` for a Lightning `Trainer` in a function that TorchDistributor runs.

    With ``local_mode=False`` every process is the only one of a node of its own, also where several share a machine.

    Raises:
        RuntimeError: Not started by TorchDistributor, or by torchrun.
    """
    try:
        world = int(os.environ["WORLD_SIZE"])
        local = int(os.environ["LOCAL_WORLD_SIZE"])
    except KeyError as error:
        raise RuntimeError(
            f"lightning_trainer_kwargs() belongs in a function of TorchDistributor: {error.args[0]} is not set here."
        ) from error
    return {"devices": local, "num_nodes": world // local}
