#!/usr/bin/env bash
# Builds the image and runs it for real: a base made here from Debian packages, wheels fetched beforehand, no daemon of
# Docker needed. Needs root, buildah and podman (with runc), debootstrap. About two minutes the first time.
#
#   base (debootstrap) ─▶ image (buildah, no network) ─▶ run: read-only root, uid 10001, scraped ─▶ SBOM
set -euo pipefail
cd "$(dirname "$0")/.."
work="${KVHOLD_IMAGE_WORK:-$PWD/.image}"
base=localhost/kvhold-base:bookworm
image=localhost/kvhold:test
python="${PYTHON:-.venv/bin/python}"
store="vfs"
mkdir -p "$work/wheels"
buildah() { command buildah --storage-driver "$store" "$@"; }

say() { printf '== %s\n' "$*"; }

if ! buildah inspect --type image "$base" >/dev/null 2>&1; then
  say "base from Debian packages"
  rm -rf "$work/rootfs"
  debootstrap --variant=minbase --include=python3,python3-venv,python-is-python3,ca-certificates bookworm "$work/rootfs" >"$work/debootstrap.log"
  rm -rf "$work"/rootfs/var/cache/apt/* "$work"/rootfs/var/lib/apt/lists/*
  tar -C "$work/rootfs" -cf "$work/rootfs.tar" .
  rm -rf "$work/rootfs"
  printf 'FROM scratch\nADD rootfs.tar /\n' >"$work/Dockerfile.base"
  buildah bud --isolation chroot -f "$work/Dockerfile.base" -t "$base" "$work" >"$work/base.log"
  rm -f "$work/rootfs.tar"
fi

say "wheels"
"$python" -m pip download -q --disable-pip-version-check --dest "$work/wheels" '.[server,cli,xxhash,zmq,cuda]' 'hatchling>=1.27,<2' 2>"$work/wheels.log"
rm -f "$work"/wheels/kvhold-*

say "image"
buildah bud --isolation chroot --pull-never -v "$work/wheels:/wheels:ro" \
  --build-arg PYTHON_IMAGE="$base" --build-arg PIP_INSTALL_ARGS="--no-index --find-links /wheels" \
  --build-arg REVISION="$(git rev-parse --short HEAD)" -t "$image" . >"$work/image.log" 2>&1 || { tail -20 "$work/image.log"; exit 1; }

say "configuration of the image"
buildah inspect --type image "$image" >"$work/inspect.json"
"$python" - "$work/inspect.json" <<'PY'
import json, sys
config = json.load(open(sys.argv[1]))["OCIv1"]["config"]
assert config["User"] == "10001:10001", config["User"]
assert config["Entrypoint"] == ["kvhold"] and config["Cmd"] == ["serve"], config
assert config["Labels"]["org.opencontainers.image.title"] == "kvhold"
PY

say "contents"
container="$(buildah from --pull-never "$image")"
cleanup() {
  podman --storage-driver "$store" stop -t 5 kvhold-image-test >/dev/null 2>&1 || true
  buildah rm "$container" >/dev/null 2>&1 || true
}
trap cleanup EXIT
buildah run --isolation chroot "$container" -- python -c '
import importlib.util, os
assert os.getuid() == 10001 and os.getgid() == 10001, (os.getuid(), os.getgid())
for heavy in ("torch", "vllm", "pip"):
    assert importlib.util.find_spec(heavy) is None, heavy
for needed in ("grpc", "prometheus_client", "xxhash", "kvhold_server", "kvhold_client"):
    assert importlib.util.find_spec(needed), needed
'

say "run: read-only root, no capabilities, scraped"
run="$(mktemp -d)"; chmod 0777 "$run"
port=19466
podman --storage-driver "$store" --runtime runc run --rm --name kvhold-image-test --network host --read-only --cap-drop ALL \
  --security-opt no-new-privileges --ulimit nofile=4096:4096 --ulimit nproc=1024:1024 --shm-size 64m --tmpfs /tmp -v "$run:/run/kvhold" \
  "$image" serve --socket /run/kvhold/kvhold.sock --metrics "127.0.0.1:$port" --log-format json >"$work/run.log" 2>&1 &
started=$!
for _ in $(seq 100); do curl -fsS "http://127.0.0.1:$port/readyz" >/dev/null 2>&1 && break; sleep 0.2; done
curl -fsS "http://127.0.0.1:$port/metrics" -o "$work/metrics.txt" || { cat "$work/run.log"; exit 1; }
curl -fsS "http://127.0.0.1:$port/" -o "$work/page.html"
grep -q '^kvhold_build_info' "$work/metrics.txt"
grep -q '<h1>kvhold</h1>' "$work/page.html"
podman --storage-driver "$store" stop -t 10 kvhold-image-test >/dev/null
wait "$started" || { echo "the daemon did not end in order: $?"; cat "$work/run.log"; exit 1; }
rm -rf "$run"

say "SBOM"
buildah run --isolation chroot "$container" -- python -c '
import importlib.metadata, json
packages = sorted({(d.metadata["Name"], d.version, d.metadata.get("License-Expression") or d.metadata.get("License") or "NOASSERTION") for d in importlib.metadata.distributions()})
print(json.dumps({"bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1, "components": [
    {"type": "library", "name": name, "version": version, "purl": f"pkg:pypi/{name.lower()}@{version}"} for name, version, _ in packages]}, indent=1))
' >"$work/sbom.cdx.json"
"$python" -c 'import json,sys; found={c["name"] for c in json.load(open(sys.argv[1]))["components"]}; assert {"kvhold","grpcio"} <= found, found; print(len(found), "packages in", sys.argv[1])' "$work/sbom.cdx.json"
say "ok: $image"
