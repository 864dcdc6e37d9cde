"""Every way in which the chart can be rendered, as values with names; shared by the tests that look at renders."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

REPO = Path(__file__).resolve().parents[2]
CHART = REPO / "deploy" / "helm" / "kvhold"
EXAMPLES = REPO / "deploy" / "examples"

GPU_MODES = ("none", "runtimeClass", "cdiAnnotation", "dra")
ENGINE = {"image": "registry.example.com/engine@sha256:" + "e6" * 32, "resources": {"limits": {"memory": "8Gi"}}}
DIGEST = "sha256:" + "5e" * 32

Manifest = dict[str, Any]


def variants() -> dict[str, Manifest]:
    """Name → values, for every mode with every GPU access, once with all flags on, and for the shipped examples."""
    found: dict[str, Manifest] = {}
    for mode in ("daemonset", "sidecar"):
        for gpu in GPU_MODES:
            found[f"{mode}-{gpu}"] = {
                "mode": mode,
                "gpu": {"mode": gpu},
                "image": {"digest": DIGEST},
                "sidecar": {"engine": ENGINE},
            }
        found[f"{mode}-everything"] = {
            **found[f"{mode}-none"],
            "config": {"lease_ttl_s": 20, "grace_period_s": 2.5, "log_level": "debug", "limits": {"max_pools": 8}},
            "podMonitor": {"enabled": True},
            "prometheusRule": {"enabled": True},
            "dashboards": {"enabled": True},
            "commonLabels": {"team": "inference"},
            "podAnnotations": {"example.com/note": "x"},
        }
    found["daemonset-holder"] = {**found["daemonset-runtimeClass"], "holder": {"enabled": True}}
    for example in sorted(EXAMPLES.glob("values-*.yaml")):
        found[example.stem] = yaml.safe_load(example.read_text())
    return found


def documents(text: str) -> list[Manifest]:
    return [document for document in yaml.safe_load_all(text) if document]


def pod_spec(manifest: Manifest) -> Manifest:
    spec: Manifest = manifest["spec"]["template"]["spec"]
    return spec


def workload(manifests: list[Manifest]) -> Manifest:
    return next(m for m in manifests if m["kind"] in ("DaemonSet", "Deployment"))


def kvhold_container(manifests: list[Manifest]) -> Manifest:
    spec = pod_spec(workload(manifests))
    containers: list[Manifest] = spec.get("initContainers", []) + spec["containers"]
    return next(c for c in containers if c["name"] == "kvhold")


def load_module(path: Path) -> ModuleType:
    """A script of deploy/ as a module."""
    spec = importlib.util.spec_from_file_location(f"deploy_{path.stem}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
