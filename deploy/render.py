"""Derives the kustomize tree, and the chart's copies of rules and dashboards, from their one source each.

    helm/kvhold/templates      ──▶ kustomize/{base,overlays/*}   (values: defaults, GPU mode none)
    prometheus/rules.yaml      ──▶ helm/kvhold/files/rules.yaml  (Helm reads only below the chart)
    grafana/*.json             ──▶ helm/kvhold/files/dashboards/

Usage: python deploy/render.py [--check]        --check writes nothing and fails when something is stale
"""

import sys
from pathlib import Path
from typing import Any

import yaml
from helm_python.chart import Chart

DEPLOY = Path(__file__).resolve().parent
CHART = DEPLOY / "helm" / "kvhold"
KUSTOMIZE = DEPLOY / "kustomize"
NAME = "kvhold"
ENGINE_PLACEHOLDER = "engine:replace-me"

HEADER = "# Made by deploy/render.py from the Helm chart: change the chart.\n"
# Template → where its manifest goes, by mode.
BASE = ("configmap", "serviceaccount")
OVERLAYS = {
    "daemonset": ("daemonset", "networkpolicy"),
    "sidecar": ("sidecar-deployment", "networkpolicy", "poddisruptionbudget"),
}


def rendered(mode: str) -> dict[str, Any]:
    """Template name → manifest, for the kustomize tree: no namespace, no trace of Helm."""
    values = {"mode": mode, "sidecar": {"engine": {"image": ENGINE_PLACEHOLDER}}}
    texts = Chart.load(CHART).render(values=values, name=NAME, namespace=NAME)
    manifests = {Path(path).stem: yaml.safe_load(text) for path, text in texts.items() if path.endswith(".yaml")}
    return {name: without_helm(manifest) for name, manifest in manifests.items() if manifest}


def without_helm(node: Any) -> Any:
    """Drops what only Helm knows: its labels, its checksum, the release's namespace."""
    if isinstance(node, list):
        return [without_helm(item) for item in node]
    if not isinstance(node, dict):
        return node
    dropped = {"app.kubernetes.io/managed-by", "app.kubernetes.io/instance", "helm.sh/chart", "checksum/config"}
    kept = {key: without_helm(value) for key, value in node.items() if key not in dropped}
    if "labels" in kept and "name" in kept:
        kept.pop("namespace", None)
    return {key: value for key, value in kept.items() if not (key == "annotations" and not value)}


def document(manifest: Any) -> str:
    return HEADER + yaml.safe_dump(manifest, sort_keys=False, width=120)


def kustomization(resources: list[str], **more: Any) -> str:
    body = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "resources": resources, **more}
    return document(body)


def wanted_files() -> dict[Path, str]:
    """Every derived file with its content."""
    files: dict[Path, str] = {}
    for mode, names in OVERLAYS.items():
        manifests = rendered(mode)
        for name in BASE:
            files[KUSTOMIZE / "base" / f"{name}.yaml"] = document(manifests[name])
        for name in names:
            files[KUSTOMIZE / "overlays" / mode / f"{name}.yaml"] = document(manifests[name])
        files[KUSTOMIZE / "overlays" / mode / "kustomization.yaml"] = kustomization(
            ["../../base", *(f"{name}.yaml" for name in names)],
            namespace=NAME,
            labels=[{"pairs": {"app.kubernetes.io/managed-by": "kustomize"}}],
            images=[{"name": NAME, "newName": NAME, "newTag": chart_version()}],
        )
    files[KUSTOMIZE / "base" / "kustomization.yaml"] = kustomization([f"{name}.yaml" for name in BASE])
    rules = DEPLOY / "prometheus" / "rules.yaml"
    if rules.exists():
        files[CHART / "files" / "rules.yaml"] = rules.read_text()
    for dashboard in sorted((DEPLOY / "grafana").glob("*.json")):
        files[CHART / "files" / "dashboards" / dashboard.name] = dashboard.read_text()
    return files


def chart_version() -> str:
    return str(yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"])


def stale() -> list[str]:
    """Derived files that are missing or differ."""
    wanted = wanted_files()
    return sorted(
        str(path.relative_to(DEPLOY)) for path, text in wanted.items() if not path.exists() or path.read_text() != text
    )


def main(argv: list[str]) -> int:
    if "--check" in argv:
        found = stale()
        print("\n".join(found) or "up to date", file=sys.stderr)
        return 1 if found else 0
    for path, text in wanted_files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
