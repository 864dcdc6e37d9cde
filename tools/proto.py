"""Generated code and the contract's promises: `generate`, `check` or `freeze`.

    proto/kvhold/v1/*.proto ──generate──▶ *_pb2.py *_pb2.pyi *_pb2_grpc.py *_pb2_grpc.pyi   (committed beside them)
                            ──freeze────▶ proto/frozen.binpb   the contract that later ones must stay compatible with

`check` runs buf's lint, compares the contract with the frozen one, and regenerates into a temporary directory to see
that what is committed is what today's .proto files give. Stubs are generated with the oldest grpcio-tools whose output
still runs on protobuf 7, so that the client installs beside engines that hold protobuf at 6.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTO = ROOT / "proto"
FROZEN = PROTO / "frozen.binpb"
BIN = Path(sys.executable).parent  # buf and protoc's plugins are installed beside the interpreter
GENERATED = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py", "*_pb2_grpc.pyi")


def proto_files() -> list[Path]:
    """Every .proto of the contract, in a stable order."""
    return sorted((PROTO / "kvhold").rglob("*.proto"))


def generate(out: Path) -> None:
    """Write the stubs of every .proto under `out`, which must exist. Raises CalledProcessError if protoc refuses."""
    command = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        f"-I{PROTO}",
        f"--python_out={out}",
        f"--grpc_python_out={out}",
    ]
    # mypy-protobuf rather than protoc's own --pyi_out: literal field names in HasField and WhichOneof, typed maps.
    for plugin in ("mypy", "mypy_grpc"):
        command += [f"--plugin=protoc-gen-{plugin}={BIN / f'protoc-gen-{plugin}'}", f"--{plugin}_out=quiet:{out}"]
    subprocess.run([*command, *map(str, proto_files())], check=True)


def stubs(root: Path) -> dict[str, bytes]:
    """Relative path → content of each generated file under `root`."""
    paths = {path for pattern in GENERATED for path in (root / "kvhold").rglob(pattern)}
    return {str(path.relative_to(root)): path.read_bytes() for path in paths}


def stale_stubs() -> list[str]:
    """Committed stubs that differ from what today's .proto files give, are missing, or have no .proto any more."""
    with tempfile.TemporaryDirectory() as directory:
        generate(Path(directory))
        fresh = stubs(Path(directory))
    committed = stubs(PROTO)
    return sorted(name for name in fresh.keys() | committed.keys() if fresh.get(name) != committed.get(name))


def buf(*arguments: str) -> int:
    """Run buf in the repository root and return its exit status."""
    return subprocess.run([str(BIN / "buf"), *arguments], cwd=ROOT).returncode


def check() -> int:
    """Exit status 0 if the contract is clean, compatible with the frozen one, and its stubs are fresh."""
    failed = buf("lint") != 0
    if FROZEN.exists():
        failed |= buf("breaking", "--against", str(FROZEN.relative_to(ROOT))) != 0
    else:
        print("proto: no contract is frozen yet (make proto-freeze), so nothing can break it")
    for name in stale_stubs():
        print(f"proto/{name}: not what the .proto files give; run `make proto`", file=sys.stderr)
        failed = True
    return int(failed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("verb", choices=("generate", "check", "freeze"))
    verb = parser.parse_args().verb
    if not proto_files():
        print(f"no .proto files under {PROTO / 'kvhold'}", file=sys.stderr)
        return 1
    if verb == "check":
        return check()
    if verb == "freeze":
        return buf("build", "--exclude-source-info", "-o", str(FROZEN.relative_to(ROOT)))
    for stale in stale_stubs():
        (PROTO / stale).unlink(missing_ok=True)
    generate(PROTO)
    return 0


if __name__ == "__main__":
    sys.exit(main())
