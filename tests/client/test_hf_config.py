"""Layer specs from config.json: published sizes, shares of ranks and stages, and errors that name the field."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvhold.v1 import plan_pb2
from kvhold_client.cli.main import main
from kvhold_client.hf_config import (
    KNOWN_MODEL_TYPES,
    HfConfigError,
    MissingField,
    UnknownModelType,
    UnusableField,
    plan_request_from_hf_config,
    read_hf_config,
)
from kvhold_client.hf_config.request import stage_lengths
from kvhold_server.domain.errors import KvholdError
from kvhold_server.planner.plan import plan
from kvhold_server.rpc.plan_codec import decode_plan_request

GIB = 1 << 30
CONFIGS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("hf_configs.json").read_text())


def asked(name: str, **settings: Any) -> plan_pb2.PlanRequest:
    return plan_request_from_hf_config(CONFIGS[name], **({"memory_bytes": 60 * GIB} | settings))


def kinds(request: plan_pb2.PlanRequest, rank: int = 0) -> dict[str, int]:
    specs = request.layer_specs
    return dict(Counter(str(specs[layer.layer_spec_index].WhichOneof("kind")) for layer in request.ranks[rank].layers))


def page_of(request: plan_pb2.PlanRequest, kind: str) -> int:
    """Bytes of a page of that kind on one rank, as the planner counts them."""
    specs = decode_plan_request(request).layer_specs
    return next(spec.page_size_bytes for spec in specs if spec.kind == kind)


# Layers by kind, and bytes of a page of 16 tokens on one rank of one, in the model's own type: worked out from the
# published sizes, 2 × heads × head size × bytes of an element × 16 for keys and values.
PUBLISHED: dict[str, dict[str, tuple[int, int]]] = {
    "llama-3.1-8b": {"full_attention": (32, 2 * 8 * 128 * 2 * 16)},
    "llama-3.1-70b": {"full_attention": (80, 2 * 8 * 128 * 2 * 16)},
    "mistral-7b-v0.1": {"sliding_window": (32, 2 * 8 * 128 * 2 * 16)},
    "mixtral-8x7b": {"full_attention": (32, 2 * 8 * 128 * 2 * 16)},
    "qwen2.5-7b": {"full_attention": (28, 2 * 4 * 128 * 2 * 16)},
    "qwen3-30b-a3b": {"full_attention": (48, 2 * 4 * 128 * 2 * 16)},
    "qwen3-next-80b-a3b": {
        "full_attention": (12, 2 * 2 * 256 * 2 * 16),
        "mamba": (36, (3 * (2 * 16 * 128 + 32 * 128) + 32 * 128 * 128) * 2),
    },
    "gemma-2-9b": {"sliding_window": (21, 2 * 8 * 256 * 4 * 16), "full_attention": (21, 2 * 8 * 256 * 4 * 16)},
    "gemma-3-4b-it": {"sliding_window": (29, 2 * 4 * 256 * 2 * 16), "full_attention": (5, 2 * 4 * 256 * 2 * 16)},
    "gemma-3-27b-it": {"sliding_window": (52, 2 * 16 * 128 * 2 * 16), "full_attention": (10, 2 * 16 * 128 * 2 * 16)},
    "gpt-oss-20b": {"sliding_window": (12, 2 * 8 * 64 * 2 * 16), "full_attention": (12, 2 * 8 * 64 * 2 * 16)},
    "llama-4-scout": {"chunked_local": (36, 2 * 8 * 128 * 2 * 16), "full_attention": (12, 2 * 8 * 128 * 2 * 16)},
    "deepseek-v2-lite": {"mla_attention": (27, 576 * 2 * 16)},
    "deepseek-v3": {"mla_attention": (61, 576 * 2 * 16)},
    "deepseek-v3.2": {"mla_attention": (122, 576 * 2 * 16)},
    "glm-4.5": {"full_attention": (92, 2 * 8 * 128 * 2 * 16)},
    "glm-5": {"mla_attention": (156, 576 * 2 * 16)},
    "jamba-v0.1": {"full_attention": (4, 2 * 8 * 128 * 2 * 16), "mamba": (28, (3 * 8192 + 8192 * 16) * 2)},
    "nemotron-h-8b": {
        "full_attention": (4, 2 * 8 * 128 * 2 * 16),
        "mamba": (24, (3 * (128 * 64 + 2 * 8 * 128) + 128 * 64 * 128) * 2),
    },
    "phi-4": {"full_attention": (40, 2 * 10 * 128 * 2 * 16)},
    "phi-3-mini-4k": {"sliding_window": (32, 2 * 32 * 96 * 2 * 16)},
    "phi-2": {"full_attention": (32, 2 * 32 * 80 * 2 * 16)},
    "olmo-2-7b": {"full_attention": (32, 2 * 32 * 128 * 4 * 16)},
    "olmo-3-7b": {"sliding_window": (24, 2 * 32 * 128 * 2 * 16), "full_attention": (8, 2 * 32 * 128 * 2 * 16)},
}


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_layers_and_pages_are_those_of_the_published_model(name: str) -> None:
    request = asked(name)
    assert kinds(request) == {kind: count for kind, (count, _) in PUBLISHED[name].items()}
    assert {kind: page_of(request, kind) for kind in PUBLISHED[name]} == {
        kind: page for kind, (_, page) in PUBLISHED[name].items()
    }


@pytest.mark.parametrize("name", sorted(CONFIGS))
@pytest.mark.parametrize("strategy", ["modern", "compact"])
def test_every_known_model_can_be_planned(name: str, strategy: str) -> None:
    made = plan(decode_plan_request(asked(name, auto_fit=True, layout="BLHNC", strategy=strategy)))
    assert made.num_blocks > 1
    assert made.capacity_tokens


def test_which_layers_are_local_is_the_familys_rule() -> None:
    def local(name: str) -> list[int]:
        request = asked(name)
        specs = request.layer_specs
        layers = enumerate(request.ranks[0].layers)
        return [i for i, layer in layers if specs[layer.layer_spec_index].WhichOneof("kind") != "full_attention"]

    assert local("gemma-2-9b") == list(range(0, 42, 2))
    assert [i for i in range(34) if i not in local("gemma-3-4b-it")] == [5, 11, 17, 23, 29]
    assert [i for i in range(48) if i not in local("llama-4-scout")] == list(range(3, 48, 4))
    assert [i for i in range(32) if i not in local("jamba-v0.1")] == [4, 12, 20, 28]
    assert [i for i in range(48) if i not in local("qwen3-next-80b-a3b")] == list(range(3, 48, 4))


def test_plan_23_fewer_heads_than_ranks_are_replicated() -> None:
    """PLAN-23: 2 heads of 128 on 4 ranks: one head on each, 512 bytes per token and layer."""
    config = CONFIGS["llama-3.1-8b"] | {"num_key_value_heads": 2, "head_dim": 128}
    request = plan_request_from_hf_config(config, memory_bytes=GIB, tensor_parallel_size=4)
    assert len(request.ranks) == 4
    assert request.layer_specs[0].geometry.num_kv_heads == 1
    assert page_of(request, "full_attention") == 512 * 16


@pytest.mark.parametrize(("tp", "heads"), [(1, 8), (2, 4), (8, 1), (16, 1)])
def test_heads_are_divided_over_ranks(tp: int, heads: int) -> None:
    assert asked("llama-3.1-70b", tensor_parallel_size=tp).layer_specs[0].geometry.num_kv_heads == heads


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(UnusableField, match=r"num_key_value_heads.*10.*tensor-parallel size 4"):
        asked("phi-4", tensor_parallel_size=4)
    with pytest.raises(UnusableField, match="linear_num_value_heads"):
        asked("qwen3-next-80b-a3b", tensor_parallel_size=64)


def test_latent_rows_are_the_same_on_every_rank() -> None:
    request = asked("deepseek-v3", tensor_parallel_size=8)
    assert request.layer_specs[0].geometry.num_kv_heads == 1
    assert page_of(request, "mla_attention") == 576 * 2 * 16


def test_states_are_divided_and_groups_that_do_not_divide_are_replicated() -> None:
    whole, half = asked("nemotron-h-8b"), asked("nemotron-h-8b", tensor_parallel_size=2)
    assert page_of(half, "mamba") == page_of(whole, "mamba") // 2
    sixteen = asked("nemotron-h-8b", tensor_parallel_size=16)  # 8 groups: one of each kind on each rank
    assert page_of(sixteen, "mamba") == (3 * (128 * 64 + 2 * 16 * 128) // 16 + 8 * 64 * 128) * 2


def test_states_may_have_a_type_of_their_own() -> None:
    config = CONFIGS["nemotron-h-8b"] | {"mamba_ssm_cache_dtype": "float32"}
    request = plan_request_from_hf_config(config, memory_bytes=GIB, dtype="fp8")
    conv, state = next(spec for spec in request.layer_specs if spec.HasField("mamba")).mamba.states
    assert (conv.dtype, state.dtype) == (plan_pb2.DTYPE_BFLOAT16, plan_pb2.DTYPE_FLOAT32)


def test_dtypes_of_the_cache() -> None:
    assert page_of(asked("llama-3.1-8b", dtype="fp8"), "full_attention") == 2 * 8 * 128 * 16
    assert asked("llama-3.1-8b", dtype="fp8_e5m2").layer_specs[0].geometry.dtype == plan_pb2.DTYPE_FLOAT8_E5M2
    assert page_of(asked("deepseek-v3", dtype="fp8"), "mla_attention") == 576 * 16
    with pytest.raises(ValueError, match="dtype 'int3'"):
        asked("llama-3.1-8b", dtype="int3")


def test_selected_latent_rows_have_an_indexers_cache_beside_them_and_a_packed_fp8_form() -> None:
    specs = decode_plan_request(asked("deepseek-v3.2", dtype="fp8", block_size_tokens=64)).layer_specs
    assert [spec.page_size_bytes for spec in specs] == [656 * 64, 132 * 64]


def test_layers_that_follow_a_selection_have_no_indexer() -> None:
    config = CONFIGS["glm-5"] | {"index_topk_pattern": "FSSS" * 20}
    request = plan_request_from_hf_config(config, memory_bytes=GIB)
    names = [layer.layer_name for layer in request.ranks[0].layers]
    assert sum(name.endswith("indexer.k_cache") for name in names) == 20


def test_stages_have_their_own_layers_and_what_remains_goes_before_the_last() -> None:
    assert stage_lengths(8, 3) == [3, 3, 2]
    assert stage_lengths(9, 4) == [2, 2, 3, 2]
    request = asked("deepseek-v3", tensor_parallel_size=2, pipeline_parallel_size=4)
    assert len(request.ranks) == 8
    assert [len(rank.layers) for rank in request.ranks[::2]] == [15, 15, 16, 15]
    assert [rank.layers_of_rank for rank in request.ranks[1::2]] == [0, 2, 4, 6]
    assert request.ranks[2].layers[0].layer_name == "model.layers.15.self_attn.attn"
    assert len(plan(decode_plan_request(request)).ranks) == 8


def test_a_window_is_on_only_if_the_file_says_so() -> None:
    off = CONFIGS["qwen2.5-7b"]
    on = off | {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 20}
    assert kinds(plan_request_from_hf_config(off, memory_bytes=GIB)) == {"full_attention": 28}
    assert kinds(plan_request_from_hf_config(on, memory_bytes=GIB)) == {"full_attention": 20, "sliding_window": 8}


def test_a_window_of_the_whole_length_is_none() -> None:
    wide = CONFIGS["phi-3-mini-4k"] | {"sliding_window": 262_144, "max_position_embeddings": 131_072}
    assert kinds(plan_request_from_hf_config(wide, memory_bytes=GIB)) == {"full_attention": 32}


def test_an_unknown_family_is_named_with_those_known() -> None:
    with pytest.raises(UnknownModelType, match=r"model_type 'rwkv9' is not known.*llama") as caught:
        plan_request_from_hf_config({"model_type": "rwkv9"}, memory_bytes=GIB)
    assert caught.value.field == "model_type"
    with pytest.raises(MissingField, match="'model_type' is missing"):
        plan_request_from_hf_config({"num_hidden_layers": 3}, memory_bytes=GIB)


def _leaves(config: dict[str, Any]) -> list[str]:
    inner = config.get("text_config", config)
    # Not needed everywhere: a type has a default, local rules have one, and what only some engines read is not read.
    return [
        field
        for field in inner
        if inner[field] is not None
        and field not in ("model_type", "torch_dtype", "dtype", "layer_types", "no_rope_layers", "sliding_window")
    ]


@pytest.mark.parametrize("name", ["llama-3.1-8b", "deepseek-v3", "deepseek-v3.2", "jamba-v0.1", "qwen3-next-80b-a3b"])
def test_a_missing_field_is_named_or_has_the_engines_default(name: str) -> None:
    whole = asked(name)
    named = set()
    for field in _leaves(CONFIGS[name]):
        config = {key: value for key, value in CONFIGS[name].items() if key != field}
        try:
            request = plan_request_from_hf_config(config, memory_bytes=60 * GIB)
        except HfConfigError as error:
            named.add(error.field)
        else:
            assert request == whole or field == "num_key_value_heads", field
    assert "num_hidden_layers" in named and "max_position_embeddings" in named
    assert named <= set(CONFIGS[name]) | {"head_dim"}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"num_hidden_layers": "many"}, "num_hidden_layers"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_key_value_heads": True}, "num_key_value_heads"),
        ({"hidden_size": 4097}, "hidden_size"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["hyena"] * 32}, "layer_types"),
        ({"torch_dtype": "int4"}, "torch_dtype"),
    ],
)
def test_a_value_that_does_not_fit_is_named(change: dict[str, Any], field: str) -> None:
    with pytest.raises(UnusableField) as caught:
        plan_request_from_hf_config(CONFIGS["llama-3.1-8b"] | change, memory_bytes=GIB)
    assert caught.value.field == field
    assert field in str(caught.value)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(UnusableField, match="fewer pipeline stages"):
        asked("llama-3.1-8b", pipeline_parallel_size=64)


def test_the_families_of_the_manual_are_known() -> None:
    wanted = (
        "llama mistral mixtral qwen2 qwen3 qwen3_next gemma2 gemma3_text gpt_oss llama4_text deepseek_v2 deepseek_v3"
    )
    wanted += " deepseek_v32 glm4 glm4_moe jamba nemotron_h phi phi3 olmo olmo2 olmo3"
    assert set(wanted.split()) <= set(KNOWN_MODEL_TYPES)


def test_the_language_part_of_a_multimodal_file_is_read() -> None:
    inner = CONFIGS["qwen3-next-80b-a3b"] | {"model_type": "qwen3_5_text"}
    whole = {"model_type": "qwen3_5", "text_config": inner, "vision_config": {"model_type": "x", "hidden_size": 3}}
    request = plan_request_from_hf_config(whole, memory_bytes=GIB)
    assert list(request.layer_specs) == list(asked("qwen3-next-80b-a3b").layer_specs)


def test_files_and_directories_are_read_and_others_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIGS["phi-2"]))
    assert read_hf_config(file) == read_hf_config(tmp_path) == CONFIGS["phi-2"]
    for content in ("{", "[]", "\xff"):
        file.write_text(content, encoding="latin-1")
        with pytest.raises(HfConfigError):
            read_hf_config(file)


def test_the_command_plans_a_models_own_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIGS["llama-3.1-70b"]))
    command = ["plan", "--hf-config", str(file), "--tp", "8", "--pp", "2", "--dtype", "fp8", "--memory", "60GiB"]
    assert main([*command, "-o", "json"], {}) == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document["ranks"]) == 16
    # 40 layers on each stage, one head of 128, a byte each: 40 × 2 × 128 × 16 bytes a block.
    assert document["ranks"][0]["bytes_per_block"] == 40 * 2 * 128 * 16
    assert document["num_blocks"] == 60 * GIB // (40 * 2 * 128 * 16)

    file.write_text(json.dumps({"model_type": "llama", "num_attention_heads": 4}))
    assert main(command, {}) == 2
    assert "num_hidden_layers" in capsys.readouterr().err


def test_refusals_of_the_planner_stay_typed() -> None:
    with pytest.raises(KvholdError, match="tokens"):
        plan(decode_plan_request(asked("llama-4-scout")))
