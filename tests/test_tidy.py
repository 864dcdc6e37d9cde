"""The house rules that a machine can check: who may import whom, how long things may get, what is generated from what.

    domain ◀─┬─ planner  ─┐
             ├─ pool      │
             ├─ sessions  ├◀─ node ◀─ rpc ◀─ app          kvhold.v1 (generated) ◀─ rpc, kvhold_client
             └─ memory   ─┘

An allow-list below may only shrink: an entry that is no longer needed fails its test.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
SERVER = REPO / "server" / "kvhold_server"
CLIENT = REPO / "client" / "kvhold_client"
SOURCES = sorted(path for root in (SERVER, CLIENT) for path in root.rglob("*.py"))
CORE = ("domain", "planner", "pool", "sessions")

# Part of the server → the parts it may import besides itself. A module directly in the package is its own part.
SIBLINGS = {"planner", "pool", "sessions", "memory"}
MAY_IMPORT: dict[str, set[str]] = {
    "domain": set(),
    **{sibling: {"domain"} for sibling in SIBLINGS},
    "node": {"domain", *SIBLINGS},
    "config": {"domain"},
    "metrics": {"domain", *SIBLINGS, "node"},
    "rpc": {"domain", *SIBLINGS, "node", "config"},
    "app": {"domain", *SIBLINGS, "node", "config", "metrics", "rpc"},
    "__main__": {"domain", "config", "app"},
}

# What the deterministic core must not know: the outside world, and anything heavy.
NOT_IN_CORE = set(
    "asyncio concurrent cuda google grpc kvhold logging mmap multiprocessing numpy os prometheus_client random select "
    "signal socket subprocess threading time torch".split()
)

# Imports inside a function: only of packages that an install may lack, or whose import would slow every command down.
LAZY_ALLOWED = {"torch", "cuda", "prometheus_client", "xxhash", "rich", "numpy", "grpc", "zmq", "msgpack"}

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 70
LONG_FILES: set[str] = set()  # "client/kvhold_client/x.py"
LONG_FUNCTIONS: set[str] = set()  # "client/kvhold_client/x.py:function"


def name_of(path: Path) -> str:
    return str(path.relative_to(REPO))


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def imported_modules(node: ast.AST) -> Iterator[str]:
    """Dotted names of every module that an import statement under `node` loads, submodules spelled out."""
    for child in ast.walk(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"line {child.lineno}: relative import"
            yield child.module or ""
            yield from (f"{child.module}.{alias.name}" for alias in child.names)


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def part_of(module: str) -> str | None:
    """The server part that a dotted name lies in: "kvhold_server.pool.errors" is in "pool"."""
    parts = module.split(".")
    return parts[1] if parts[0] == "kvhold_server" and len(parts) > 1 else None


@pytest.mark.parametrize("path", sorted(SERVER.rglob("*.py")), ids=name_of)
def test_server_parts_import_only_downwards(path: Path) -> None:
    if path.parent == SERVER and path.name == "__init__.py":
        assert not list(imported_modules(tree_of(path))), "the package itself imports nothing"
        return
    part = path.relative_to(SERVER).parts[0].removesuffix(".py")
    # A new module directly in the package sits at the level of app until it is given a level of its own above.
    allowed = MAY_IMPORT.get(part, MAY_IMPORT["app"]) | {part}
    used = {part_of(module) for module in imported_modules(tree_of(path))} - {None}
    known = {child.stem for child in SERVER.iterdir()}
    assert used & known <= allowed, f"{part} must not import {sorted(map(str, used & known - allowed))}"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_generated_code_is_seen_by_rpc_and_client_only(path: Path) -> None:
    roots = {module.split(".")[0] for module in imported_modules(tree_of(path))}
    is_client = path.is_relative_to(CLIENT)
    if not is_client and not path.is_relative_to(SERVER / "rpc"):
        assert "kvhold" not in roots
    if is_client:
        assert "kvhold_server" not in roots, "a client never imports the server"


@pytest.mark.parametrize("path", [p for part in CORE for p in sorted((SERVER / part).rglob("*.py"))], ids=name_of)
def test_core_knows_no_outside_world(path: Path) -> None:
    roots = {module.split(".")[0] for module in imported_modules(tree_of(path))}
    assert not roots & NOT_IN_CORE


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_imports_are_at_the_top_except_of_optional_packages(path: Path) -> None:
    tree = tree_of(path)
    lazy = {module.split(".")[0] for function in functions(tree) for module in imported_modules(function)}
    own = {name for name in lazy if name.startswith("kvhold")} if path.name != "cli.py" else set()
    third_party = lazy - set(sys.stdlib_module_names) - {name for name in lazy if name.startswith("kvhold")}
    assert third_party <= LAZY_ALLOWED
    assert not own, "a lazy import of our own code hides a cycle"
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert "TYPE_CHECKING" not in names, "a TYPE_CHECKING import hides a cycle"


def test_client_import_loads_nothing_heavy() -> None:
    heavy = "torch cuda numpy prometheus_client rich kvhold_server grpc_health grpc_status".split()
    code = f"import sys, kvhold_client; print([m for m in {heavy!r} if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert shown.stdout.strip() == "[]"


def test_files_stay_short() -> None:
    long = {name_of(path) for path in SOURCES if len(path.read_text().splitlines()) > MAX_FILE_LINES}
    assert not long - LONG_FILES, f"over {MAX_FILE_LINES} lines: split by concept"
    assert not LONG_FILES - long, "no longer long: take it off the list"


def test_functions_stay_short() -> None:
    long = {
        f"{name_of(path)}:{function.name}"
        for path in SOURCES
        for function in functions(tree_of(path))
        if (function.end_lineno or 0) - function.lineno + 1 > MAX_FUNCTION_LINES
    }
    assert not long - LONG_FUNCTIONS, f"over {MAX_FUNCTION_LINES} lines"
    assert not LONG_FUNCTIONS - long, "no longer long: take it off the list"


def layer_spec_classes() -> set[str]:
    """Names of the classes that the kinds package defines."""
    trees = map(tree_of, sorted((SERVER / "domain" / "kinds").rglob("*.py")))
    return {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


@pytest.mark.parametrize("path", [p for p in SOURCES if p.is_relative_to(SERVER)], ids=name_of)
def test_no_kind_is_asked_for_by_type(path: Path) -> None:
    """A kind answers questions; a ladder of isinstance would have to be found again for each new one."""
    kinds = layer_spec_classes()
    calls = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call) and len(node.args) == 2]
    tests = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "isinstance"]
    asked = {name.id for call in tests for name in ast.walk(call.args[1]) if isinstance(name, ast.Name)}
    attributes = {name.attr for call in tests for name in ast.walk(call.args[1]) if isinstance(name, ast.Attribute)}
    assert not (asked | attributes) & kinds


def version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


def declared_floor(package: str) -> tuple[int, ...]:
    found = re.search(rf'dependencies = \[.*?"{package}>=([\d.]+)', (REPO / "pyproject.toml").read_text())
    assert found, f"{package} has no floor in pyproject.toml"
    return version(found[1])


def test_stubs_run_on_the_declared_floors() -> None:
    """A stub made by newer tools refuses to import beside an engine that holds an older protobuf."""
    stubs = sorted((REPO / "proto").rglob("*_pb2*.py"))
    assert stubs, "the generated code is committed"
    for stub in stubs:
        text = stub.read_text()
        for found in re.findall(r"GRPC_GENERATED_VERSION = '([\d.]+)'", text):
            assert version(found) <= declared_floor("grpcio"), stub.name
        for found in re.findall(r"Protobuf Python Version: ([\d.]+)", text):
            assert version(found) <= declared_floor("protobuf"), stub.name


def test_generated_code_is_in_sync() -> None:
    pytest.importorskip("grpc_tools")
    code = "import sys; sys.path.insert(0, 'tools'); import proto; sys.exit('; '.join(proto.stale_stubs()) or 0)"
    run = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
