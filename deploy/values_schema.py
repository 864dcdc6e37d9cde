"""Makes deploy/helm/kvhold/values.schema.json: the chart's values by hand, the daemon's settings from its own code.

Usage: python deploy/values_schema.py
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "server"))

from kvhold_server.config import ServerConfig  # noqa: E402
from kvhold_server.domain.service_limits import ServiceLimits  # noqa: E402

TARGET = ROOT / "deploy" / "helm" / "kvhold" / "values.schema.json"
# The daemon's settings that the chart decides itself.
CHART_OWNED = {"socket", "socket_gid", "admin_socket", "state_dir", "holder", "health", "metrics"}
# Those that make no sense in a pod of the chart: TCP for engines needs certificates and another threat model.
NOT_IN_CHART = {"tcp", "insecure", "tls_cert", "tls_key", "tls_client_ca"}

JSON_TYPES = {"bool": "boolean", "int": "integer", "float": "number", "str": "string"}


def setting_schema(field: "dataclasses.Field[Any]") -> dict[str, Any]:
    """From a setting's type, choices and bound."""
    kind = field.type if isinstance(field.type, str) else field.type.__name__
    found: dict[str, Any] = {"type": JSON_TYPES[kind], "description": field.metadata["text"]}
    if field.metadata["choices"]:
        found["enum"] = list(field.metadata["choices"])
    if field.metadata["low"] is not None:
        found["minimum"] = field.metadata["low"]
    return found


def settings() -> dict[str, Any]:
    """Schemas of the settings that `config` may hold."""
    skipped = CHART_OWNED | NOT_IN_CHART | {"limits"}
    found = {f.name: setting_schema(f) for f in dataclasses.fields(ServerConfig) if f.name not in skipped}
    return found | {"limits": obj({f.name: whole(1) for f in dataclasses.fields(ServiceLimits)})}


def obj(props: dict[str, Any], required: tuple[str, ...] | list[str] = (), extra: bool = False) -> dict[str, Any]:
    d = {"type": "object", "additionalProperties": extra, "properties": props}
    if required:
        d["required"] = list(required)
    return d


S = {"type": "string"}
B = {"type": "boolean"}


def whole(lo: float, hi: float | None = None) -> dict[str, Any]:
    d = {"type": "integer", "minimum": lo}
    if hi is not None:
        d["maximum"] = hi
    return d


def at_least(lo: float) -> dict[str, Any]:
    return {"type": "number", "minimum": lo}


MAP = {"type": "object", "additionalProperties": {"type": "string"}}
ANY = {"type": "object"}
ANYL = {"type": "array", "items": {"type": "object"}}
STRL = {"type": "array", "items": {"type": "string"}}
Q = {"type": "string", "pattern": "^[1-9][0-9]*[MGT]i$", "description": "whole number of Mi, Gi or Ti"}
PATH = {"type": "string", "pattern": "^/[A-Za-z0-9._/-]+$", "maxLength": 80}
PORT = whole(1, 65535)
SCHEMA = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "title": "kvhold chart values",
    **obj(
        {
            "global": ANY,
            "mode": {"enum": ["daemonset", "sidecar"]},
            "image": obj(
                {
                    "repository": {"type": "string", "minLength": 1},
                    "tag": S,
                    "digest": {"type": "string", "pattern": "^(|sha256:[0-9a-f]{64})$"},
                    "pullPolicy": {"enum": ["Always", "IfNotPresent", "Never"]},
                }
            ),
            "imagePullSecrets": {"type": "array", "items": obj({"name": S}, ["name"])},
            "nameOverride": S,
            "fullnameOverride": S,
            "commonLabels": MAP,
            "podAnnotations": MAP,
            "podLabels": MAP,
            "config": obj(settings()),
            "runAs": obj({"user": whole(1, 2147483647), "group": whole(1, 2147483647)}, ["user", "group"]),
            "socketGroup": whole(1, 2147483647),
            "ports": obj({"health": PORT, "metrics": PORT}, ["health", "metrics"]),
            "gpu": obj(
                {
                    "mode": {"enum": ["none", "runtimeClass", "cdiAnnotation", "dra"]},
                    "runtimeClassName": S,
                    "cdiAnnotationPrefix": S,
                    "cdiDevice": S,
                    "dra": obj({"deviceClassName": S, "count": whole(1, 64)}),
                }
            ),
            "hostMemory": obj({"size": Q}),
            "resources": obj({"cpu": {"type": "string", "pattern": "^[0-9]+(\\.[0-9]+|m)?$"}, "overheadMemory": Q}),
            "probes": obj({"startupFailureThreshold": whole(10), "livenessFailureThreshold": whole(6)}),
            "terminationGracePeriodSeconds": whole(1),
            "daemonset": obj(
                {
                    "updateStrategy": {"enum": ["OnDelete", "RollingUpdate"]},
                    "priorityClassName": S,
                    "nodeSelector": MAP,
                    "tolerations": ANYL,
                    "affinity": ANY,
                    "hostPaths": obj({"sockets": PATH, "state": PATH, "sharedMemory": PATH}),
                }
            ),
            "sidecar": obj(
                {
                    "replicas": whole(0),
                    "engine": obj(
                        {
                            "image": S,
                            "command": STRL,
                            "args": STRL,
                            "env": ANYL,
                            "port": PORT,
                            "sharedMemory": Q,
                            "resources": ANY,
                            "gpuCount": whole(1, 64),
                            "readinessProbe": ANY,
                        }
                    ),
                    "pdb": obj({"enabled": B, "maxUnavailable": {"type": ["integer", "string"]}}),
                    "nodeSelector": MAP,
                    "tolerations": ANYL,
                    "affinity": ANY,
                }
            ),
            "holder": obj({"enabled": B}),
            "serviceAccount": obj({"create": B, "name": S, "annotations": MAP}),
            "networkPolicy": obj({"enabled": B, "metricsFrom": ANYL, "engineFrom": ANYL}),
            "podMonitor": obj(
                {"enabled": B, "interval": {"type": "string", "pattern": "^[0-9]+(ms|s|m)$"}, "labels": MAP}
            ),
            "prometheusRule": obj({"enabled": B, "runbookBaseUrl": S, "labels": MAP}),
            "dashboards": obj({"enabled": B, "labels": MAP}),
        },
        ["mode", "image", "ports", "gpu"],
    ),
    "if": {"properties": {"mode": {"const": "sidecar"}}},
    "then": {"properties": {"holder": {"properties": {"enabled": {"const": False}}}}},
}


def text() -> str:
    return json.dumps(SCHEMA, indent=2) + "\n"


if __name__ == "__main__":
    TARGET.write_text(text())
