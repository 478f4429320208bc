"""A KubeRay RayJob that runs a conversion: the manifest, to be read, changed and applied.

    kubectl apply -f JOB.yaml      needs the KubeRay operator, an image with moepress and Ray, and a shared volume

Source and output lie on one volume that every pod mounts. ``backoffLimit`` starts the job again when its head was lost: it
resumes from the receipts.
"""

from __future__ import annotations

from typing import Any

import yaml

from moepress.cluster.jobs import Job


def rayjob(job: Job, *, image: str, claim: str, mount: str = "/data", memory: str = "256Gi") -> dict[str, Any]:
    """The manifest.

    Args:
        job: what to do; paths as the pods see them.
        image: container image with moepress, Ray and, for GPUs, CUDA.
        claim: PersistentVolumeClaim that holds source and output, ReadWriteMany.
        mount: where the pods see it.
        memory: of each pod.
    """
    resources: dict[str, Any] = {"cpu": str(job.cpus), "memory": memory}
    if job.gpus:
        resources["nvidia.com/gpu"] = str(job.gpus)
    pod = {
        "spec": {
            "containers": [
                {
                    "name": "ray",
                    "image": image,
                    "resources": {"limits": resources, "requests": resources},
                    "volumeMounts": [
                        {"name": "data", "mountPath": mount},
                        {"name": "shared-memory", "mountPath": "/dev/shm"},
                    ],
                }
            ],
            "volumes": [
                {"name": "data", "persistentVolumeClaim": {"claimName": claim}},
                {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
            ],
        }
    }
    params = {"num-cpus": str(job.cpus), "num-gpus": str(job.gpus)}
    cluster: dict[str, Any] = {"headGroupSpec": {"rayStartParams": params, "template": pod}}
    if job.nodes > 1:
        others = job.nodes - 1
        cluster["workerGroupSpecs"] = [
            {
                "groupName": "workers",
                "replicas": others,
                "minReplicas": others,
                "maxReplicas": others,
                "rayStartParams": params,
                "template": pod,
            }
        ]
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": job.name},
        "spec": {
            "entrypoint": job.command("auto"),
            "shutdownAfterJobFinishes": True,
            "backoffLimit": 3,
            "rayClusterSpec": cluster,
        },
    }


def rayjob_text(job: Job, *, image: str, claim: str, mount: str = "/data", memory: str = "256Gi") -> str:
    """The manifest as YAML, for a file. Arguments as `rayjob`."""
    manifest = rayjob(job, image=image, claim=claim, mount=mount, memory=memory)
    return yaml.dump(manifest, Dumper=_WithoutAnchors, sort_keys=False, width=120)


class _WithoutAnchors(yaml.SafeDumper):
    """Repeats what is repeated: anchors are correct and nobody can read them."""

    def ignore_aliases(self, _: Any) -> bool:
        return True
