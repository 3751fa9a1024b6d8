"""The addresses at which a service listens: Ray, doors, stages with their links, decode workers."""

from __future__ import annotations

from deltafront.service.local.server_process import LocalService

from ..service.inprocess import wait_until
from ..strangers import listeners, uninvited


def test_service_listens_only_on_configured_addresses(service: LocalService) -> None:
    names = {name for _, _, name in listeners(service.pid)}
    for part in ("gcs_server", "raylet", "haproxy", "StageActor", "DecodeActor", "FrontDoor"):
        assert any(part in name for name in names), part
    assert not uninvited(service.pid, set()), "door.host is loopback"


def test_start_prints_the_addresses_beyond_loopback(service: LocalService) -> None:
    wait_until(lambda: "open      to this machine alone" in service.log.read_text(), "it does not say so")
