"""The chart in all modes: valid against real schemas, and what its pods promise."""

import importlib.util
import json
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvhold_server.config import load_config
from tests.deploy.manifests import (
    CHART,
    DIGEST,
    ENGINE,
    EXAMPLES,
    Manifest,
    documents,
    kvhold_container,
    load_module,
    pod_spec,
    variants,
    workload,
)

helm = pytest.importorskip(
    "helm_python.chart", reason="helm-python-sdk is not installed; `make deploy-test` installs it"
)
kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")

MINORS = ("1.37.0", "1.36.0", "1.35.0")
VARIANTS = variants()
CHART_OWNED = {"socket", "socket_gid", "admin_socket", "state_dir", "holder", "health", "metrics"}

# Checks of checkov that we break on purpose, and why.
ARGUED = {
    "CKV_K8S_11": "no CPU limit: throttling would become latency of every scheduler step of every engine",
    "CKV_K8S_15": "pull policy IfNotPresent: a restart that keeps caches warm must not wait for a registry",
    "CKV_K8S_25": "the init container of the DaemonSet adds CHOWN, FOWNER, FSETID: kubelet makes hostPaths as root",
    "CKV_K8S_8": "liveness of the engine container is the engine's business",
    "CKV_K8S_9": "readiness of the engine container is the engine's business",
}


def render(values: Manifest, name: str = "kvhold") -> list[Manifest]:
    texts: dict[str, str] = helm.Chart.load(CHART).render(values=values, name=name, namespace="kvhold")
    return [m for path, text in texts.items() if path.endswith(".yaml") for m in documents(text)]


@pytest.fixture(params=VARIANTS, scope="module")
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    return render(VARIANTS[request.param])


# ---- validity -------------------------------------------------------------------------------------------------------
def schema_errors(manifest: Manifest, minor: str) -> str:
    """What the strict schema of one Kubernetes minor has against a manifest; custom resources have no schema here."""
    if manifest["apiVersion"].startswith("monitoring.coreos.com/"):
        return ""
    try:
        kubernetes_validate.validate(manifest, minor, strict=True)
    except kubernetes_validate.ValidationError as error:
        return f"{manifest['kind']}: {error}"
    return ""


@pytest.mark.parametrize("minor", MINORS)
def test_every_render_fits_the_strict_schema(manifests: list[Manifest], minor: str) -> None:
    assert manifests
    assert not [text for m in manifests if (text := schema_errors(m, minor))]


def test_a_misspelt_probe_would_be_noticed() -> None:
    broken = workload(render(VARIANTS["daemonset-none"]))
    container = pod_spec(broken)["containers"][0]
    container["readinesProbe"] = container.pop("readinessProbe")
    assert "readinesProbe" in schema_errors(broken, MINORS[0])


@pytest.mark.parametrize("overlay", ["daemonset", "sidecar"])
@pytest.mark.parametrize("component", ["", "gpu-runtimeclass", "gpu-dra"])
def test_kustomize_builds_and_fits_the_schema(
    overlay: str, component: str, deploy_dir: Path, tmp_path: Path, tool: Callable[[str], str]
) -> None:
    kustomize = deploy_dir / "kustomize"
    target = kustomize / "overlays" / overlay
    if component:
        for part in ("base", "overlays", "components"):
            subprocess.run(["cp", "-r", str(kustomize / part), str(tmp_path / part)], check=True)
        target = tmp_path / "mine"
        target.mkdir()
        body = {"resources": [f"../overlays/{overlay}"], "components": [f"../components/{component}"]}
        (target / "kustomization.yaml").write_text(yaml.safe_dump(body))
    run = subprocess.run([tool("kubectl"), "kustomize", str(target)], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    built = documents(run.stdout)
    assert {m["metadata"].get("namespace", "kvhold") for m in built} == {"kvhold"}
    assert not [text for m in built if (text := schema_errors(m, MINORS[0]))]
    if component == "gpu-runtimeclass":
        assert pod_spec(workload(built))["runtimeClassName"] == "nvidia"


def test_kustomize_and_chart_files_are_up_to_date(deploy_dir: Path) -> None:
    module = load_module(deploy_dir / "render.py")
    assert module.stale() == [], "run python deploy/render.py"


def test_examples_fit_the_schema() -> None:
    for path in EXAMPLES.glob("engine-*.yaml"):
        for manifest in documents(path.read_text()):
            for minor in MINORS:
                assert schema_errors(manifest, minor) == "", path.name


def test_chart_lints_without_errors() -> None:
    result = helm.lint(CHART, strict=True)
    assert result["errors"] == []
    assert [m["error"] for m in result["messages"]] == ["icon is recommended"]


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["daemonset-runtimeClass", "daemonset-holder", "sidecar-dra"])
def test_checkov_finds_only_what_is_argued(variant: str, tmp_path: Path, tool: Callable[[str], str]) -> None:
    path = tmp_path / "rendered.yaml"
    path.write_text(yaml.safe_dump_all(render(VARIANTS[variant])))
    command = [
        tool("checkov"),
        "-f",
        str(path),
        "--framework",
        "kubernetes",
        "--quiet",
        "--skip-download",
        "-o",
        "json",
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=110)
    report = json.loads(run.stdout)
    assert report["summary"]["passed"] > 70
    failed = {check["check_id"]: check["check_name"] for check in report["results"]["failed_checks"]}
    assert not {key: text for key, text in failed.items() if key not in ARGUED}


# ---- the values' schema ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "values",
    [
        {"mode": "replicaset"},
        {"gpu": {"mode": "privileged"}},
        {"hostMemory": {"size": "lots"}},
        {"image": {"digest": "latest"}},
        {"probes": {"livenessFailureThreshold": 1}},
        {"config": {"lease_ttl": 3}},
        {"config": {"socket": "/elsewhere"}},
        {"config": {"limits": {"max_pols": 3}}},
        {"podMonitr": {}},
        {"config": {"holder": "/run/holder.sock"}},
        {"mode": "sidecar", "holder": {"enabled": True}, "sidecar": {"engine": ENGINE}},
    ],
    ids=str,
)
def test_wrong_values_are_refused(values: Manifest) -> None:
    with pytest.raises(Exception, match=r"(?i)schema|additional|value"):
        render(values)


def test_sidecar_without_engine_image_is_refused_with_the_value_to_set() -> None:
    with pytest.raises(Exception, match=r"sidecar\.engine\.image is required"):
        render({"mode": "sidecar"})


def test_values_schema_knows_every_setting_of_the_daemon(deploy_dir: Path) -> None:
    schema = load_module(deploy_dir / "values_schema.py")
    assert schema.TARGET.read_text() == schema.text(), "run python deploy/values_schema.py"
    assert schema.CHART_OWNED == CHART_OWNED
    assert not set(schema.settings()) & (CHART_OWNED | schema.NOT_IN_CHART)


def test_daemon_accepts_the_rendered_configuration(manifests: list[Manifest], tmp_path: Path) -> None:
    text = next(m for m in manifests if m["kind"] == "ConfigMap" and "kvhold.toml" in m["data"])["data"]["kvhold.toml"]
    path = tmp_path / "kvhold.toml"
    path.write_text(text)
    config = load_config(["--config", str(path)], {})
    assert set(tomllib.loads(text)) >= CHART_OWNED
    assert config.socket_gid == 10001
    assert config.drain_deadline_s < pod_spec(workload(manifests))["terminationGracePeriodSeconds"]


def test_config_values_arrive_with_their_types(tmp_path: Path) -> None:
    values = {**VARIANTS["daemonset-none"], "config": {"lease_ttl_s": 2.5, "limits": {"max_message_bytes": 134217728}}}
    path = tmp_path / "kvhold.toml"
    path.write_text(next(m for m in render(values) if m["kind"] == "ConfigMap")["data"]["kvhold.toml"])
    config = load_config(["--config", str(path)], {})
    assert (config.lease_ttl_s, config.limits.max_message_bytes) == (2.5, 134217728)


# ---- promises -------------------------------------------------------------------------------------------------------
def test_k8s_01_no_host_namespaces(manifests: list[Manifest]) -> None:
    """K8S-01: memory travels as descriptors over the socket, so no host namespace is shared."""
    spec = pod_spec(workload(manifests))
    assert not spec["hostIPC"] and not spec["hostPID"] and not spec["hostNetwork"]
    assert not any(c["securityContext"].get("privileged") for c in spec.get("initContainers", []) + spec["containers"])


def test_k8s_02_socket_group_is_shared_whatever_the_uids_are(manifests: list[Manifest]) -> None:
    """K8S-02: access to the socket is by group; the directory belongs to it and the daemon is told its number."""
    spec = pod_spec(workload(manifests))
    assert spec["securityContext"]["fsGroup"] == 10001
    if workload(manifests)["kind"] == "DaemonSet":
        assert "-g 10001 -m 2750 /run/kvhold" in spec["initContainers"][0]["command"][2]
        example = next(
            d for d in documents((EXAMPLES / "engine-on-daemonset.yaml").read_text()) if "Deploy" in d["kind"]
        )
        assert pod_spec(example)["securityContext"]["supplementalGroups"] == [10001]


def test_k8s_03_one_claim_serves_engine_and_sidecar() -> None:
    """K8S-03: both containers name the same claim, so both see the same device."""
    spec = pod_spec(workload(render(VARIANTS["sidecar-dra"])))
    kvhold, engine = spec["initContainers"][0], spec["containers"][0]
    assert kvhold["resources"]["claims"] == engine["resources"]["claims"] == [{"name": "gpu"}]
    assert spec["resourceClaims"] == [{"name": "gpu", "resourceClaimTemplateName": "kvhold-gpu"}]


def test_device_plugin_counts_a_gpu_once() -> None:
    spec = pod_spec(workload(render(VARIANTS["sidecar-runtimeClass"])))
    assert spec["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert "nvidia.com/gpu" not in spec["initContainers"][0]["resources"]["limits"]


def test_k8s_04_engine_waits_for_the_daemons_own_startup_probe() -> None:
    """K8S-04: a native sidecar gates on its startup probe, which asks the daemon about itself and nobody else."""
    spec = pod_spec(workload(render(VARIANTS["sidecar-none"])))
    kvhold = spec["initContainers"][0]
    assert kvhold["restartPolicy"] == "Always"
    assert kvhold["startupProbe"]["grpc"] == {"port": 9465, "service": "readiness"}
    assert [c["name"] for c in spec["containers"]] == ["engine"]


def test_k8s_05_shared_memory_is_sized_and_not_the_64_mib_default(manifests: list[Manifest]) -> None:
    """K8S-05: /dev/shm of the daemon is a volume of its own, and the memory limit covers it."""
    mounts = {m["mountPath"]: m["name"] for m in kvhold_container(manifests)["volumeMounts"]}
    volume = next(v for v in pod_spec(workload(manifests))["volumes"] if v["name"] == mounts["/dev/shm"])
    size = volume.get("emptyDir", {}).get("sizeLimit")
    limit_mib = int(kvhold_container(manifests)["resources"]["limits"]["memory"].removesuffix("Mi"))
    assert (size == "4Gi" and limit_mib > 4096) or volume["hostPath"]["path"].startswith("/dev/shm/")


def test_liveness_is_patient_and_asks_another_question_than_readiness(manifests: list[Manifest]) -> None:
    container = kvhold_container(manifests)
    liveness = container["livenessProbe"]
    assert liveness["grpc"]["service"] == "liveness"
    assert liveness["failureThreshold"] * liveness["periodSeconds"] >= 60
    assert container["readinessProbe"]["grpc"]["service"] == "readiness"
    health = next(p["containerPort"] for p in container["ports"] if p["name"] == "health")
    assert liveness["grpc"]["port"] == health, "kubelet's gRPC probes know numeric ports only"


def test_containers_are_restricted_but_for_the_one_that_prepares_host_directories(manifests: list[Manifest]) -> None:
    spec = pod_spec(workload(manifests))
    for container in spec.get("initContainers", []) + spec["containers"]:
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"] and not context["allowPrivilegeEscalation"]
        assert context["capabilities"]["drop"] == ["ALL"]
        if container["name"] == "prepare-directories":
            assert set(context["capabilities"]["add"]) == {"CHOWN", "FOWNER", "FSETID"}
        else:
            assert context["runAsNonRoot"] and "add" not in context["capabilities"]
    assert spec["automountServiceAccountToken"] is False


def test_service_variables_cannot_become_settings(manifests: list[Manifest]) -> None:
    """Kubernetes injects KVHOLD_PORT for a Service named kvhold; the daemon refuses settings that it does not know."""
    assert pod_spec(workload(manifests))["enableServiceLinks"] is False
    with pytest.raises(Exception, match="no such setting"):
        load_config([], {"KVHOLD_PORT": "tcp://10.0.0.1:9464"})


def test_memory_is_guaranteed_and_cpu_is_never_throttled(manifests: list[Manifest]) -> None:
    resources = kvhold_container(manifests)["resources"]
    assert resources["requests"]["memory"] == resources["limits"]["memory"]
    assert "cpu" in resources["requests"] and "cpu" not in resources["limits"]


def test_daemonset_is_not_rolled_under_running_engines() -> None:
    daemonset = workload(render(VARIANTS["daemonset-none"]))
    assert daemonset["spec"]["updateStrategy"] == {"type": "OnDelete"}
    assert pod_spec(daemonset)["priorityClassName"] == "system-node-critical"


def test_admin_socket_stays_inside_the_pod(manifests: list[Manifest]) -> None:
    volumes = {v["name"]: v for v in pod_spec(workload(manifests))["volumes"]}
    assert volumes["admin"] == {"name": "admin", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}}
    others = [c for c in pod_spec(workload(manifests))["containers"] if c["name"] != "kvhold"]
    assert all(m["name"] != "admin" for c in others for m in c["volumeMounts"])


def test_network_policy_admits_only_scrapes_and_the_engine(manifests: list[Manifest]) -> None:
    policy = next(m for m in manifests if m["kind"] == "NetworkPolicy")["spec"]
    ports = [rule["ports"][0]["port"] for rule in policy["ingress"]]
    is_daemonset = workload(manifests)["kind"] == "DaemonSet"
    assert ports == ([9464] if is_daemonset else [9464, 8000])
    assert ("Egress" in policy["policyTypes"]) is is_daemonset
    assert policy["ingress"][0]["from"]


def test_custom_resources_appear_only_on_demand() -> None:
    def kinds(name: str) -> set[str]:
        return {m["kind"] for m in render(VARIANTS[name])}

    assert not kinds("daemonset-none") & {"PodMonitor", "PrometheusRule"}
    everything = {m["kind"]: m for m in render(VARIANTS["daemonset-everything"])}
    endpoint = everything["PodMonitor"]["spec"]["podMetricsEndpoints"][0]
    names = {p["name"] for p in kvhold_container(list(everything.values()))["ports"]}
    assert endpoint["port"] in names and endpoint["path"] == "/metrics"
    assert everything["PrometheusRule"]["spec"]["groups"]


def test_names_and_selectors_agree(manifests: list[Manifest]) -> None:
    target = workload(manifests)
    labels: dict[str, Any] = target["spec"]["template"]["metadata"]["labels"]
    selector: dict[str, Any] = target["spec"]["selector"]["matchLabels"]
    assert selector.items() <= labels.items()
    for manifest in manifests:
        if manifest["kind"] in ("PodMonitor", "PodDisruptionBudget"):
            assert manifest["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_long_release_names_still_make_valid_names() -> None:
    for manifest in render(VARIANTS["sidecar-dra"], name="a-very-long-release-name-that-somebody-typed-into-ci"):
        assert len(manifest["metadata"]["name"]) <= 63


def test_digest_wins_over_tag() -> None:
    values = {"image": {"digest": DIGEST, "tag": "x"}, "sidecar": {"engine": ENGINE}}
    assert kvhold_container(render(values))["image"] == f"kvhold@{DIGEST}"


def test_rules_and_dashboards_of_the_chart_are_the_tested_ones(deploy_dir: Path) -> None:
    values = {
        **VARIANTS["daemonset-everything"],
        "prometheusRule": {"enabled": True, "runbookBaseUrl": "https://docs.test/r"},
    }
    manifests = {(m["kind"], m["metadata"]["name"]): m for m in render(values)}
    rules = (deploy_dir / "prometheus" / "rules.yaml").read_text()
    wanted = yaml.safe_load(rules.replace("https://kvhold.example/docs/runbooks", "https://docs.test/r"))
    assert manifests["PrometheusRule", "kvhold"]["spec"] == wanted
    shipped = manifests["ConfigMap", "kvhold-dashboards"]["data"]
    for path in (deploy_dir / "grafana").glob("*.json"):
        assert json.loads(shipped[path.name]) == json.loads(path.read_text())
    assert manifests["ConfigMap", "kvhold-dashboards"]["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_manifests_hold_no_template_leftovers(manifests: list[Manifest]) -> None:
    """A forgotten brace would reach the cluster as text."""
    texts = [yaml.safe_dump(m) for m in manifests if m["kind"] not in ("PrometheusRule", "ConfigMap")]
    assert not any("{{" in text or "<no value>" in text for text in texts)


def test_holder_outlives_the_daemons_container_and_nothing_else_sees_it() -> None:
    """A native sidecar with the daemon's user, no host directory, no device, and a socket that only the two share."""
    manifests = render(VARIANTS["daemonset-holder"])
    spec, daemon = pod_spec(workload(manifests)), kvhold_container(manifests)
    holder = next(c for c in spec["initContainers"] if c["name"] == "holder")
    assert holder["restartPolicy"] == "Always", "not restarted with the daemon, ended after it"
    assert holder["securityContext"] == daemon["securityContext"], "it talks to its own user only"
    assert holder["image"] == daemon["image"] and "args" not in holder and "ports" not in holder
    (mount,) = holder["volumeMounts"]
    assert mount in daemon["volumeMounts"]
    assert {v["name"]: v for v in spec["volumes"]}[mount["name"]]["emptyDir"] == {
        "medium": "Memory",
        "sizeLimit": "1Mi",
    }
    config = next(m for m in manifests if m["kind"] == "ConfigMap")["data"]["kvhold.toml"]
    python, dash_m, module, path = holder["command"]
    assert tomllib.loads(config)["holder"] == path and path.startswith(mount["mountPath"] + "/")
    assert (python, dash_m) == ("python", "-m") and importlib.util.find_spec(module) is not None
    limits = [c["resources"]["limits"]["memory"] for c in (holder, daemon)]
    assert all(limits), "a pod has a bound only if all its containers have"


def test_without_a_holder_there_is_no_trace_of_one(manifests: list[Manifest], request: pytest.FixtureRequest) -> None:
    if "daemonset-holder" in request.node.name:
        pytest.skip("it has one")
    names = [c["name"] for c in pod_spec(workload(manifests)).get("initContainers", [])]
    volumes = [v["name"] for v in pod_spec(workload(manifests))["volumes"]]
    config = next(m for m in manifests if m["kind"] == "ConfigMap" and "kvhold.toml" in m["data"])["data"][
        "kvhold.toml"
    ]
    assert "holder" not in names + volumes and tomllib.loads(config)["holder"] == ""
