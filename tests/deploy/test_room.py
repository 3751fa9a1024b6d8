"""Compares the resources that an overlay's pods request with the needs of its configuration."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from deltafront.benchmarks import overlays
from deltafront.benchmarks.overlays import quantity
from deltafront.service.cli.size import (
    GIB,
    RESERVE_GIB,
    SHAPES,
    kv_bytes,
    rank_bytes,
    stage_bytes,
    weight_bytes,
)
from deltafront.service.config import ServiceConfig

from .manifests import OVERLAYS, container, ray_service, settings, worker_groups


def ranks(config: ServiceConfig) -> tuple[dict[str, str], float, float]:
    decode, count = config.decode, config.decode.tensor_parallel
    return dict(decode.node_labels), count * decode.cpus, count * decode.gpus


def bundles(config: ServiceConfig) -> Iterator[tuple[dict[str, str], float, float]]:
    """Yield node labels, CPUs and GPUs of everything that Ray places, the largest first. A worker's ranks are
    one bundle."""
    prefill, decode, door = config.prefill, config.decode, config.door
    yield from [ranks(config)] * decode.workers
    stage = (dict(prefill.node_labels), prefill.cpus_per_stage, prefill.gpus_per_stage)
    yield from [stage] * (prefill.groups * prefill.stages)
    for owner in [*[prefill] * prefill.groups, *[decode] * decode.workers]:
        yield dict(owner.node_labels), 0.1, 0.0
    yield from [(dict(door.node_labels), door.cpus, 0.0)] * door.replicas


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_have_room_for_the_configured_actors(overlay: str) -> None:
    """Ray uses a pod's limits as its resources, and a bundle never spans two pods."""
    free = [
        (name, [quantity(limits["cpu"]) // 1, quantity(limits.get("nvidia.com/gpu", 0))])
        for name, group in worker_groups(overlay).items()
        for limits in [container(group["template"])["resources"]["limits"]]
        for _ in range(group["replicas"])
    ]
    for labels, cpus, gpus in bundles(settings(overlay)):
        assert list(labels) == ["ray.io/node-group"], "only groups are told apart"
        fits = (
            room
            for name, room in free
            if name == labels["ray.io/node-group"] and room[0] >= cpus and room[1] >= gpus
        )
        room = next(fits, None)
        assert room is not None, f"{overlay}: no pod has room for {cpus} CPUs, {gpus} GPUs with {labels}"
        room[0], room[1] = room[0] - cpus, room[1] - gpus
    unused = [name for name, (_cpus, gpus) in free if gpus >= 1]
    assert not unused, f"{overlay}: GPUs of {unused} are paid for and not used"


@pytest.mark.parametrize("overlay", [name for name in OVERLAYS if name != "cpu"])
def test_weights_and_kv_fit_the_requested_gpus(overlay: str) -> None:
    """Counts the processes on each GPU: Ray gives stages whole GPUs or parts, and rank i also uses GPU i."""
    config = settings(overlay)
    shape = SHAPES["70b" if "70b" in config.model.path else "8b"]
    prefill, decode, model = config.prefill, config.decode, config.model
    how = model.dtype, model.quantisation, decode.kv_dtype
    needs = {"prefill": stage_bytes(shape, prefill.stages, prefill.cache_tokens, *how) + RESERVE_GIB * GIB}
    group = dict(decode.node_labels)["ray.io/node-group"]
    rank = rank_bytes(shape, decode.tensor_parallel, decode.cache_tokens, *how) + RESERVE_GIB * GIB
    if config.handoff.transport == "mapped":
        needs["prefill"] = RESERVE_GIB * GIB
    needs[group] = rank + (needs[group] if decode.gpus < 1 else 0)
    for name, need in needs.items():
        affinity = worker_groups(overlay)[name]["template"]["spec"]["affinity"]["nodeAffinity"]
        terms = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
        ((expression,),) = [term["matchExpressions"] for term in terms]
        assert (expression["key"], expression["operator"]) == ("nvidia.com/gpu.memory", "Gt")
        assert need <= int(expression["values"][0]) << 20, f"{overlay}: {name} needs {need / GIB:.1f} GiB"


@pytest.mark.parametrize("overlay", [name for name in OVERLAYS if name != "cpu"])
def test_host_cache_exceeds_the_gpus_kv_and_fits_the_pod(overlay: str) -> None:
    """A pod also needs room for Ray's object store (30%), weights on their way and 8 GiB of processes."""
    config = settings(overlay)
    decode, model = config.decode, config.model
    shape = SHAPES["70b" if "70b" in model.path else "8b"]
    kept = decode.cache_tokens * kv_bytes(shape, shape.layers, model.dtype, decode.kv_dtype)
    weights = weight_bytes(shape, range(shape.layers), model.dtype, model.quantisation)
    group = worker_groups(overlay)[dict(decode.node_labels)["ray.io/node-group"]]
    memory = quantity(container(group["template"])["resources"]["limits"]["memory"])
    host = decode.host_cache_gib * GIB
    assert 1.5 * kept < host <= 0.7 * memory - weights - 8 * GIB


def test_ranks_beside_stages_have_own_gpus_and_no_second_worker_fits() -> None:
    """Ray does not count the ranks' GPUs. So CPUs must keep a second worker away, even while stages are
    replaced."""
    config, group = settings("pd-70b"), worker_groups("pd-70b")["prefill"]
    prefill, decode = config.prefill, config.decode
    limits = container(group["template"])["resources"]["limits"]
    assert decode.gpus == 0 and decode.node_labels == prefill.node_labels
    assert decode.tensor_parallel <= quantity(limits["nvidia.com/gpu"]) == prefill.stages
    _labels, cpus, _gpus = ranks(config)
    assert 2 * cpus > quantity(limits["cpu"]) >= cpus + prefill.stages * prefill.cpus_per_stage + 0.2
    environment = {one["name"]: one["value"] for one in container(group["template"])["env"]}
    assert "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO" not in environment, "it would hide all GPUs from ranks"


SEEN_GPUS = """
import os, ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as Bundle

class Process:
    def gpus(self):
        return os.environ["CUDA_VISIBLE_DEVICES"]

ray.init(address="local", num_cpus=3, num_gpus=2, include_dashboard=False, log_to_driver=False)
group = placement_group([{"CPU": 1, "GPU": 1}, {"CPU": 1, "GPU": 1}, {"CPU": 1}], strategy="STRICT_PACK")
ray.get(group.ready())
made = [
    ray.remote(Process).options(num_cpus=1, num_gpus=gpus, scheduling_strategy=Bundle(group, bundle)).remote()
    for bundle, gpus in enumerate((1, 1, 0))
]
print(ray.get([process.gpus.remote() for process in made]))
"""


def test_ray_shows_all_gpus_of_the_pod_to_ranks_that_request_none() -> None:
    """The GPUs are made up, because Ray only counts them."""
    hidden = "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"
    environment = {name: value for name, value in os.environ.items() if name != hidden}
    done = subprocess.run(
        [sys.executable, "-c", SEEN_GPUS],
        env=environment | {"CUDA_VISIBLE_DEVICES": "0,1"},
        check=True,
        capture_output=True,
        text=True,
    )
    *stages, rank = ast.literal_eval(done.stdout)
    assert sorted(stages) == ["0", "1"] and rank == "0,1"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_gpu_tables_match_the_kustomize_output(overlay: str) -> None:
    """Compares the whole cluster, except for namespaces, labels and images, which only kustomize sets."""
    read = overlays.read(overlay)
    assert read.config.decode == settings(overlay).decode and read.config.prefill == settings(overlay).prefill
    rendered = ray_service(overlay)["rayClusterConfig"]
    assert list(read.worker_groups) == list(worker_groups(overlay))
    pairs = [(read.cluster["headGroupSpec"], rendered["headGroupSpec"])]
    pairs += [(read.worker_groups[name], group) for name, group in worker_groups(overlay).items()]
    for ours, theirs in pairs:
        assert ours.get("replicas") == theirs.get("replicas")
        assert ours["rayStartParams"] == theirs["rayStartParams"]
        pods = ours["template"]["spec"], theirs["template"]["spec"]
        assert pods[0].get("affinity") == pods[1].get("affinity")
        for part in ("resources", "lifecycle", "readinessProbe"):
            assert container(ours["template"]).get(part) == container(theirs["template"]).get(part)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_gpu_table_counts_the_gpus_that_pods_request(overlay: str) -> None:
    limits = [
        group["replicas"]
        * quantity(container(group["template"])["resources"]["limits"].get("nvidia.com/gpu", 0))
        for group in worker_groups(overlay).values()
    ]
    assert sum(overlays.read(overlay).gpus.values()) == sum(limits)


def test_every_overlay_is_in_the_gpu_table() -> None:
    assert sorted(overlays.names()) == sorted(OVERLAYS)


def test_refuses_a_patch_of_a_missing_path() -> None:
    for operation in (
        {"op": "test", "path": "/a/0", "value": 2},
        {"op": "replace", "path": "/b", "value": 2},
        {"op": "move", "path": "/a", "from": "/b"},
    ):
        with pytest.raises(ValueError, match=operation["path"]):
            overlays.patched({"a": [1]}, [operation])
