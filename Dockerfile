# The daemon alone: no torch, no CUDA toolkit (the container runtime injects the driver's library), no compiler, no root.
#
#   make image                                     with docker, podman or buildah
#   make image PYTHON_IMAGE=…@sha256:…             production: pin the base by digest
#   --build-arg PIP_INSTALL_ARGS="--no-index --find-links /wheels" -v …:/wheels:ro      without a network
ARG PYTHON_IMAGE=docker.io/library/python:3.12-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ARG PIP_INSTALL_ARGS=""
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY proto proto
COPY server server
COPY client client
# hadolint ignore=SC2086
RUN python -m venv /opt/kvhold \
 && /opt/kvhold/bin/pip install --no-cache-dir --no-compile ${PIP_INSTALL_ARGS} '.[server,cli,xxhash,zmq,cuda]' \
 && /opt/kvhold/bin/pip uninstall --yes pip setuptools

FROM ${PYTHON_IMAGE}
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="kvhold" \
      org.opencontainers.image.description="Per-node daemon that owns the memory of LLM KV caches" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
ENV PATH=/opt/kvhold/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=build /opt/kvhold /opt/kvhold
# Bytecode of what a daemon imports, of the base image's library too, which comes without: a start compiles nothing.
RUN PYTHONDONTWRITEBYTECODE='' /opt/kvhold/bin/python -c "import kvhold_server.__main__, kvhold_server.pages, kvhold_client.client, kvhold_client.cli.serve"
# A number, so that runAsNonRoot can be checked without looking into the image; no HEALTHCHECK: kubelet's probes ask.
USER 10001:10001
STOPSIGNAL SIGTERM
ENTRYPOINT ["kvhold"]
CMD ["serve"]
