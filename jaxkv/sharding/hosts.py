"""Many hosts: each runs the same program, and together they are one mesh."""

import jax
import numpy as np
from jax.experimental.multihost_utils import broadcast_one_to_all, process_allgather, sync_global_devices

from jaxkv.errors import BadValue, HostFailure, first_line


def start(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout: int = 60,
) -> None:
    """Join the other hosts, before anything else of jax runs; `jaxkv.mesh` then spans the devices of all.

    `coordinator` is "host:port" of process 0. With nothing given a TPU pod, Slurm or Open MPI is asked, and where there
    is none this stays a run of one host. A host that does not come within `timeout` seconds, or gives no sign of life
    for as long, ends all of them: with `HostFailure` here, and with a non-zero exit later. Raises `BadValue`.
    """
    given = {"coordinator": coordinator, "num_processes": num_processes, "process_id": process_id}
    lacking = [name for name, value in given.items() if value is None]
    if 0 < len(lacking) < len(given):
        raise BadValue(f"{' and '.join(lacking)} not given: give coordinator, num_processes and process_id, or none")
    if timeout < 1:
        raise BadValue(f"timeout={timeout}: expected at least 1 second")
    if not lacking and not (":" in str(coordinator) and 0 <= (process_id or 0) < (num_processes or 0)):
        raise BadValue(
            f"coordinator={coordinator!r}, num_processes={num_processes}, process_id={process_id}: expected host:port, "
            "and a process_id from 0 to num_processes - 1"
        )
    try:
        jax.distributed.initialize(
            coordinator,
            num_processes,
            process_id,
            cluster_detection_method="deactivate" if coordinator else None,
            initialization_timeout=timeout,
            heartbeat_timeout_seconds=timeout,
            shutdown_timeout_seconds=timeout,
        )
    except ValueError:
        if coordinator is not None:
            raise
        return  # no cluster around: one host
    except RuntimeError as error:
        if "must be called before" in str(error):
            if coordinator is None:
                return  # jax runs already, on the hosts that it has found
            raise BadValue("hosts must be joined before anything else of jax runs: call start() first") from error
        raise HostFailure(
            f"the {num_processes} hosts of coordinator {coordinator} did not come together within {timeout} s (process "
            f"{process_id}): {first_line(error)}. Start all of them, or raise the timeout"
        ) from error


def together(name: str) -> None:
    """Wait until every host has come to this place, which all of them call by the same name."""
    if jax.process_count() > 1:
        sync_global_devices(name)


def agreed(text: str) -> str:
    """Process 0's text (ASCII, of equal length everywhere), which all hosts then have."""
    if jax.process_count() == 1:
        return text
    sent = broadcast_one_to_all(np.frombuffer(text.encode(), np.uint8))
    return np.asarray(sent, np.uint8).tobytes().decode()


def somewhere(flag: bool) -> bool:
    """Whether the flag is set on any host."""
    return flag if jax.process_count() == 1 else bool(np.any(process_allgather(np.array(flag))))


def speaks() -> bool:
    """Whether this host prints: process 0 does."""
    return jax.process_index() == 0


def failed_elsewhere(error: BaseException) -> str | None:
    """What to say of an error that jax raised because another host is gone; None for any other error."""
    if not isinstance(error, jax.errors.JaxRuntimeError) or jax.process_count() == 1:
        return None
    return f"process {jax.process_index()} of {jax.process_count()} stops, for another one failed: {first_line(error)}"
