# The daemon alone: no torch, no CUDA toolkit (the container runtime injects the driver's library), no compiler, no root.
ARG PYTHON_IMAGE=docker.io/library/python:3.12-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY proto proto
COPY server server
COPY client client
RUN python -m venv /opt/kvhold \
 && /opt/kvhold/bin/pip install --no-cache-dir '.[server,cli,xxhash,zmq,cuda]'

FROM ${PYTHON_IMAGE}
LABEL org.opencontainers.image.title="kvhold" \
      org.opencontainers.image.description="Per-node daemon that owns the memory of LLM KV caches" \
      org.opencontainers.image.licenses="Apache-2.0"
ENV PATH=/opt/kvhold/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=build /opt/kvhold /opt/kvhold
USER 10001:10001
ENTRYPOINT ["kvhold"]
CMD ["serve"]
