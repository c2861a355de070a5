"""Many hosts: each runs the same program, and together they are one mesh."""

from typing import Any

import jax
import numpy as np
from jax.experimental.multihost_utils import broadcast_one_to_all, process_allgather, sync_global_devices

from jaxkv.checks import fits, shown
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
    if not fits(timeout, int) or timeout < 1:
        raise BadValue(f"timeout={shown(timeout)}: expected whole seconds, at least 1")
    if not lacking and not _may_be(coordinator, num_processes, process_id):
        raise BadValue(
            f"coordinator={shown(coordinator)}, num_processes={shown(num_processes)}, process_id={shown(process_id)}: "
            "expected host:port, and a process_id from 0 to num_processes - 1"
        )
    if jax.distributed.is_initialized():
        if coordinator is None:
            return
        raise BadValue("the hosts have been joined already: start() is called once, before anything else of jax runs")
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
        said = first_line(error).rstrip(".")
        if "must be called before" in said:
            if coordinator is None and (jax.process_count() > 1 or _processes_around() == 1):
                return  # jax runs already, on the hosts that it has found
            raise BadValue("hosts must be joined before anything else of jax runs: call start() first") from error
        if "mpi4py" in said:
            raise BadValue(f"{said}: pip install mpi4py, or give coordinator, num_processes and process_id") from error
        those = (
            "hosts that were found around here" if lacking else f"{num_processes} hosts of coordinator {coordinator}"
        )
        me = "" if lacking else f" (process {process_id})"
        raise HostFailure(
            f"the {those} did not come together within {timeout} s{me}: {said}. Start all of them, or raise the timeout"
        ) from error


def _may_be(coordinator: Any, num_processes: Any, process_id: Any) -> bool:
    """Whether these can name a run and a process of it."""
    counts = fits(num_processes, int) and fits(process_id, int) and 0 <= process_id < num_processes
    return counts and isinstance(coordinator, str) and ":" in coordinator


def _processes_around() -> int:
    """How many processes a TPU pod, Slurm or Open MPI says that there are; jax has no public name for who is asked."""
    from jax._src.clusters import ClusterEnv

    kinds = [kind for kind in ClusterEnv._cluster_types if not kind.opt_in_only_method and kind.is_env_present()]
    return kinds[0].get_process_count() if kinds else 1


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


def measured_once(value: float) -> float:
    """What process 0 measured, which all hosts then have."""
    return value if jax.process_count() == 1 else float(broadcast_one_to_all(np.float32(value)))


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


PART = 2**20  # letters of a message that the store takes at a time
WAIT = 2000  # milliseconds between two looks at whether somebody wants this process to end
KEPT = 64  # messages between two times that those which all have heard are removed


class Line:
    """What process 0 says to all others: messages of any length, in order, each heard once by every process.

    They go through the key-value store that `jax.distributed` keeps on process 0, not over the devices. So nobody waits
    for the programs that run there, a message needs no shape, and nothing has to be kept open while there is none. All
    processes open their lines in the same order. Raises `BadValue` where the hosts have not been joined.
    """

    def __init__(self) -> None:
        self._store = _store()
        number = self._store.key_value_increment(f"jaxkv/lines/{jax.process_index()}", 1)
        self._name, self._count, self._forgotten = f"jaxkv/line/{number}", 0, 0

    def say(self, message: str) -> None:
        """Process 0 says something."""
        parts = [message[at : at + PART] for at in range(0, max(len(message), 1), PART)]
        for number, part in enumerate(parts):
            self._store.key_value_set(self._key(), f"{int(number < len(parts) - 1)}{part}")
            self._count += 1
            if self._count % KEPT == 0:
                self._forget()

    def hear(self) -> str:
        """The next message, when it comes. Raises `HostFailure` where process 0 is gone."""
        parts, more = [], True
        while more:
            part = self._part()
            more = part[0] == "1"
            parts.append(part[1:])
        return "".join(parts)

    def _part(self) -> str:
        while True:
            try:
                part = self._store.blocking_key_value_get(self._key(), WAIT)
                break
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise HostFailure(f"process 0, which says what to do, is gone: {first_line(error)}") from error
        self._count += 1
        if self._count % KEPT == 0:
            self._store.key_value_set(f"{self._name}/heard/{jax.process_index()}", str(self._count), True)
        return part

    def _key(self) -> str:
        return f"{self._name}/said/{self._count}"

    def _forget(self) -> None:
        """Removes what all others have heard."""
        heard = [int(count) for _, count in self._store.key_value_dir_get(f"{self._name}/heard/")]
        if len(heard) == jax.process_count() - 1:
            for number in range(self._forgotten, min(heard)):
                self._store.key_value_delete(f"{self._name}/said/{number}")
            self._forgotten = min(heard)


def _store() -> Any:
    """The store that all processes share. jax has no public name for it; orbax takes it by this one as well."""
    from jax._src import distributed

    client = distributed.global_state.client
    if client is None:
        raise BadValue("the hosts have not been joined: call jaxkv.sharding.start() on each of them first")
    return client
