"""The house rules that a machine can check: who may import whom, how long things may get, what is generated from what.

    domain ◀─┬─ planner ◀──┐
             ├─ pool ◀─────┤
             ├─ sessions ◀─┼─ node ◀─ rpc ◀─ app          kvhold.v1 (generated) ◀─ rpc, kvhold_client
             └─ memory ◀───┘

An allow-list below may only shrink: an entry that is no longer needed fails its test.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
SERVER = REPO / "server" / "kvhold_server"
CLIENT = REPO / "client" / "kvhold_client"
SOURCES = sorted(path for root in (SERVER, CLIENT) for path in root.rglob("*.py"))
CORE = ("domain", "planner", "pool", "sessions")

# Parts of the server, lowest first. A part imports from lower levels only, never from its own level's others. A module
# directly in the package is a part of its own.
LEVELS: tuple[set[str], ...] = (
    {"failpoints"},
    {"domain"},
    {"planner", "pool", "sessions", "memory"},
    {"node"},
    {"config", "http", "exposition"},
    {"backends", "logs", "metrics", "quarantine_log"},
    {"rpc", "observe"},
    {"pages"},
    {"app"},
    {"__main__"},
)

# What the deterministic core must not know: the outside world, and anything heavy.
NOT_IN_CORE = set(
    "asyncio concurrent cuda google grpc kvhold logging mmap multiprocessing numpy os prometheus_client random select "
    "signal socket subprocess threading time torch".split()
)

# Imports inside a function: only of packages that an install may lack, or whose import would slow every command down.
LAZY_ALLOWED = {
    "torch",
    "cuda",
    "prometheus_client",
    "xxhash",
    "rich",
    "numpy",
    "grpc",
    "zmq",
    "msgpack",
    "opentelemetry",
}

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 70
LONG_FILES: set[str] = set()
LONG_FUNCTIONS: set[str] = set()  # "client/kvhold_client/x.py:function"
KINDS_ASKED_FOR: set[str] = {
    "server/kvhold_server/planner/legacy_layers.py:AttentionSpec",  # the legacy rules are themselves about classes
    "server/kvhold_server/planner/legacy_layers.py:MlaSpec",
}


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
    level = next((level for level, parts in enumerate(LEVELS) if part in parts), None)
    assert level is not None, f"give {part} a level in {Path(__file__).name}"
    allowed = {part}.union(*LEVELS[:level])
    used = {part_of(module) for module in imported_modules(tree_of(path))} & set().union(*LEVELS)
    assert used <= allowed, f"{part} must not import {sorted(map(str, used - allowed))}"


def module_of(path: Path) -> str:
    """Dotted name that a source file is imported by."""
    root = SERVER if path.is_relative_to(SERVER) else CLIENT
    return ".".join(path.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__")


def circle_in(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle, the first of them again at the end; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@pytest.mark.parametrize("root", (SERVER, CLIENT), ids=lambda root: root.name)
def test_no_modules_import_each_other_in_a_circle(root: Path) -> None:
    """Inside parts, too, and whatever an import is for: in a function, or for type checking only."""
    modules = {module_of(path): path for path in root.rglob("*.py")}
    graph = {name: set(imported_modules(tree_of(path))) & modules.keys() - {name} for name, path in modules.items()}
    assert sum(map(len, graph.values())) > len(graph), "the modules do import each other"
    assert not circle_in(graph)


def test_a_circle_would_be_found() -> None:
    assert not circle_in({"a": {"b", "c"}, "b": {"c"}})
    assert set(circle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}})) == {"b", "c"}


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
    lazy = {module.split(".")[0] for function in functions(tree_of(path)) for module in imported_modules(function)}
    own = {name for name in lazy if name.startswith("kvhold")}
    assert lazy - own - set(sys.stdlib_module_names) <= LAZY_ALLOWED
    starts_quickly = path.is_relative_to(CLIENT / "cli")  # a command loads what it needs, not what others need
    assert not own or starts_quickly, "a lazy import of our own code hides a cycle"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_no_import_is_for_type_checking_only(path: Path) -> None:
    """It would hide a circle: two modules that need each other are one, or lack a third."""
    names = {node.id for node in ast.walk(tree_of(path)) if isinstance(node, ast.Name)}
    assert "TYPE_CHECKING" not in names


def test_client_needs_nothing_but_grpc_and_protobuf() -> None:
    """All of its public names together load no package that the base install lacks, and nothing of the server."""
    heavy = "torch cuda.bindings numpy prometheus_client rich xxhash cbor2 kvhold_server grpc_status".split()
    code = f"""
import sys, kvhold_client
names = [getattr(kvhold_client, name) for name in dir(kvhold_client)]
assert "grpc" in sys.modules
print([module for module in {heavy!r} if module in sys.modules])
"""
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
    """Names of the layer-spec classes. A uniform_type is no kind of layer but the shape of a group."""
    trees = map(tree_of, sorted((SERVER / "domain" / "kinds").rglob("*.py")))
    classes = {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    return {name for name in classes if name.endswith("Spec")} - {"UniformTypeSpec"}


def test_no_kind_is_asked_for_by_type() -> None:
    """A kind answers questions; a ladder of isinstance would have to be found again for each new one."""
    kinds, asked = layer_spec_classes(), set()
    for path in SOURCES:
        calls = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call) and len(node.args) == 2]
        tests = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "isinstance"]
        names = {name.id for call in tests for name in ast.walk(call.args[1]) if isinstance(name, ast.Name)}
        names |= {name.attr for call in tests for name in ast.walk(call.args[1]) if isinstance(name, ast.Attribute)}
        asked |= {f"{name_of(path)}:{name}" for name in names & kinds}
    assert not asked - KINDS_ASKED_FOR, "give the kinds a method or a property"
    assert not KINDS_ASKED_FOR - asked, "no longer asked: take it off the list"


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
