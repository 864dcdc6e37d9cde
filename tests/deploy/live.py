"""A real daemon as a subprocess, and a real Prometheus that scrapes it; both end with their context."""

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvhold_client.leash import leashed

REPO = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class LiveDaemon:
    """Where it listens."""

    target: str  # for gRPC
    http: str  # base URL of the metrics listener
    process: "subprocess.Popen[bytes]"

    def get(self, path: str, accept: str = "") -> str:
        """Body of a page."""
        request = urllib.request.Request(self.http + path, headers={"Accept": accept} if accept else {})
        with urllib.request.urlopen(request, timeout=10) as reply:
            return str(reply.read().decode())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment() -> dict[str, str]:
    paths = os.pathsep.join(str(REPO / part) for part in ("proto", "server", "client"))
    return {key: value for key, value in os.environ.items() if not key.startswith("KVHOLD_")} | {"PYTHONPATH": paths}


def wait_for(url: str, process: "subprocess.Popen[bytes]") -> None:
    """Until the URL answers 200. Raises AssertionError."""
    end = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < end:
        assert process.poll() is None, f"ended with {process.returncode}"
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2) as reply:
            if reply.status == 200:
                return
        time.sleep(0.1)
    raise AssertionError(f"{url} did not answer within {START_TIMEOUT_S} s")


def stop(process: "subprocess.Popen[bytes]") -> None:
    """By signal, then by force."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
    if process.poll() is None:
        process.kill()
        process.wait(timeout=10)
    if process.stdin is not None:
        process.stdin.close()


@contextlib.contextmanager
def daemon(directory: Path, *flags: str) -> Iterator[LiveDaemon]:
    """kvhold on a socket in `directory`, with short leases."""
    path, port = directory / "k.sock", free_port()
    command = leashed("kvhold_server", "serve", "--socket", str(path), "--metrics", f"127.0.0.1:{port}")
    command += ["--state-dir", str(directory), "--grace-period-s", "1", "--lease-ttl-s", "3", "--drain-deadline-s", "0"]
    command += ["--no-keep-pools"]  # nobody comes back to this directory
    log = (directory / "daemon.log").open("wb")
    process = subprocess.Popen(
        [*command, *flags], env=environment(), stdin=subprocess.PIPE, stderr=log, stdout=log, cwd=directory
    )
    try:
        wait_for(f"http://127.0.0.1:{port}/readyz", process)
        yield LiveDaemon(f"unix:{path}", f"http://127.0.0.1:{port}", process)
    finally:
        stop(process)
        log.close()


@contextlib.contextmanager
def prometheus(directory: Path, program: str, target_url: str) -> Iterator[str]:
    """Prometheus with our rules, scraping every second. Yields its base URL."""
    port = free_port()
    rules = REPO / "deploy" / "prometheus" / "rules.yaml"
    (directory / "rules.yaml").write_text(rules.read_text().replace("interval: 30s", "interval: 1s"))
    target = target_url.removeprefix("http://")
    (directory / "prometheus.yml").write_text(
        "global: {scrape_interval: 1s, evaluation_interval: 1s}\n"
        "rule_files: [rules.yaml]\n"
        f"scrape_configs: [{{job_name: kvhold, static_configs: [{{targets: ['{target}']}}]}}]\n"
    )
    command = [program, f"--config.file={directory}/prometheus.yml", f"--storage.tsdb.path={directory}/tsdb"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]
    with (directory / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            wait_for(f"http://127.0.0.1:{port}/-/ready", process)
            yield f"http://127.0.0.1:{port}"
        finally:
            stop(process)


def chromium(
    program: str, url: str, directory: Path, *, dark: bool = False, screenshot: Path | None = None, strict: bool = True
) -> str:
    """Opens a page without a screen, lets its script run, returns the DOM, or "" with a screenshot. Console: stderr.

    Raises AssertionError for anything that the page wrote to the console, unless `strict` is off (others' pages).
    """
    command = [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage"]
    command += [f"--user-data-dir={directory}/chromium", "--disable-background-networking", "--hide-scrollbars"]
    command += ["--virtual-time-budget=7000", "--enable-logging=stderr", "--v=0", "--window-size=1240,2300"]
    if dark:
        command.append("--blink-settings=preferredColorScheme=0")
    command.append(f"--screenshot={screenshot}" if screenshot else "--dump-dom")
    run = subprocess.run([*command, url], capture_output=True, text=True, timeout=60)
    console = [line for line in run.stderr.splitlines() if "CONSOLE" in line]
    assert not (strict and console), console
    return run.stdout
