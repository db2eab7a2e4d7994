"""A cluster changed while it serves: workers added, drained, removed, and given another role.

What a worker can do does not depend on its role: any of them computes prompts, decodes, and hands KV over. A role says
what it is given, so a flip takes effect with the next request and ends nobody's answer.
"""

from __future__ import annotations

from typing import Any, cast

from backends.base import BackendError
from backends.disagg.cluster import Cluster
from backends.disagg.handle import WorkerHandle
from backends.disagg.messages import Role
from backends.disagg.roster import Roster, free_name

_ROLES = ("prefill", "decode")


def worker_named(cluster: Cluster, name: str) -> WorkerHandle:
    """Raises BackendError (404)."""
    for worker in cluster.workers:
        if worker.name == name:
            return worker
    known = ", ".join(worker.name for worker in cluster.workers)
    raise BackendError(f"no worker {name!r} in this cluster; there are {known}", status=404, param="worker")


def drain(cluster: Cluster, name: str) -> None:
    """Give it nothing new. Raises BackendError (404, 409)."""
    worker = worker_named(cluster, name)
    _may_leave(cluster, worker, "draining")
    worker.draining = True


def undrain(cluster: Cluster, name: str) -> None:
    """Give it requests again. Raises BackendError (404)."""
    worker_named(cluster, name).draining = False


def flip(cluster: Cluster, name: str) -> str:
    """Make a prefill worker a decode worker, or the other way round; its new role. Raises BackendError (404, 409)."""
    worker = worker_named(cluster, name)
    if worker.role == "unified":
        raise BackendError(
            f"{name} is a unified worker: it does both already", status=409, hint="set mode: split to have two pools"
        )
    _may_leave(cluster, worker, "flipping")
    cluster.flip(worker)
    return worker.role


async def add(cluster: Cluster, roster: Roster, role: str, address: str | None = None) -> str:
    """Start one more worker, here or behind the node at `address`, and wait until it serves; its name. Raises
    BackendError."""
    roles = sorted({worker.role for worker in cluster.workers} | set(_ROLES if cluster.prefill else ()))
    if role not in roles:
        raise BackendError(f"role {role!r} is none of this cluster's: {', '.join(roles)}", status=400, param="role")
    worker = roster.another(free_name(cast(Role, role), cluster.workers), cast(Role, role), address)
    await cluster.adopt(worker)
    return worker.name


async def remove(cluster: Cluster, name: str, *, now: bool = False) -> None:
    """Stop a worker for good: when it has nothing left to do, or `now`, and then others go on with its answers.

    Raises BackendError (404, 409).
    """
    worker = worker_named(cluster, name)
    _may_leave(cluster, worker, "removing")
    worker.draining = True
    await cluster.dismiss(worker, now=now)


async def change(
    cluster: Cluster,
    roster: Roster,
    action: str,
    worker: str | None,
    role: str | None,
    address: str | None,
    *,
    now: bool = False,
) -> dict[str, Any]:
    """One of these, by name. Raises BackendError."""
    if action == "add":
        return {"added": await add(cluster, roster, role or "decode", address)}
    if worker is None:
        raise BackendError(f"{action} needs the name of a worker", status=400, param="worker")
    match action:
        case "drain":
            drain(cluster, worker)
        case "undrain":
            undrain(cluster, worker)
        case "flip":
            return {"flip": worker, "role": flip(cluster, worker)}
        case "remove":
            await remove(cluster, worker, now=now)
        case _:
            known = "add, drain, undrain, remove, flip"
            raise BackendError(f"unknown action {action!r}; there are {known}", status=400, param="action")
    return {action: worker}


def _may_leave(cluster: Cluster, worker: WorkerHandle, doing: str) -> None:
    """Raises BackendError (409) where nobody would be left in its pool."""
    left = [one for one in cluster.pools.of(worker.role) if one is not worker and not one.draining]
    if not left and not worker.draining:
        raise BackendError(
            f"{doing} {worker.name} would leave no {worker.role} worker",
            status=409,
            hint=f"add one first: splitroute cluster add --role {worker.role}",
        )
