"""`kvhold plan`: what a model would get, before anything is allocated.

    kvhold plan request.json                          a PlanRequest as JSON (the contract's own names)
    kvhold plan --model llama-3.1-8b --memory 40GiB   a model that is known here
    kvhold plan --hf-config config.json --tp 8        a model's own file (or its directory)

A daemon plans; if none is named and none listens where one is expected, a temporary one does.
"""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

from google.protobuf import json_format

from kvhold.v1 import plan_pb2
from kvhold_client.cli.console import Console, plain
from kvhold_client.cli.exits import OK, UsageError
from kvhold_client.cli.plan_picture import pictures
from kvhold_client.cli.plan_tables import print_plan
from kvhold_client.cli.units import parse_bytes
from kvhold_client.client import Client
from kvhold_client.hf_config import plan_request_from_hf_config, read_hf_config
from kvhold_client.local_daemon import LocalDaemon, socket_answers
from kvhold_client.models import GIB, LAYOUTS, MODELS, model_plan_request
from kvhold_client.plan import Plan

MAX_FILE_BYTES = 32 * 1024 * 1024
STRATEGIES = ("modern", "legacy", "compact")
HF_CONFIG_ONLY = {"dtype": "auto", "pp": 1, "state_cache": "none"}  # flag → default
NOT_WITH_FILE = {
    "memory": 40 * GIB,
    "block_size": 16,
    "max_model_len": 0,
    "max_num_seqs": 256,
    "layout": "LBNHC",
    "strategy": "modern",
    "ranks": 1,
    "auto_fit": False,
    **HF_CONFIG_ONLY,
}
FLAGS = {"ranks": "--tp"}  # that are not called like their values


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A file or a model, and what to change about it."""
    parser.add_argument("request", nargs="?", type=Path, metavar="FILE", help="PlanRequest as JSON")
    parser.add_argument("--model", choices=sorted(MODELS), help="a known model instead of a file")
    parser.add_argument("--hf-config", type=Path, metavar="FILE", help="a model's config.json, or its directory")
    parser.add_argument("--memory", type=parse_bytes, default=40 * GIB, metavar="SIZE", help="per rank (default 40GiB)")
    parser.add_argument("--block-size", type=int, default=16, metavar="TOKENS", help="of a block (default 16)")
    parser.add_argument("--max-model-len", type=int, default=0, metavar="TOKENS", help="default: the model's")
    parser.add_argument("--max-num-seqs", type=int, default=256, metavar="N", help="requests at once (default 256)")
    parser.add_argument("--layout", choices=LAYOUTS, default="LBNHC", help="order of the axes (default LBNHC)")
    parser.add_argument("--strategy", choices=STRATEGIES, default="modern", help="the planner (default modern)")
    parser.add_argument("--tp", "--ranks", dest="ranks", type=int, default=1, metavar="N", help="tensor-parallel size")
    parser.add_argument("--pp", type=int, default=1, metavar="N", help="pipeline stages, with --hf-config (default 1)")
    parser.add_argument(
        "--dtype",
        default="auto",
        metavar="T",
        help="of keys and values, with --hf-config, e.g. fp8 (default: the model's)",
    )
    parser.add_argument(
        "--state-cache", default="none", metavar="M", help="recurrent states, with --hf-config: none, align or all"
    )
    parser.add_argument("--auto-fit", action="store_true", help="shorten the longest request to what fits")
    parser.add_argument("--max-groups", type=int, metavar="N", help="with compact: block tables per request at most")
    parser.add_argument("--keep-layout", action="store_true", help="with compact: do not exchange L and B")
    parser.add_argument("--tensors", action="store_true", help="list every tensor, not only the first of a kind")


def run(args: argparse.Namespace, console: Console) -> int:
    """Plans and shows."""
    title, request = plan_source(args)
    request.explain = True
    if args.max_groups is not None:
        request.config.compact.max_num_groups = args.max_groups
    if args.keep_layout:
        request.config.compact.keep_layout = True
    plan = plan_somewhere(request, args)
    if args.output == "json":
        console.json({**plain(plan), "pictures": [plain(picture) for picture in pictures(plan)]})
    else:
        print_plan(console, title, plan, all_tensors=args.tensors)
    return OK


def plan_source(args: argparse.Namespace) -> tuple[str, plan_pb2.PlanRequest]:
    """Title and request from whichever source was named. Raises UsageError unless exactly one was."""
    given = [source for name, source in SOURCES.items() if getattr(args, name)]
    if len(given) != 1:
        raise UsageError("name one of: FILE, --model, --hf-config; `kvhold plan --help` explains")
    return given[0](args)


def _from_file(args: argparse.Namespace) -> tuple[str, plan_pb2.PlanRequest]:
    path: Path = args.request
    _refuse(args, NOT_WITH_FILE, "goes with --model or --hf-config; FILE says it itself")
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise UsageError(f"{path}: larger than {MAX_FILE_BYTES} bytes, the bound of one message")
        request = json_format.Parse(path.read_text(), plan_pb2.PlanRequest())
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except (json_format.ParseError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not a PlanRequest in JSON: {error}") from None
    return path.stem, request


def _from_model(args: argparse.Namespace) -> tuple[str, plan_pb2.PlanRequest]:
    _refuse(args, HF_CONFIG_ONLY, "goes with --hf-config; a model named by --model has its own")
    try:
        return MODELS[args.model].title, model_plan_request(
            args.model,
            memory_bytes=args.memory,
            block_size_tokens=args.block_size,
            max_model_len_tokens=args.max_model_len,
            max_num_seqs=args.max_num_seqs,
            layout=args.layout,
            strategy=args.strategy,
            num_ranks=args.ranks,
            auto_fit=args.auto_fit,
        )
    except ValueError as error:
        raise UsageError(f"--tp: {error}") from None


def _from_hf_config(args: argparse.Namespace) -> tuple[str, plan_pb2.PlanRequest]:
    path: Path = args.hf_config
    try:
        config = read_hf_config(path)
    except OSError as error:
        raise UsageError(f"{error.filename or path}: {error.strerror}") from None
    except ValueError as error:  # names the file itself: it may be the one in the directory `path`
        raise UsageError(str(error)) from None
    try:
        request = plan_request_from_hf_config(
            config,
            memory_bytes=args.memory,
            tensor_parallel_size=args.ranks,
            pipeline_parallel_size=args.pp,
            dtype=args.dtype,
            block_size_tokens=args.block_size,
            max_model_len_tokens=args.max_model_len,
            max_num_seqs=args.max_num_seqs,
            layout=args.layout,
            strategy=args.strategy,
            state_cache_mode=args.state_cache,
            auto_fit=args.auto_fit,
        )
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from None
    return f"{path.parent.name or path.stem} ({request.config.model_type})", request


def _refuse(args: argparse.Namespace, defaults: Mapping[str, object], why: str) -> None:
    """Raises UsageError for a flag that would be ignored."""
    for name, default in defaults.items():
        if getattr(args, name) != default:
            raise UsageError(f"{FLAGS.get(name, '--' + name.replace('_', '-'))} {why}")


# A further source is a flag in `add_arguments` and a line here.
SOURCES: dict[str, Callable[[argparse.Namespace], tuple[str, plan_pb2.PlanRequest]]] = {
    "request": _from_file,
    "model": _from_model,
    "hf_config": _from_hf_config,
}


def plan_somewhere(request: plan_pb2.PlanRequest, args: argparse.Namespace) -> Plan:
    """By the daemon that is named or there, else by a temporary one."""
    if args.target_given or socket_answers(Path(args.target.removeprefix("unix:"))):
        with Client(args.target, timeout_s=args.timeout) as client:
            return client.plan(request)
    with LocalDaemon("--backend", "fake") as daemon, Client(daemon.target, timeout_s=args.timeout) as client:
        return client.plan(request)
